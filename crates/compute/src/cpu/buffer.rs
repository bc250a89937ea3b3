//! Rows of activations.

use std::ops::{Deref, DerefMut, Range};

use super::layout::bf16_rows::{Bf16Rows, Bf16Writer};
use super::layout::region::LINE_BYTES;
use super::product::output::Output;
use super::simd::LANES;

/// Rows of floats, or of bf16 between two products.
#[derive(Debug)]
pub struct Buffer {
    pub(super) data: Floats,
    pub(super) width: usize,
    pub(super) rows: usize,
    /// Those of its rows that it has in bf16 instead. Apart, as buffers change hands.
    halves: Box<(Range<usize>, Bf16Rows)>,
}

impl Buffer {
    /// Room for `rows` rows; pages are taken from the system when they are first written. Small pages: a sequence that decodes writes
    /// the first row of each buffer only.
    pub(super) fn new(rows: usize, width: usize) -> Self {
        // Not an allocation that is aligned itself: to zero such a one means to write it.
        let all = vec![0.0; rows * width + LANES];
        let start = all.as_ptr().align_offset(LINE_BYTES).min(LANES);
        Self { data: Floats { all, start }, width, rows: 0, halves: Default::default() }
    }

    pub(super) fn shape(&mut self, rows: usize) {
        assert!(rows * self.width <= self.data.len(), "a step has more rows than its buffers were made for");
        self.rows = rows;
        self.halves.0 = 0..0;
    }

    /// The most rows that it has room for.
    pub(super) fn capacity(&self) -> usize {
        self.data.len() / self.width.max(1)
    }

    /// Where results of some rows go, or what they are added to.
    pub(super) fn output(&mut self, rows: Range<usize>, adds: bool) -> Output {
        assert!(rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        // SAFETY: within the buffer.
        let data = unsafe { self.data.as_mut_ptr().add(rows.start * self.width) };
        Output { data, stride: self.width, rows: rows.len(), adds }
    }

    /// Where some rows go in bf16. The only ones: they are taken before others are written.
    pub(super) fn output_in_halves(&mut self, rows: Range<usize>) -> Bf16Writer<'_> {
        assert!(rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let (these, halves) = &mut *self.halves;
        halves.shape(rows.len(), self.width);
        *these = rows;
        halves.writer()
    }

    /// These rows, if they are there in bf16.
    pub(super) fn halved(&self, rows: &Range<usize>) -> Option<&Bf16Rows> {
        let (these, halves) = &*self.halves;
        debug_assert!(
            these == rows || these.end <= rows.start || rows.end <= these.start,
            "rows {rows:?} of {these:?} in bf16"
        );
        (these == rows).then_some(halves)
    }
}

/// Floats from a cache line's start on, which results are streamed to.
#[derive(Debug)]
pub(super) struct Floats {
    /// Never grows, so never moves.
    all: Vec<f32>,
    start: usize,
}

impl Deref for Floats {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.all[self.start..self.all.len() - LANES + self.start]
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        let end = self.all.len() - LANES + self.start;
        &mut self.all[self.start..end]
    }
}
