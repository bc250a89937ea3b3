//! Where a product's results go.

#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use crate::cpu::layout::matrix::Matrix;
use crate::cpu::simd::{LANES, Simd};

/// Where a panel's results go: row-major, `stride` floats from row to row.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Output {
    /// The first column of the first row. The column need not exist if no thread writes it.
    pub data: *mut f32,
    pub stride: usize,
    pub rows: usize,
    /// True if results are added to the stored values, false if they replace them.
    pub adds: bool,
}

// SAFETY: the pointer is only a number until it is written through, and each thread writes its own
// columns.
unsafe impl Sync for Output {}

impl Output {
    /// Where a row begins. The row need not exist if nothing is written to it.
    pub(in crate::cpu) fn row(&self, row: usize) -> *mut f32 {
        self.data.wrapping_add(row * self.stride)
    }

    /// The same rows, from column `column` on.
    ///
    /// # Safety
    /// The rows have that column.
    pub(in crate::cpu) unsafe fn starting_at(&self, column: usize) -> Self {
        Self { data: self.data.add(column), ..*self }
    }
}

/// Adds the bias to 16 results of a row (fewer in the last panel), and stores them or adds them to
/// the stored values.
///
/// # Safety
/// The output holds the row and the panel's columns, which no other thread writes; the CPU has `S`.
#[inline(always)]
pub(in crate::cpu) unsafe fn finish<S: Simd>(w: &Matrix, panel: usize, row: usize, acc: S::F, out: Output) {
    let first = panel * LANES;
    let count = LANES.min(w.rows - first);
    let to = out.data.wrapping_add(row * out.stride + first);
    let mut lanes = [0.0; LANES];
    if count == LANES {
        let bias = if w.bias.is_empty() { S::splat(0.0) } else { S::load(w.bias.as_ptr().add(first)) };
        let result = S::add(acc, bias);
        S::store(to, if out.adds { S::add(S::load(to), result) } else { result });
    } else {
        S::store(lanes.as_mut_ptr(), acc);
        for (i, x) in lanes[..count].iter().enumerate() {
            let result = x + w.bias.get(first + i).copied().unwrap_or(0.0);
            *to.add(i) = if out.adds { *to.add(i) + result } else { result };
        }
    }
}
