//! Panels' columns as tiles of bf16.
//!
//! A tile row holds two columns of the 16 rows, in pairs: of each four columns first 0 and 2, then 1 and 3, as they come out of
//! bytes; activations have the same order. Weights go through f16, which the CPU converts and multiplies twice as many of at a
//! time as of f32, and then lose 3 bits of their fraction.

#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::tiles::{Tile, Weights};
use crate::cpu::dispatch::of_bits;
use crate::cpu::layout::bf16_rows::BLOCK;
use crate::cpu::layout::block32::octet;
use crate::cpu::layout::fixed_point::{Fixed, HEADER_BYTES};
use crate::cpu::layout::matrix::{Matrix, OCTET, STEP_BYTES, record_bytes};
use crate::cpu::product::affine::PREFETCH_BYTES;
use crate::cpu::product::bf16::four_columns;
use crate::cpu::simd::{LANES, Simd, avx512::Avx512};
use crate::source::{Encoding, Float};

/// One of a matrix's panels.
pub(super) type Panel<'a> = (&'a Matrix, usize);

/// What unpacked weights are multiplied with by halving the width of their exponents.
const HALVED: f32 = 1.0 / 65536.0;

/// What a product's sums are multiples of, beside the weights' units.
pub(super) fn unit(encoding: Encoding) -> f32 {
    match encoding {
        Encoding::Affine { bits, .. } => (1u32 << Fixed::of(bits).shift) as f32 / HALVED,
        Encoding::Float(_) => 1.0,
    }
}

/// The columns of blocks, the last of which may lack some.
fn columns_of(w: &Matrix, blocks: &Range<usize>) -> Range<usize> {
    blocks.start * BLOCK..w.cols.min(blocks.end * BLOCK)
}

/// The packed form of blocks of columns of a panel.
pub(super) fn packed<'a>((w, panel): Panel<'a>, blocks: &Range<usize>) -> &'a [u8] {
    let columns = columns_of(w, blocks);
    let bytes = match w.encoding {
        Encoding::Affine { bits, group, .. } => {
            let record = record_bytes(bits, group);
            columns.start / group * record..columns.end.div_ceil(group) * record
        }
        Encoding::Float(float) => {
            let column = LANES * float.bytes();
            columns.start * column..columns.end * column
        }
    };
    &w.panels[panel * w.panel_bytes()..][bytes]
}

/// Unpacks blocks of columns of a panel to one side of the chunk, and asks for what follows in the panel if it is read straight
/// through.
///
/// # Safety
/// The CPU has AVX-512 with FP16; the panel has the blocks, the last of which may lack columns.
#[inline(always)]
pub(super) unsafe fn chunk(
    (w, panel): Panel<'_>,
    blocks: Range<usize>,
    side: usize,
    straight: bool,
    out: &mut Weights,
) {
    let panel = w.panels.as_ptr().add(panel * w.panel_bytes());
    let columns = columns_of(w, &blocks);
    // Columns that the matrix lacks meet activations of zero, and must be numbers.
    if !columns.len().is_multiple_of(BLOCK) {
        out[blocks.len() - 1][side].0.as_flattened_mut().fill(0);
    }
    let out = out.as_mut_ptr().cast::<Tile>().add(side).cast();
    match w.encoding {
        Encoding::Affine { bits, group, .. } => {
            of_bits!(bits, [affine], [], (group, panel, columns, straight, out))
        }
        Encoding::Float(float) => floats(float, panel, columns, out),
    }
}

/// Where four columns go, the first of which is `index` columns from the chunk's start.
#[inline(always)]
unsafe fn place(out: *mut u8, index: usize) -> *mut __m512i {
    out.add(index / BLOCK * (2 * size_of::<Tile>())).cast::<__m512i>().add(index % BLOCK / 2)
}

#[inline(always)]
unsafe fn affine<const BITS: u32>(
    group: usize,
    panel: *const u8,
    columns: Range<usize>,
    straight: bool,
    out: *mut u8,
) {
    // 0, 1 or 2: a shift, where a division would take as long as the rest.
    let per_group = (group / OCTET).trailing_zeros();
    for (i, index) in (columns.start / OCTET..columns.end / OCTET).enumerate() {
        let (g, within) = (index >> per_group, index & ((1 << per_group) - 1));
        let record = panel.add(g * record_bytes(BITS, group));
        let packed = record.add(HEADER_BYTES + within * BITS as usize * STEP_BYTES);
        if straight {
            for line in 0..BITS as usize {
                Avx512::prefetch(packed.wrapping_add(PREFETCH_BYTES + line * STEP_BYTES));
            }
        }
        let affine = Affine::load::<BITS>(record.cast());
        let to = place(out, i * OCTET);
        for (s, step) in octet::<Avx512, BITS>(packed).into_iter().enumerate() {
            let first = affine.weights(_mm512_and_si512(step, _mm512_set1_epi16(0xff)));
            let second = affine.weights(_mm512_srli_epi16::<8>(step));
            _mm512_store_si512(to.add(2 * s), first);
            _mm512_store_si512(to.add(2 * s + 1), second);
        }
    }
}

/// Scales and biases of 16 rows in f16, twice in each lane of 32 bits: a lane holds two of a row's columns.
#[derive(Clone, Copy)]
struct Affine {
    scale: __m512h,
    bias: __m512h,
}

impl Affine {
    #[inline(always)]
    unsafe fn load<const BITS: u32>(header: *const i16) -> Self {
        const { assert!(HEADER_BYTES == 2 * LANES * size_of::<i16>()) };
        // A bias is a multiple of this already.
        let unit = 1.0 / (1u32 << Fixed::of(BITS).shift) as f32;
        Self { scale: twice(header, unit), bias: twice(header.add(LANES), 1.0) }
    }

    /// The weights of 32 levels of 16 bits.
    #[inline(always)]
    unsafe fn weights(self, levels: __m512i) -> __m512i {
        let half = _mm512_castph_si512(_mm512_fmadd_ph(_mm512_cvtepu16_ph(levels), self.scale, self.bias));
        // To the nearest, away from zero in the middle; then sign, 3 bits, exponent and 7 bits of the fraction.
        let shifted = _mm512_srai_epi16::<3>(_mm512_add_epi16(half, _mm512_set1_epi16(4)));
        /// `a & b | c`, as a table of truth.
        const AND_OR: i32 = 0xea;
        // The 3 bits become 011, so that the exponent is 16 less than it should be: `HALVED`. Zero becomes 2^-31.
        let (kept, exponent) = (_mm512_set1_epi16(0x8fff_u16 as i16), _mm512_set1_epi16(0x3000));
        _mm512_ternarylogic_epi32::<AND_OR>(shifted, kept, exponent)
    }
}

/// 16 numbers times `unit`, each twice.
#[inline(always)]
unsafe fn twice(from: *const i16, unit: f32) -> __m512h {
    let wide = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256(from.cast())));
    let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_mul_ps(wide, _mm512_set1_ps(unit)));
    let once = _mm512_cvtepu16_epi32(half);
    _mm512_castsi512_ph(_mm512_or_si512(once, _mm512_slli_epi32::<16>(once)))
}

#[inline(always)]
unsafe fn floats(float: Float, panel: *const u8, columns: Range<usize>, out: *mut u8) {
    for (i, col) in columns.clone().step_by(4).enumerate() {
        let to = place(out, 4 * i);
        let [first, second] = four_columns(float, panel, col, columns.end);
        _mm512_store_si512(to, first);
        _mm512_store_si512(to.add(1), second);
    }
}
