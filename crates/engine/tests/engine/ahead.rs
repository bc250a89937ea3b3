//! A layer that predicts further tokens makes answers faster, and does not change them.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::common::{LAYOUTS, PATIENCE, any_pace, read, with_engine_of_adapted};
use crate::guesses::{answers, compare_until_guessed, guesses, preempt_and_cancel};
use crate::models::{self, Kind};
use thunder_engine::assembly::{Assembly, DraftSpec, EngineSpec, RankSpec};
use thunder_engine::{Engine, Limits, Request, Sampling};
use thunder_model::{ModelFolder, Parallelism};

/// Layers of the served model, so that the layer for drafts takes a small part of a step.
const THICK: usize = 24;

fn limits() -> Limits {
    Limits { sequences: 6, rows: 48, kv_blocks: 64, draft_rows: 16, prefix_cache: true, ..any_pace() }
}

/// Sampled, greedy, with penalties, in turn. `number` also determines the text and its length.
fn request(engine: &Engine, number: usize) -> Request {
    let prompt =
        format!("Question {number}: what does rank {} send to {}?", number * 7, "rank 1".repeat(number));
    Request {
        prompt: engine.info().tokenizer.encode(&prompt, false).unwrap(),
        sampling: Sampling {
            temperature: if number % 3 == 1 { 0.0 } else { 0.9 },
            repetition_penalty: if number % 3 == 2 { 1.1 } else { 1.0 },
            seed: Some(number as u64),
            ..Sampling::default()
        },
        max_tokens: Some(60),
        ignore_eos: true,
        ..Request::default()
    }
}

fn with_engine(
    model: &Path,
    (ranks, parallel): (usize, Parallelism),
    limits: Limits,
    work: impl FnOnce(Engine) + Send,
) {
    let mut folder = ModelFolder::open(model).unwrap();
    assert!(folder.spec.ahead.is_some(), "the layer is found");
    if limits.draft_rows == 0 {
        folder.spec.ahead = None;
    }
    with_engine_of_adapted(folder, ranks, parallel, limits, work);
}

#[test]
fn answers_do_not_depend_on_the_layer() {
    for kind in [Kind::Right, Kind::Sometimes, Kind::Wrong] {
        let model = models::ahead(THICK, kind);
        for layout in LAYOUTS.into_iter().chain([(3, Parallelism::Tensor)]) {
            let mut without = Vec::new();
            with_engine(model.path(), layout, Limits { draft_rows: 0, ..limits() }, |engine| {
                without = answers(&engine, request, 4, true);
            });
            with_engine(model.path(), layout, limits(), |engine| {
                let what = format!("{layout:?}, {kind:?}");
                let (guessed, right) = compare_until_guessed(&engine, request, &without, (&*what, kind));
                match kind {
                    Kind::Right => assert!(right * 10 > guessed * 8, "{layout:?}: {right} of {guessed}"),
                    Kind::Wrong => assert!(right * 10 < guessed, "{layout:?}: {right} of {guessed}"),
                    Kind::Sometimes => {}
                }
            });
        }
    }
}

/// In a pipeline, requests whose answers are guessed decode in one step. If guesses are wrong, they
/// decode in as many steps as there are stages.
#[test]
fn requests_of_a_pipeline_are_guessed_together() {
    for layout in [(2, Parallelism::Pipeline), (3, Parallelism::Pipeline)] {
        for kind in [Kind::Right, Kind::Wrong] {
            let model = models::ahead(THICK, kind);
            let mut without = Vec::new();
            with_engine(model.path(), layout, Limits { draft_rows: 0, ..limits() }, |engine| {
                without = answers(&engine, request, 6, true);
            });
            with_engine(model.path(), layout, limits(), |engine| {
                let steps = || engine.counters().steps.load(Ordering::Relaxed);
                let began = Instant::now();
                let mut guessed = 0;
                for round in 0.. {
                    assert!(began.elapsed() < PATIENCE, "{layout:?}, {kind:?}: {guessed} guesses");
                    let before = (steps(), guesses(&engine).0);
                    assert_eq!(answers(&engine, request, 6, true), without, "{layout:?}, {kind:?}");
                    let now = (steps(), guesses(&engine).0);
                    println!(
                        "{layout:?}, {kind:?}: {} guesses in {} steps",
                        now.1 - before.1,
                        now.0 - before.0
                    );
                    guessed = now.1 - before.1;
                    if kind == Kind::Right && guessed > 100 {
                        return;
                    }
                    if round > 10 && kind == Kind::Wrong {
                        break;
                    }
                }
                assert!(kind == Kind::Wrong && guessed < 40, "{layout:?}, {kind:?}: {guessed} guesses");
            });
        }
    }
}

#[test]
fn the_layer_is_given_the_models_hidden_states() {
    let model = models::cycle(THICK);
    let first = models::CYCLE_FIRST;
    for layout in LAYOUTS.into_iter().chain([(3, Parallelism::Tensor)]) {
        with_engine(model.path(), layout, limits(), |engine| {
            let submit = |number: u32| {
                // Tokens that are not consecutive in the cycle, so that nothing is guessed from the
                // text.
                let prompt = (0..30 + number).map(|index| first + (index * 37 + number) % 128).collect();
                let request =
                    Request { prompt, max_tokens: Some(60), ignore_eos: true, ..Request::default() };
                engine.submit(request).unwrap()
            };
            let began = Instant::now();
            loop {
                for number in 0..4 {
                    read(submit(number)).unwrap();
                }
                let streams: Vec<_> = (0..4).map(submit).collect();
                streams.into_iter().for_each(|stream| drop(read(stream).unwrap()));
                if guesses(&engine).0 > 40 {
                    break;
                }
                assert!(began.elapsed() < PATIENCE, "{layout:?}: nothing was guessed");
            }
            let (guessed, right) = guesses(&engine);
            println!("{layout:?}: {right} of {guessed} guesses were right");
            assert!(right * 20 > guessed * 19, "{layout:?}: {right} of {guessed}");
        });
    }
}

#[test]
fn a_layer_that_is_never_right_is_switched_off() {
    let model = models::ahead(THICK, Kind::Wrong);
    with_engine(model.path(), (1, Parallelism::Tensor), limits(), |engine| {
        let answer = |number| read(engine.submit(request(&engine, number)).unwrap()).unwrap();
        (0..4).for_each(|number| drop(answer(3 * number)));
        let counters = engine.counters();
        let steps = || counters.steps.load(Ordering::Relaxed);
        let (before, began) = (guesses(&engine).0, steps());
        (4..14).for_each(|number| drop(answer(number)));
        let (tried, steps) = (guesses(&engine).0 - before, steps() - began);
        // A hundredth of the time may be spent on trials.
        assert!(tried * 10 < steps, "{:?} {tried} guesses in {steps} steps", guesses(&engine));
    });
}

#[test]
fn preempted_and_cancelled_requests_are_guessed_too() {
    let model = models::ahead(THICK, Kind::Right);
    for layout in [(1, Parallelism::Tensor), (2, Parallelism::Tensor), (2, Parallelism::Pipeline)] {
        with_engine(model.path(), layout, Limits { kv_blocks: 9, ..limits() }, |engine| {
            let (guessed, right) = preempt_and_cancel(&engine, request, &format!("{layout:?}"));
            println!("{layout:?}: {right} of {guessed} guesses were right");
            assert!(right * 2 > guessed, "{layout:?}: {right} of {guessed}");
        });
    }
}

#[test]
fn options_leave_the_layer_out() {
    let model = models::ahead(models::LAYERS, Kind::Right);
    let bytes = |change: &dyn Fn(&mut EngineSpec)| {
        let mut engine = EngineSpec::new(model.path(), "org/served");
        change(&mut engine);
        Assembly::open(&RankSpec::solo(engine)).unwrap().weight_bytes()
    };
    let with = bytes(&|_| {});
    let without = bytes(&|engine| engine.speculation = false);
    assert!(with > without, "{with}, {without}");
    let draft = bytes(&|engine| {
        let model = thunder_testing::builtin_model();
        engine.draft = Some(DraftSpec { name: "org/draft".to_owned(), model });
    });
    assert_eq!(draft, without, "a draft model takes its place");
}
