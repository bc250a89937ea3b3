//! Products of rows with packed panels: chooses the kernel for the rows' format, the weights'
//! encoding and the instruction set.
//!
//! Each output is added up in one fixed order, whatever the number of rows and whichever block of
//! rows the row falls in. So a sequence's numbers do not depend on the rest of the batch.

#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::ops::Range;

use crate::cpu::dispatch::{entry, of_bits};
use crate::cpu::isa::Isa;
use crate::cpu::layout::bf16_rows::{Bf16Rows, Bf16Writer};
use crate::cpu::layout::matrix::Matrix;
use crate::cpu::product::output::Output;
use crate::cpu::product::quantize::{QuantRows, STRIP_ROWS};
use crate::cpu::product::{affine, dequantized, floats};
#[cfg(target_arch = "x86_64")]
use crate::cpu::product::{amx, bf16, numerics::takes_tiles};
use crate::cpu::scratch::Scratch;
use crate::cpu::simd::Simd;
use crate::source::PackedFormat;

/// Bytes of activations that are multiplied with one panel after another. They share the
/// second-level cache with the weights, which are read again for the next rows.
const CACHED_INPUT_BYTES: usize = 512 << 10;

/// The rows that a panel is multiplied with.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) enum Input<'a> {
    /// Row-major floats, `stride` from row to row.
    Floats { data: *const f32, stride: usize },
    /// Quantized rows.
    Quantized(&'a QuantRows),
    /// Rows in bf16, for matrix units.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no matrix unit is used there"))]
    Bf16(&'a Bf16Rows),
}

impl Input<'_> {
    /// How many rows of `cols` columns take about `bytes` bytes, in whole strips.
    fn rows_of(&self, bytes: usize, cols: usize) -> usize {
        let row_bytes = match self {
            Self::Floats { .. } => cols * size_of::<f32>(),
            Self::Quantized(x) => cols * x.planes,
            Self::Bf16(_) => cols * size_of::<u16>(),
        };
        (bytes / row_bytes.max(1)).max(1).next_multiple_of(STRIP_ROWS)
    }
}

/// All rows, in parts that stay in the cache.
#[inline(always)]
fn cached_rows(x: Input<'_>, cols: usize, rows: usize) -> impl Iterator<Item = Range<usize>> {
    let together = x.rows_of(CACHED_INPUT_BYTES, cols);
    (0..rows).step_by(together).map(move |first| first..rows.min(first + together))
}

/// Rows times the given panels of a matrix.
///
/// # Safety
/// `isa` was detected on this CPU, and the conditions of [`multiply`] hold.
pub(super) unsafe fn multiply_on(
    isa: Isa,
    w: &Matrix,
    panels: Range<usize>,
    x: Input<'_>,
    out: Output,
    scratch: &mut Scratch,
) {
    #[cfg(target_arch = "x86_64")]
    match x {
        Input::Bf16(rows) if isa == Isa::Amx => return amx::multiply(w, panels, rows, out, scratch),
        Input::Bf16(x) => {
            for rows in cached_rows(Input::Bf16(x), w.cols, out.rows) {
                bf16::multiply(w, panels.clone(), x, rows, out);
            }
            return;
        }
        Input::Quantized(x) if takes_tiles(isa, out.rows, x.planes) => {
            for rows in cached_rows(Input::Quantized(x), w.cols, out.rows) {
                amx::multiply_exactly(w, panels.clone(), x, rows, out, scratch);
            }
            return;
        }
        _ => {}
    }
    #[cfg(not(target_arch = "x86_64"))]
    let Scratch = scratch;
    vectors_on(isa, w, panels, x, out);
}

entry! {
    /// Products by vector instructions.
    fn vectors_on(w: &Matrix, panels: Range<usize>, x: Input<'_>, out: Output) = by_vectors
}

#[inline(always)]
unsafe fn by_vectors<S: Simd>(w: &Matrix, panels: Range<usize>, x: Input<'_>, out: Output) {
    for rows in cached_rows(x, w.cols, out.rows) {
        multiply::<S>(w, panels.clone(), x, rows, out);
    }
}

/// `out[r][the panels' columns] = x[r] · W` (+ bias) for the given rows.
///
/// # Safety
/// The CPU has `S`; `x` and `out` hold `out.rows` rows of the matrix's shape; no other thread
/// writes the panels' columns.
#[inline(always)]
pub(in crate::cpu) unsafe fn multiply<S: Simd>(
    w: &Matrix,
    panels: Range<usize>,
    x: Input<'_>,
    rows: Range<usize>,
    out: Output,
) {
    if let (PackedFormat::Affine { bits, .. }, Input::Quantized(x)) = (w.format, x) {
        return affine::multiply::<S>(bits, w, panels, x, rows, out);
    }
    let Input::Floats { data: x, stride } = x else {
        unreachable!("the caller prepares the input that the encoding needs")
    };
    for panel in panels {
        let data = w.panels.as_ptr().add(panel * w.panel_bytes());
        let rows = rows.clone();
        match w.format {
            PackedFormat::Float(float) => floats::panel::<S>(float, w, panel, data, x, stride, rows, out),
            PackedFormat::Affine { bits, .. } => {
                of_bits!(bits, [dequantized::panel], [S], (w, panel, data, x, stride, rows, out));
            }
        }
    }
}

/// `silu(x · Gᵀ + g) * (x · Uᵀ + u)` for the given panels of gate and up, in bf16.
///
/// # Safety
/// The CPU has a matrix unit; both matrices take rows in bf16 and have one shape; `out` has these
/// rows and the matrices' rows as columns; no other thread writes the panels' columns.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "no matrix unit is used there"))]
pub(super) unsafe fn multiply_gated(
    gate_up: [&Matrix; 2],
    panels: Range<usize>,
    x: &Bf16Rows,
    out: Bf16Writer<'_>,
    scratch: &mut Scratch,
) {
    #[cfg(target_arch = "x86_64")]
    amx::multiply_gated(gate_up, panels, x, out, scratch);
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("there is no matrix unit");
}
