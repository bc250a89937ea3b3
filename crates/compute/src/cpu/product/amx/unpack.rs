//! Unpacks panels to tiles of bf16.
//!
//! A tile row holds two columns of the 16 rows, as pairs: of each four columns first 0 and 2, then
//! 1 and 3, the order in which they are unpacked from bytes. Activations have the same order.
//! Weights are computed in f16, because the CPU converts and multiplies twice as many f16 as f32
//! per instruction, and then lose 3 bits of their fraction.

#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::tiles::{Tile, WeightTiles};
use crate::cpu::dispatch::of_bits;
use crate::cpu::layout::bf16_rows::TILE_COLUMNS;
use crate::cpu::layout::block32::unpack_block32;
use crate::cpu::layout::fixed_point::FixedPoint;
use crate::cpu::layout::matrix::{
    BLOCK32, Headers, Matrix, Record, STEP_BYTES, STEPS, block_bytes, block_lines, record_columns,
    shares_block,
};
use crate::cpu::product::affine::{GroupScales, PREFETCH_BYTES};
use crate::cpu::product::bf16::four_columns;
use crate::cpu::simd::{LANES, Simd, avx512::Avx512};
use crate::source::{Float, PackedFormat};

/// A matrix and the index of one of its panels.
pub(super) type Panel<'a> = (&'a Matrix, usize);

/// Factor of unpacked weights: f16 bits become bf16 bits without correcting the exponent, which is
/// 16 too small.
const UNPACKED_SCALE: f32 = 1.0 / 65536.0;

/// The factor of a product's sums, in addition to the weights' units.
pub(super) fn unit(encoding: PackedFormat) -> f32 {
    match encoding {
        PackedFormat::Affine { bits, .. } => (1u32 << FixedPoint::of(bits).shift) as f32 / UNPACKED_SCALE,
        PackedFormat::Float(_) => 1.0,
    }
}

/// The columns of these column tiles, the last of which may be partly empty.
fn columns_of(w: &Matrix, depth: &Range<usize>) -> Range<usize> {
    depth.start * TILE_COLUMNS..w.cols.min(depth.end * TILE_COLUMNS)
}

/// The packed bytes of these column tiles of a panel.
pub(super) fn packed<'a>((w, panel): Panel<'a>, depth: &Range<usize>) -> &'a [u8] {
    let columns = columns_of(w, depth);
    let bytes = match w.format {
        PackedFormat::Affine { bits, group } => {
            let record = Record::of(bits, group, w.headers);
            let (first, end) = (columns.start / record.columns, columns.end.div_ceil(record.columns));
            first * record.bytes..end * record.bytes
        }
        PackedFormat::Float(float) => {
            let column = LANES * float.bytes();
            columns.start * column..columns.end * column
        }
    };
    &w.panels[panel * w.panel_bytes()..][bytes]
}

/// Unpacks column tiles of a panel to one side of the chunk. `in_order`: panels are read from first
/// to last byte, so this prefetches the bytes that follow.
///
/// # Safety
/// The CPU has AVX-512 with FP16; the panel has these column tiles, the last of which may be partly
/// empty.
#[inline(always)]
pub(super) unsafe fn chunk(
    (w, panel): Panel<'_>,
    depth: Range<usize>,
    side: usize,
    in_order: bool,
    out: &mut WeightTiles,
) {
    let panel = w.panels.as_ptr().add(panel * w.panel_bytes());
    let columns = columns_of(w, &depth);
    // Columns that the matrix lacks are multiplied with zeros; they must not be NaN.
    if !columns.len().is_multiple_of(TILE_COLUMNS) {
        out[depth.len() - 1][side].0.as_flattened_mut().fill(0);
    }
    let out = out.as_mut_ptr().cast::<Tile>().add(side).cast();
    match w.format {
        PackedFormat::Affine { bits, group } => {
            let of = (group, w.headers);
            if shares_block(group) {
                of_bits!(bits, [affine], [true], (of, panel, columns, in_order, out))
            } else {
                of_bits!(bits, [affine], [false], (of, panel, columns, in_order, out))
            }
        }
        PackedFormat::Float(float) => floats(float, panel, columns, out),
    }
}

/// The destination of four columns, the first of which is column `index` of the chunk.
#[inline(always)]
unsafe fn place(out: *mut u8, index: usize) -> *mut __m512i {
    out.add(index / TILE_COLUMNS * (2 * size_of::<Tile>())).cast::<__m512i>().add(index % TILE_COLUMNS / 2)
}

/// `SHARED`: two groups share a block. `headers`: see `layout/matrix.rs`.
#[inline(always)]
unsafe fn affine<const SHARED: bool, const BITS: u32>(
    (group, headers): (usize, Headers),
    panel: *const u8,
    columns: Range<usize>,
    in_order: bool,
    out: *mut u8,
) {
    let record = Record::of(BITS, group, headers);
    // Shifts by 0 to 3: divisions would take as long as the rest.
    let [per_record, per_group] =
        [record.columns, record_columns(group)].map(|columns| (columns / BLOCK32).trailing_zeros());
    for (i, block) in (columns.start / BLOCK32..columns.end / BLOCK32).enumerate() {
        let (r, within) = (block >> per_record, block & ((1 << per_record) - 1));
        let at = panel.add(r * record.bytes);
        let packed = at.add(record.header_bytes + within * block_bytes(BITS));
        if in_order {
            for line in 0..block_lines(BITS) {
                Avx512::prefetch(packed.wrapping_add(PREFETCH_BYTES + line * STEP_BYTES));
            }
        }
        let group = if SHARED { 2 * within } else { within >> per_group };
        let first = Affine::load::<BITS>(at, group, headers);
        let second = if SHARED { Affine::load::<BITS>(at, group + 1, headers) } else { first };
        let to = place(out, i * BLOCK32);
        for (s, step) in unpack_block32::<Avx512, BITS>(packed).into_iter().enumerate() {
            let affine = if s < STEPS / 2 { first } else { second };
            let first = affine.weights(_mm512_and_si512(step, _mm512_set1_epi16(0xff)));
            let second = affine.weights(_mm512_srli_epi16::<8>(step));
            _mm512_store_si512(to.add(2 * s), first);
            _mm512_store_si512(to.add(2 * s + 1), second);
        }
    }
}

/// Scales and biases of 16 rows in f16, each twice in its 32-bit lane: a lane holds two columns of
/// a row.
#[derive(Clone, Copy)]
struct Affine {
    scale: __m512h,
    bias: __m512h,
}

impl Affine {
    /// Those of group `index` of a record.
    #[inline(always)]
    unsafe fn load<const BITS: u32>(record: *const u8, index: usize, headers: Headers) -> Self {
        let GroupScales { scales, biases } = GroupScales::<Avx512>::of_record::<BITS>(record, index, headers);
        let unit = 1.0 / (1u32 << FixedPoint::of(BITS).shift) as f32;
        Self { scale: twice(scales, unit), bias: twice(biases, unit) }
    }

    /// The weights of 32 levels, which are 16-bit integers.
    #[inline(always)]
    unsafe fn weights(self, levels: __m512i) -> __m512i {
        let f16 = _mm512_castph_si512(_mm512_fmadd_ph(_mm512_cvtepu16_ph(levels), self.scale, self.bias));
        // Rounds to the nearest, ties away from zero. Then: sign, 3 copies of it, exponent, 7 bits
        // of the fraction.
        let shifted = _mm512_srai_epi16::<3>(_mm512_add_epi16(f16, _mm512_set1_epi16(4)));
        /// The truth table of `a & b | c`.
        const AND_OR: i32 = 0xea;
        // The 3 bits become 011, so the exponent is 16 too small: `UNPACKED_SCALE`. Zero becomes
        // 2^-31.
        let (kept, exponent) = (_mm512_set1_epi16(0x8fff_u16 as i16), _mm512_set1_epi16(0x3000));
        _mm512_ternarylogic_epi32::<AND_OR>(shifted, kept, exponent)
    }
}

/// 16 numbers times `unit` in f16, each twice.
#[inline(always)]
unsafe fn twice(wide: __m512, unit: f32) -> __m512h {
    let f16 = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_mul_ps(wide, _mm512_set1_ps(unit)));
    let once = _mm512_cvtepu16_epi32(f16);
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
