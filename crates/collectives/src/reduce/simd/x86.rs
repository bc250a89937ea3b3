//! AVX-512, and AVX2 with conversions of f16.
#![allow(unsafe_op_in_unsafe_fn, reason = "each method is one operation under the trait's contract")]

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::*;

use super::{Simd, SumFn, sum_with};
use crate::DType;

/// The loops that this processor can run, fastest first.
pub(super) fn available() -> impl Iterator<Item = (&'static str, SumFn)> {
    let has_avx512 = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
    let has_avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
    let avx512 = has_avx512.then_some(("AVX-512", avx512 as SumFn));
    avx512.into_iter().chain(has_avx2.then_some(("AVX2", avx2 as SumFn)))
}

#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn avx512(dtype: DType, out: *mut u8, sources: &[*const u8], bytes: usize) -> usize {
    // SAFETY: as promised by the caller; this function has the instructions.
    unsafe { sum_with::<Avx512>(dtype, out, sources, bytes) }
}

#[target_feature(enable = "avx2,f16c")]
unsafe fn avx2(dtype: DType, out: *mut u8, sources: &[*const u8], bytes: usize) -> usize {
    // SAFETY: as promised by the caller; this function has the instructions.
    unsafe { sum_with::<Avx2>(dtype, out, sources, bytes) }
}

/// The high 16 of 32 bits.
const HIGH_16_BITS: i32 = 0xffff_0000_u32 as i32;
/// Rounds the low 16 of 32 bits up above the middle; the lowest remaining bit is added too, to
/// break ties to even.
const ROUNDING_BIAS: i32 = 0x7fff;
/// The bit that makes a NaN quiet. It survives the cut to 16 bits, so that the NaN does not become
/// infinity.
const QUIET_NAN_BIT: i32 = 0x40_0000;

struct Avx512;

// SAFETY: each method consists of the instructions that do what it says.
unsafe impl Simd for Avx512 {
    type Vector = __m512;
    const BYTES: usize = 64;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m512 {
        _mm512_loadu_ps(from.cast())
    }
    #[inline(always)]
    unsafe fn store(vector: __m512, to: *mut u8) {
        _mm512_storeu_ps(to.cast(), vector);
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn lower(pairs: __m512) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(pairs)))
    }
    #[inline(always)]
    unsafe fn upper(pairs: __m512) -> __m512 {
        _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(HIGH_16_BITS)))
    }
    #[inline(always)]
    unsafe fn pack(lower: __m512, upper: __m512) -> __m512 {
        const HIGH_LANES: __mmask32 = 0xaaaa_aaaa;
        let lower = _mm512_srli_epi32::<16>(Self::round(lower));
        _mm512_castsi512_ps(_mm512_mask_mov_epi16(lower, HIGH_LANES, Self::round(upper)))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
    }
    #[inline(always)]
    unsafe fn store_f16(vector: __m512, to: *mut u8) {
        _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector));
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
}

impl Avx512 {
    /// Rounds to `bf16` in the high 16 bits; the low 16 bits are undefined.
    #[inline(always)]
    unsafe fn round(vector: __m512) -> __m512i {
        let bits = _mm512_castps_si512(vector);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(ROUNDING_BIAS)), odd);
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(vector, vector);
        _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(QUIET_NAN_BIT))
    }
}

struct Avx2;

// SAFETY: each method consists of the instructions that do what it says.
unsafe impl Simd for Avx2 {
    type Vector = __m256;
    const BYTES: usize = 32;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m256 {
        _mm256_loadu_ps(from.cast())
    }
    #[inline(always)]
    unsafe fn store(vector: __m256, to: *mut u8) {
        _mm256_storeu_ps(to.cast(), vector);
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn lower(pairs: __m256) -> __m256 {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(pairs)))
    }
    #[inline(always)]
    unsafe fn upper(pairs: __m256) -> __m256 {
        _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), _mm256_set1_epi32(HIGH_16_BITS)))
    }
    #[inline(always)]
    unsafe fn pack(lower: __m256, upper: __m256) -> __m256 {
        const HIGH_LANES: i32 = 0b1010_1010;
        let lower = _mm256_srli_epi32::<16>(Self::round(lower));
        _mm256_castsi256_ps(_mm256_blend_epi16::<HIGH_LANES>(lower, Self::round(upper)))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> __m256 {
        _mm256_cvtph_ps(_mm_loadu_si128(from.cast()))
    }
    #[inline(always)]
    unsafe fn store_f16(vector: __m256, to: *mut u8) {
        _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector));
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
}

impl Avx2 {
    /// Rounds to `bf16` in the high 16 bits; the low 16 bits are undefined.
    #[inline(always)]
    unsafe fn round(vector: __m256) -> __m256i {
        let bits = _mm256_castps_si256(vector);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(ROUNDING_BIAS)), odd);
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(QUIET_NAN_BIT));
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(vector, vector));
        _mm256_blendv_epi8(rounded, quiet, is_nan)
    }
}
