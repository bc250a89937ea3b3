//! One pass through the model: the tokens of each sequence, and the places of its caches.

use std::ops::Range;

/// Tokens of one block of the KV cache.
pub const KV_BLOCK_TOKENS: usize = 32;

/// Most tokens of a draft: guesses that one step verifies.
pub const MAX_DRAFT: usize = 15;

/// Consecutive tokens of one sequence in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepSequence {
    /// Its rows in the step's buffers.
    pub rows: Range<usize>,
    /// Position of its first row's token in the sequence.
    pub start: usize,
    /// True for prompt tokens, which may use lower precision. `push` sets it when there is more
    /// than one token.
    pub prompt: bool,
    /// Its part of [`Step::blocks`]: block `i` has the positions from `i * KV_BLOCK_TOKENS` on. No
    /// other sequence of the step reads the blocks to which this one's rows are written.
    pub blocks: Range<usize>,
    /// Its slot in caches of [`crate::CacheKind::State`]. A sequence keeps its slot as long as it
    /// keeps its state; a state starts at zero with position 0.
    pub slot: usize,
    /// The low-rank adapter of its rows, counted from 1; 0: none. `push` sets 0.
    pub adapter: u32,
    /// Number of its last rows that are a draft, whose tokens states do not absorb yet. `push` sets
    /// 0.
    pub drafted: usize,
    /// Rows of the draft in the sequence's last step that were right. States absorb their tokens
    /// before those of these rows. `push` sets 0.
    pub accepted: usize,
}

/// What all ranks compute together. Reused from step to step, so that no step allocates.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Step {
    /// Token ids, one a row.
    pub tokens: Vec<u32>,
    /// The sequences, in the order of their rows.
    pub sequences: Vec<StepSequence>,
    /// KV blocks of all sequences, one after the other.
    pub blocks: Vec<u32>,
    /// Rows whose logits are wanted, ascending.
    pub logit_rows: Vec<u32>,
}

impl StepSequence {
    /// The rows that the sequence has among `rows`.
    pub fn rows_within(&self, rows: &Range<usize>) -> Range<usize> {
        let start = self.rows.start.max(rows.start);
        start..self.rows.end.min(rows.end).max(start)
    }

    /// The sequence's rows among `rows`: those with certain tokens, and those of the draft.
    pub fn certain_and_drafted(&self, rows: &Range<usize>) -> [Range<usize>; 2] {
        let rows = self.rows_within(rows);
        let middle = (self.rows.end - self.drafted).clamp(rows.start, rows.end);
        [rows.start..middle, middle..rows.end]
    }

    /// Rows of the last draft that states must absorb before those of `rows`.
    pub fn accepted_before(&self, rows: &Range<usize>) -> usize {
        if rows.contains(&self.rows.start) { self.accepted } else { 0 }
    }

    /// Position after its last row's.
    pub fn end(&self) -> usize {
        self.start + self.rows.len()
    }

    /// Position of a row's token.
    pub fn position(&self, row: usize) -> usize {
        self.start + row - self.rows.start
    }
}

impl Step {
    /// Rows of the step.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Number of generated tokens' rows, which come before the first prompt.
    pub fn generated(&self) -> usize {
        self.sequences
            .iter()
            .find(|sequence| sequence.prompt)
            .map_or(self.rows(), |sequence| sequence.rows.start)
    }

    /// Empties the step and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.sequences.clear();
        self.blocks.clear();
        self.logit_rows.clear();
    }

    /// Adds tokens of the sequence in `slot`, starting at position `start`, with the blocks that
    /// hold the sequence up to them. `logits` requests the last token's logits.
    pub fn push(&mut self, tokens: &[u32], start: usize, blocks: &[u32], slot: usize, logits: bool) {
        debug_assert!(blocks.len() * KV_BLOCK_TOKENS >= start + tokens.len(), "each position needs a block");
        let row = self.tokens.len();
        let block = self.blocks.len();
        self.tokens.extend_from_slice(tokens);
        self.blocks.extend_from_slice(blocks);
        self.sequences.push(StepSequence {
            rows: row..self.tokens.len(),
            start,
            prompt: tokens.len() > 1,
            blocks: block..self.blocks.len(),
            slot,
            adapter: 0,
            drafted: 0,
            accepted: 0,
        });
        if logits {
            self.logit_rows.push((self.tokens.len() - 1) as u32);
        }
    }
}
