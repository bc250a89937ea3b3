//! The queries of one KV head in some rows of a sequence, as attention kernels process them.

use std::ops::Range;
use std::sync::Arc;

use super::kv::KvPart;
use crate::backend::{AttentionSpec, Scoring};
use crate::cpu::pointers::SendPtr;
use crate::step::StepSequence;

/// Lower than any score, and finite, so that the difference of two is not NaN.
pub(in crate::cpu) const NO_SCORE: f32 = -1e30;

/// Queries of a KV head that a thread claims at once: as many as a matrix unit processes together.
pub(in crate::cpu) const PIECE_QUERIES: usize = 128;

/// Some rows of one sequence and one KV head. Queries are numbered by row, then by head among those
/// that share the KV head.
pub(in crate::cpu) struct Heads<'a> {
    pub spec: &'a AttentionSpec<Arc<[f32]>>,
    pub scoring: Scoring,
    pub kv: KvPart,
    pub kv_head: usize,
    pub(super) sequence: &'a StepSequence,
    pub blocks: &'a [u32],
    pub rows: Range<usize>,
    pub(super) queries: SendPtr<f32>,
    pub(super) query_stride: usize,
    pub(super) out: SendPtr<f32>,
    pub(super) out_stride: usize,
}

impl Heads<'_> {
    /// Queries.
    pub fn count(&self) -> usize {
        self.rows.len() * self.spec.queries_of[self.kv_head].len()
    }

    /// Whether the rows are prompt tokens.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no matrix unit is used there"))]
    pub fn of_prompt(&self) -> bool {
        self.sequence.prompt
    }

    /// Row and head of a query.
    #[inline(always)]
    fn place(&self, query: usize) -> (usize, usize) {
        let group = &self.spec.queries_of[self.kv_head];
        (self.rows.start + query / group.len(), group.start + query % group.len())
    }

    /// Positions that a query attends to: from, to.
    #[inline(always)]
    pub fn visible(&self, query: usize) -> (usize, usize) {
        let position = self.sequence.position(self.place(query).0);
        let first = self.scoring.first_visible(position, self.spec.first_visible(position));
        (first, self.scoring.end_visible(position, self.sequence.end()))
    }

    /// Initial maximum score and sum of weights of a query: its head's sink has the weight 1 while
    /// it is the maximum.
    #[inline(always)]
    pub fn first_score(&self, query: usize) -> (f32, f32) {
        match &self.spec.sinks {
            Some(sinks) => (sinks[self.place(query).1], 1.0),
            None => (NO_SCORE, 0.0),
        }
    }

    /// A query's numbers.
    ///
    /// # Safety
    /// Pointers and ranges describe the step's buffers.
    #[inline(always)]
    pub unsafe fn query(&self, query: usize) -> *const f32 {
        let (row, head) = self.place(query);
        // SAFETY: the row's queries come first in the fused projection.
        unsafe { self.queries.at(row * self.query_stride + head * self.spec.key_dim) }
    }

    /// Where a query's result goes.
    ///
    /// # Safety
    /// As [`Self::query`].
    #[inline(always)]
    pub unsafe fn output(&self, query: usize) -> *mut f32 {
        let (row, head) = self.place(query);
        // SAFETY: the head's columns of this row are written by this piece alone.
        unsafe { self.out.at(row * self.out_stride + self.spec.out_column + head * self.spec.value_dim) }
    }
}
