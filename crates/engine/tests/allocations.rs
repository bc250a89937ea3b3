//! Generating a token allocates nothing except the text that the client gets.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "this test uses a part of it")]
#[path = "engine/common.rs"]
mod common;

use std::time::Instant;

use common::{PATIENCE, read, with_engine_of_drafted};
use thunder_engine::{Engine, Limits, Request, Sampling};
use thunder_model::{ModelFolder, Parallelism};
use thunder_testing::allocations::{self, CountingAllocator};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Allocations of the ranks while they answer three requests with `max_tokens` tokens each: greedy,
/// sampled, and with a stop text.
fn answer_requests(engine: &Engine, max_tokens: usize) -> usize {
    let request = |index: usize| Request {
        prompt: (20..30 + index as u32).collect(),
        sampling: Sampling {
            temperature: (index % 2) as f32,
            top_k: index,
            seed: Some(index as u64),
            ..Sampling::default()
        },
        max_tokens: Some(max_tokens),
        stop: if index == 2 { vec!["not to be met".to_owned()] } else { Vec::new() },
        ignore_eos: true,
        logprobs: None,
        ..Request::default()
    };
    let before = allocations::total();
    for index in 0..3 {
        assert!(read(engine.submit(request(index)).unwrap()).is_some());
    }
    let deadline = Instant::now() + PATIENCE;
    while engine.load() != (0, 0) {
        assert!(Instant::now() < deadline, "the slots are not free");
    }
    allocations::total() - before
}

// The only test in this binary, because another one would allocate at the same time.
#[test]
fn a_token_allocates_nothing_but_its_text() {
    let draft = thunder_testing::builtin_model();
    for (ranks, draft) in [(1, None), (2, None), (1, Some(&*draft)), (2, Some(&*draft))] {
        let limits = Limits {
            sequences: 4,
            rows: 32,
            kv_blocks: 16,
            prefix_cache: true,
            draft_rows: 8,
            ..Limits::default()
        };
        let folder = ModelFolder::open(&thunder_testing::builtin_model()).unwrap();
        with_engine_of_drafted(folder, draft, ranks, Parallelism::Tensor, limits, |engine| {
            allocations::exempt_this_thread();
            // Queues may grow on a busy machine, which only adds allocations: the minimum of
            // several rounds counts.
            let [few, many] = [8, 108].map(|tokens| {
                answer_requests(&engine, tokens);
                (0..5).map(|_| answer_requests(&engine, tokens)).min().unwrap()
            });
            assert!(few > 0, "allocations are not counted");
            // Each token allocates its text; a channel allocates space for 32 events at once.
            let tokens = 3 * 100;
            let most = tokens + tokens / 32 + 3;
            assert!(
                many - few <= most,
                "{ranks} ranks, {draft:?}: {} allocations for {tokens} tokens, allowed {most}",
                many - few
            );
        });
    }
}
