//! Requests for numbers instead of text: hidden states and likelihoods.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use thunder_engine::{Engine, Event, EventStream, Limits, Output, Request, Sampling};
use thunder_model::Parallelism;

use crate::common::{LAYOUTS, PATIENCE, read, with_engine, with_engine_of};

fn limits() -> Limits {
    Limits { sequences: 4, rows: 32, kv_blocks: 32, ..Limits::default() }
}

fn case() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cases/llama-f32")
}

/// The numbers of a 32-bit tensor in a file of the fixture.
fn tensor(file: &str, name: &str) -> Vec<[u8; 4]> {
    let bytes = std::fs::read(case().join(file)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec()
}

fn floats(file: &str, name: &str) -> Vec<f32> {
    tensor(file, name).into_iter().map(f32::from_le_bytes).collect()
}

fn submit(engine: &Engine, prompt: &[u32], output: Output) -> EventStream {
    engine.submit(Request { prompt: prompt.to_vec(), output, ..Request::default() }).unwrap()
}

/// The numbers that a request reports. The request generates nothing.
fn numbers(mut stream: EventStream) -> Vec<f32> {
    let mut reported = Vec::new();
    loop {
        match stream.next_within(PATIENCE).unwrap().unwrap() {
            Event::Hidden { values: numbers } | Event::Likelihoods { logprobs: numbers } => {
                assert!(reported.is_empty(), "numbers are reported once");
                reported = numbers;
            }
            Event::Done { usage, .. } => {
                assert_eq!(usage.completion_tokens, 0);
                return reported;
            }
            other => panic!("{other:?}"),
        }
    }
}

/// MLX-LM's logits are the product of its hidden states with the fixture's output matrix, which is
/// in f32. The engine's hidden states must give the same logits.
#[test]
fn hidden_states_give_the_logits_of_the_reference() {
    let head = floats("model.safetensors", "lm_head.weight");
    let prompts: Vec<(Vec<u32>, Vec<f32>)> = (0..3)
        .map(|index| {
            let tokens = tensor("golden.safetensors", &format!("tokens.{index}"));
            let logits = floats("golden.safetensors", &format!("logits.{index}"));
            let last = logits[logits.len() - head.len() / 64..].to_vec();
            (tokens.into_iter().map(u32::from_le_bytes).collect(), last)
        })
        .collect();
    // The model has two layers.
    for (ranks, parallel) in [LAYOUTS[0], LAYOUTS[1], LAYOUTS[2], (3, Parallelism::Tensor)] {
        with_engine_of(&case(), ranks, parallel, limits(), |engine| {
            let submit = |(prompt, _): &(Vec<u32>, _)| submit(&engine, prompt, Output::Hidden);
            let streams: Vec<EventStream> = prompts.iter().map(submit).collect();
            for (stream, (_, expected)) in streams.into_iter().zip(&prompts) {
                let hidden = numbers(stream);
                assert_eq!(hidden.len(), 64);
                let logit = |row: &[f32]| row.iter().zip(&hidden).map(|(w, x)| w * x).sum::<f32>();
                let logits = head.chunks(64).map(logit);
                let error: f32 = logits.zip(expected).map(|(ours, theirs)| (ours - theirs).powi(2)).sum();
                let relative = (error / expected.iter().map(|x| x * x).sum::<f32>()).sqrt();
                // Activations are bytes, as for text, so the limit of the golden tests applies.
                assert!(relative < 0.02, "{ranks} ranks, {parallel:?}: {relative}");
            }
        });
    }
}

#[test]
fn likelihoods_are_those_that_texts_report_and_change_no_text() {
    for (ranks, parallel) in LAYOUTS {
        with_engine(ranks, parallel, limits(), |engine| {
            let prompt = engine.info().tokenizer.encode("The all-reduce of three ranks", false).unwrap();
            let text = || Request { prompt: prompt.clone(), max_tokens: Some(8), ..Request::default() };
            let alone = read(engine.submit(text()).unwrap()).unwrap();
            let mut reported =
                engine.submit(Request { logprobs: Some(3), max_tokens: Some(1), ..text() }).unwrap();
            let Some(Some(Event::Delta { logprobs, .. })) = reported.next_within(PATIENCE) else {
                panic!("a token is reported")
            };
            let (ids, expected): (Vec<u32>, Vec<f32>) =
                logprobs[0].top.iter().map(|(id, _, logprob)| (*id, *logprob)).unzip();
            // All in the same steps.
            let greedy = engine.submit(text()).unwrap();
            let hidden = submit(&engine, &prompt, Output::Hidden);
            let likelihoods = submit(&engine, &prompt, Output::Likelihoods(ids));
            assert_eq!(numbers(likelihoods), expected);
            assert!(numbers(hidden).iter().any(|x| *x != 0.0));
            assert_eq!(read(greedy).unwrap(), alone);
            let beyond = Output::Likelihoods(vec![engine.info().vocab_size as u32]);
            let request = Request { prompt: prompt.clone(), output: beyond, ..Request::default() };
            assert!(engine.submit(request).is_err());
        });
    }
}

#[test]
fn a_chosen_tokens_log_probability_is_that_before_penalties_and_biases() {
    for (ranks, parallel) in LAYOUTS {
        with_engine(ranks, parallel, limits(), |engine| {
            let prompt = engine.info().tokenizer.encode("The all-reduce of three ranks", false).unwrap();
            // Tokens of both ranks' parts of the vocabulary that nobody would choose here.
            for token in [300, engine.info().vocab_size as u32 - 3] {
                let sampling = Sampling {
                    temperature: 0.0,
                    repetition_penalty: 2.0,
                    logit_bias: vec![(token, 100.0)],
                    ..Sampling::default()
                };
                let request = Request { prompt: prompt.clone(), sampling, ..Request::default() };
                let request = Request { logprobs: Some(0), max_tokens: Some(1), ..request };
                let mut reported = engine.submit(Request { ignore_eos: true, ..request }).unwrap();
                let chosen = loop {
                    match reported.next_within(PATIENCE).unwrap().unwrap() {
                        Event::Delta { logprobs, .. } if !logprobs.is_empty() => break logprobs[0].clone(),
                        Event::Done { .. } => panic!("no token is reported"),
                        _ => {}
                    }
                };
                let expected = numbers(submit(&engine, &prompt, Output::Likelihoods(vec![token])));
                assert_eq!((chosen.id, chosen.logprob), (token, expected[0]), "{ranks} ranks, {parallel:?}");
                assert!(chosen.logprob < -2.0, "{chosen:?}: it is likely without the bias");
            }
        });
    }
}
