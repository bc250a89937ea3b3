//! 16-bit float weights as pairs of bf16, and AVX-512's bf16 dot products: prompts with unquantized
//! weights, without AMX.

#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::arch::x86_64::*;
use std::ops::Range;

use crate::cpu::layout::bf16_rows::{Bf16Rows, TILE_COLUMNS, TILE_ROWS};
use crate::cpu::layout::matrix::Matrix;
use crate::cpu::product::affine::PREFETCH_BYTES;
use crate::cpu::product::output::{Output, finish};
use crate::cpu::simd::{LANES, Simd, avx512::Avx512};
use crate::source::{Float, PackedFormat};

/// Bytes of four columns of a panel.
const FOUR: usize = 4 * LANES * size_of::<u16>();

/// Rows times the given panels of a matrix of 16-bit floats. `rows` starts at a tile's first row.
///
/// # Safety
/// The CPU has AVX-512 with bf16; the other conditions are those of
/// [`crate::cpu::product::matmul::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(in crate::cpu) unsafe fn multiply(
    w: &Matrix,
    panels: Range<usize>,
    x: &Bf16Rows,
    rows: Range<usize>,
    out: Output,
) {
    let PackedFormat::Float(float) = w.format else {
        unreachable!("the caller takes other weights elsewhere")
    };
    for panel in panels {
        let data = w.panels.as_ptr().add(panel * w.panel_bytes());
        for first in rows.clone().step_by(TILE_ROWS) {
            // Rows that the last tile lacks hold arbitrary numbers; their results are not stored.
            let mut sums = [_mm512_setzero_ps(); TILE_ROWS];
            for tile in 0..x.depth() {
                let lines = x.tile(first / TILE_ROWS, tile);
                let end = w.cols.min((tile + 1) * TILE_COLUMNS);
                for (i, col) in (tile * TILE_COLUMNS..end).step_by(4).enumerate() {
                    let [first, second] = four_columns(float, data, col, w.cols);
                    for (m, sum) in sums.iter_mut().enumerate() {
                        let pairs = lines
                            .add(m * size_of::<[u16; TILE_COLUMNS]>() + i * size_of::<[u16; 4]>())
                            .cast::<i32>();
                        *sum = dot(*sum, first, *pairs);
                        *sum = dot(*sum, second, *pairs.add(1));
                    }
                }
            }
            for (row, sum) in (first..rows.end).zip(sums) {
                finish::<Avx512>(w, panel, row, sum, out);
            }
        }
    }
}

/// Adds the dot products of 16 pairs with one pair.
#[inline(always)]
unsafe fn dot(sum: __m512, pairs: __m512i, pair: i32) -> __m512 {
    // SAFETY: all types have 512 bits.
    let [pairs, pair]: [__m512bh; 2] = std::mem::transmute([pairs, _mm512_set1_epi32(pair)]);
    _mm512_dpbf16_ps(sum, pairs, pair)
}

/// Four columns of a panel of 16-bit floats, from `col` on, as pairs of bf16: columns 0 and 2, then
/// 1 and 3. Columns from `end` on are zero.
///
/// # Safety
/// The CPU has AVX-512; the panel has the columns up to `end`.
#[inline(always)]
pub(in crate::cpu) unsafe fn four_columns(
    float: Float,
    panel: *const u8,
    col: usize,
    end: usize,
) -> [__m512i; 2] {
    let mut from = panel.add(col / 4 * FOUR);
    Avx512::prefetch(from.wrapping_add(PREFETCH_BYTES));
    Avx512::prefetch(from.wrapping_add(PREFETCH_BYTES + FOUR / 2));
    let mut last = [0; FOUR];
    if col + 4 > end {
        from.copy_to_nonoverlapping(last.as_mut_ptr(), (end - col) * FOUR / 4);
        from = last.as_ptr();
    }
    let [a, b] = if float == Float::BF16 {
        [_mm512_loadu_si512(from.cast()), _mm512_loadu_si512(from.add(FOUR / 2).cast())]
    } else {
        [from_f16(from), from_f16(from.add(FOUR / 2))]
    };
    [_mm512_permutex2var_epi16(a, order(0), b), _mm512_permutex2var_epi16(a, order(1), b)]
}

/// The permutation that alternates columns `first` and `first + 2` of four.
#[inline(always)]
unsafe fn order(first: usize) -> __m512i {
    const ORDER: [[u16; 2 * LANES]; 2] = {
        let mut order = [[0; 2 * LANES]; 2];
        let mut i = 0;
        while i < 2 * LANES {
            order[0][i] = (i % 2 * 2 * LANES + i / 2) as u16;
            order[1][i] = order[0][i] + LANES as u16;
            i += 1;
        }
        order
    };
    _mm512_loadu_si512(ORDER[first].as_ptr().cast())
}

/// Two columns of f16, rounded to bf16.
#[inline(always)]
unsafe fn from_f16(from: *const u8) -> __m512i {
    let (a, b) = (Avx512::load_f16(from.cast()), Avx512::load_f16(from.cast::<u16>().add(LANES)));
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(rounded_to_bf16(a)), rounded_to_bf16(b))
}

/// f32 rounded to bf16: to the nearest, ties away from zero.
#[inline(always)]
unsafe fn rounded_to_bf16(x: __m512) -> __m256i {
    let rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded))
}

/// Multiplications and additions of one pass of [`arithmetic`].
pub(in crate::cpu) const PASS_OPERATIONS: usize = 2 * 2 * LANES * TILE_ROWS;

/// Multiplies bf16 and does nothing else: the upper bound of a product's speed.
///
/// # Safety
/// The CPU has AVX-512 with bf16.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(in crate::cpu) unsafe fn arithmetic(passes: usize) {
    // 0x3c3c is 0.0115.
    let mut sums = [_mm512_setzero_ps(); TILE_ROWS];
    let pairs = std::hint::black_box(_mm512_set1_epi8(0x3c));
    for _ in 0..passes {
        for sum in &mut sums {
            *sum = dot(*sum, pairs, 0x3c3c_3c3c);
        }
    }
    std::hint::black_box(sums);
}
