//! Memory on the device, and rows of activations in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use thunder_compute::ComputeError;

/// Columns of a row are padded with zeros to a multiple of this: a product's thread reads this many
/// columns at once.
pub(crate) const BLOCK_COLUMNS: usize = 32;

/// A buffer of the device.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    pub buffer: wgpu::Buffer,
    /// Unique among all buffers of this device, including released ones.
    pub id: u64,
    /// Value of `Device::recorded` when a write to this buffer was last recorded.
    written: Arc<AtomicU64>,
}

impl Memory {
    pub fn new(buffer: wgpu::Buffer, id: u64) -> Self {
        Self { buffer, id, written: Arc::default() }
    }

    pub fn note_write(&self, recorded: u64) {
        self.written.store(recorded, Ordering::Relaxed);
    }

    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    pub fn bytes(&self) -> u64 {
        self.buffer.size()
    }
}

/// A vector of weights.
#[derive(Debug, Clone)]
pub struct Vector {
    pub(crate) memory: Memory,
    pub(crate) len: usize,
}

/// Rows of f32.
#[derive(Debug)]
pub struct Buffer {
    pub(crate) memory: Memory,
    pub(crate) width: usize,
    pub(crate) rows: usize,
    capacity: usize,
}

/// Distance of two rows, in numbers.
pub(crate) fn stride(width: usize) -> usize {
    width.next_multiple_of(BLOCK_COLUMNS).max(BLOCK_COLUMNS)
}

impl Buffer {
    pub(crate) fn new(memory: Memory, rows: usize, width: usize) -> Self {
        Self { memory, width, rows: 0, capacity: rows }
    }

    /// Bytes of a buffer of this size. It has one additional block, because a product that begins
    /// in the middle of a row may read beyond its end.
    pub(crate) fn bytes_of(rows: usize, width: usize) -> usize {
        (rows * stride(width) + BLOCK_COLUMNS) * size_of::<f32>()
    }

    pub(crate) fn stride(&self) -> usize {
        stride(self.width)
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets the number of rows.
    pub(crate) fn shape(&mut self, rows: usize) -> Result<(), ComputeError> {
        if rows > self.capacity {
            return Err(ComputeError::Shape {
                what: "the number of a step's rows",
                value: rows,
                backend: "GPU",
                needs: "no more rows than its buffers were made for",
            });
        }
        self.rows = rows;
        Ok(())
    }
}
