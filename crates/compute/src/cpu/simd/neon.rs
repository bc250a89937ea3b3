//! NEON with byte dot products: Apple's chips (i8mm since the M2), Arm's cores since Neoverse N1
//! and Cortex-A76.
//!
//! Dot products and f16 conversions are in assembly, because their intrinsics are not stable; the
//! rest uses intrinsics.
#![allow(unsafe_op_in_unsafe_fn, reason = "each method is one operation under the trait's contract")]

use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

use super::{Kernel, Simd};

/// The instruction set. Needs dotprod; `MIXED` also needs i8mm, to multiply unsigned with signed
/// bytes.
#[derive(Debug, Clone, Copy)]
pub struct Neon<const MIXED: bool>;

impl<const MIXED: bool> Neon<MIXED> {
    /// True if this CPU has the instructions.
    pub fn detected() -> bool {
        std::arch::is_aarch64_feature_detected!("dotprod")
            && (!MIXED || std::arch::is_aarch64_feature_detected!("i8mm"))
    }
}

/// 16 lanes.
type F = [float32x4_t; 4];
type I = [int32x4_t; 4];
/// 64 bytes.
type B = [uint8x16_t; 4];

// SAFETY: each method is the instructions of that meaning; the trait's conditions are the
// instructions' conditions. Every aarch64 target has NEON, so closures have it too.
unsafe impl<const MIXED: bool> Simd for Neon<MIXED> {
    type F = F;
    type I = I;
    type B = B;

    #[inline(always)]
    unsafe fn splat(x: f32) -> F {
        [vdupq_n_f32(x); 4]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> F {
        from_fn(|i| vld1q_f32(p.add(4 * i)))
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: F) {
        (0..4).for_each(|i| vst1q_f32(p.add(4 * i), v[i]));
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> F {
        from_fn(|i| {
            let wide: float32x4_t;
            asm!("fcvtl {wide:v}.4s, {half:v}.4h", wide = out(vreg) wide, half = in(vreg) vld1_u16(p.add(4 * i)),
                options(pure, nomem, nostack, preserves_flags));
            wide
        })
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: F) {
        for (i, wide) in v.into_iter().enumerate() {
            let half: uint16x4_t;
            asm!("fcvtn {half:v}.4h, {wide:v}.4s", half = out(vreg) half, wide = in(vreg) wide,
                options(pure, nomem, nostack, preserves_flags));
            vst1_u16(p.add(4 * i), half);
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> F {
        from_fn(|i| vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.add(4 * i)))))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> F {
        let bytes = vld1q_s8(p);
        let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes)));
        [vget_low_s16(low), vget_high_s16(low), vget_low_s16(high), vget_high_s16(high)]
            .map(|x| vcvtq_f32_s32(vmovl_s16(x)))
    }
    #[inline(always)]
    unsafe fn add(a: F, b: F) -> F {
        from_fn(|i| vaddq_f32(a[i], b[i]))
    }
    #[inline(always)]
    unsafe fn sub(a: F, b: F) -> F {
        from_fn(|i| vsubq_f32(a[i], b[i]))
    }
    #[inline(always)]
    unsafe fn mul(a: F, b: F) -> F {
        from_fn(|i| vmulq_f32(a[i], b[i]))
    }
    #[inline(always)]
    unsafe fn div(a: F, b: F) -> F {
        from_fn(|i| vdivq_f32(a[i], b[i]))
    }
    #[inline(always)]
    unsafe fn max(a: F, b: F) -> F {
        from_fn(|i| vmaxq_f32(a[i], b[i]))
    }
    #[inline(always)]
    unsafe fn abs(a: F) -> F {
        a.map(|a| vabsq_f32(a))
    }
    #[inline(always)]
    unsafe fn fma(a: F, b: F, c: F) -> F {
        from_fn(|i| vfmaq_f32(c[i], a[i], b[i]))
    }
    #[inline(always)]
    unsafe fn round(a: F) -> F {
        a.map(|a| vrndnq_f32(a))
    }
    #[inline(always)]
    unsafe fn scale2(a: F, n: F) -> F {
        from_fn(|i| {
            let n = vminq_s32(vcvtq_s32_f32(n[i]), vdupq_n_s32(128));
            let exponent = vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127)));
            vmulq_f32(a[i], vreinterpretq_f32_s32(exponent))
        })
    }
    #[inline(always)]
    unsafe fn reduce_add(a: F) -> f32 {
        vaddvq_f32(vaddq_f32(vaddq_f32(a[0], a[1]), vaddq_f32(a[2], a[3])))
    }
    #[inline(always)]
    unsafe fn reduce_max(a: F) -> f32 {
        vmaxvq_f32(vmaxq_f32(vmaxq_f32(a[0], a[1]), vmaxq_f32(a[2], a[3])))
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: F) {
        let words: [int16x4_t; 4] = v.map(|v| vmovn_s32(vcvtnq_s32_f32(v)));
        vst1_s8(p, vmovn_s16(vcombine_s16(words[0], words[1])));
        vst1_s8(p.add(8), vmovn_s16(vcombine_s16(words[2], words[3])));
    }
    #[inline(always)]
    unsafe fn zero_i() -> I {
        [vdupq_n_s32(0); 4]
    }
    #[inline(always)]
    unsafe fn add_i(a: I, b: I) -> I {
        std::array::from_fn(|i| vaddq_s32(a[i], b[i]))
    }
    #[inline(always)]
    unsafe fn to_f(a: I) -> F {
        a.map(|a| vcvtq_f32_s32(a))
    }
    #[inline(always)]
    unsafe fn load_b(p: *const u8) -> B {
        from_fn(|i| vld1q_u8(p.add(16 * i)))
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        asm!("prfm pldl2keep, [{p}]", p = in(reg) p, options(readonly, nostack, preserves_flags));
    }
    #[inline(always)]
    unsafe fn prefetch_near(p: *const u8) {
        asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(readonly, nostack, preserves_flags));
    }
    #[inline(always)]
    unsafe fn bits<const SHIFT: u32, const BITS: u32>(a: B) -> B {
        // Shifts left by a negative number, because the immediate right shift cannot be by 0.
        a.map(|a| vandq_u8(vshlq_u8(a, vdupq_n_s8(-(SHIFT as i8))), vdupq_n_u8(((1u32 << BITS) - 1) as u8)))
    }
    #[inline(always)]
    unsafe fn or_shl<const SHIFT: u32>(a: B, b: B) -> B {
        from_fn(|i| vorrq_u8(a[i], vshlq_u8(b[i], vdupq_n_s8(SHIFT as i8))))
    }
    #[inline(always)]
    unsafe fn levels(table: &[u8; 16], codes: B) -> B {
        let table = vld1q_u8(table.as_ptr());
        codes.map(|codes| vqtbl1q_u8(table, codes))
    }
    #[inline(always)]
    unsafe fn dot4(mut acc: I, w: B, x: *const i8) -> I {
        let x = vreinterpretq_s8_s32(vdupq_n_s32(x.cast::<i32>().read_unaligned()));
        if MIXED {
            for (acc, w) in acc.iter_mut().zip(w) {
                asm!("usdot {acc:v}.4s, {w:v}.16b, {x:v}.16b", acc = inout(vreg) *acc, w = in(vreg) w, x = in(vreg) x,
                    options(pure, nomem, nostack, preserves_flags));
            }
            return acc;
        }
        // Both operands of `sdot` are signed, so 128 is subtracted from the weights, and its
        // products are added back.
        let mut less = vdupq_n_s32(0);
        sdot(&mut less, vdupq_n_s8(-128), x);
        for (acc, w) in acc.iter_mut().zip(w) {
            sdot(acc, vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(128))), x);
            *acc = vsubq_s32(*acc, less);
        }
        acc
    }
    #[inline(always)]
    unsafe fn enter(kernel: impl Kernel) {
        #[target_feature(enable = "neon,dotprod")]
        unsafe fn plain(kernel: impl Kernel) {
            kernel.run::<Neon<false>>();
        }
        #[target_feature(enable = "neon,dotprod,i8mm")]
        unsafe fn mixed(kernel: impl Kernel) {
            kernel.run::<Neon<true>>();
        }
        if MIXED { mixed(kernel) } else { plain(kernel) }
    }
    #[inline(always)]
    unsafe fn fused(a: F, b: F, c: F) -> F {
        Self::fma(a, b, c)
    }
    #[inline(always)]
    unsafe fn load_i16(p: *const i16) -> F {
        from_fn(|i| vcvtq_f32_s32(vmovl_s16(vld1_s16(p.add(4 * i)))))
    }
    #[inline(always)]
    unsafe fn join(high: I, low: I) -> I {
        from_fn(|i| vaddq_s32(vshlq_n_s32::<8>(high[i]), low[i]))
    }
}

/// # Safety
/// The CPU has dot products.
#[inline(always)]
unsafe fn sdot(acc: &mut int32x4_t, a: int8x16_t, b: int8x16_t) {
    asm!("sdot {acc:v}.4s, {a:v}.16b, {b:v}.16b", acc = inout(vreg) *acc, a = in(vreg) a, b = in(vreg) b,
        options(pure, nomem, nostack, preserves_flags));
}
