//! Products of float rows with quantized panels: each weight becomes a float first.

#![allow(clippy::needless_range_loop, reason = "indices name registers")]
#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::ops::Range;

use crate::cpu::dispatch::in_fours;
use crate::cpu::layout::block32::unpack_block32;
use crate::cpu::layout::matrix::{BLOCK32, Matrix, Record, STEPS, block_bytes};
use crate::cpu::product::affine::GroupScales;
use crate::cpu::product::output::{Output, finish};
use crate::cpu::simd::{LANES, Simd};
use crate::source::PackedFormat;

/// A byte dot product with one of these selects one of four bytes.
const UNITS: [[i8; 4]; 4] = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]];

/// All rows times one panel.
///
/// # Safety
/// As for [`crate::cpu::product::matmul::multiply`].
#[inline(always)]
pub(in crate::cpu) unsafe fn panel<S: Simd, const BITS: u32>(
    w: &Matrix,
    panel: usize,
    data: *const u8,
    x: *const f32,
    stride: usize,
    range: Range<usize>,
    out: Output,
) {
    in_fours!(range, row, rows, [S, BITS], (w, panel, data, x, stride, row, out));
}

/// `M` rows. Each row's products are added in the order of the columns.
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
    let PackedFormat::Affine { group, .. } = w.format else { unreachable!("chosen by the caller") };
    let (mut p, mut col) = (data, 0);
    let mut acc = [S::splat(0.0); M];
    let record = Record::of(BITS, group, w.headers);
    for _ in 0..w.cols / record.columns {
        let headers = p;
        p = p.add(record.header_bytes);
        for first in (0..record.columns).step_by(BLOCK32) {
            let (low, high) = (first / group, (first + BLOCK32 / 2) / group);
            // For the first and the second half of the block.
            let halves = [
                GroupScales::<S>::of_record::<BITS>(headers, low, w.headers),
                GroupScales::<S>::of_record::<BITS>(headers, high, w.headers),
            ];
            for (index, step) in unpack_block32::<S, BITS>(p).into_iter().enumerate() {
                let scales = halves[index / (STEPS / 2)];
                for unit in &UNITS {
                    let level = S::to_f(S::dot4(S::zero_i(), step, unit.as_ptr()));
                    let weight = scales.weights(level);
                    for m in 0..M {
                        acc[m] = S::fma(weight, S::splat(*x.add((row + m) * stride + col)), acc[m]);
                    }
                    col += 1;
                }
            }
            p = p.add(block_bytes(BITS));
        }
    }
    let units = S::load(w.units.as_ptr().add(panel * LANES));
    for m in 0..M {
        finish::<S>(w, panel, row + m, S::mul(acc[m], units), out);
    }
}
