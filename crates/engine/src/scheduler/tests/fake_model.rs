//! A model whose next token is a hash of everything before it, computed from the caches of a rank.

use std::collections::VecDeque;

use thunder_compute::Step;
use thunder_compute::step::KV_BLOCK_TOKENS;

use crate::event::FinishReason;
use crate::protocol::{Bounds, Command, Message, StepExtras};
use crate::scheduler::{Generation, Limits, NextStep};
use crate::transfer::{Part, Transfer};

/// Tokens of the vocabulary; token 0 ends a sequence.
pub const VOCAB: u64 = 40;
pub const EOS: u32 = 0;

/// Low-rank adapters of the model.
pub const ADAPTERS: u32 = 2;

/// One rank. It reads steps from real messages, and keeps a number for each token in paged blocks
/// and a state for each slot. A block with two owners, a stale table, a state that was not zeroed,
/// or a prompt token computed as a generated one leads to other tokens than [`alone`].
pub struct FakeModel {
    message: Message,
    tables: Vec<Vec<u32>>,
    step: Step,
    copies: StepExtras,
    bounds: Bounds,
    has_states: bool,
    /// By block, then by token of the block.
    paged: Vec<u64>,
    /// By slot; snapshots after them.
    states: Vec<u64>,
    /// For each slot: the changes of states by the rows of the last draft.
    drafts: Vec<Vec<u64>>,
    /// Tokens of the steps in flight.
    results: VecDeque<Vec<u32>>,
}

impl FakeModel {
    pub fn new(limits: Limits) -> Self {
        let Limits { sequences: slots, kv_blocks: blocks, .. } = limits;
        let snapshots = limits.snapshots.unwrap_or(0);
        Self {
            copies: StepExtras::default(),
            bounds: Bounds {
                slots,
                blocks,
                snapshots,
                adapters: ADAPTERS as usize,
                wanted_rows: slots + limits.draft_rows,
            },
            has_states: limits.snapshots.is_some(),
            message: Message::default(),
            tables: Vec::new(),
            step: Step::default(),
            paged: vec![0; blocks * KV_BLOCK_TOKENS],
            states: vec![0; slots + snapshots],
            drafts: vec![Vec::new(); slots],
            results: VecDeque::new(),
        }
    }

    /// Computes a step. [`FakeModel::results`] returns its tokens.
    pub fn compute(&mut self, next: &NextStep<'_>) {
        self.message.begin(Command::Compute(next.results()));
        next.parts().for_each(|part| self.message.push(&part));
        self.message.read(self.bounds, &mut self.tables, &mut self.step, &mut self.copies).unwrap();
        for (slot, snapshot) in &self.copies.restore {
            self.states[*slot] = self.states[self.bounds.slots + snapshot];
        }
        self.check_writes();
        let mut tokens = Vec::new();
        for sequence in &self.step.sequences {
            let slot = sequence.slot;
            let blocks = &self.step.blocks[sequence.blocks.clone()];
            let place = |position: usize| {
                blocks[position / KV_BLOCK_TOKENS] as usize * KV_BLOCK_TOKENS + position % KV_BLOCK_TOKENS
            };
            if sequence.start == 0 {
                self.states[slot] = 0;
            }
            let kept = std::mem::take(&mut self.drafts[slot]);
            let mut state = kept[..sequence.accepted].iter().fold(self.states[slot], |sum, x| mix(sum, *x));
            let drafted = sequence.rows.end - sequence.drafted;
            for row in sequence.rows.clone() {
                let position = sequence.position(row);
                let cached = cached(self.step.tokens[row], position, sequence.prompt, sequence.adapter);
                self.paged[place(position)] = cached;
                if row == drafted {
                    self.states[slot] = state;
                }
                if row >= drafted {
                    self.drafts[slot].push(cached);
                }
                state = mix(state, cached);
                if self.step.logit_rows.contains(&(row as u32)) {
                    let paged = (0..=position).fold(0, |sum, at| mix(sum, self.paged[place(at)]));
                    tokens.push(token(paged, if self.has_states { state } else { paged }));
                }
            }
            if sequence.drafted == 0 {
                self.states[slot] = state;
            }
        }
        for (slot, snapshot) in &self.copies.save {
            self.states[self.bounds.slots + snapshot] = self.states[*slot];
        }
        self.results.push_back(tokens);
    }

    /// The content of the caches for a block or a snapshot.
    pub fn cached_at(&mut self, transfer: &Transfer) -> &mut [u64] {
        let place = transfer.place as usize;
        match transfer.part {
            Part::Block => &mut self.paged[place * KV_BLOCK_TOKENS..][..KV_BLOCK_TOKENS],
            Part::State => &mut self.states[self.bounds.slots + place..][..1],
        }
    }

    /// Checks that no other sequence of a step has the blocks that one writes to, because a rank
    /// computes them at the same time.
    fn check_writes(&self) {
        for writer in &self.step.sequences {
            let end = writer.start + writer.rows.len();
            let blocks = &self.step.blocks[writer.blocks.clone()];
            let written = &blocks[writer.start / KV_BLOCK_TOKENS..end.div_ceil(KV_BLOCK_TOKENS)];
            for other in self.step.sequences.iter().filter(|other| other.slot != writer.slot) {
                let theirs = &self.step.blocks[other.blocks.clone()];
                assert!(written.iter().all(|block| !theirs.contains(block)), "a block that another reads");
            }
        }
    }

    /// The tokens of the oldest step in flight.
    pub fn results(&mut self) -> Vec<u32> {
        self.results.pop_front().unwrap()
    }
}

/// The model's answer to a prompt that runs alone, with at most `max_tokens` tokens in prompt and
/// answer.
pub fn alone(prompt: &[u32], generation: Generation, max_tokens: usize) -> (Vec<u32>, FinishReason) {
    let (mut answer, mut state, mut position) = (Vec::new(), 0, 0);
    for &id in prompt {
        state = mix(state, cached(id, position, prompt.len() > 1, generation.adapter));
        position += 1;
    }
    loop {
        let id = token(state, state);
        answer.push(id);
        if id == EOS && !generation.ignore_eos {
            return (answer, FinishReason::Stop);
        }
        if generation.max_tokens == Some(answer.len()) || prompt.len() + answer.len() == max_tokens {
            return (answer, FinishReason::Length);
        }
        state = mix(state, cached(id, position, false, generation.adapter));
        position += 1;
    }
}

/// The cached number of a token.
fn cached(token: u32, position: usize, prompt: bool, adapter: u32) -> u64 {
    let place = position as u64 * 2 + u64::from(prompt);
    mix(u64::from(token), place * u64::from(ADAPTERS + 1) + u64::from(adapter))
}

fn token(paged: u64, state: u64) -> u32 {
    (mix(paged, state) % VOCAB) as u32
}

/// Combines two numbers (with the multiplications and shifts of SplitMix64).
fn mix(a: u64, b: u64) -> u64 {
    let sum = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.wrapping_add(0x94d0_49bb_1331_11eb);
    let sum = (sum ^ (sum >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    sum ^ (sum >> 27)
}
