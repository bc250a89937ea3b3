//! The vector operations that kernels are written in, once for all instruction sets.
//!
//! A kernel is a generic `#[inline(always)]` function over [`Simd`]. `entry!` in `dispatch.rs` and
//! [`Simd::enter`] instantiate it inside a `#[target_feature]` function per instruction set, where
//! the operations below inline to single instructions. A vector has 16 lanes of 32 bits: one
//! AVX-512 register, two of AVX2, four of NEON.
#![allow(unsafe_op_in_unsafe_fn, reason = "exp is under the trait's contract")]
#![allow(
    missing_docs,
    clippy::missing_safety_doc,
    reason = "the names say what the operations do; the trait's contract covers their safety"
)]

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod portable;
pub(crate) mod widest;

/// Lanes of 32 bits in a vector.
pub const LANES: usize = 16;

/// A computation that is compiled for each instruction set. Implementations are
/// `#[inline(always)]`.
pub trait Kernel {
    /// # Safety
    /// The CPU has `S`, and the kernel's own conditions hold.
    unsafe fn run<S: Simd>(self);
}

/// An instruction set with vectors of 16 floats, 16 integers, and 64 bytes.
///
/// # Safety
/// Every method requires that the CPU has the implementation's instructions, and that pointers are
/// valid for the 16 (or 64) elements that it reads or writes; no alignment is required.
pub unsafe trait Simd: Copy + Send + Sync + 'static {
    /// 16 × f32.
    type F: Copy;
    /// 16 × i32.
    type I: Copy;
    /// 64 × u8.
    type B: Copy;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(p: *mut f32, v: Self::F);
    unsafe fn load_f16(p: *const u16) -> Self::F;
    unsafe fn store_f16(p: *mut u16, v: Self::F);
    unsafe fn load_bf16(p: *const u16) -> Self::F;
    unsafe fn load_i8(p: *const i8) -> Self::F;
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn abs(a: Self::F) -> Self::F;
    /// `a * b + c`, rounded once or twice.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// To the nearest integer, ties to even.
    unsafe fn round(a: Self::F) -> Self::F;
    /// `a * 2^n` for integral `n` from −126 on. Infinite for positive `a` if `n` exceeds 127.
    unsafe fn scale2(a: Self::F, n: Self::F) -> Self::F;
    /// The sum of the lanes, in a fixed order.
    unsafe fn reduce_add(a: Self::F) -> f32;
    unsafe fn reduce_max(a: Self::F) -> f32;
    /// Rounds to the nearest integers, which must fit, and stores them as 16 × i8.
    unsafe fn store_i8(p: *mut i8, v: Self::F);

    /// Rows that a product processes at a time: as many as have sums that fit in the registers.
    const REGISTER_ROWS: usize = 4;
    /// Whether 2 and 3 rows have special products; otherwise they are processed one by one.
    const HAS_2_AND_3_ROWS: bool = true;

    unsafe fn zero_i() -> Self::I;
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn to_f(a: Self::I) -> Self::F;

    unsafe fn load_b(p: *const u8) -> Self::B;
    /// Prefetches the cache line at `p`, which may be outside any allocation, from memory into the
    /// second-level cache. (The first-level cache can wait for fewer lines at a time than memory
    /// could deliver.)
    unsafe fn prefetch(p: *const u8);
    /// Prefetches a line from the second-level cache into the first.
    unsafe fn prefetch_near(p: *const u8);
    /// Bits `SHIFT..SHIFT + BITS` of each byte, moved to the bottom.
    unsafe fn bits<const SHIFT: u32, const BITS: u32>(a: Self::B) -> Self::B;
    /// `a | (b << SHIFT)`, byte by byte; the shifted bits must fit.
    unsafe fn or_shl<const SHIFT: u32>(a: Self::B, b: Self::B) -> Self::B;
    /// Levels of codes below 16.
    unsafe fn levels(table: &[u8; 16], codes: Self::B) -> Self::B;
    /// For each lane: adds the products of its 4 unsigned bytes of `w` with the 4 signed bytes at
    /// `x`. All lanes use the same 4 bytes of `x`.
    unsafe fn dot4(acc: Self::I, w: Self::B, x: *const i8) -> Self::I;

    /// Returns `sum` unchanged, but forces the compiler to finish it before later loads and stores.
    /// Otherwise compilers delay the arithmetic to the next use of its result, and load its
    /// operands into registers.
    #[inline(always)]
    unsafe fn done(sum: Self::I) -> Self::I {
        sum
    }

    /// 16 integers of 16 bits.
    unsafe fn load_i16(p: *const i16) -> Self::F;
    /// `256 * high + low`, which must fit.
    unsafe fn join(high: Self::I, low: Self::I) -> Self::I;
    /// `a * b + c`, rounded once on every instruction set.
    unsafe fn fused(a: Self::F, b: Self::F, c: Self::F) -> Self::F;

    /// Runs a kernel in a function of its own with these instructions. Separate functions, because
    /// compile time grows faster than a function's size.
    unsafe fn enter(kernel: impl Kernel);

    /// `e^a`; relative error below 3e-7 where the result is a normal number, 0 below about −87.
    #[inline(always)]
    unsafe fn exp(a: Self::F) -> Self::F {
        // Cody-Waite reduction to |r| <= ln2/2, then the Taylor polynomial of degree 6 (error of
        // its tail: 1.2e-7).
        let clamped = Self::max(a, Self::splat(-87.3));
        let n = Self::round(Self::mul(clamped, Self::splat(std::f32::consts::LOG2_E)));
        let r = Self::fma(n, Self::splat(-0.693_359_4), clamped);
        let r = Self::fma(n, Self::splat(2.121_944_4e-4), r);
        let mut p = Self::splat(1.0 / 720.0);
        for c in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = Self::fma(p, r, Self::splat(c));
        }
        Self::scale2(p, n)
    }
}
