//! Equal beginnings of prompts are computed once, and no answer changes.

use crate::common::{LAYOUTS, read_with_usage, with_engine};
use thunder_engine::{Engine, Limits, Request, Sampling};

const SYSTEM: &str =
    "You are a careful engineer. Answer in few words, name the units, and say what you do not know.";

fn limits(prefix_cache: bool) -> Limits {
    Limits { sequences: 4, rows: 24, kv_blocks: 24, prefix_cache, ..Limits::default() }
}

/// A question after the common beginning. The second turn repeats the first one and its answer.
fn request(engine: &Engine, question: usize, turn: usize) -> Request {
    let mut prompt = format!("{SYSTEM} {SYSTEM} Question {question}: what does rank {} do?", question * 7);
    if turn > 0 {
        prompt.push_str(" It waits for its peers. And after that, what will it do?");
    }
    Request {
        prompt: engine.info().tokenizer.encode(&prompt, false).unwrap(),
        sampling: Sampling {
            temperature: (question % 2) as f32,
            seed: Some(question as u64),
            ..Sampling::default()
        },
        max_tokens: Some(20),
        stop: Vec::new(),
        ignore_eos: true,
        logprobs: None,
        ..Request::default()
    }
}

/// The answers to all questions, one turn at a time, and the number of cached prompt tokens.
fn answers(engine: &Engine) -> (Vec<String>, usize) {
    let (mut texts, mut cached) = (Vec::new(), 0);
    for turn in 0..2 {
        // The first alone, so that the others find its blocks; the others together.
        for questions in [0..1, 1..6] {
            let streams: Vec<_> =
                questions.map(|question| engine.submit(request(engine, question, turn)).unwrap()).collect();
            for stream in streams {
                let (text, usage) = read_with_usage(stream).unwrap();
                cached += usage.cached_tokens;
                texts.push(text);
            }
        }
    }
    (texts, cached)
}

#[test]
fn answers_do_not_depend_on_what_was_cached() {
    for (ranks, parallel) in LAYOUTS {
        let mut without = Vec::new();
        with_engine(ranks, parallel, limits(false), |engine| {
            let (texts, cached) = answers(&engine);
            assert_eq!(cached, 0);
            without = texts;
        });
        with_engine(ranks, parallel, limits(true), |engine| {
            let (texts, cached) = answers(&engine);
            assert_eq!(texts, without, "{ranks} ranks, {parallel:?}");
            // Five first questions share at least one block, and six second turns their whole
            // question.
            assert!(cached >= 11 * 32, "{cached} tokens were cached");
            let (_, again) = answers(&engine);
            assert!(again >= cached, "{again} the second time, {cached} the first");
        });
    }
}
