//! Drafts in models with states (delta rules, state spaces, compressed tokens): a wrong guess
//! leaves no trace in a state, so no answer changes.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::common::{
    LAYOUTS, PATIENCE, any_pace, read, read_with_usage, with_engine_of, with_engine_of_drafted,
};
use thunder_engine::{Engine, Limits, Request, Sampling};
use thunder_model::{ModelFolder, Parallelism};

const MODELS: [&str; 12] = [
    "transformers-qwen3_next",
    "transformers-qwen3_5",
    "transformers-qwen3_5_moe",
    "transformers-kimi_linear",
    "transformers-nemotron_h",
    "transformers-granitemoehybrid",
    "transformers-lfm2",
    "transformers-deepseek_v4",
    "deepseek_v41-engram",
    "transformers-glm5_next",
    // With a layer that predicts further tokens.
    "../ahead/qwen3_next",
    "../ahead/qwen3_5",
];

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cases").join(name)
}

/// Each model with each layout.
fn cases() -> impl Iterator<Item = (&'static str, (usize, Parallelism))> {
    let layouts = || LAYOUTS.into_iter().chain([(3, Parallelism::Tensor)]);
    let all = MODELS.into_iter().flat_map(move |name| layouts().map(move |layout| (name, layout)));
    // A stage cannot read what layers of another stage keep.
    all.filter(|(name, (_, parallel))| *parallel == Parallelism::Tensor || !name.contains("deepseek_v41"))
}

fn limits(draft_rows: usize) -> Limits {
    Limits {
        sequences: 4,
        rows: 40,
        kv_blocks: 40,
        prefix_cache: true,
        snapshots: Some(4),
        draft_rows,
        ..any_pace()
    }
}

/// A prompt that repeats itself. All except number 0 begin with the same 64 tokens or more. The
/// answer is greedy, or sampled from few of the most probable tokens, or from all.
fn request(index: usize) -> Request {
    let token = |(seed, at): (usize, usize)| ((at % 9 * 7 + at % 4 * 31 + seed * 53) % 160) as u32;
    let common = (0..64).map(|at| (usize::from(index == 0), at));
    let own = (0..9 + 3 * index).map(|at| (index + 2, at));
    Request {
        prompt: common.chain(own).map(token).collect(),
        sampling: Sampling {
            temperature: [0.0, 0.4, 1.2][index % 3],
            seed: Some(index as u64),
            ..Sampling::default()
        },
        max_tokens: Some(30),
        ignore_eos: true,
        ..Request::default()
    }
}

fn count(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// The answers to all requests, one at a time or all together, and the tokens that were cached.
fn answers(engine: &Engine, together: bool) -> (Vec<String>, usize) {
    let submit = |index| engine.submit(request(index)).unwrap();
    let read = |stream| read_with_usage(stream).unwrap();
    let answers: Vec<_> = match together {
        true => (0..6).map(submit).collect::<Vec<_>>().into_iter().map(read).collect(),
        false => (0..6).map(|index| read(submit(index))).collect(),
    };
    let cached = answers.iter().map(|(_, usage)| usage.cached_tokens).sum();
    (answers.into_iter().map(|(text, _)| text).collect(), cached)
}

/// Cases with right guesses, and cases with wrong ones.
#[derive(Debug, Default)]
struct Guessed {
    right: usize,
    wrong: usize,
}

impl Guessed {
    /// Repeats `round` until right and wrong guesses were verified, at most a dozen times, because
    /// their number depends on the machine's speed. A fixture that is nearly sure of each token has
    /// no wrong ones, and a random layer for multi-token prediction has no right ones.
    fn ask(&mut self, engine: &Engine, mut round: impl FnMut()) {
        let mut guesses = [0; 2];
        for _ in 0..12 {
            round();
            let right = count(&engine.counters().drafts_right);
            guesses = [right, count(&engine.counters().drafted) - right];
            if guesses[0] > 3 && guesses[1] > 0 {
                break;
            }
        }
        self.right += usize::from(guesses[0] > 0);
        self.wrong += usize::from(guesses[1] > 0);
    }

    /// Fails unless most of the cases tested something.
    fn check(&self) {
        let half = cases().count() / 2;
        assert!(self.right > half && self.wrong > half, "of {} cases only {self:?}", 2 * half);
    }
}

#[test]
fn answers_depend_neither_on_drafts_nor_on_what_was_cached() {
    let mut guessed = Guessed::default();
    for (name, (ranks, parallel)) in cases() {
        let what = format!("{name}, {ranks} ranks, {parallel:?}");
        let mut without = Vec::new();
        let plain = Limits { prefix_cache: false, ..limits(0) };
        with_engine_of(&case(name), ranks, parallel, plain, |engine| without = answers(&engine, false).0);
        with_engine_of(&case(name), ranks, parallel, limits(16), |engine| {
            let mut cached = 0;
            guessed.ask(&engine, || {
                for together in [false, true] {
                    let (texts, tokens) = answers(&engine, together);
                    assert_eq!(texts, without, "{what}, together: {together}");
                    cached += tokens;
                }
            });
            assert!(cached >= 8 * 64, "{what}: {cached} tokens were cached");
        });
    }
    guessed.check();
}

#[test]
fn answers_do_not_depend_on_preemptions() {
    let mut guessed = Guessed::default();
    for (name, (ranks, parallel)) in cases() {
        let what = format!("{name}, {ranks} ranks, {parallel:?}");
        let limits = Limits { kv_blocks: 9, rows: 24, ..limits(12) };
        with_engine_of(&case(name), ranks, parallel, limits, |engine| {
            let alone = answers(&engine, false).0;
            guessed.ask(&engine, || assert_eq!(answers(&engine, true).0, alone, "{what}"));
            assert!(count(&engine.counters().preempted) > 0, "{what}: the cache was too large");
        });
    }
    guessed.check();
}

#[test]
fn a_draft_model_may_have_states_too() {
    // The model is its own draft model, so that most guesses are right.
    for (name, served) in [
        ("transformers-qwen3_next", "transformers-qwen3_next"),
        ("transformers-nemotron_h", "transformers-nemotron_h"),
        ("transformers-qwen3_5", "transformers-qwen3_next"),
    ] {
        for (ranks, parallel) in LAYOUTS {
            let what = format!("{name} for {served}, {ranks} ranks, {parallel:?}");
            let mut without = Vec::new();
            with_engine_of(&case(served), ranks, parallel, limits(0), |engine| {
                without = answers(&engine, false).0;
            });
            for kv_blocks in [40, 9] {
                let folder = ModelFolder::open(&case(served)).unwrap();
                let limits = Limits { kv_blocks, ..limits(12) };
                with_engine_of_drafted(folder, Some(&case(name)), ranks, parallel, limits, |engine| {
                    let guessed = || count(&engine.counters().model_drafted);
                    let right = || count(&engine.counters().model_drafts_right);
                    // A state that has absorbed a wrong guess, or not all tokens, changes answers
                    // for good. Two tokens that are equally probable cost the rest of one draft.
                    let are_right = || name != served || right() * 10 > guessed() * 6;
                    let began = Instant::now();
                    for round in 1.. {
                        for together in [false, true] {
                            assert_eq!(answers(&engine, together).0, without, "{what}, {together}");
                        }
                        // A model that costs as much as the served one is only tried, and with a
                        // short text first, because it is read soonest.
                        for number in 0..4 {
                            let prompt = request(number).prompt[..8].to_vec();
                            read(engine.submit(Request { prompt, ..request(number) }).unwrap()).unwrap();
                        }
                        if guessed() > 10 && are_right() || guessed() > 0 && round >= 30 {
                            break;
                        }
                        // A trial that was held up by 10 ms is made up for by a second of steps.
                        assert!(began.elapsed() < PATIENCE, "{what}: no guesses in {round} rounds");
                    }
                    let counts = format!("{what}, {kv_blocks} blocks: {} of {}", right(), guessed());
                    println!("{counts} were right");
                    assert!(guessed() <= 10 || are_right(), "{counts} were right");
                });
            }
        }
    }
}
