//! Rows of activations.

use std::io;
use std::ops::{Deref, DerefMut};

use super::matmul::Output;
use super::memory::Region;

/// Rows of floats.
#[derive(Debug)]
pub struct Buffer {
    pub(super) data: Floats,
    pub(super) width: usize,
    pub(super) rows: usize,
}

impl Buffer {
    /// Room for `rows` rows.
    ///
    /// # Errors
    /// When memory cannot be had.
    pub(super) fn new(rows: usize, width: usize) -> io::Result<Self> {
        Ok(Self { data: Floats(Region::zeroed(rows * width * size_of::<f32>())?), width, rows: 0 })
    }

    pub(super) fn shape(&mut self, rows: usize) {
        assert!(rows * self.width <= self.data.len(), "a step has more rows than its buffers were made for");
        self.rows = rows;
    }

    pub(super) fn output(&mut self, column: usize) -> Output {
        debug_assert!(column <= self.width);
        // SAFETY: within the buffer's first row, or one past it when the buffer is empty.
        let data = unsafe { self.data.as_mut_ptr().add(column) };
        Output { data, stride: self.width, rows: self.rows }
    }
}

/// Aligned to cache lines, because vectors across two of them are stored at half the speed.
#[derive(Debug)]
pub(super) struct Floats(Region);

impl Deref for Floats {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // SAFETY: a region begins at a cache line, and all bits are floats.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() / size_of::<f32>()) }
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() / size_of::<f32>()) }
    }
}
