//! The counters' values when a client has its last event.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{LAYOUTS, PATIENCE, read, read_with_usage, with_engine};
use thunder_engine::{Event, Limits, Request};

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

/// Tokens that steps have made count at once, and a prompt once, whether its request ends or not.
#[test]
fn tokens_count_as_steps_make_them_and_prompts_once() {
    let limits = Limits { sequences: 4, rows: 32, kv_blocks: 32, prefix_cache: true, ..Limits::default() };
    for (ranks, parallel) in LAYOUTS {
        with_engine(ranks, parallel, limits, |engine| {
            let what = format!("{ranks} ranks, {parallel:?}");
            let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as usize;
            let counters = engine.counters();
            let prompt = engine.info().tokenizer.encode(&"What is a rank? ".repeat(16), false).unwrap();
            let request = |max_tokens| Request {
                prompt: prompt.clone(),
                max_tokens: Some(max_tokens),
                ignore_eos: true,
                ..Request::default()
            };
            // The client leaves after the first text: what was made until then is counted.
            let mut stream = engine.submit(request(64)).unwrap();
            assert!(matches!(stream.next_within(PATIENCE), Some(Some(Event::Delta { .. }))), "{what}");
            assert!(count(&counters.generated_tokens) > 0, "{what}: counted only at the end");
            assert_eq!(count(&counters.read_tokens), prompt.len(), "{what}");
            drop(stream);
            let until = std::time::Instant::now() + PATIENCE;
            while engine.load() != (0, 0) && std::time::Instant::now() < until {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let cancelled = count(&counters.generated_tokens);
            let usage = read_with_usage(engine.submit(request(7)).unwrap()).unwrap().1;
            assert_eq!(count(&counters.generated_tokens) - cancelled, usage.completion_tokens, "{what}");
            assert_eq!(count(&counters.read_tokens), 2 * prompt.len(), "{what}");
            assert!(usage.cached_tokens > 0, "{what}");
            assert_eq!(count(&counters.cached_tokens), usage.cached_tokens, "{what}");
        });
    }
}
