//! A planned step, and how a caller reads it.

use super::sequence::{RequestId, Sequence};

/// The slots of a step and their tokens. Kept until its tokens are applied, and reused.
#[derive(Debug, Default)]
pub(super) struct PlannedStep {
    pub entries: Vec<Entry>,
    /// Requests that get a token from this step, in the order of the entries.
    awaiting: Vec<RequestId>,
    needs_logits: bool,
}

/// Consecutive tokens of one slot's sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub slot: usize,
    pub start: usize,
    pub count: usize,
    /// Blocks of the sequence that earlier steps have told the ranks.
    pub kept_blocks: usize,
    pub prompt: bool,
    pub wants_token: bool,
    pub restore: Option<u32>,
    pub save: Option<u32>,
}

impl PlannedStep {
    pub fn clear(&mut self) {
        self.entries.clear();
        self.awaiting.clear();
        self.needs_logits = false;
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Notes that the step gives a sequence its next token.
    pub fn await_token(&mut self, sequence: &Sequence) {
        self.awaiting.push(sequence.id);
        self.needs_logits |= !sequence.generation.greedy;
    }

    pub fn awaiting(&self) -> &[RequestId] {
        &self.awaiting
    }

    pub fn is_greedy(&self) -> bool {
        !self.needs_logits
    }
}

/// A step to compute.
#[derive(Debug, Clone, Copy)]
pub struct NextStep<'a> {
    step: &'a PlannedStep,
    slots: &'a [Option<Sequence>],
}

/// One sequence's part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepPart<'a> {
    /// The sequence's slot, which finds its block table and its state on every rank.
    pub slot: usize,
    /// Position of the first token in the sequence. At 0 the slot's state is zeroed.
    pub start: usize,
    /// Tokens to compute.
    pub tokens: &'a [u32],
    /// Blocks of the slot's table that stay; the rest of the table is dropped.
    pub kept_blocks: usize,
    /// Blocks to append to the slot's table.
    pub new_blocks: &'a [u32],
    /// True for prompt tokens, which may use lower precision.
    pub prompt: bool,
    /// True if the last token's row gives the next token.
    pub wants_token: bool,
    /// Snapshot that the slot's state is copied from before the step.
    pub restore: Option<u32>,
    /// Snapshot that the slot's state is copied to after the step.
    pub save: Option<u32>,
}

impl<'a> NextStep<'a> {
    pub(super) fn new(step: &'a PlannedStep, slots: &'a [Option<Sequence>]) -> Self {
        Self { step, slots }
    }

    /// True if the likeliest token of each row is enough; false if a row needs all its logits.
    pub fn is_greedy(&self) -> bool {
        self.step.is_greedy()
    }

    /// The parts in the order of their rows: generated tokens first, prompts last.
    pub fn parts(&self) -> impl Iterator<Item = StepPart<'a>> {
        self.step.entries.iter().filter_map(|entry| {
            let sequence = self.slots[entry.slot].as_ref()?;
            Some(StepPart {
                slot: entry.slot,
                start: entry.start,
                tokens: &sequence.tokens[entry.start..entry.start + entry.count],
                kept_blocks: entry.kept_blocks,
                new_blocks: &sequence.blocks[entry.kept_blocks..],
                prompt: entry.prompt,
                wants_token: entry.wants_token,
                restore: entry.restore,
                save: entry.save,
            })
        })
    }
}
