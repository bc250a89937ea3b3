//! Prompts with equal beginnings: what is computed once, and where states are saved.

use thunder_compute::step::KV_BLOCK_TOKENS;

use super::cases::{TOKEN, apply, generation, limits, plan};
use crate::scheduler::{Limits, RequestId, Scheduler};

const SIZE: usize = KV_BLOCK_TOKENS;

fn scheduler(snapshots: Option<usize>) -> Scheduler {
    let limits = Limits { kv_blocks: 64, rows: 400, prefix_cache: true, snapshots, ..limits() };
    Scheduler::new(limits, 1, 1000, vec![0])
}

/// Submits a prompt of `common` tokens that all prompts have, and `own` different ones.
fn submit(scheduler: &mut Scheduler, common: usize, own: usize, fill: u32) -> RequestId {
    let prompt = [vec![TOKEN; common], vec![fill; own]].concat();
    scheduler.submit(&prompt, generation()).unwrap()
}

/// Reads one prompt to its end. Returns the pieces, with the snapshots that each restored and
/// saved, and the number of tokens from the cache.
fn read(scheduler: &mut Scheduler, common: usize, own: usize, fill: u32) -> (Vec<Piece>, usize) {
    let id = submit(scheduler, common, own, fill);
    let mut pieces = Vec::new();
    loop {
        let step = scheduler.next_step().unwrap();
        pieces.extend(step.parts().map(|part| Piece {
            tokens: part.start..part.start + part.tokens.len(),
            restore: part.restore,
            save: part.save,
        }));
        if let Some(event) = apply(scheduler, TOKEN).iter().find(|event| event.request == id) {
            let cached = event.cached_tokens;
            scheduler.cancel(id);
            return (pieces, cached);
        }
    }
}

#[derive(Debug, PartialEq)]
struct Piece {
    tokens: std::ops::Range<usize>,
    restore: Option<u32>,
    save: Option<u32>,
}

fn piece(tokens: std::ops::Range<usize>) -> Piece {
    Piece { tokens, restore: None, save: None }
}

#[test]
fn a_prompt_goes_on_after_the_blocks_of_an_earlier_one() {
    let mut scheduler = scheduler(None);
    assert_eq!(read(&mut scheduler, 100, 10, 1), (vec![piece(0..110)], 0));
    assert_eq!(read(&mut scheduler, 100, 10, 2), (vec![piece(96..110)], 96));
    // The whole prompt is known, and is computed from its last block on, because it gives the next
    // token.
    assert_eq!(read(&mut scheduler, 100, 10, 1), (vec![piece(96..110)], 96));
    assert_eq!(read(&mut scheduler, 2 * SIZE, 0, 1), (vec![piece(32..64)], 32));
    // No piece is a single token.
    assert_eq!(read(&mut scheduler, 2 * SIZE + 1, 0, 1), (vec![piece(32..65)], 32));
    assert_eq!(read(&mut scheduler, 2 * SIZE + 2, 0, 1), (vec![piece(64..66)], 64));
}

#[test]
fn running_requests_share_blocks_and_room() {
    let mut scheduler = scheduler(None);
    scheduler.limits.kv_blocks = 16;
    scheduler.blocks = super::super::blocks::BlockPool::new(16, None);
    submit(&mut scheduler, 300, 10, 1);
    assert_eq!(plan(&mut scheduler), [(0, 0, 310)]);
    // Ten of 16 blocks are in use, and each of these prompts needs ten, but nine exist already.
    let _others = [2, 3, 4].map(|fill| submit(&mut scheduler, 300, 10, fill));
    apply(&mut scheduler, TOKEN);
    assert_eq!(plan(&mut scheduler)[1..], [(1, 288, 22), (2, 288, 22), (3, 288, 20)]);
    assert_eq!((scheduler.blocks.unused(), scheduler.preemptions()), (3, 0));
}

#[test]
fn prompts_that_are_read_at_the_same_time_end_up_with_the_same_blocks() {
    let mut scheduler = scheduler(None);
    submit(&mut scheduler, 70, 5, 1);
    submit(&mut scheduler, 70, 5, 2);
    assert_eq!(plan(&mut scheduler), [(0, 0, 75), (1, 0, 75)]);
    assert_eq!(scheduler.blocks.unused(), 64 - 6);
    apply(&mut scheduler, TOKEN);
    let parts: Vec<_> =
        scheduler.next_step().unwrap().parts().map(|p| (p.kept_blocks, p.new_blocks.to_vec())).collect();
    assert_eq!(scheduler.blocks.unused(), 64 - 4);
    let table = &scheduler.slots[1].as_ref().unwrap().blocks;
    assert_eq!(parts[0], (3, vec![]));
    assert_eq!(parts[1], (0, table.clone()), "the ranks learn of the exchange");
}

#[test]
fn generated_tokens_are_not_taken_for_a_prompts() {
    let mut scheduler = scheduler(None);
    submit(&mut scheduler, 40, 0, 1);
    for _ in 0..60 {
        plan(&mut scheduler);
        apply(&mut scheduler, TOKEN);
    }
    // The running request has 100 equal tokens; 40 of them are in its prompt.
    assert_eq!(read(&mut scheduler, 100, 0, 1).1, 32);
}

#[test]
fn a_state_is_saved_at_the_end_of_a_prompt_and_where_prompts_part() {
    let mut scheduler = scheduler(Some(8));
    let saved = |range, number| Piece { save: Some(number), ..piece(range) };
    let restored = |range, number| Piece { restore: Some(number), ..piece(range) };
    // The last whole block that leaves two tokens ends at 160.
    assert_eq!(read(&mut scheduler, 128, 40, 1), (vec![saved(0..160, 0), piece(160..168)], 0));
    // The next prompt of this conversation continues there.
    let (pieces, cached) = read(&mut scheduler, 128, 100, 1);
    assert_eq!(cached, 160);
    let [first, last] = &pieces[..] else { panic!("{pieces:?}") };
    assert_eq!((first.restore, first.save, first.tokens.clone()), (Some(0), Some(1), 160..224));
    assert_eq!(*last, piece(224..228));
    // Another one knows 128 tokens, but not the state after them, and saves it for the next.
    let others = vec![saved(0..128, 2), saved(128..160, 3), piece(160..168)];
    assert_eq!(read(&mut scheduler, 128, 40, 2), (others, 0));
    let (pieces, cached) = read(&mut scheduler, 128, 40, 3);
    assert_eq!(cached, 128);
    assert_eq!(pieces.iter().map(|piece| piece.tokens.len()).collect::<Vec<_>>(), [32, 8]);
    assert_eq!(pieces[0].restore, Some(2));
    // A short prompt saves nothing.
    assert_eq!(read(&mut scheduler, 0, 100, 4), (vec![piece(0..100)], 0));
    assert_eq!(read(&mut scheduler, 128, 10, 5).0, [restored(128..138, 2)]);
}
