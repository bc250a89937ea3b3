//! Models that select tokens by separate keys (DeepSeek V3.2, GLM-5), or have compressed tokens or
//! keys and several residual streams (DeepSeek V4, GLM-5.3): preemption, prefix cache and pipelines
//! change no answer. Keys and compressed vectors are in blocks, and tokens that are not compressed
//! yet in a state.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use common::{LAYOUTS, any_pace, read, read_with_usage, with_engine_of};
use thunder_engine::{Engine, Limits, Request};
use thunder_model::Parallelism;

const MODELS: [&str; 5] = [
    "transformers-deepseek_v32",
    "transformers-glm_moe_dsa",
    "transformers-deepseek_v4",
    "deepseek_v41-engram",
    "transformers-glm5_next",
];

/// Each model with each layout.
fn cases() -> impl Iterator<Item = (PathBuf, usize, Parallelism)> {
    let folder = |name| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cases").join(name);
    let all = MODELS.into_iter().flat_map(|name| LAYOUTS.map(|(ranks, parallel)| (name, ranks, parallel)));
    let runs = |(name, ranks, parallel): &(&str, usize, Parallelism)| match *name {
        _ if *parallel == Parallelism::Tensor => true,
        // A stage cannot read what layers of another stage keep or select.
        "deepseek_v41-engram" | "transformers-glm_moe_dsa" => false,
        // The model has two layers.
        "transformers-deepseek_v32" => *ranks <= 2,
        _ => true,
    };
    all.filter(runs).map(move |(name, ranks, parallel)| (folder(name), ranks, parallel))
}

/// A prompt of 75 tokens or more. All except number 0 begin with the same 64.
fn request(index: usize) -> Request {
    let token = |(seed, at): (usize, usize)| ((at * at * 7 + at * 31 + seed * 53) % 163) as u32;
    let common = (0..64).map(|at| (usize::from(index == 0), at));
    let own = (0..11 + 3 * index).map(|at| (index + 2, at));
    Request {
        prompt: common.chain(own).map(token).collect(),
        max_tokens: Some(24),
        ignore_eos: true,
        ..Request::default()
    }
}

fn together(engine: &Engine) -> Vec<String> {
    let streams: Vec<_> = (0..6).map(|index| engine.submit(request(index)).unwrap()).collect();
    streams.into_iter().map(|stream| read(stream).unwrap()).collect()
}

#[test]
fn answers_depend_neither_on_stages_nor_on_preemptions() {
    let mut expected = Vec::new();
    for (folder, ranks, parallel) in cases() {
        let limits = Limits { sequences: 5, rows: 24, kv_blocks: 9, ..any_pace() };
        if ranks == 1 {
            expected.clear();
        }
        with_engine_of(&folder, ranks, parallel, limits, |engine| {
            let alone: Vec<_> =
                (0..6).map(|index| read(engine.submit(request(index)).unwrap()).unwrap()).collect();
            assert_eq!(together(&engine), alone, "{}, {ranks} ranks, {parallel:?}", folder.display());
            assert!(engine.counters().preempted.load(Ordering::Relaxed) > 0, "the cache was too large");
            if expected.is_empty() {
                expected.clone_from(&alone);
            }
            // The ranks of a tensor split round sums differently.
            if parallel == Parallelism::Pipeline {
                assert_eq!(alone, expected, "{}, {ranks} stages", folder.display());
            }
        });
    }
}

#[test]
fn answers_do_not_depend_on_what_was_cached() {
    for (folder, ranks, parallel) in cases() {
        let limits = |prefix_cache| Limits {
            sequences: 4,
            rows: 40,
            kv_blocks: 40,
            prefix_cache,
            snapshots: Some(4),
            ..any_pace()
        };
        let mut without = Vec::new();
        with_engine_of(&folder, ranks, parallel, limits(false), |engine| without = together(&engine));
        with_engine_of(&folder, ranks, parallel, limits(true), |engine| {
            let mut cached = 0;
            for round in 0..2 {
                for (index, expected) in without.iter().enumerate() {
                    let stream = engine.submit(request(index)).unwrap();
                    let (text, usage) = read_with_usage(stream).unwrap();
                    assert_eq!(&text, expected, "{ranks} ranks, {parallel:?}, round {round}");
                    cached += usage.cached_tokens;
                }
            }
            assert!(cached >= 8 * 64, "{cached} tokens were cached");
        });
    }
}
