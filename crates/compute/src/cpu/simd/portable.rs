//! Plain Rust on arrays, for every CPU. The compiler vectorises what it can.
#![allow(unsafe_op_in_unsafe_fn, reason = "each method is one operation under the trait's contract")]

use half::{bf16, f16};

use super::{Kernel, LANES, Simd};

/// The instruction set that every CPU has.
#[derive(Debug, Clone, Copy)]
pub struct Portable;

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

// SAFETY: each method computes what the trait says; only the pointers need the trait's conditions.
unsafe impl Simd for Portable {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type B = [u8; 4 * LANES];

    // Fewer forms of the code, and byte operations that are not inlined: this fallback was 60 % of
    // the crate's code when it was unrolled into every kernel.
    const HAS_2_AND_3_ROWS: bool = false;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        p.cast::<Self::F>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::F) {
        p.cast::<Self::F>().write_unaligned(v)
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::F {
        let bits = p.cast::<[u16; LANES]>().read_unaligned();
        bits.map(|b| f16::from_bits(b).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: Self::F) {
        p.cast::<[u16; LANES]>().write_unaligned(v.map(|x| f16::from_f32(x).to_bits()))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::F {
        let bits = p.cast::<[u16; LANES]>().read_unaligned();
        bits.map(|b| bf16::from_bits(b).to_f32())
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self::F {
        p.cast::<[i8; LANES]>().read_unaligned().map(f32::from)
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn abs(a: Self::F) -> Self::F {
        a.map(f32::abs)
    }
    // Not `mul_add`: without an instruction for it, `mul_add` is a slow call into the C library.
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn round(a: Self::F) -> Self::F {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn scale2(a: Self::F, n: Self::F) -> Self::F {
        zip(a, n, |a, n| a * f32::from_bits(((n.min(128.0) as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn reduce_add(a: Self::F) -> f32 {
        a.iter().sum()
    }
    #[inline(always)]
    unsafe fn reduce_max(a: Self::F) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: Self::F) {
        p.cast::<[i8; LANES]>().write_unaligned(v.map(|x| x.round_ties_even() as i8))
    }
    #[inline(always)]
    unsafe fn zero_i() -> Self::I {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn to_f(a: Self::I) -> Self::F {
        a.map(|x| x as f32)
    }
    #[inline(always)]
    unsafe fn load_b(p: *const u8) -> Self::B {
        p.cast::<Self::B>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_near(_: *const u8) {}
    #[inline(never)]
    unsafe fn bits<const SHIFT: u32, const BITS: u32>(a: Self::B) -> Self::B {
        a.map(|b| (b >> SHIFT) & ((1u32 << BITS) - 1) as u8)
    }
    #[inline(never)]
    unsafe fn or_shl<const SHIFT: u32>(a: Self::B, b: Self::B) -> Self::B {
        std::array::from_fn(|i| a[i] | (b[i] << SHIFT))
    }
    #[inline(never)]
    unsafe fn levels(table: &[u8; 16], codes: Self::B) -> Self::B {
        codes.map(|code| table[usize::from(code)])
    }
    #[inline(never)]
    unsafe fn dot4(acc: Self::I, w: Self::B, x: *const i8) -> Self::I {
        let x = x.cast::<[i8; 4]>().read_unaligned().map(i32::from);
        std::array::from_fn(|lane| {
            let w: [i32; 4] = std::array::from_fn(|j| i32::from(w[4 * lane + j]));
            acc[lane] + w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3]
        })
    }
    #[inline(never)]
    unsafe fn enter(kernel: impl Kernel) {
        kernel.run::<Self>();
    }
    #[inline(always)]
    unsafe fn load_i16(p: *const i16) -> Self::F {
        p.cast::<[i16; LANES]>().read_unaligned().map(f32::from)
    }
    #[inline(always)]
    unsafe fn join(high: Self::I, low: Self::I) -> Self::I {
        std::array::from_fn(|i| (high[i] << 8) + low[i])
    }
    #[inline(always)]
    unsafe fn fused(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
}
