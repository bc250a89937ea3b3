//! AVX2 with FMA and F16C: Intel since Haswell, AMD since Zen; and with AVX-VNNI: Intel since Alder
//! Lake, AMD since Zen 5.
#![allow(unsafe_op_in_unsafe_fn, reason = "each method is one operation under the trait's contract")]

use std::arch::x86_64::*;

use super::{Kernel, Simd};

/// The instruction set. Needs avx2, fma and f16c; `VNNI` also needs avxvnni, for byte dot products.
#[derive(Debug, Clone, Copy)]
pub struct Avx2<const VNNI: bool>;

impl<const VNNI: bool> Avx2<VNNI> {
    /// True if this CPU has the instructions.
    pub fn detected() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!VNNI || is_x86_feature_detected!("avxvnni"))
    }
}

/// 16 lanes.
type F = [__m256; 2];
type I = [__m256i; 2];
/// 64 bytes.
type B = [__m256i; 2];

// SAFETY: each method is the instructions of that meaning; the trait's conditions are the
// instructions' conditions. No closures: a closure lacks the instruction set of the function around
// it.
unsafe impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type F = F;
    type I = I;
    type B = B;

    #[inline(always)]
    unsafe fn splat(x: f32) -> F {
        [_mm256_set1_ps(x); 2]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> F {
        [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))]
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: F) {
        _mm256_storeu_ps(p, v[0]);
        _mm256_storeu_ps(p.add(8), v[1]);
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> F {
        [_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))]
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: F) {
        _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0]));
        _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]));
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> F {
        [eight_bf16(p), eight_bf16(p.add(8))]
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> F {
        [eight_i8(p), eight_i8(p.add(8))]
    }
    #[inline(always)]
    unsafe fn add(a: F, b: F) -> F {
        [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn sub(a: F, b: F) -> F {
        [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn mul(a: F, b: F) -> F {
        [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn div(a: F, b: F) -> F {
        [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn max(a: F, b: F) -> F {
        [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn abs(a: F) -> F {
        let sign = _mm256_set1_ps(-0.0);
        [_mm256_andnot_ps(sign, a[0]), _mm256_andnot_ps(sign, a[1])]
    }
    #[inline(always)]
    unsafe fn fma(a: F, b: F, c: F) -> F {
        [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
    }
    #[inline(always)]
    unsafe fn round(a: F) -> F {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        [_mm256_round_ps::<NEAREST>(a[0]), _mm256_round_ps::<NEAREST>(a[1])]
    }
    #[inline(always)]
    unsafe fn scale2(a: F, n: F) -> F {
        [_mm256_mul_ps(a[0], power_of_2(n[0])), _mm256_mul_ps(a[1], power_of_2(n[1]))]
    }
    #[inline(always)]
    unsafe fn reduce_add(a: F) -> f32 {
        let eight = _mm256_add_ps(a[0], a[1]);
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
    #[inline(always)]
    unsafe fn reduce_max(a: F) -> f32 {
        let eight = _mm256_max_ps(a[0], a[1]);
        let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: F) {
        let words = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
        // Packing works within 128-bit lanes, so the two middle 64-bit parts must swap.
        let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
        let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
        _mm_storeu_si128(p.cast(), bytes);
    }
    #[inline(always)]
    unsafe fn zero_i() -> I {
        [_mm256_setzero_si256(); 2]
    }
    #[inline(always)]
    unsafe fn add_i(a: I, b: I) -> I {
        [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn to_f(a: I) -> F {
        [_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])]
    }
    #[inline(always)]
    unsafe fn load_b(p: *const u8) -> B {
        [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())]
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
    unsafe fn bits<const SHIFT: u32, const BITS: u32>(a: B) -> B {
        [bits::<SHIFT, BITS>(a[0]), bits::<SHIFT, BITS>(a[1])]
    }
    #[inline(always)]
    unsafe fn or_shl<const SHIFT: u32>(a: B, b: B) -> B {
        let shift = _mm_cvtsi32_si128(SHIFT as i32);
        [
            _mm256_or_si256(a[0], _mm256_sll_epi16(b[0], shift)),
            _mm256_or_si256(a[1], _mm256_sll_epi16(b[1], shift)),
        ]
    }
    #[inline(always)]
    unsafe fn levels(table: &[u8; 16], codes: B) -> B {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
        [_mm256_shuffle_epi8(table, codes[0]), _mm256_shuffle_epi8(table, codes[1])]
    }
    #[inline(always)]
    unsafe fn dot4(acc: I, w: B, x: *const i8) -> I {
        let x = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
        if VNNI {
            return [_mm256_dpbusd_avx_epi32(acc[0], w[0], x), _mm256_dpbusd_avx_epi32(acc[1], w[1], x)];
        }
        // `maddubs` saturates, so the even and the odd bytes are multiplied as 16-bit words.
        let (even, odd) = (_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)), _mm256_srai_epi16::<8>(x));
        [dot(acc[0], w[0], even, odd), dot(acc[1], w[1], even, odd)]
    }
    #[inline(always)]
    unsafe fn enter(kernel: impl Kernel) {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn plain(kernel: impl Kernel) {
            kernel.run::<Avx2<false>>();
        }
        #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
        unsafe fn with_vnni(kernel: impl Kernel) {
            kernel.run::<Avx2<true>>();
        }
        if VNNI { with_vnni(kernel) } else { plain(kernel) }
    }
    #[inline(always)]
    unsafe fn fused(a: F, b: F, c: F) -> F {
        Self::fma(a, b, c)
    }
    #[inline(always)]
    unsafe fn load_i16(p: *const i16) -> F {
        [eight_i16(p), eight_i16(p.add(8))]
    }
    #[inline(always)]
    unsafe fn join(high: I, low: I) -> I {
        [
            _mm256_add_epi32(_mm256_slli_epi32::<8>(high[0]), low[0]),
            _mm256_add_epi32(_mm256_slli_epi32::<8>(high[1]), low[1]),
        ]
    }
}

#[inline(always)]
unsafe fn eight_bf16(p: *const u16) -> __m256 {
    let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
}

#[inline(always)]
unsafe fn eight_i8(p: *const i8) -> __m256 {
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())))
}

#[inline(always)]
unsafe fn eight_i16(p: *const i16) -> __m256 {
    _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128(p.cast())))
}

#[inline(always)]
unsafe fn power_of_2(n: __m256) -> __m256 {
    let n = _mm256_min_ps(n, _mm256_set1_ps(128.0));
    let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
}

#[inline(always)]
unsafe fn bits<const SHIFT: u32, const BITS: u32>(a: __m256i) -> __m256i {
    let shifted = if SHIFT == 0 { a } else { _mm256_srl_epi16(a, _mm_cvtsi32_si128(SHIFT as i32)) };
    _mm256_and_si256(shifted, _mm256_set1_epi8(((1u32 << BITS) - 1) as i8))
}

#[inline(always)]
unsafe fn dot(acc: __m256i, w: __m256i, even: __m256i, odd: __m256i) -> __m256i {
    let low = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0xff)), even);
    let high = _mm256_madd_epi16(_mm256_srli_epi16::<8>(w), odd);
    _mm256_add_epi32(acc, _mm256_add_epi32(low, high))
}
