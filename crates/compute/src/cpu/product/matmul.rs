//! Products of rows with packed matrices. For each output the additions happen in one order, whatever the number of
//! rows and whichever block of rows a row falls in: a sequence's numbers do not depend on what else is in the batch.

#![allow(clippy::needless_range_loop, reason = "indices name registers")]
#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::ops::Range;

use super::affine;
use super::dequantized;
use crate::cpu::layout::bf16_rows::HalfRows;
use crate::cpu::layout::matrix::Matrix;
use crate::cpu::product::quantize::{QuantRows, TILE_ROWS};
use crate::cpu::simd::{LANES, Simd};
use crate::source::{Encoding, Float};

/// Calls a kernel for weights of so many bits, which are the last of its generic parameters.
macro_rules! of_bits {
    ($bits:expr, [$($kernel:ident)::+], [$($generic:tt),*], ($($argument:expr),*)) => {
        match $bits {
            2 => $($kernel)::+::<$($generic,)* 2>($($argument),*),
            3 => $($kernel)::+::<$($generic,)* 3>($($argument),*),
            4 => $($kernel)::+::<$($generic,)* 4>($($argument),*),
            5 => $($kernel)::+::<$($generic,)* 5>($($argument),*),
            6 => $($kernel)::+::<$($generic,)* 6>($($argument),*),
            _ => $($kernel)::+::<$($generic,)* 8>($($argument),*),
        }
    };
}
pub(in crate::cpu) use of_bits;

/// Calls a kernel for blocks of four rows and then for single ones; how many is the last of its generic parameters.
macro_rules! in_fours {
    ($rows:expr, $row:ident, $kernel:ident, [$($generic:tt),*], ($($argument:expr),*)) => {
        let mut $row = $rows.start;
        while $row + 4 <= $rows.end {
            $kernel::<$($generic,)* 4>($($argument),*);
            $row += 4;
        }
        while $row < $rows.end {
            $kernel::<$($generic,)* 1>($($argument),*);
            $row += 1;
        }
    };
}
pub(in crate::cpu) use in_fours;

/// Where a panel's results go: row-major, `stride` floats from row to row.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Output {
    /// The first column of the first row; it need not exist if nobody writes it.
    pub data: *mut f32,
    pub stride: usize,
    pub rows: usize,
    /// Whether results are added to what is there.
    pub adds: bool,
}

// SAFETY: only a pointer until it is written through, and each thread writes its own columns.
unsafe impl Sync for Output {}

impl Output {
    /// The same rows, from a column on.
    ///
    /// # Safety
    /// The rows have that many columns.
    pub(in crate::cpu) unsafe fn starting_at(&self, column: usize) -> Self {
        Self { data: self.data.add(column), ..*self }
    }
}

/// What a panel is multiplied with.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) enum Input<'a> {
    /// Row-major floats, `stride` from row to row.
    Floats { data: *const f32, stride: usize },
    /// Quantized rows.
    Quantized(&'a QuantRows),
    /// Rows in bf16, for matrix units.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no matrix unit is used there"))]
    Halves(&'a HalfRows),
}

impl Input<'_> {
    /// How many rows of `cols` columns take so many bytes, in whole tiles.
    pub fn rows_of(&self, bytes: usize, cols: usize) -> usize {
        let row_bytes = match self {
            Self::Floats { .. } => cols * size_of::<f32>(),
            Self::Quantized(x) => cols * x.planes,
            Self::Halves(_) => cols * size_of::<u16>(),
        };
        (bytes / row_bytes.max(1)).max(1).next_multiple_of(TILE_ROWS)
    }
}

/// `out[r][the panels' columns] = x[r] · W` (+ bias) for the given rows.
///
/// # Safety
/// The CPU has `S`; `x` and `out` hold `out.rows` rows of the matrix's shape; nobody else writes the panels' columns.
#[inline(always)]
pub(in crate::cpu) unsafe fn multiply<S: Simd>(
    w: &Matrix,
    panels: Range<usize>,
    x: Input<'_>,
    rows: Range<usize>,
    out: Output,
) {
    if let (Encoding::Affine { bits, .. }, Input::Quantized(x)) = (w.encoding, x) {
        return affine::multiply::<S>(bits, w, panels, x, rows, out);
    }
    let Input::Floats { data: x, stride } = x else {
        unreachable!("the caller prepares the input that the encoding needs")
    };
    for panel in panels {
        let data = w.panels.as_ptr().add(panel * w.panel_bytes());
        let rows = rows.clone();
        match w.encoding {
            Encoding::Float(Float::F32) => floats::<S, F32>(w, panel, data, x, stride, rows, out),
            Encoding::Float(Float::F16) => floats::<S, F16>(w, panel, data, x, stride, rows, out),
            Encoding::Float(Float::BF16) => floats::<S, BF16>(w, panel, data, x, stride, rows, out),
            Encoding::Affine { bits, .. } => {
                of_bits!(bits, [dequantized::panel], [S], (w, panel, data, x, stride, rows, out));
            }
        }
    }
}

/// Adds the bias and stores 16 results of a row, fewer in the last panel, or adds them to what is there.
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

trait Load {
    const BYTES: usize;
    unsafe fn load<S: Simd>(p: *const u8) -> S::F;
}
struct F32;
struct F16;
struct BF16;
impl Load for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        S::load(p.cast())
    }
}
impl Load for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        S::load_f16(p.cast())
    }
}
impl Load for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        S::load_bf16(p.cast())
    }
}

#[inline(always)]
unsafe fn floats<S: Simd, L: Load>(
    w: &Matrix,
    panel: usize,
    data: *const u8,
    x: *const f32,
    stride: usize,
    rows: Range<usize>,
    out: Output,
) {
    in_fours!(rows, row, float_rows, [S, L], (w, panel, data, x, stride, row, out));
}

/// `M` rows. Four chains of additions a row hide the latency of the multiply-add.
#[inline(always)]
unsafe fn float_rows<S: Simd, L: Load, const M: usize>(
    w: &Matrix,
    panel: usize,
    data: *const u8,
    x: *const f32,
    stride: usize,
    row: usize,
    out: Output,
) {
    const CHAINS: usize = 4;
    let mut acc = [[S::splat(0.0); CHAINS]; M];
    let whole = w.cols / CHAINS * CHAINS;
    for col in (0..whole).step_by(CHAINS) {
        for c in 0..CHAINS {
            let weights = L::load::<S>(data.add((col + c) * LANES * L::BYTES));
            for m in 0..M {
                let x = S::splat(*x.add((row + m) * stride + col + c));
                acc[m][c] = S::fma(weights, x, acc[m][c]);
            }
        }
    }
    for col in whole..w.cols {
        let weights = L::load::<S>(data.add(col * LANES * L::BYTES));
        for m in 0..M {
            acc[m][0] = S::fma(weights, S::splat(*x.add((row + m) * stride + col)), acc[m][0]);
        }
    }
    for (m, acc) in acc.into_iter().enumerate() {
        let sum = S::add(S::add(acc[0], acc[1]), S::add(acc[2], acc[3]));
        finish::<S>(w, panel, row + m, sum, out);
    }
}
