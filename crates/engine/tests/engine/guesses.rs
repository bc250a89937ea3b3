//! What guesses of a draft model and of a layer that predicts further tokens have in common: they
//! do not change answers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use thunder_engine::{Engine, Request};

use crate::common::{PATIENCE, read};
use crate::models::Kind;

/// Makes the request of a number.
pub type Ask = fn(&Engine, usize) -> Request;

/// The answers to `count` requests, one at a time or all together.
pub fn answers(engine: &Engine, ask: Ask, count: usize, together: bool) -> Vec<String> {
    let submit = |number| engine.submit(ask(engine, number)).unwrap();
    if together {
        let streams: Vec<_> = (0..count).map(submit).collect();
        streams.into_iter().map(|stream| read(stream).unwrap()).collect()
    } else {
        (0..count).map(|number| read(submit(number)).unwrap()).collect()
    }
}

/// Tokens that a model or a layer has guessed, and those that were right.
pub fn guesses(engine: &Engine) -> (u64, u64) {
    let counters = engine.counters();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    (count(&counters.model_drafted), count(&counters.model_drafts_right))
}

/// Compares answers with those `without` guesses until enough tokens were guessed. Returns
/// [`guesses`].
pub fn compare_until_guessed(
    engine: &Engine,
    ask: Ask,
    without: &[String],
    (what, kind): (&str, Kind),
) -> (u64, u64) {
    // What is always wrong is only tried, in a hundredth of the time.
    let most = if kind == Kind::Wrong { 3 } else { 20 };
    // Whether guesses are worthwhile depends on the machine's speed.
    let began = Instant::now();
    // One answer at a time takes four times as long.
    let alone = (kind == Kind::Sometimes || thunder_testing::is_long()).then_some(false);
    loop {
        for together in alone.into_iter().chain([true]) {
            assert_eq!(answers(engine, ask, without.len(), together), without, "{what}, {together}");
        }
        let (guessed, right) = guesses(engine);
        let is_late = began.elapsed() > PATIENCE;
        if guessed > most || (is_late && guessed > 0) {
            println!("{what}: {right} of {guessed} guesses were right");
            return (guessed, right);
        }
        assert!(!is_late, "{what}: nothing was guessed");
    }
}

/// Preempts and cancels requests, and compares the answers of the others. Returns [`guesses`]. The
/// cache has space for one request, and not for eight.
pub fn preempt_and_cancel(engine: &Engine, ask: Ask, what: &str) -> (u64, u64) {
    let alone = answers(engine, ask, 8, false);
    let preempted = || engine.counters().preempted.load(Ordering::Relaxed);
    assert_eq!(preempted(), 0, "one at a time fits");
    for round in 0..thunder_testing::runs(3, 6) {
        assert_eq!(answers(engine, ask, 8, true), alone, "{what}");
        let mut streams: Vec<_> = (0..6).map(|number| engine.submit(ask(engine, number)).unwrap()).collect();
        for moment in 0..4 {
            streams.remove((round + moment) % streams.len());
            std::thread::sleep(Duration::from_micros(1500 * round as u64));
        }
        streams.into_iter().for_each(|stream| assert!(read(stream).is_some()));
    }
    assert!(preempted() > 0, "{what}: the cache was too large for this test");
    guesses(engine)
}
