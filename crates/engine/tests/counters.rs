//! The counters' values when a client has its last event.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::atomic::Ordering;

use common::{LAYOUTS, read, with_engine};
use thunder_engine::{Limits, Request};

/// Number of answers for each layout, because the time between an event and a counter is short.
const ANSWERS: usize = 200;

/// `/metrics` just after an answer must not count that answer as running.
#[test]
fn a_request_is_counted_no_more_once_its_last_event_is_there() {
    let limits = Limits { sequences: 4, rows: 32, kv_blocks: 32, prefix_cache: true, ..Limits::default() };
    for (ranks, parallel) in LAYOUTS {
        with_engine(ranks, parallel, limits, |engine| {
            for answer in 0..ANSWERS {
                let request = Request {
                    prompt: engine.info().tokenizer.encode("What is a rank?", false).unwrap(),
                    max_tokens: Some(1 + answer % 3),
                    ignore_eos: true,
                    ..Request::default()
                };
                assert!(read(engine.submit(request).unwrap()).is_some());
                let blocks = engine.counters().kv_blocks_used.load(Ordering::Relaxed);
                let what = format!("after answer {answer} of {ranks} ranks, {parallel:?}");
                assert_eq!((engine.load(), blocks), ((0, 0), 0), "{what}");
            }
        });
    }
}
