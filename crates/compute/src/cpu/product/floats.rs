//! Products of float rows with float panels (f32, f16 or bf16 weights).

#![allow(clippy::needless_range_loop, reason = "indices name registers")]
#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::ops::Range;

use crate::cpu::dispatch::in_fours;
use crate::cpu::layout::matrix::Matrix;
use crate::cpu::product::output::{Output, finish};
use crate::cpu::simd::{LANES, Simd};
use crate::source::Float;

/// All rows times one panel of `float` numbers.
///
/// # Safety
/// As for [`crate::cpu::product::matmul::multiply`]; `data` is the panel's first byte.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the state of the loops around it")]
pub(super) unsafe fn panel<S: Simd>(
    float: Float,
    w: &Matrix,
    panel: usize,
    data: *const u8,
    x: *const f32,
    stride: usize,
    rows: Range<usize>,
    out: Output,
) {
    match float {
        Float::F32 => floats::<S, F32>(w, panel, data, x, stride, rows, out),
        Float::F16 => floats::<S, F16>(w, panel, data, x, stride, rows, out),
        Float::BF16 => floats::<S, BF16>(w, panel, data, x, stride, rows, out),
    }
}

/// A weight format.
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

/// `M` rows. Four chains of additions per row hide the latency of the multiply-add.
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
