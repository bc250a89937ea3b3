//! Kinds of caches: preemption, prefix cache, pipelines and the number of ranks change no answer.
//! Keys and values, compressed vectors and keys for selection are in blocks. Tokens that are not
//! compressed yet are in a state, as are those of delta rules and state spaces, for which
//! `states.rs` tests the rest.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use crate::common::{
    LAYOUTS, PATIENCE, any_pace, read, read_with_usage, with_engine_of, with_engine_of_int16,
};
use thunder_engine::{Engine, Event, Limits, Request};
use thunder_model::{ModelFolder, Parallelism};

const MODELS: [&str; 11] = [
    // A vector for each token, shared by all heads.
    "transformers-deepseek_v3",
    // Windows: with sinks, with other heads, and with heads of two widths.
    "transformers-gpt_oss",
    "transformers-gemma3_text",
    "transformers-gemma4_text",
    "transformers-mimo_v2_flash",
    // Chunks.
    "transformers-llama4",
    // Selected tokens, by keys of their own.
    "transformers-deepseek_v32",
    "transformers-glm_moe_dsa",
    // Compressed tokens or keys, and several residual streams.
    "transformers-deepseek_v4",
    "deepseek_v41-engram",
    "transformers-glm5_next",
];

/// Those whose layers keep states, but no compressed tokens, and plain attention.
const MORE_MODELS: [&str; 5] = [
    "transformers-qwen3",
    "transformers-qwen3_next",
    "transformers-kimi_linear",
    "transformers-nemotron_h",
    "transformers-lfm2",
];

fn case(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cases").join(name)
}

/// Whether a model can be divided so.
fn can_run(name: &str, (ranks, parallel): (usize, Parallelism)) -> bool {
    match name {
        _ if parallel == Parallelism::Tensor => true,
        // A stage cannot read what layers of another stage keep or select.
        "deepseek_v41-engram" | "transformers-glm_moe_dsa" => false,
        _ => ranks <= ModelFolder::open(&case(name)).unwrap().spec.layers.len(),
    }
}

/// Each model with each layout.
fn cases() -> impl Iterator<Item = (PathBuf, usize, Parallelism)> {
    let of_model = |name| LAYOUTS.into_iter().filter(move |layout| can_run(name, *layout));
    MODELS
        .into_iter()
        .flat_map(move |name| of_model(name).map(move |(ranks, parallel)| (case(name), ranks, parallel)))
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

/// A greedy answer.
struct Greedy {
    index: usize,
    tokens: Vec<u32>,
    /// Log-probabilities of the best two tokens at each place.
    best: Vec<[f32; 2]>,
}

impl Greedy {
    fn of(engine: &Engine, index: usize) -> Self {
        let request = Request { max_tokens: Some(12), logprobs: Some(2), ..request(index) };
        let mut stream = engine.submit(request).unwrap();
        let (mut tokens, mut best) = (Vec::new(), Vec::new());
        loop {
            match stream.next_within(PATIENCE).unwrap().unwrap() {
                Event::Delta { logprobs, .. } => {
                    tokens.extend(logprobs.iter().map(|token| token.id));
                    best.extend(logprobs.iter().map(|token| [token.top[0].2, token.top[1].2]));
                }
                Event::Done { .. } => return Self { index, tokens, best },
                other => panic!("{other:?} was not asked for"),
            }
        }
    }

    /// How clearly its least clear token is the best.
    fn clarity(&self) -> f32 {
        self.best.iter().map(|[first, second]| first - second).fold(f32::MAX, f32::min)
    }
}

/// Sums of ranks differ in their last bits, which decide between tokens that are almost equally
/// likely. Answers without such a choice are the same on any ranks.
#[test]
fn greedy_answers_do_not_depend_on_the_number_of_ranks() {
    const CLEAR: f32 = 0.02;
    // 2e-5 with tables by the last tokens, 6e-6 or less elsewhere.
    const LIMIT: f32 = 1e-4;
    const ANSWERS: usize = 4;
    let layouts = [2, 3, 5].map(|ranks| (ranks, Parallelism::Tensor));
    let stages = [2, 3].map(|ranks| (ranks, Parallelism::Pipeline));
    for name in MODELS.into_iter().chain(MORE_MODELS) {
        let limits = Limits { sequences: 1, rows: 40, kv_blocks: 8, prefix_cache: false, ..any_pace() };
        let mut expected = Vec::new();
        with_engine_of_int16(&case(name), (1, Parallelism::Tensor), limits, |engine| {
            expected = (0..16).map(|index| Greedy::of(&engine, index)).collect();
        });
        expected.sort_by(|one, other| other.clarity().total_cmp(&one.clarity()));
        expected.truncate(ANSWERS);
        assert!(expected.iter().all(|answer| answer.clarity() > CLEAR), "{name}: too few clear answers");
        for layout in layouts.into_iter().chain(stages).filter(|layout| can_run(name, *layout)) {
            with_engine_of_int16(&case(name), layout, limits, |engine| {
                let mut most = 0.0f32;
                for expected in &expected {
                    let answer = Greedy::of(&engine, expected.index);
                    let what = format!("{name}, {layout:?}, prompt {}", expected.index);
                    assert_eq!(answer.tokens, expected.tokens, "{what}");
                    // Models that are certain of a token are not of the second best.
                    for (ours, theirs) in answer.best.iter().flatten().zip(expected.best.iter().flatten()) {
                        most = most.max((ours - theirs).abs() / (1.0 + theirs.abs()));
                    }
                }
                println!("{name}, {layout:?}: {most:e}");
                assert!(most < LIMIT, "{name}, {layout:?}: log-probabilities differ by {most}");
            });
        }
    }
}
