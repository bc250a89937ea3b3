//! The reduction loops that the compiler vectorises, for every element type and operation.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::{DType, Op};

/// Elements per accumulator block: 2 KiB of f32, which stay in the first-level cache.
pub(super) const ACC_BLOCK: usize = 512;
/// The same for two sources that need no conversion: few enough for registers.
const PAIR_BLOCK: usize = 32;

/// Reduces a range of elements with loops that the compiler vectorises.
///
/// # Safety
/// As for `reduce`, for elements up to the range's end.
pub(super) unsafe fn reduce_autovectorized(
    dtype: DType,
    op: Op,
    out: *mut u8,
    sources: &[*const u8],
    range: Range<usize>,
) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2; the pointers are as promised by the caller.
        unsafe { reduce_avx2(dtype, op, out, sources, range) };
        return;
    }
    // SAFETY: as promised by the caller.
    unsafe { reduce_portable(dtype, op, out, sources, range) }
}

/// The same loops, compiled for AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn reduce_avx2(dtype: DType, op: Op, out: *mut u8, sources: &[*const u8], range: Range<usize>) {
    // SAFETY: as promised by the caller.
    unsafe { reduce_portable(dtype, op, out, sources, range) }
}

#[inline(always)]
unsafe fn reduce_portable(dtype: DType, op: Op, out: *mut u8, sources: &[*const u8], range: Range<usize>) {
    macro_rules! dispatch {
        ($($name:ident => $type:ty),*) => {
            match dtype {
                $(DType::$name => {
                    // SAFETY: as promised by the caller.
                    unsafe {
                        match op {
                            Op::Sum => reduce_blocks::<$type, Sum>(out, sources, range),
                            Op::Prod => reduce_blocks::<$type, Prod>(out, sources, range),
                            Op::Max => reduce_blocks::<$type, Max>(out, sources, range),
                            Op::Min => reduce_blocks::<$type, Min>(out, sources, range),
                        }
                    }
                })*
            }
        };
    }
    dispatch!(F32 => f32, F64 => f64, F16 => f16, BF16 => bf16, I8 => i8, I16 => i16, I32 => i32, I64 => i64,
        U8 => u8, U16 => u16, U32 => u32, U64 => u64, Bool => BoolByte)
}

/// How an element is read from the wire, accumulated and written back.
pub(super) trait ReduceType: Copy {
    /// The type of the accumulator.
    type Acc: Copy + Default;
    /// Reads `acc.len()` elements.
    unsafe fn load(from: *const u8, acc: &mut [Self::Acc]);
    /// Writes `acc.len()` elements.
    unsafe fn store(acc: &[Self::Acc], to: *mut u8);
    const SIZE: usize = size_of::<Self>();
    /// True if a value is read and written unchanged. The compiler vectorises conversions only in
    /// long loops.
    const PLAIN_COPY: bool = false;
}

/// One of the four operations, on an accumulator type.
trait Combine<A> {
    fn combine(a: A, b: A) -> A;
}

#[inline(always)]
unsafe fn reduce_blocks<L: ReduceType, C: Combine<L::Acc>>(
    out: *mut u8,
    sources: &[*const u8],
    range: Range<usize>,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        match *sources {
            // Two sources are the most common case. A loop over a known number of sources keeps the
            // results in registers.
            [a, b] if L::PLAIN_COPY => reduce_blocks_of::<L, C, PAIR_BLOCK>(out, &[a, b], range),
            _ => reduce_blocks_of::<L, C, ACC_BLOCK>(out, sources, range),
        }
    }
}

#[inline(always)]
unsafe fn reduce_blocks_of<L: ReduceType, C: Combine<L::Acc>, const N: usize>(
    out: *mut u8,
    sources: &[*const u8],
    range: Range<usize>,
) {
    let whole = range.end - range.len() % N;
    for start in (range.start..whole).step_by(N) {
        // SAFETY: within the range, for which the caller vouches.
        unsafe { reduce_block::<L, C, N>(out, sources, start, N) };
    }
    if whole < range.end {
        // SAFETY: as above, for the rest.
        unsafe { reduce_block::<L, C, N>(out, sources, whole, range.end - whole) };
    }
}

/// Reduces `n <= N` elements from `start` on.
#[inline(always)]
unsafe fn reduce_block<L: ReduceType, C: Combine<L::Acc>, const N: usize>(
    out: *mut u8,
    sources: &[*const u8],
    start: usize,
    n: usize,
) {
    let at = start * L::SIZE;
    let (mut sum, mut next) = ([L::Acc::default(); N], [L::Acc::default(); N]);
    let (sum, next) = (&mut sum[..n], &mut next[..n]);
    for (index, source) in sources.iter().enumerate() {
        // SAFETY: the caller vouches for `start + n` elements of every source.
        unsafe { L::load(source.add(at), if index == 0 { &mut *sum } else { &mut *next }) };
        if index > 0 {
            for (a, b) in sum.iter_mut().zip(next.iter()) {
                *a = C::combine(*a, *b);
            }
        }
    }
    // SAFETY: as above, for `out`.
    unsafe { L::store(sum, out.add(at)) };
}

struct Sum;
struct Prod;
struct Max;
struct Min;

macro_rules! native_type {
    ($($type:ty),*) => {$(
        impl ReduceType for $type {
            type Acc = $type;
            const PLAIN_COPY: bool = true;
            #[inline(always)]
            unsafe fn load(from: *const u8, acc: &mut [$type]) {
                // SAFETY: the caller vouches for `acc.len()` elements at `from`; bytes need no
                // alignment.
                unsafe { std::ptr::copy_nonoverlapping(from, acc.as_mut_ptr().cast(), size_of_val(acc)) };
            }
            #[inline(always)]
            unsafe fn store(acc: &[$type], to: *mut u8) {
                // SAFETY: the caller vouches for `acc.len()` elements at `to`.
                unsafe { std::ptr::copy_nonoverlapping(acc.as_ptr().cast(), to, size_of_val(acc)) };
            }
        }
    )*};
}
native_type!(f32, f64, i8, i16, i32, i64, u8, u16, u32, u64);

macro_rules! float_ops {
    ($($type:ty),*) => {$(
        impl Combine<$type> for Sum {
            #[inline(always)]
            fn combine(a: $type, b: $type) -> $type { a + b }
        }
        impl Combine<$type> for Prod {
            #[inline(always)]
            fn combine(a: $type, b: $type) -> $type { a * b }
        }
        impl Combine<$type> for Max {
            #[inline(always)]
            fn combine(a: $type, b: $type) -> $type { a.max(b) }
        }
        impl Combine<$type> for Min {
            #[inline(always)]
            fn combine(a: $type, b: $type) -> $type { a.min(b) }
        }
    )*};
}
float_ops!(f32, f64);

macro_rules! integer_ops {
    ($($type:ty),*) => {$(
        impl Combine<$type> for Sum {
            #[inline(always)]
            fn combine(a: $type, b: $type) -> $type { a.wrapping_add(b) }
        }
        impl Combine<$type> for Prod {
            #[inline(always)]
            fn combine(a: $type, b: $type) -> $type { a.wrapping_mul(b) }
        }
        impl Combine<$type> for Max {
            #[inline(always)]
            fn combine(a: $type, b: $type) -> $type { a.max(b) }
        }
        impl Combine<$type> for Min {
            #[inline(always)]
            fn combine(a: $type, b: $type) -> $type { a.min(b) }
        }
    )*};
}
integer_ops!(i8, i16, i32, i64, u8, u16, u32, u64);

/// A boolean on the wire: any byte but 0 is true, and only 0 and 1 are written.
#[derive(Clone, Copy)]
struct BoolByte(#[allow(dead_code)] u8);

impl ReduceType for BoolByte {
    type Acc = bool;
    #[inline(always)]
    unsafe fn load(from: *const u8, acc: &mut [bool]) {
        for (index, value) in acc.iter_mut().enumerate() {
            // SAFETY: the caller vouches for `acc.len()` bytes at `from`.
            *value = unsafe { *from.add(index) } != 0;
        }
    }
    #[inline(always)]
    unsafe fn store(acc: &[bool], to: *mut u8) {
        for (index, value) in acc.iter().enumerate() {
            // SAFETY: the caller vouches for `acc.len()` bytes at `to`.
            unsafe { *to.add(index) = u8::from(*value) };
        }
    }
}

macro_rules! bool_ops {
    ($($op:ty => $operator:tt),*) => {$(
        impl Combine<bool> for $op {
            #[inline(always)]
            fn combine(a: bool, b: bool) -> bool { a $operator b }
        }
    )*};
}
bool_ops!(Sum => |, Prod => &, Max => |, Min => &);

impl ReduceType for bf16 {
    type Acc = f32;
    #[inline(always)]
    unsafe fn load(from: *const u8, acc: &mut [f32]) {
        let from = from.cast::<u16>();
        for (index, value) in acc.iter_mut().enumerate() {
            // SAFETY: the caller vouches for `acc.len()` elements at `from`.
            let bits = unsafe { from.add(index).read_unaligned() };
            *value = f32::from_bits(u32::from(bits) << 16);
        }
    }
    #[inline(always)]
    unsafe fn store(acc: &[f32], to: *mut u8) {
        let to = to.cast::<u16>();
        for (index, value) in acc.iter().enumerate() {
            // SAFETY: the caller vouches for `acc.len()` elements at `to`.
            unsafe { to.add(index).write_unaligned(bf16_bits(*value)) };
        }
    }
}

/// Rounds to nearest even, without a branch so that the loop is vectorised. A NaN stays a NaN.
#[inline(always)]
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if value.is_nan() { quiet } else { rounded }) as u16
}

impl ReduceType for f16 {
    type Acc = f32;
    #[inline(always)]
    unsafe fn load(from: *const u8, acc: &mut [f32]) {
        let mut block = [f16::ZERO; ACC_BLOCK];
        let block = &mut block[..acc.len()];
        // SAFETY: the caller vouches for `acc.len()` elements at `from`.
        unsafe { std::ptr::copy_nonoverlapping(from, block.as_mut_ptr().cast(), size_of_val(block)) };
        block.convert_to_f32_slice(acc);
    }
    #[inline(always)]
    unsafe fn store(acc: &[f32], to: *mut u8) {
        let mut block = [f16::ZERO; ACC_BLOCK];
        let block = &mut block[..acc.len()];
        block.convert_from_f32_slice(acc);
        // SAFETY: the caller vouches for `acc.len()` elements at `to`.
        unsafe { std::ptr::copy_nonoverlapping(block.as_ptr().cast(), to, size_of_val(block)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        for step in 0..200_000u32 {
            let value = f32::from_bits(step.wrapping_mul(21_474_913));
            let ours = bf16::from_bits(bf16_bits(value));
            let theirs = bf16::from_f32(value);
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{value}");
        }
    }
}
