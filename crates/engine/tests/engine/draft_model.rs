//! A draft model makes answers faster, and does not change them.

use std::path::Path;
use std::sync::atomic::Ordering;

use crate::common::{LAYOUTS, any_pace, read, with_engine_of, with_engine_of_drafted};
use crate::guesses::{answers, compare_until_guessed, guesses, preempt_and_cancel};
use crate::models::{self, Kind};
use thunder_engine::assembly::{Assembly, DraftSpec, EngineSpec, RankSpec};
use thunder_engine::{Engine, Limits, Request, Sampling};
use thunder_model::{ModelFolder, Parallelism};

/// Layers of the served model, so that a draft of the built-in model's size takes a quarter of a
/// step.
const THICK: usize = 24;

fn limits() -> Limits {
    Limits { sequences: 6, rows: 48, kv_blocks: 64, draft_rows: 16, prefix_cache: true, ..any_pace() }
}

/// Greedy, sampled, with penalties, in turn. `number` also determines the text.
fn request(engine: &Engine, number: usize, max_tokens: usize) -> Request {
    let prompt = format!("Question {number}: what does rank {} send to rank {}?", number * 7, number + 3);
    Request {
        prompt: engine.info().tokenizer.encode(&prompt, false).unwrap(),
        sampling: Sampling {
            temperature: if number.is_multiple_of(3) { 0.0 } else { 0.9 },
            top_p: if number % 3 == 1 { 0.95 } else { 1.0 },
            repetition_penalty: if number % 3 == 2 { 1.1 } else { 1.0 },
            seed: Some(number as u64),
            ..Sampling::default()
        },
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        ..Request::default()
    }
}

fn short_request(engine: &Engine, number: usize) -> Request {
    request(engine, number, 50)
}

fn with_draft(
    served: &Path,
    draft: &Path,
    (ranks, parallel): (usize, Parallelism),
    limits: Limits,
    work: impl FnOnce(Engine) + Send,
) {
    let folder = ModelFolder::open(served).unwrap();
    with_engine_of_drafted(folder, Some(draft), ranks, parallel, limits, work);
}

#[test]
fn answers_do_not_depend_on_a_draft_model() {
    let served = models::thick(THICK);
    let drafts = [
        (Kind::Right, models::first_layers(models::LAYERS)),
        (Kind::Sometimes, models::first_layers(4)),
        (Kind::Wrong, models::random()),
    ];
    for layout in LAYOUTS.into_iter().chain([(3, Parallelism::Tensor)]) {
        let mut without = Vec::new();
        let plain = Limits { draft_rows: 0, ..limits() };
        with_engine_of(served.path(), layout.0, layout.1, plain, |engine| {
            without = answers(&engine, short_request, 4, true);
        });
        for (kind, draft) in &drafts {
            let what = format!("{layout:?}, {kind:?}");
            with_draft(served.path(), draft.path(), layout, limits(), |engine| {
                let (guessed, right) =
                    compare_until_guessed(&engine, short_request, &without, (&*what, *kind));
                match kind {
                    // Sums of shards differ from the draft's in their last bits, and if guesses do
                    // not pay, few are made.
                    Kind::Right => assert!(right * 2 > guessed, "{what}: {right} of {guessed}"),
                    Kind::Wrong => assert!(right * 10 < guessed, "{what}: {right} of {guessed}"),
                    Kind::Sometimes => {}
                }
            });
        }
    }
}

#[test]
fn a_draft_model_that_is_never_right_is_switched_off() {
    let (served, draft) = (models::thick(THICK), models::random());
    with_draft(served.path(), draft.path(), (1, Parallelism::Tensor), limits(), |engine| {
        let answer = |number| read(engine.submit(request(&engine, number, 90)).unwrap()).unwrap();
        (0..4).for_each(|number| drop(answer(3 * number)));
        let counters = engine.counters();
        let steps = || counters.steps.load(Ordering::Relaxed);
        let (before, began) = (guesses(&engine).0, steps());
        (4..14).for_each(|number| drop(answer(3 * number)));
        let (tried, steps) = (guesses(&engine).0 - before, steps() - began);
        // A trial of two tokens takes about half a step, and a hundredth of the time may be spent
        // on trials.
        assert!(tried * 10 < steps, "{:?} {tried} guesses in {steps} steps", guesses(&engine));
    });
}

#[test]
fn preempted_and_cancelled_requests_are_guessed_too() {
    let (served, draft) = (models::thick(THICK), models::first_layers(models::LAYERS));
    for layout in [(1, Parallelism::Tensor), (2, Parallelism::Pipeline)] {
        let few = Limits { kv_blocks: 7, ..limits() };
        with_draft(served.path(), draft.path(), layout, few, |engine| {
            let (_, right) = preempt_and_cancel(&engine, short_request, &format!("{layout:?}"));
            assert!(right > 0, "{layout:?}: no guess was right");
        });
    }
}

/// The error for a draft model when the engine is assembled.
fn refusal(served: &Path, draft: &Path) -> String {
    let mut engine = EngineSpec::new(served, "org/served");
    engine.draft = Some(DraftSpec { name: "org/draft".to_owned(), model: draft.to_owned() });
    Assembly::open(&RankSpec::solo(engine)).map(drop).expect_err("the draft model is refused").to_string()
}

#[test]
fn a_draft_model_with_other_tokens_is_refused() {
    let other = models::other_vocabulary();
    let error = refusal(&thunder_testing::builtin_model(), other.path());
    for part in ["org/draft", "org/served", "4096 tokens, checksum", "same tokenizer"] {
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
    let error = refusal(&thunder_testing::builtin_model(), Path::new("/nowhere"));
    assert!(error.contains("org/draft") && error.contains("/nowhere"), "{error}");
}
