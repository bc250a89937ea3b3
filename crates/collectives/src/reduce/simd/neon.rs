//! NEON, which every 64-bit Arm processor has. Conversions of f16 are in assembly: their intrinsics
//! are not stable.
#![allow(unsafe_op_in_unsafe_fn, reason = "each method is one operation under the trait's contract")]

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Simd, SumFn, sum_with};

/// The loops that this processor can run.
pub(super) fn available() -> impl Iterator<Item = (&'static str, SumFn)> {
    std::iter::once(("NEON", sum_with::<Neon> as SumFn))
}

struct Neon;

// SAFETY: each method consists of the instructions that do what it says.
unsafe impl Simd for Neon {
    type Vector = float32x4_t;
    const BYTES: usize = 16;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> float32x4_t {
        vreinterpretq_f32_u8(vld1q_u8(from))
    }
    #[inline(always)]
    unsafe fn store(vector: float32x4_t, to: *mut u8) {
        vst1q_u8(to, vreinterpretq_u8_f32(vector));
    }
    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vaddq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn lower(pairs: float32x4_t) -> float32x4_t {
        vreinterpretq_f32_u32(vshlq_n_u32::<16>(vreinterpretq_u32_f32(pairs)))
    }
    #[inline(always)]
    unsafe fn upper(pairs: float32x4_t) -> float32x4_t {
        vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pairs), vdupq_n_u32(0xffff_0000)))
    }
    #[inline(always)]
    unsafe fn pack(lower: float32x4_t, upper: float32x4_t) -> float32x4_t {
        vreinterpretq_f32_u32(vsriq_n_u32::<16>(Self::round(upper), Self::round(lower)))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> float32x4_t {
        let wide: float32x4_t;
        asm!("fcvtl {wide:v}.4s, {narrow:v}.4h", wide = out(vreg) wide, narrow = in(vreg) vld1_u8(from),
            options(pure, nomem, nostack, preserves_flags));
        wide
    }
    #[inline(always)]
    unsafe fn store_f16(vector: float32x4_t, to: *mut u8) {
        let narrow: uint8x8_t;
        asm!("fcvtn {narrow:v}.4h, {wide:v}.4s", narrow = out(vreg) narrow, wide = in(vreg) vector,
            options(pure, nomem, nostack, preserves_flags));
        vst1_u8(to, narrow);
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags));
    }
}

impl Neon {
    /// Rounds to `bf16` in the high 16 bits; the low 16 bits are undefined.
    #[inline(always)]
    unsafe fn round(vector: float32x4_t) -> uint32x4_t {
        let bits = vreinterpretq_u32_f32(vector);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        // Adding 0x7fff rounds up above the middle, and the lowest remaining bit breaks ties to
        // even.
        let rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
        // A NaN gets a bit that survives the cut to 16 bits, so that it does not become infinity.
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x40_0000));
        vbslq_u32(vceqq_f32(vector, vector), rounded, quiet)
    }
}
