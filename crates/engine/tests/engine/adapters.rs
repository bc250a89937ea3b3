//! Requests with different adapters in one engine: answers do not depend on each other.

use std::path::Path;

use crate::common::{LAYOUTS, PATIENCE, with_engine_of_adapted};
use thunder_engine::{Engine, Event, EventStream, Limits, Request, Sampling, SubmitError};
use thunder_model::{ModelFolder, Parallelism};

const NAMES: [&str; 3] = ["llama-all", "llama-some", "llama-mlx"];

fn folder() -> ModelFolder {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let mut folder = ModelFolder::open(&golden.join("cases/llama-4bit-g32")).unwrap();
    for name in NAMES {
        folder.add_adapter(name, &golden.join("adapters").join(name)).unwrap();
    }
    folder
}

fn limits(prefix_cache: bool) -> Limits {
    Limits { sequences: 4, rows: 24, kv_blocks: 32, prefix_cache, draft_rows: 8, ..Limits::default() }
}

/// All have the same prompt, so that a cache that ignores the adapter is detected.
fn request(adapter: Option<usize>, seed: u64) -> Request {
    Request {
        prompt: (0..70).map(|token| token * 7 % 160).collect(),
        sampling: Sampling { temperature: 0.8, seed: Some(seed), ..Sampling::default() },
        max_tokens: Some(12),
        ignore_eos: true,
        logprobs: Some(0),
        adapter,
        ..Request::default()
    }
}

/// A token and its log-probability.
type Choice = (u32, f32);

/// The choices of a whole answer, and the number of cached prompt tokens.
fn read(mut stream: EventStream) -> (Vec<Choice>, usize) {
    let mut choices = Vec::new();
    loop {
        match stream.next_within(PATIENCE).unwrap().unwrap() {
            Event::Delta { logprobs, .. } => {
                choices.extend(logprobs.iter().map(|token| (token.id, token.logprob)));
            }
            Event::Done { usage, .. } => return (choices, usage.cached_tokens),
            other => panic!("{other:?}"),
        }
    }
}

/// The answers of all adapters and of the model, and the number of cached prompt tokens.
fn answers(engine: &Engine, together: bool) -> (Vec<Vec<Choice>>, usize) {
    let requests: Vec<_> = [None, Some(0), Some(1), Some(2), None, Some(0)]
        .into_iter()
        .map(|adapter| request(adapter, 5))
        .collect();
    let (mut texts, mut cached) = (Vec::new(), 0);
    for group in requests.chunks(if together { requests.len() } else { 1 }) {
        let streams: Vec<_> = group.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
        for stream in streams {
            let (choices, of_prompt) = read(stream);
            cached += of_prompt;
            texts.push(choices);
        }
    }
    (texts, cached)
}

#[test]
fn answers_depend_on_the_adapter_and_on_nothing_else() {
    // The model has two layers.
    let fits = |(ranks, parallel): &(usize, Parallelism)| *parallel == Parallelism::Tensor || *ranks <= 2;
    for (ranks, parallel) in LAYOUTS.into_iter().filter(fits) {
        let mut without = Vec::new();
        with_engine_of_adapted(folder(), ranks, parallel, limits(false), |engine| {
            (without, _) = answers(&engine, false);
            assert_eq!((&without[0], &without[1]), (&without[4], &without[5]));
            for (index, one) in without[..4].iter().enumerate() {
                assert!(!without[..index].contains(one), "{without:?}");
            }
        });
        with_engine_of_adapted(folder(), ranks, parallel, limits(true), |engine| {
            for together in [false, true] {
                let (texts, cached) = answers(&engine, together);
                assert_eq!(texts, without, "{ranks} ranks, {parallel:?}, {together}");
                // Two blocks of the prompt, separate for each adapter.
                let least = if together { 6 } else { 2 };
                assert!(cached >= least * 64, "{cached} tokens were cached");
            }
            let unknown = engine.submit(request(Some(3), 0));
            assert!(matches!(unknown, Err(SubmitError::BadParameter { name: "adapter", .. })), "{unknown:?}");
        });
    }
}
