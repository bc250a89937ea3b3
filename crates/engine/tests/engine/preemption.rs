//! More sequences than the KV cache holds: the youngest are preempted, and no answer changes.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::common::{LAYOUTS, PATIENCE, any_pace, read, with_engine};
use thunder_engine::{Engine, Limits, Request, Sampling};
use thunder_model::Parallelism;

/// Maximum tokens of an answer. With this, three sequences fit into the smallest cache here, and
/// four do not.
const MAX_TOKENS: usize = 40;

fn request(engine: &Engine, index: usize) -> Request {
    let prompt = format!("Question {index}: what does rank {} do, and why?", index * 7);
    Request {
        prompt: engine.info().tokenizer.encode(&prompt, false).unwrap(),
        // Every other request is sampled, because a sampler's state must survive a preemption too.
        sampling: Sampling {
            temperature: (index % 2) as f32,
            seed: Some(index as u64),
            ..Sampling::default()
        },
        max_tokens: Some(MAX_TOKENS),
        stop: Vec::new(),
        ignore_eos: true,
        logprobs: None,
        ..Request::default()
    }
}

#[test]
fn answers_do_not_depend_on_preemptions() {
    for (ranks, parallel) in LAYOUTS {
        // With few rows, prompts are read in pieces, and a pipeline has several pieces of one
        // prompt in flight.
        let limits = Limits { sequences: 6, rows: 8, kv_blocks: 6, prefix_cache: true, ..any_pace() };
        with_engine(ranks, parallel, limits, |engine| {
            let alone: Vec<_> =
                (0..8).map(|index| read(engine.submit(request(&engine, index)).unwrap()).unwrap()).collect();
            assert_eq!(engine.counters().preempted.load(Ordering::Relaxed), 0, "one at a time fits");
            let streams: Vec<_> =
                (0..8).map(|index| engine.submit(request(&engine, index)).unwrap()).collect();
            let together: Vec<_> = streams.into_iter().map(|stream| read(stream).unwrap()).collect();
            assert_eq!(together, alone, "{ranks} ranks, {parallel:?}");
            let preempted = engine.counters().preempted.load(Ordering::Relaxed);
            assert!(preempted > 0, "{ranks} ranks, {parallel:?}: the cache was too large for this test");
            // What is computed again is no prompt token more.
            let prompts: usize = (0..8).map(|index| request(&engine, index).prompt.len()).sum();
            let read = engine.counters().read_tokens.load(Ordering::Relaxed);
            assert_eq!(read, 2 * prompts as u64, "{ranks} ranks, {parallel:?}");
        });
    }
}

#[test]
fn requests_share_steps() {
    let limits = Limits { sequences: 6, rows: 64, kv_blocks: 64, prefix_cache: true, ..any_pace() };
    with_engine(1, Parallelism::Tensor, limits, |engine| {
        let steps = || engine.counters().steps.load(Ordering::Relaxed);
        let round = || {
            let before = steps();
            let streams: Vec<_> =
                (0..6).map(|index| engine.submit(request(&engine, index)).unwrap()).collect();
            streams.into_iter().for_each(|stream| assert!(read(stream).is_some()));
            steps() - before
        };
        // Six answers of 40 tokens each; the first requests are some steps ahead, or many if this
        // thread is held up meanwhile.
        let fewest = (0..10).map(|_| round()).find(|steps| *steps < 2 * MAX_TOKENS as u64);
        assert!(fewest.is_some(), "6 answers of {MAX_TOKENS} tokens never shared their steps");
    });
}

#[test]
fn cancelled_requests_leave_their_blocks_to_others() {
    for (ranks, parallel) in [(1, Parallelism::Tensor), (2, Parallelism::Pipeline)] {
        let limits = Limits { sequences: 4, rows: 8, kv_blocks: 5, prefix_cache: true, ..any_pace() };
        with_engine(ranks, parallel, limits, |engine| {
            let expected = read(engine.submit(request(&engine, 0)).unwrap()).unwrap();
            for round in 0..20 {
                let mut streams: Vec<_> =
                    (0..6).map(|index| engine.submit(request(&engine, index)).unwrap()).collect();
                // Clients leave while they wait, during the prompt, and during the answer.
                for moment in 0..4 {
                    streams.remove((round + moment) % streams.len());
                    std::thread::sleep(Duration::from_micros(700 * round as u64));
                }
                streams.into_iter().for_each(|stream| assert!(read(stream).is_some()));
            }
            // This answer needs most of the cache, so a lost block would be noticed.
            let mut long = request(&engine, 0);
            long.max_tokens = None;
            assert!(read(engine.submit(long).unwrap()).unwrap().starts_with(&expected));
            // The slot of a cancelled request counts as free after the engine's next check.
            let deadline = Instant::now() + PATIENCE;
            while engine.load() != (0, 0) {
                assert!(Instant::now() < deadline, "{:?} requests are still counted", engine.load());
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    }
}
