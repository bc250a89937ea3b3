//! Single cases: the content of steps, and when requests start, pause and end.

use thunder_compute::step::KV_BLOCK_TOKENS;

use crate::event::FinishReason;
use crate::request::SubmitError;
use crate::scheduler::pace::UNMEASURED_ROWS;
use crate::scheduler::plan::prompt_piece;
use crate::scheduler::{Generation, Limits, RequestId, RowResults, Scheduler, TokenEvent, Wanted};

const EOS: u32 = 0;
/// A token that does not end an answer.
pub(super) const TOKEN: u32 = 7;

pub(super) fn limits() -> Limits {
    Limits { sequences: 4, rows: 100, kv_blocks: 16, ..Limits::default() }
}

fn scheduler(limits: Limits, stages: usize) -> Scheduler {
    Scheduler::new(limits, stages, 400, vec![EOS])
}

pub(super) fn generation() -> Generation {
    Generation::default()
}

fn submit(scheduler: &mut Scheduler, prompt_tokens: usize) -> RequestId {
    scheduler.submit(&vec![TOKEN; prompt_tokens], generation()).unwrap()
}

/// Plans a step: slot, start and tokens of each part.
pub(super) fn plan(scheduler: &mut Scheduler) -> Vec<(usize, usize, usize)> {
    let part = |part: crate::scheduler::StepPart<'_>| (part.slot, part.start, part.tokens.len());
    scheduler.next_step().map(|step| step.parts().map(part).collect()).unwrap_or_default()
}

/// Applies the oldest step. Every sequence that awaits a token gets this one.
pub(super) fn apply(scheduler: &mut Scheduler, token: u32) -> Vec<TokenEvent> {
    let count = scheduler.oldest_step().map_or(0, |step| step.wanted_rows());
    let mut events = Vec::new();
    scheduler.apply(&vec![token; count], &mut events);
    events
}

#[test]
fn requests_share_steps() {
    let mut scheduler = scheduler(limits(), 1);
    let _ids = [0; 4].map(|_| submit(&mut scheduler, 10));
    assert_eq!(plan(&mut scheduler), [(0, 0, 10), (1, 0, 10), (2, 0, 10), (3, 0, 10)]);
    assert_eq!(apply(&mut scheduler, TOKEN).len(), 4);
    assert_eq!(plan(&mut scheduler), [(0, 10, 1), (1, 10, 1), (2, 10, 1), (3, 10, 1)]);
}

/// An answer whose mask is late does not delay others, and loses nothing.
#[test]
fn a_held_request_stays_out_of_steps_until_it_is_let_go() {
    let mut scheduler = scheduler(limits(), 1);
    let ids = [0; 2].map(|_| submit(&mut scheduler, 10));
    assert_eq!(plan(&mut scheduler), [(0, 0, 10), (1, 0, 10)]);
    apply(&mut scheduler, TOKEN);
    scheduler.hold(ids[0], true);
    for position in [10, 11] {
        assert_eq!(plan(&mut scheduler), [(1, position, 1)]);
        assert_eq!(apply(&mut scheduler, TOKEN).len(), 1);
    }
    scheduler.hold(ids[0], false);
    assert_eq!(plan(&mut scheduler), [(0, 10, 1), (1, 12, 1)]);
}

#[test]
fn a_long_prompt_is_read_in_pieces() {
    let mut scheduler = scheduler(limits(), 1);
    submit(&mut scheduler, 201);
    // Not 100, 100, 1: no piece is a single token.
    for (start, count) in [(0, 100), (100, 99), (199, 2)] {
        assert_eq!(plan(&mut scheduler), [(0, start, count)]);
        assert_eq!(apply(&mut scheduler, TOKEN).len(), usize::from(start == 199));
    }
}

#[test]
fn a_prompt_leaves_rows_to_those_that_decode() {
    let mut scheduler = scheduler(limits(), 1);
    submit(&mut scheduler, 5);
    plan(&mut scheduler);
    apply(&mut scheduler, TOKEN);
    submit(&mut scheduler, 200);
    assert_eq!(plan(&mut scheduler), [(0, 5, 1), (1, 0, UNMEASURED_ROWS)]);
}

#[test]
fn no_piece_of_a_prompt_is_a_single_token() {
    for room in 3..9 {
        for prompt in 2..40 {
            let mut left = prompt;
            while left > 0 {
                let piece = prompt_piece(left, room);
                assert!((2..=room).contains(&piece), "{piece} of {left}, with room for {room}");
                left -= piece;
            }
        }
    }
    assert_eq!((prompt_piece(5, 1), prompt_piece(3, 2)), (0, 0), "they wait for the next step");
}

#[test]
fn the_first_to_come_is_admitted_first() {
    let mut scheduler = scheduler(Limits { sequences: 2, ..limits() }, 1);
    let ids = [0; 4].map(|_| submit(&mut scheduler, 10));
    plan(&mut scheduler);
    assert_eq!((scheduler.running(), scheduler.waiting()), (2, 2));
    scheduler.cancel(ids[1]);
    apply(&mut scheduler, TOKEN);
    plan(&mut scheduler);
    assert_eq!(scheduler.slot_of(ids[2]), Some(1), "the third request has the freed slot");
    assert_eq!((scheduler.running(), scheduler.waiting()), (2, 1));
}

#[test]
fn a_prompt_that_does_not_fit_yet_waits_and_is_not_overtaken() {
    let mut scheduler = scheduler(Limits { kv_blocks: 4, ..limits() }, 1);
    let first = submit(&mut scheduler, 2 * KV_BLOCK_TOKENS);
    plan(&mut scheduler);
    submit(&mut scheduler, 2 * KV_BLOCK_TOKENS);
    submit(&mut scheduler, 1);
    apply(&mut scheduler, TOKEN);
    assert_eq!(plan(&mut scheduler).len(), 1, "two blocks hold the prompt, but no answer");
    assert_eq!(scheduler.waiting(), 2);
    scheduler.cancel(first);
    apply(&mut scheduler, TOKEN);
    assert_eq!(plan(&mut scheduler), [(1, 0, 1), (0, 0, 2 * KV_BLOCK_TOKENS)]);
}

#[test]
fn the_youngest_is_preempted_and_starts_over() {
    let mut scheduler = scheduler(Limits { kv_blocks: 3, ..limits() }, 1);
    let old = submit(&mut scheduler, KV_BLOCK_TOKENS - 3);
    let young = submit(&mut scheduler, KV_BLOCK_TOKENS - 4);
    plan(&mut scheduler);
    // The old sequence gets the third block with its 33rd token, and the young one finds none.
    for _ in 0..4 {
        apply(&mut scheduler, TOKEN);
        assert_eq!(plan(&mut scheduler).len(), 2);
    }
    apply(&mut scheduler, TOKEN);
    assert_eq!(plan(&mut scheduler), [(0, 33, 1)]);
    assert_eq!((scheduler.preemptions(), scheduler.waiting()), (1, 1));
    scheduler.cancel(old);
    apply(&mut scheduler, TOKEN);
    // The prompt is read as a prompt, but the generated tokens are not.
    assert_eq!(plan(&mut scheduler), [(0, 0, 28)]);
    assert!(apply(&mut scheduler, TOKEN).is_empty(), "the prompt's next token is known");
    assert_eq!(plan(&mut scheduler), [(0, 28, 5)]);
    assert_eq!(
        apply(&mut scheduler, TOKEN),
        [TokenEvent { request: young, token: TOKEN, finish: None, cached_tokens: 0 }]
    );
}

#[test]
fn a_sequence_waits_for_younger_ones_in_flight_rather_than_giving_up_its_slot() {
    let mut scheduler = scheduler(Limits { kv_blocks: 2, ..limits() }, 2);
    let old = submit(&mut scheduler, KV_BLOCK_TOKENS - 1);
    plan(&mut scheduler);
    submit(&mut scheduler, 2);
    assert_eq!(plan(&mut scheduler), [(1, 0, 2)]);
    apply(&mut scheduler, TOKEN);
    assert_eq!(plan(&mut scheduler), [(0, 31, 1)]);
    apply(&mut scheduler, TOKEN);
    assert_eq!(plan(&mut scheduler), [(1, 2, 1)]);
    apply(&mut scheduler, TOKEN);
    assert!(plan(&mut scheduler).is_empty(), "the only blocks to take are in flight");
    assert_eq!(scheduler.preemptions(), 0);
    apply(&mut scheduler, TOKEN);
    assert_eq!(plan(&mut scheduler), [(0, 32, 1)]);
    assert_eq!((scheduler.preemptions(), scheduler.slot_of(old)), (1, Some(0)));
}

#[test]
fn an_answer_ends_with_an_end_token_its_limit_or_the_context() {
    let finish = |generation, prompt_tokens: usize, token| {
        let mut scheduler = Scheduler::new(limits(), 1, 40, vec![EOS]);
        scheduler.submit(&vec![TOKEN; prompt_tokens], generation).unwrap();
        for count in 1.. {
            plan(&mut scheduler);
            let events = apply(&mut scheduler, token);
            if let Some(finish) = events[0].finish {
                assert!(scheduler.is_idle(), "the slot is free");
                return (count, finish);
            }
        }
        unreachable!()
    };
    let limited = Generation { max_tokens: Some(3), ..generation() };
    let ignoring = Generation { ignore_eos: true, ..limited };
    assert_eq!(finish(limited, 8, TOKEN), (3, FinishReason::Length));
    assert_eq!(finish(limited, 8, EOS), (1, FinishReason::Stop));
    assert_eq!(finish(ignoring, 8, EOS), (3, FinishReason::Length));
    assert_eq!(finish(generation(), 8, TOKEN), (32, FinishReason::Length));
    assert_eq!(finish(generation(), 39, TOKEN), (1, FinishReason::Length));
}

#[test]
fn a_prompt_without_room_for_an_answer_is_refused() {
    let mut scheduler = scheduler(Limits { kv_blocks: 2, ..limits() }, 1);
    let context = 2 * KV_BLOCK_TOKENS;
    assert_eq!(scheduler.submit(&[], generation()), Err(SubmitError::EmptyPrompt));
    let refused = SubmitError::PromptTooLong { tokens: context, context };
    assert_eq!(scheduler.submit(&vec![TOKEN; context], generation()), Err(refused));
    assert!(scheduler.is_idle());
}

#[test]
fn a_cancelled_request_leaves_at_once_unless_it_is_in_flight() {
    let mut scheduler = scheduler(Limits { sequences: 1, ..limits() }, 2);
    let [first, second] = [0; 2].map(|_| submit(&mut scheduler, 150));
    plan(&mut scheduler);
    plan(&mut scheduler);
    scheduler.cancel(second);
    assert_eq!(scheduler.waiting(), 0);
    scheduler.cancel(first);
    assert!(apply(&mut scheduler, TOKEN).is_empty());
    assert_eq!(scheduler.running(), 1, "the second piece of its prompt is in flight");
    assert!(apply(&mut scheduler, TOKEN).is_empty(), "nobody gets the token");
    assert!(scheduler.is_idle());
    assert_eq!(scheduler.blocks.unused(), 16);
    scheduler.cancel(first);
    assert!(scheduler.is_idle(), "a request that has ended is no longer known");
}

#[test]
fn a_pipeline_is_filled_and_the_sequences_are_shared_among_its_steps() {
    let mut scheduler = scheduler(Limits { sequences: 6, ..limits() }, 3);
    let _ids = [0; 6].map(|_| submit(&mut scheduler, 2));
    plan(&mut scheduler);
    apply(&mut scheduler, TOKEN);
    let mut step = || plan(&mut scheduler).iter().map(|part| part.0).collect::<Vec<_>>();
    assert_eq!([step(), step(), step()], [[0, 1], [2, 3], [4, 5]]);
    assert!(step().is_empty(), "three steps are in flight");
    apply(&mut scheduler, TOKEN);
    assert_eq!(plan(&mut scheduler), [(0, 3, 1), (1, 3, 1)]);
}

#[test]
fn a_pipeline_reads_a_prompt_in_several_steps_at_once() {
    let mut scheduler = scheduler(limits(), 3);
    submit(&mut scheduler, 350);
    assert_eq!(plan(&mut scheduler), [(0, 0, 100)]);
    assert_eq!(plan(&mut scheduler), [(0, 100, 100)]);
    assert_eq!(plan(&mut scheduler), [(0, 200, 100)]);
    assert!(plan(&mut scheduler).is_empty(), "three steps are in flight");
    assert!(apply(&mut scheduler, TOKEN).is_empty());
    assert_eq!(plan(&mut scheduler), [(0, 300, 50)]);
    assert_eq!([0; 3].map(|_| apply(&mut scheduler, TOKEN).len()), [0, 0, 1]);
}

#[test]
fn one_sampled_request_has_the_step_return_logits() {
    let mut scheduler = scheduler(limits(), 1);
    let sampled = Generation { wanted: Wanted::Logits, max_tokens: Some(1), ..generation() };
    submit(&mut scheduler, 3);
    scheduler.submit(&[TOKEN; 3], sampled).unwrap();
    assert_eq!(
        scheduler.next_step().unwrap().results(),
        RowResults { logits: true, ..RowResults::default() }
    );
    apply(&mut scheduler, TOKEN);
    let results = scheduler.next_step().unwrap().results();
    assert_eq!(results, RowResults::default(), "the sampled request has ended");
}

#[test]
fn a_slot_starts_its_next_sequence_at_position_0_with_a_table_of_its_own() {
    let mut scheduler = scheduler(Limits { sequences: 1, ..limits() }, 1);
    let first = submit(&mut scheduler, 40);
    submit(&mut scheduler, 50);
    plan(&mut scheduler);
    scheduler.cancel(first);
    apply(&mut scheduler, TOKEN);
    let step = scheduler.next_step().unwrap();
    let part = step.parts().next().unwrap();
    assert_eq!((part.slot, part.start, part.kept_blocks, part.new_blocks.len()), (0, 0, 0, 2));
}

/// Decodes a sequence of `prompt` tokens with a draft, and returns these tokens for its rows.
/// Returns the tokens that the sequence receives, and its next part.
fn verify(
    prompt: usize,
    limits: Limits,
    draft: &[u32],
    rows: &[u32],
) -> (Vec<u32>, Vec<(usize, usize, usize)>) {
    let mut scheduler = scheduler(Limits { draft_rows: 4, ..limits }, 1);
    let id = submit(&mut scheduler, prompt);
    plan(&mut scheduler);
    apply(&mut scheduler, TOKEN);
    scheduler.propose(id, draft);
    assert_eq!(plan(&mut scheduler), [(0, prompt, rows.len())]);
    let mut events = Vec::new();
    scheduler.apply(rows, &mut events);
    (events.iter().map(|event| event.token).collect(), plan(&mut scheduler))
}

#[test]
fn a_draft_gives_its_right_tokens_and_the_one_after_them() {
    let draft = [11, 12, 13];
    let verify = |rows: &[u32]| verify(10, limits(), &draft, rows);
    assert_eq!(verify(&[11, 12, 13, 14]), (vec![11, 12, 13, 14], vec![(0, 14, 1)]));
    assert_eq!(verify(&[11, 12, 99, 14]), (vec![11, 12, 99], vec![(0, 13, 1)]));
    assert_eq!(verify(&[99, 12, 13, 14]), (vec![99], vec![(0, 11, 1)]));
}

#[test]
fn a_draft_takes_no_rows_and_no_blocks_that_others_need() {
    let long = [1; 9];
    let (all, _) = verify(10, limits(), &long, &[1; 5]);
    assert_eq!(all.len(), 5, "four rows are for drafts");
    let few = Limits { kv_blocks: 1, ..limits() };
    let (all, _) = verify(KV_BLOCK_TOKENS - 3, few, &long, &[1; 2]);
    assert_eq!(all.len(), 2, "a draft of one fits in the context");
}

#[test]
fn an_answer_ends_within_a_draft() {
    let mut scheduler = scheduler(Limits { draft_rows: 8, ..limits() }, 1);
    let limited = Generation { max_tokens: Some(4), ..generation() };
    let ids = [0; 2].map(|_| scheduler.submit(&[TOKEN; 10], limited).unwrap());
    plan(&mut scheduler);
    apply(&mut scheduler, TOKEN);
    ids.iter().for_each(|id| scheduler.propose(*id, &[TOKEN; 8]));
    // Three tokens are left to generate: a draft of two, and the token after it.
    assert_eq!(plan(&mut scheduler), [(0, 10, 3), (1, 10, 3)]);
    let mut events = Vec::new();
    scheduler.apply(&[TOKEN, EOS, TOKEN, TOKEN, TOKEN, TOKEN], &mut events);
    let finishes: Vec<_> = events.iter().map(|event| event.finish).collect();
    let (stop, length) = (Some(FinishReason::Stop), Some(FinishReason::Length));
    assert_eq!(finishes, [None, stop, None, None, length]);
    assert!(scheduler.is_idle());
}
