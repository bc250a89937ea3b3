//! Rows of activations.

use std::ops::{Deref, DerefMut, Range};

use super::layout::bf16_rows::{Bf16Rows, Bf16Writer};
use super::layout::region::LINE_BYTES;
use super::product::output::Output;
use super::simd::LANES;
use crate::backend::Largest;

/// Rows of floats, or of bf16 between two products.
#[derive(Debug)]
pub struct Buffer {
    pub(super) data: Floats,
    pub(super) width: usize,
    pub(super) rows: usize,
    /// The rows that it holds in bf16 instead of f32. Boxed, because buffers are moved.
    bf16: Box<(Range<usize>, Bf16Rows)>,
    /// The largest output of the first rows, if the product that computed them searched for it.
    pub(super) largest: Vec<Largest>,
}

impl Buffer {
    /// Reserves `rows` rows; the system provides pages when they are first written. Huge pages are
    /// not used, because a decoding sequence writes only the first row of each buffer.
    pub(super) fn new(rows: usize, width: usize) -> Self {
        // An aligned allocation would be zeroed by writing it.
        let all = vec![0.0; rows * width + LANES];
        let start = all.as_ptr().align_offset(LINE_BYTES).min(LANES);
        Self { data: Floats { all, start }, width, rows: 0, bf16: Default::default(), largest: Vec::new() }
    }

    pub(super) fn shape(&mut self, rows: usize) {
        assert!(rows * self.width <= self.data.len(), "a step has more rows than its buffers were made for");
        self.rows = rows;
        self.bf16.0 = 0..0;
        self.largest.clear();
    }

    /// Maximum number of rows.
    pub(super) fn capacity(&self) -> usize {
        self.data.len() / self.width.max(1)
    }

    /// Destination of some rows' results, which may be added to the existing values.
    pub(super) fn output(&mut self, rows: Range<usize>, adds: bool) -> Output {
        assert!(rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        // SAFETY: within the buffer.
        let data = unsafe { self.data.as_mut_ptr().add(rows.start * self.width) };
        Output { data, stride: self.width, rows: rows.len(), adds }
    }

    /// Destination of some rows in bf16. Earlier rows are lost, because a product has already read
    /// them.
    pub(super) fn output_in_bf16(&mut self, rows: Range<usize>) -> Bf16Writer<'_> {
        assert!(rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let (these, bf16) = &mut *self.bf16;
        bf16.shape(rows.len(), self.width);
        *these = rows;
        bf16.writer()
    }

    /// These rows, if they are in bf16.
    pub(super) fn bf16_rows(&self, rows: &Range<usize>) -> Option<&Bf16Rows> {
        let (these, bf16) = &*self.bf16;
        debug_assert!(
            these == rows || these.end <= rows.start || rows.end <= these.start,
            "rows {rows:?} of {these:?} in bf16"
        );
        (these == rows).then_some(bf16)
    }
}

/// Floats aligned to a cache line, so that results can be streamed to them.
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
