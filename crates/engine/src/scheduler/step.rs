//! A planned step, and how a caller reads it.

use super::sequence::{RequestId, Sequence, Wanted};
use crate::sampler::Draws;

/// The slots of a step and their tokens. Kept until its tokens are applied, and reused.
#[derive(Debug, Default)]
pub(super) struct PlannedStep {
    pub entries: Vec<Entry>,
    pub results: RowResults,
    pub load: StepLoad,
}

/// The amounts of work in a step that determine its time.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepLoad {
    /// Rows of generated tokens.
    pub decode: usize,
    /// Tokens that these rows attend to, summed over the rows.
    pub decode_pairs: f64,
    /// Rows of prompts.
    pub prompt: usize,
    /// Tokens that these rows attend to, summed over the rows.
    pub prompt_pairs: f64,
    /// Tokens that the last row of each prompt attends to.
    pub prompt_context: f64,
    /// Prompts that end in the step: their last rows give tokens.
    pub prompt_ends: usize,
}

impl StepLoad {
    /// Adds `count` rows of a sequence from position `start`.
    pub(super) fn add(&mut self, prompt: bool, start: usize, count: usize) {
        let (first, rows) = (start as f64, count as f64);
        let pairs = rows * first + rows * (rows + 1.0) / 2.0;
        if prompt {
            self.prompt += count;
            self.prompt_pairs += pairs;
            self.prompt_context += first + rows;
        } else {
            self.decode += count;
            self.decode_pairs += pairs;
        }
    }
}

/// What ranks send for each row that gives a token: the most probable token, or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RowResults {
    /// A token that is chosen as the sequence's [`StepPart::draws`] say.
    pub chosen: bool,
    /// All logits, in place of tokens.
    pub logits: bool,
    /// The hidden state after the last norm.
    pub hidden: bool,
    /// How likely a chosen token is, and this many of the likeliest ones.
    pub likely: Option<u8>,
    /// Only rank 0 chooses, because only it knows changes of logits, and reports how likely tokens
    /// are.
    pub by_head: bool,
}

impl RowResults {
    /// Adds the results that a row needs.
    pub(super) fn add(&mut self, wanted: Wanted) {
        self.chosen |= wanted == Wanted::Chosen;
        self.logits |= wanted == Wanted::Logits;
        self.hidden |= wanted == Wanted::Hidden;
    }
}

/// Consecutive tokens of one slot's sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub slot: usize,
    pub start: usize,
    pub count: usize,
    /// Blocks of the sequence that the ranks know from earlier steps.
    pub kept_blocks: usize,
    pub prompt: bool,
    pub wants_token: bool,
    /// Tokens at the end that are a draft.
    pub drafted: usize,
    /// Tokens of the sequence's last draft that were right.
    pub accepted: usize,
    pub restore: Option<u32>,
    pub save: Option<u32>,
}

impl Entry {
    /// Rows that give a token.
    pub fn wanted_rows(&self) -> usize {
        if self.wants_token { self.drafted + 1 } else { 0 }
    }
}

impl PlannedStep {
    pub fn clear(&mut self) {
        self.entries.clear();
        self.results = RowResults::default();
        self.load = StepLoad::default();
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Rows of prompts among the entries so far.
    pub fn prompt_rows(&self) -> usize {
        self.entries.iter().filter(|entry| entry.prompt).map(|entry| entry.count).sum()
    }
}

/// A step to compute, or in flight.
#[derive(Debug, Clone, Copy)]
pub struct NextStep<'a> {
    step: &'a PlannedStep,
    slots: &'a [Option<Sequence>],
}

/// A request that gets tokens from a step: one, and one more for each token of `draft` that equals
/// the token of the row before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Awaiting<'a> {
    /// The request.
    pub request: RequestId,
    /// Guesses of its tokens.
    pub draft: &'a [u32],
}

impl<'a> NextStep<'a> {
    /// Requests that get tokens from the step, in the order of their rows.
    pub fn awaiting(&self) -> impl Iterator<Item = Awaiting<'a>> {
        let Self { step, slots } = *self;
        step.entries.iter().filter(|entry| entry.wants_token).filter_map(|entry| {
            let sequence = slots[entry.slot].as_ref()?;
            Some(Awaiting { request: sequence.id, draft: sequence.draft() })
        })
    }

    /// The step's rows, if all of them decode.
    pub fn rows_if_decoding(&self) -> Option<usize> {
        let decodes = |entry: &Entry| entry.wants_token && entry.count == entry.drafted + 1;
        let entries = &self.step.entries;
        entries.iter().all(decodes).then(|| entries.iter().map(|entry| entry.count).sum())
    }

    /// The work in the step.
    pub fn load(&self) -> StepLoad {
        self.step.load
    }

    /// Rows whose logits are wanted.
    pub fn wanted_rows(&self) -> usize {
        self.step.entries.iter().map(Entry::wanted_rows).sum()
    }
}

/// One sequence's part of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepPart<'a> {
    /// The sequence's slot, which identifies its block table and its state on every rank.
    pub slot: usize,
    /// Position of the first token in the sequence. At 0 the slot's state is zeroed.
    pub start: usize,
    /// Tokens to compute.
    pub tokens: &'a [u32],
    /// The following token, if it is known.
    pub next: Option<u32>,
    /// Blocks of the slot's table that stay; the rest of the table is dropped.
    pub kept_blocks: usize,
    /// Blocks to append to the slot's table.
    pub new_blocks: &'a [u32],
    /// True for prompt tokens, which may use lower precision.
    pub prompt: bool,
    /// Number of rows at the end that give a next token each. If there are several, they verify a
    /// draft.
    pub wanted_rows: usize,
    /// Tokens of the sequence's last draft that were right. States absorb them first.
    pub accepted: usize,
    /// Snapshot that the slot's state is copied from before the step.
    pub restore: Option<u32>,
    /// Snapshot that the slot's state is copied to after the step.
    pub save: Option<u32>,
    /// The low-rank adapter, counted from 1; 0: none.
    pub adapter: u32,
    /// How ranks choose tokens; `None`: the most probable ones.
    pub draws: Option<Draws>,
}

impl<'a> NextStep<'a> {
    pub(super) fn new(step: &'a PlannedStep, slots: &'a [Option<Sequence>]) -> Self {
        Self { step, slots }
    }

    /// The results needed for the rows that give a token: everything that any of them needs.
    pub fn results(&self) -> RowResults {
        self.step.results
    }

    /// The requests of [`Self::parts`], in their order.
    pub fn requests(&self) -> impl Iterator<Item = RequestId> {
        let sequences = self.step.entries.iter().filter_map(|entry| self.slots[entry.slot].as_ref());
        sequences.map(|sequence| sequence.id)
    }

    /// The parts in the order of their rows: generated tokens first, then prompts.
    pub fn parts(&self) -> impl Iterator<Item = StepPart<'a>> {
        self.step.entries.iter().filter_map(|entry| {
            let sequence = self.slots[entry.slot].as_ref()?;
            Some(StepPart {
                slot: entry.slot,
                start: entry.start,
                tokens: &sequence.tokens[entry.start..entry.start + entry.count],
                next: sequence.tokens.get(entry.start + entry.count).copied(),
                kept_blocks: entry.kept_blocks,
                new_blocks: &sequence.blocks[entry.kept_blocks..],
                prompt: entry.prompt,
                wanted_rows: entry.wanted_rows(),
                accepted: entry.accepted,
                restore: entry.restore,
                save: entry.save,
                adapter: sequence.generation.adapter,
                draws: None,
            })
        })
    }
}
