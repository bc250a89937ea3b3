//! Rows of activations.

use std::ops::Range;

use super::matmul::Output;
use super::memory::Array;

/// Rows of floats.
#[derive(Debug)]
pub struct Buffer {
    /// From a cache line's start on, as results are streamed to it.
    pub(super) data: Array<f32>,
    pub(super) width: usize,
    pub(super) rows: usize,
}

impl Buffer {
    /// Room for `rows` rows; pages are taken from the system when they are first written.
    pub(super) fn new(rows: usize, width: usize) -> Self {
        Self { data: Array::zeroed(rows * width), width, rows: 0 }
    }

    pub(super) fn shape(&mut self, rows: usize) {
        assert!(rows * self.width <= self.data.len(), "a step has more rows than its buffers were made for");
        self.rows = rows;
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
}
