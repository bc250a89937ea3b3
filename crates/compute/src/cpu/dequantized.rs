//! Products of plain floats with quantized weights, each of which becomes a float first.

#![allow(clippy::needless_range_loop, reason = "indices name registers")]
#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use super::matmul::{Output, finish, load_numbers, octet};
use super::matrix::{Matrix, OCTET, STEP_BYTES};
use super::simd::{LANES, Simd};
use crate::source::Encoding;

/// Byte dot products with these take one of four bytes.
const UNITS: [[i8; 4]; 4] = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]];

/// All rows with one panel.
///
/// # Safety
/// As for [`super::matmul::panel`].
#[inline(always)]
pub(super) unsafe fn panel<S: Simd, const BITS: u32>(
    w: &Matrix,
    panel: usize,
    data: *const u8,
    x: *const f32,
    stride: usize,
    out: Output,
) {
    let mut row = 0;
    while row + 4 <= out.rows {
        rows::<S, BITS, 4>(w, panel, data, x, stride, row, out);
        row += 4;
    }
    while row < out.rows {
        rows::<S, BITS, 1>(w, panel, data, x, stride, row, out);
        row += 1;
    }
}

/// `M` rows; for each the additions happen in the order of the columns.
#[inline(always)]
unsafe fn rows<S: Simd, const BITS: u32, const M: usize>(
    w: &Matrix,
    panel: usize,
    data: *const u8,
    x: *const f32,
    stride: usize,
    row: usize,
    out: Output,
) {
    let Encoding::Affine { group, scales, .. } = w.encoding else { unreachable!("chosen by the caller") };
    let (mut p, mut col) = (data, 0);
    let mut acc = [S::splat(0.0); M];
    for _ in 0..w.cols / group {
        let scale = load_numbers::<S>(scales, p);
        let bias = load_numbers::<S>(scales, p.add(LANES * scales.bytes()));
        p = p.add(2 * LANES * scales.bytes());
        for _ in 0..group / OCTET {
            for step in octet::<S, BITS>(p) {
                for unit in &UNITS {
                    let level = S::to_f(S::dot4(S::zero_i(), step, unit.as_ptr()));
                    let weight = S::fma(level, scale, bias);
                    for m in 0..M {
                        acc[m] = S::fma(weight, S::splat(*x.add((row + m) * stride + col)), acc[m]);
                    }
                    col += 1;
                }
            }
            p = p.add(BITS as usize * STEP_BYTES);
        }
    }
    for m in 0..M {
        finish::<S>(w, panel, row + m, acc[m], out);
    }
}
