//! A panel's groups as whole weights in byte planes.

#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::arch::x86_64::*;
use std::ops::Range;

use super::tiles::TILE_BYTES;
use super::{BLOCK, CHUNK_BYTES, Fixed, LANES, OCTET, record_bytes};
use crate::cpu::affine::{PREFETCH_BYTES, octet};
use crate::cpu::fixed::HEADER_BYTES;
use crate::cpu::matmul::of_bits;
use crate::cpu::matrix::{STEP_BYTES, STEPS};
use crate::cpu::simd::avx512::Avx512;

/// Every other byte.
const ODD: u64 = 0xaaaa_aaaa_aaaa_aaaa;

/// Unpacks blocks of columns of the panel at `records` to `out`: `[block][plane, the highest first][step][64]`.
///
/// # Safety
/// The CPU has AVX-512; the panel has the blocks, and they fit `out`.
#[inline(always)]
pub(super) unsafe fn chunk(
    bits: u32,
    group: usize,
    records: *const u8,
    blocks: Range<usize>,
    cols: usize,
    out: &mut [u8; CHUNK_BYTES],
) {
    let out = out.as_mut_ptr();
    of_bits!(bits, [chunk_of], [], (group, records, blocks, cols, out));
}

#[inline(always)]
unsafe fn chunk_of<const BITS: u32>(
    group: usize,
    records: *const u8,
    blocks: Range<usize>,
    cols: usize,
    out: *mut u8,
) {
    let (planes, octet_bytes) = (Fixed::of(BITS).planes, BITS as usize * STEP_BYTES);
    let octets = blocks.start * (BLOCK / OCTET)..blocks.end * (BLOCK / OCTET);
    // 1, 2 or 4: shifts, where a division would take as long as the rest.
    let per_group = (group / OCTET).trailing_zeros();
    for (i, index) in octets.enumerate() {
        let out = out.add(i / 2 * planes * TILE_BYTES + i % 2 * (STEPS * STEP_BYTES));
        if index * OCTET >= cols {
            // The second half of the last block.
            for plane in 0..planes {
                out.add(plane * TILE_BYTES).write_bytes(0, STEPS * STEP_BYTES);
            }
            continue;
        }
        let (g, within) = (index >> per_group, index & ((1 << per_group) - 1));
        let record = records.add(g * record_bytes(BITS, group));
        let packed = record.add(HEADER_BYTES + within * octet_bytes);
        for line in 0..BITS as usize {
            _mm_prefetch::<_MM_HINT_T0>(packed.wrapping_add(PREFETCH_BYTES + line * STEP_BYTES).cast());
        }
        let affine = Affine::load::<BITS>(record);
        for (s, step) in octet::<Avx512, BITS>(packed).into_iter().enumerate() {
            let to = out.add(s * STEP_BYTES).cast::<__m512i>();
            let plane = TILE_BYTES / size_of::<__m512i>();
            if planes == 2 {
                let [high, low] = affine.two_planes(step);
                _mm512_store_si512(to, high);
                _mm512_store_si512(to.add(plane), low);
            } else {
                let [high, middle, low] = affine.three_planes(step);
                _mm512_store_si512(to, high);
                _mm512_store_si512(to.add(plane), middle);
                _mm512_store_si512(to.add(2 * plane), low);
            }
        }
    }
}

/// Scales and biases of 16 rows, twice in each lane of 32 bits: a lane holds two of a row's columns.
#[derive(Clone, Copy)]
struct Affine {
    scale: __m512i,
    /// The lower and the upper 16 bits.
    bias: [__m512i; 2],
}

impl Affine {
    #[inline(always)]
    unsafe fn load<const BITS: u32>(record: *const u8) -> Self {
        let wide =
            |index: usize| _mm512_cvtepi16_epi32(_mm256_loadu_si256(record.cast::<__m256i>().add(index)));
        let twice = |x: __m512i| {
            _mm512_or_si512(_mm512_slli_epi32::<16>(x), _mm512_and_si512(x, _mm512_set1_epi32(0xffff)))
        };
        const { assert!(HEADER_BYTES == 2 * LANES * 2) };
        let bias = _mm512_sll_epi32(wide(1), _mm_cvtsi32_si128(Fixed::of(BITS).shift as i32));
        Self { scale: twice(wide(0)), bias: [twice(bias), twice(_mm512_srai_epi32::<16>(bias))] }
    }

    /// Levels of the even and of the odd columns.
    #[inline(always)]
    unsafe fn halves(levels: __m512i) -> [__m512i; 2] {
        [_mm512_and_si512(levels, _mm512_set1_epi16(0xff)), _mm512_srli_epi16::<8>(levels)]
    }

    /// The low bytes of both.
    #[inline(always)]
    unsafe fn low([even, odd]: [__m512i; 2]) -> __m512i {
        _mm512_mask_blend_epi8(ODD, even, _mm512_slli_epi16::<8>(odd))
    }

    /// The high bytes of both.
    #[inline(always)]
    unsafe fn high([even, odd]: [__m512i; 2]) -> __m512i {
        _mm512_mask_blend_epi8(ODD, _mm512_srli_epi16::<8>(even), odd)
    }

    #[inline(always)]
    unsafe fn two_planes(&self, levels: __m512i) -> [__m512i; 2] {
        let [even, odd] = Self::halves(levels);
        let weight = |q| _mm512_add_epi16(_mm512_mullo_epi16(q, self.scale), self.bias[0]);
        let weights = [weight(even), weight(odd)];
        [Self::high(weights), Self::low(weights)]
    }

    #[inline(always)]
    unsafe fn three_planes(&self, levels: __m512i) -> [__m512i; 3] {
        let weight = |q| {
            let low = _mm512_add_epi16(_mm512_mullo_epi16(q, self.scale), self.bias[0]);
            let high = _mm512_add_epi16(_mm512_mulhi_epi16(q, self.scale), self.bias[1]);
            let carry = _mm512_cmplt_epu16_mask(low, self.bias[0]);
            (low, _mm512_mask_sub_epi16(high, carry, high, _mm512_set1_epi16(-1)))
        };
        let [even, odd] = Self::halves(levels);
        let ((even_low, even_high), (odd_low, odd_high)) = (weight(even), weight(odd));
        let low = [even_low, odd_low];
        [Self::low([even_high, odd_high]), Self::high(low), Self::low(low)]
    }
}
