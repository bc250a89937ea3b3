//! The ranks' reports about their work, in each layout.

use std::time::{Duration, Instant};

use crate::common::{PATIENCE, any_pace, with_engine};
use thunder_engine::{Engine, Event, Limits, Request, RequestWork};
use thunder_model::Parallelism;

/// The ranks' report about a request, and the request's time.
fn work_of(engine: &Engine, tokens: usize) -> (Option<RequestWork>, Duration) {
    let request = Request {
        // More tokens than rows: the prompt takes several steps, and only the last has a result.
        prompt: (20..90).collect(),
        max_tokens: Some(tokens),
        ignore_eos: true,
        reports_work: true,
        ..Request::default()
    };
    let (began, mut work) = (Instant::now(), None);
    let mut stream = engine.submit(request).unwrap();
    loop {
        match stream.next_within(PATIENCE).expect("an event comes in time").unwrap() {
            Event::Work(reported) => work = Some(reported),
            Event::Done { usage, .. } => {
                assert_eq!(usage.completion_tokens, tokens);
                return (work, began.elapsed());
            }
            Event::Failed { message, .. } => panic!("{message}"),
            _ => {}
        }
    }
}

#[test]
fn every_rank_reports_its_time_of_prefill_and_decoding() {
    let limits = Limits { sequences: 4, rows: 32, kv_blocks: 32, ..any_pace() };
    let layouts = [(1, Parallelism::Tensor, 1), (2, Parallelism::Tensor, 1), (3, Parallelism::Pipeline, 3)];
    for (ranks, parallel, stages) in layouts {
        with_engine(ranks, parallel, limits, |engine| {
            for tokens in [20, 1] {
                let what = format!("{tokens} tokens of {ranks} ranks, {parallel:?}");
                let (work, took) = work_of(&engine, tokens);
                let work = work.unwrap_or_else(|| panic!("{what}: no report"));
                assert_eq!((work.ranks.len(), work.tensor_ranks), (ranks, ranks / stages), "{what}");
                assert_eq!(work.prefill_steps, 3, "{what}");
                assert_eq!(work.decode_steps, tokens as u64 - 1, "{what}");
                for (rank, of) in work.ranks.iter().enumerate() {
                    let what = format!("{what}, rank {rank}: {of:?} of {took:?}");
                    assert!(of.prefill.computed > Duration::ZERO, "{what}");
                    assert_eq!(of.decode.computed > Duration::ZERO, tokens > 1, "{what}");
                    // Ranks of a pipeline wait for the previous stage, and rank 0 waits for the
                    // last one.
                    assert!(ranks == 1 || of.prefill.waited > Duration::ZERO, "{what}");
                    let all = [of.prefill, of.decode].map(|time| time.computed + time.waited);
                    // The first report contains what a rank did not report before the request
                    // began.
                    assert!(all[0] + all[1] < took + Duration::from_millis(50), "{what}");
                }
            }
        });
    }
}
