//! One pass through the model: which tokens of which sequences, and where their keys and values lie.

use std::ops::Range;

/// Tokens of one block of the KV cache.
pub const KV_BLOCK_TOKENS: usize = 32;

/// Consecutive tokens of one sequence in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepSequence {
    /// Its rows in the step's buffers.
    pub rows: Range<usize>,
    /// Position of its first row's token in the sequence.
    pub start: usize,
    /// Whether these are a prompt's tokens, which backends may multiply otherwise than generated ones. At first that is so if they
    /// are more than one.
    pub prompt: bool,
    /// Its part of [`Step::blocks`]: block `i` holds the positions from `i * KV_BLOCK_TOKENS` on. No other sequence of the step reads
    /// those that this one's rows are written to.
    pub blocks: Range<usize>,
}

/// What every rank computes together. Reused from step to step, so that none allocates.
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

impl Step {
    /// Rows of the step.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Rows before the first prompt. Those of prompts come last.
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

    /// Adds tokens of a sequence that start at position `start`, with the blocks that hold the sequence up to them.
    /// `logits` asks for those of the last token.
    pub fn push(&mut self, tokens: &[u32], start: usize, blocks: &[u32], logits: bool) {
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
        });
        if logits {
            self.logit_rows.push((self.tokens.len() - 1) as u32);
        }
    }
}
