//! Drafts make answers faster, and do not change them.

use std::sync::atomic::Ordering;

use crate::common::{PATIENCE, with_engine};
use thunder_engine::{Engine, Event, Grammar, Limits, Predicted, Request, Sampling};
use thunder_model::Parallelism;

/// A text that repeats itself, so that much of it is guessed.
const TEXT: &str = "rank 0 sends to rank 1, rank 1 sends to rank 2, rank 2 sends to rank 3, rank 3 sends to";

fn limits(draft_rows: usize) -> Limits {
    Limits { sequences: 6, rows: 32, kv_blocks: 48, draft_rows, ..Limits::default() }
}

fn request(engine: &Engine, index: usize) -> Request {
    // One that repeats itself, and one that ends after a few tokens of a longer draft.
    let grammar = match index {
        4 => Some("(rank [0-9] sends to rank [0-9], ){9,}"),
        5 => Some("rank 0 sends to rank 1, rank 1"),
        _ => None,
    };
    let compiled = |regex: &str| engine.compile(&Grammar::Regex(regex.to_owned())).unwrap();
    Request {
        constraint: grammar.map(compiled),
        prompt: engine.info().tokenizer.encode(TEXT, false).unwrap(),
        // Greedy, sampled, with penalties and biases, and with log-probabilities: each choice
        // depends on the previous ones. With log-probabilities in a step, rank 0 chooses all of its
        // tokens from logits.
        sampling: Sampling {
            temperature: if index == 0 { 0.0 } else { 0.9 },
            repetition_penalty: if index == 2 { 1.02 } else { 1.0 },
            frequency_penalty: if index == 2 { 0.01 } else { 0.0 },
            logit_bias: if index == 2 { vec![(40, 0.5), (7, -0.5)] } else { Vec::new() },
            seed: Some(index as u64),
            ..Sampling::default()
        },
        max_tokens: Some(60),
        stop: if index == 1 { vec!["rank 9 sends to rank 9".to_owned()] } else { Vec::new() },
        ignore_eos: true,
        logprobs: (index == 3).then_some(2),
        ..Request::default()
    }
}

/// Texts and log-probabilities of the answers, one request at a time or all together.
fn answers(engine: &Engine, together: bool) -> Vec<(String, Vec<(u32, f32)>)> {
    let mut answers = Vec::new();
    for indices in if together { vec![0..6] } else { (0..6).map(|index| index..index + 1).collect() } {
        let streams: Vec<_> = indices.map(|index| engine.submit(request(engine, index)).unwrap()).collect();
        for mut stream in streams {
            let (mut answer, mut reports) = (String::new(), Vec::new());
            loop {
                match stream.next_within(PATIENCE).unwrap().unwrap() {
                    Event::Delta { text, logprobs, .. } => {
                        answer.push_str(&text);
                        reports.extend(logprobs.iter().map(|token| (token.id, token.logprob)));
                    }
                    Event::Mark { .. } | Event::Accepted { .. } | Event::Work(_) => {}
                    Event::Hidden { .. } | Event::Likelihoods { .. } => panic!("text was asked for"),
                    Event::Done { .. } => break,
                    Event::Failed { message, .. } => panic!("{message}"),
                }
            }
            answers.push((answer, reports));
        }
    }
    answers
}

#[test]
fn answers_do_not_depend_on_drafts() {
    for (ranks, parallel) in [
        (1, Parallelism::Tensor),
        (2, Parallelism::Tensor),
        (2, Parallelism::Pipeline),
        (3, Parallelism::Tensor),
    ] {
        let mut without = Vec::new();
        with_engine(ranks, parallel, limits(0), |engine| {
            without = answers(&engine, false);
            assert_eq!(engine.counters().drafted.load(Ordering::Relaxed), 0);
        });
        with_engine(ranks, parallel, limits(16), |engine| {
            let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
            // The number of guesses depends on the machine's speed: continues until a wrong one was
            // verified too, but only as long as a slow machine needs.
            for round in 0..20 {
                for together in [false, true] {
                    assert_eq!(
                        answers(&engine, together),
                        without,
                        "{ranks} ranks, {parallel:?}, {together}"
                    );
                }
                let counters = engine.counters();
                let (drafted, right) = (count(&counters.drafted), count(&counters.drafts_right));
                if right > 0 && right < drafted {
                    break;
                }
                assert!(round < 19, "{ranks} ranks, {parallel:?}: {right} of {drafted} guesses were right");
            }
        });
    }
}

/// The text of an answer, and how much of its prediction was right.
fn answer(engine: &Engine, predicted: Vec<u32>, index: usize) -> (String, Option<Predicted>) {
    let request = Request { predicted, logprobs: None, ..request(engine, index) };
    let mut stream = engine.submit(request).unwrap();
    let mut answer = String::new();
    loop {
        match stream.next_within(PATIENCE).unwrap().unwrap() {
            Event::Delta { text, .. } => answer.push_str(&text),
            Event::Done { usage, .. } => return (answer, usage.predicted),
            Event::Failed { message, .. } => panic!("{message}"),
            _ => {}
        }
    }
}

#[test]
fn predictions_come_true_and_change_no_answer() {
    for ranks in [1, 2] {
        with_engine(ranks, Parallelism::Tensor, limits(16), |engine| {
            let encode = |text: &str| engine.info().tokenizer.encode(text, false).unwrap();
            for index in [0, 3] {
                let (text, none) = answer(&engine, Vec::new(), index);
                assert_eq!(none, None);
                // The text's tokens may differ from the chosen ones, but most are the same.
                let (same, true_one) = answer(&engine, encode(&text), index);
                let true_one = true_one.unwrap();
                assert_eq!(same, text);
                assert!(true_one.right > 3 * true_one.wrong, "{true_one:?}");
                let cats = encode(&"Cats sleep most of the day. ".repeat(9));
                let (other, false_one) = answer(&engine, cats.clone(), index);
                let false_one = false_one.unwrap();
                assert_eq!(other, text);
                assert_eq!(false_one.right + false_one.wrong, cats.len());
                assert!(false_one.right < false_one.wrong, "{false_one:?}");
            }
        });
    }
}
