//! AVX-512 with VNNI: Intel since Ice Lake, AMD since Zen 4.
#![allow(unsafe_op_in_unsafe_fn, reason = "each method is one operation under the trait's contract")]

use std::arch::asm;
use std::arch::x86_64::*;

use super::avx2::Avx2;
use super::{Kernel, Simd};

/// The instruction set. Needs avx512f, avx512bw, avx512dq, avx512vl and avx512vnni, and the
/// features of AVX2.
#[derive(Debug, Clone, Copy)]
pub struct Avx512;

impl Avx512 {
    /// True if this CPU has the instructions.
    pub fn detected() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && Avx2::<false>::detected()
    }
}

// SAFETY: each method is the instruction of that meaning; the trait's conditions are the
// instructions' conditions.
unsafe impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    type B = __m512i;
    const REGISTER_ROWS: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        _mm512_loadu_ps(p)
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        _mm512_storeu_ps(p, v)
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: __m512) {
        _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn abs(a: __m512) -> __m512 {
        _mm512_abs_ps(a)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
    }
    #[inline(always)]
    unsafe fn scale2(a: __m512, n: __m512) -> __m512 {
        _mm512_scalef_ps(a, n)
    }
    #[inline(always)]
    unsafe fn reduce_add(a: __m512) -> f32 {
        _mm512_reduce_add_ps(a)
    }
    #[inline(always)]
    unsafe fn reduce_max(a: __m512) -> f32 {
        _mm512_reduce_max_ps(a)
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: __m512) {
        _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)))
    }
    #[inline(always)]
    unsafe fn zero_i() -> __m512i {
        _mm512_setzero_si512()
    }
    #[inline(always)]
    unsafe fn add_i(a: __m512i, b: __m512i) -> __m512i {
        _mm512_add_epi32(a, b)
    }
    #[inline(always)]
    unsafe fn to_f(a: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(a)
    }
    #[inline(always)]
    unsafe fn load_b(p: *const u8) -> __m512i {
        _mm512_loadu_si512(p.cast())
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(p.cast());
    }
    #[inline(always)]
    unsafe fn prefetch_near(p: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
    #[inline(always)]
    unsafe fn bits<const SHIFT: u32, const BITS: u32>(a: __m512i) -> __m512i {
        let shifted = if SHIFT == 0 { a } else { _mm512_srli_epi16::<SHIFT>(a) };
        _mm512_and_si512(shifted, _mm512_set1_epi8(((1u32 << BITS) - 1) as i8))
    }
    #[inline(always)]
    unsafe fn or_shl<const SHIFT: u32>(a: __m512i, b: __m512i) -> __m512i {
        _mm512_or_si512(a, _mm512_slli_epi16::<SHIFT>(b))
    }
    #[inline(always)]
    unsafe fn levels(table: &[u8; 16], codes: __m512i) -> __m512i {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
        _mm512_shuffle_epi8(table, codes)
    }
    #[inline(always)]
    unsafe fn dot4(acc: __m512i, w: __m512i, x: *const i8) -> __m512i {
        _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x.cast::<i32>().read_unaligned()))
    }
    #[inline(always)]
    unsafe fn done(sum: __m512i) -> __m512i {
        /// A function of its own, because `zmm_reg` needs the instruction set enabled.
        #[inline]
        #[target_feature(enable = "avx512f")]
        fn named(mut sum: __m512i) -> __m512i {
            // SAFETY: the assembly has no instruction.
            unsafe { asm!("/* {} */", inout(zmm_reg) sum, options(nomem, nostack, preserves_flags)) };
            sum
        }
        named(sum)
    }
    #[inline(always)]
    unsafe fn enter(kernel: impl Kernel) {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        unsafe fn inside(kernel: impl Kernel) {
            kernel.run::<Avx512>();
        }
        inside(kernel);
    }
    #[inline(always)]
    unsafe fn fused(a: __m512, b: __m512, c: __m512) -> __m512 {
        Self::fma(a, b, c)
    }
    #[inline(always)]
    unsafe fn load_i16(p: *const i16) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn join(high: __m512i, low: __m512i) -> __m512i {
        _mm512_add_epi32(_mm512_slli_epi32::<8>(high), low)
    }
}
