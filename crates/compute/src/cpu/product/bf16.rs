//! Half floats as pairs of bf16, and AVX-512's dot products of these: prompts with unquantized weights where there is no matrix unit.

#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::arch::x86_64::*;
use std::ops::Range;

use crate::cpu::layout::bf16_rows::{BLOCK, HalfRows, TILE_ROWS};
use crate::cpu::layout::matrix::Matrix;
use crate::cpu::product::affine::PREFETCH_BYTES;
use crate::cpu::product::output::{Output, finish};
use crate::cpu::simd::{LANES, Simd, avx512::Avx512};
use crate::source::{Encoding, Float};

/// Bytes of four columns of a panel.
const FOUR: usize = 4 * LANES * size_of::<u16>();

/// The given rows, which begin at a tile, times the given panels of a matrix of half floats.
///
/// # Safety
/// The CPU has AVX-512 with bf16; otherwise as [`crate::cpu::product::matmul::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(in crate::cpu) unsafe fn multiply(
    w: &Matrix,
    panels: Range<usize>,
    x: &HalfRows,
    rows: Range<usize>,
    out: Output,
) {
    let Encoding::Float(float) = w.encoding else { unreachable!("the caller takes other weights elsewhere") };
    for panel in panels {
        let data = w.panels.as_ptr().add(panel * w.panel_bytes());
        for first in rows.clone().step_by(TILE_ROWS) {
            // Rows that the last tile lacks hold anything, and are not stored.
            let mut sums = [_mm512_setzero_ps(); TILE_ROWS];
            for block in 0..x.blocks() {
                let lines = x.tile(first / TILE_ROWS, block);
                let end = w.cols.min((block + 1) * BLOCK);
                for (i, col) in (block * BLOCK..end).step_by(4).enumerate() {
                    let [first, second] = four_columns(float, data, col, w.cols);
                    for (m, sum) in sums.iter_mut().enumerate() {
                        let pairs = lines
                            .add(m * size_of::<[u16; BLOCK]>() + i * size_of::<[u16; 4]>())
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

/// Adds the products of 16 pairs with one.
#[inline(always)]
unsafe fn dot(sum: __m512, pairs: __m512i, pair: i32) -> __m512 {
    // SAFETY: all are 512 bits.
    let [pairs, pair]: [__m512bh; 2] = std::mem::transmute([pairs, _mm512_set1_epi32(pair)]);
    _mm512_dpbf16_ps(sum, pairs, pair)
}

/// Four columns of a panel of half floats, from `col` on, as pairs of bf16: columns 0 and 2, then 1 and 3. Zero from `end` on.
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

/// Takes columns `first` and `first + 2` of four in turns.
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

/// Two columns of f16 in bf16, rounded.
#[inline(always)]
unsafe fn from_f16(from: *const u8) -> __m512i {
    let (a, b) = (Avx512::load_f16(from.cast()), Avx512::load_f16(from.cast::<u16>().add(LANES)));
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(upper_halves(a)), upper_halves(b))
}

/// The upper halves of numbers, rounded to the nearest, away from zero in the middle.
#[inline(always)]
unsafe fn upper_halves(x: __m512) -> __m256i {
    let rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded))
}

/// Operations of a pass of [`arithmetic`].
pub(in crate::cpu) const PASS_OPERATIONS: usize = 2 * 2 * LANES * TILE_ROWS;

/// Multiplies bf16 and nothing else: what a product can come near to.
///
/// # Safety
/// The CPU has AVX-512 with bf16.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(in crate::cpu) unsafe fn arithmetic(passes: usize) {
    // 0x3c3c: 0.0115.
    let mut sums = [_mm512_setzero_ps(); TILE_ROWS];
    let pairs = std::hint::black_box(_mm512_set1_epi8(0x3c));
    for _ in 0..passes {
        for sum in &mut sums {
            *sum = dot(*sum, pairs, 0x3c3c_3c3c);
        }
    }
    std::hint::black_box(sums);
}
