//! Sums of floats that stay in vector registers from the first source to the result.

#[cfg(target_arch = "aarch64")]
#[path = "simd/neon.rs"]
mod native;
#[cfg(target_arch = "x86_64")]
#[path = "simd/x86.rs"]
mod native;

use crate::DType;

/// An instruction set with vectors of `f32`.
///
/// # Safety
/// Every method requires that the processor has the implementation's instructions, and that
/// pointers are valid for what is read or written; no alignment is required.
unsafe trait Simd {
    type Vector: Copy;
    /// Bytes per vector.
    const BYTES: usize;

    unsafe fn load(from: *const u8) -> Self::Vector;
    unsafe fn store(vector: Self::Vector, to: *mut u8);
    unsafe fn add(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The `bf16` in the low 16 bits of each 32, as `f32`. `pairs` holds two `bf16` in each 32
    /// bits, as they are in memory.
    unsafe fn lower(pairs: Self::Vector) -> Self::Vector;
    /// The `bf16` in the high 16 bits of each 32, as `f32`.
    unsafe fn upper(pairs: Self::Vector) -> Self::Vector;
    /// Rounds to nearest even and packs the pairs again; a NaN stays a NaN.
    unsafe fn pack(lower: Self::Vector, upper: Self::Vector) -> Self::Vector;
    /// Reads as many `f16` as a vector has `f32`: `BYTES / 2` bytes.
    unsafe fn load_f16(from: *const u8) -> Self::Vector;
    /// Rounds like `pack`.
    unsafe fn store_f16(vector: Self::Vector, to: *mut u8);
    /// Prefetches the cache line at an address, which need not be valid.
    unsafe fn prefetch(at: *const u8);
}

/// How the elements of a type are converted to four vectors and back.
trait VectorFormat<S: Simd> {
    /// Bytes of the elements in four vectors.
    const BYTES: usize;
    unsafe fn load(from: *const u8) -> [S::Vector; 4];
    unsafe fn store(sum: [S::Vector; 4], to: *mut u8);
}

struct F32;
struct BF16;
struct F16;

impl<S: Simd> VectorFormat<S> for F32 {
    const BYTES: usize = 4 * S::BYTES;
    #[inline(always)]
    unsafe fn load(from: *const u8) -> [S::Vector; 4] {
        // SAFETY: the caller vouches for `BYTES` and for the instructions.
        unsafe {
            [
                S::load(from),
                S::load(from.add(S::BYTES)),
                S::load(from.add(2 * S::BYTES)),
                S::load(from.add(3 * S::BYTES)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store([a, b, c, d]: [S::Vector; 4], to: *mut u8) {
        // SAFETY: as above.
        unsafe {
            S::store(a, to);
            S::store(b, to.add(S::BYTES));
            S::store(c, to.add(2 * S::BYTES));
            S::store(d, to.add(3 * S::BYTES));
        }
    }
}

/// Needs no move between lanes: a `bf16` is the high 16 bits of an `f32`, so one of a pair takes a
/// mask, the other a shift.
impl<S: Simd> VectorFormat<S> for BF16 {
    const BYTES: usize = 2 * S::BYTES;
    #[inline(always)]
    unsafe fn load(from: *const u8) -> [S::Vector; 4] {
        // SAFETY: the caller vouches for `BYTES` and for the instructions.
        unsafe {
            let (a, b) = (S::load(from), S::load(from.add(S::BYTES)));
            [S::lower(a), S::upper(a), S::lower(b), S::upper(b)]
        }
    }
    #[inline(always)]
    unsafe fn store([a, b, c, d]: [S::Vector; 4], to: *mut u8) {
        // SAFETY: as above.
        unsafe {
            S::store(S::pack(a, b), to);
            S::store(S::pack(c, d), to.add(S::BYTES));
        }
    }
}

impl<S: Simd> VectorFormat<S> for F16 {
    const BYTES: usize = 2 * S::BYTES;
    #[inline(always)]
    unsafe fn load(from: *const u8) -> [S::Vector; 4] {
        // SAFETY: the caller vouches for `BYTES` and for the instructions.
        unsafe {
            [
                S::load_f16(from),
                S::load_f16(from.add(S::BYTES / 2)),
                S::load_f16(from.add(S::BYTES)),
                S::load_f16(from.add(S::BYTES / 2 * 3)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store([a, b, c, d]: [S::Vector; 4], to: *mut u8) {
        // SAFETY: as above.
        unsafe {
            S::store_f16(a, to);
            S::store_f16(b, to.add(S::BYTES / 2));
            S::store_f16(c, to.add(S::BYTES));
            S::store_f16(d, to.add(S::BYTES / 2 * 3));
        }
    }
}

/// Adds as many bytes as fill whole vectors. Returns their number.
///
/// # Safety
/// As for `sum`, in bytes, and the processor must have the instructions of `S`.
#[inline(always)]
unsafe fn sum_with<S: Simd>(dtype: DType, out: *mut u8, sources: &[*const u8], bytes: usize) -> usize {
    // SAFETY: as promised by the caller.
    unsafe {
        match dtype {
            DType::F32 => sum_vectors::<S, F32>(out, sources, bytes),
            DType::BF16 => sum_vectors::<S, BF16>(out, sources, bytes),
            DType::F16 => sum_vectors::<S, F16>(out, sources, bytes),
            _ => 0,
        }
    }
}

/// # Safety
/// As for `sum_with`.
#[inline(always)]
unsafe fn sum_vectors<S: Simd, F: VectorFormat<S>>(
    out: *mut u8,
    sources: &[*const u8],
    bytes: usize,
) -> usize {
    let whole = bytes - bytes % F::BYTES;
    // SAFETY: as promised by the caller.
    unsafe {
        match *sources {
            // Two sources are the most common case, and need no inner loop.
            [a, b] => add_sources::<S, F>(out, &[a, b], whole),
            _ => add_sources::<S, F>(out, sources, whole),
        }
    }
    whole
}

/// Prefetch distance: a source may be in another core's cache, and hardware prefetchers stop at the
/// end of a page.
const AHEAD_BYTES: usize = 1 << 10;
const LINE_BYTES: usize = 64;

/// # Safety
/// As for `sum_with`, and `bytes` must fill vectors.
#[inline(always)]
unsafe fn add_sources<S: Simd, F: VectorFormat<S>>(out: *mut u8, sources: &[*const u8], bytes: usize) {
    let Some((first, others)) = sources.split_first() else { return };
    for at in (0..bytes).step_by(F::BYTES) {
        // SAFETY: within `bytes`, for which the caller vouches. Where `out` is a source, it is read
        // before it is written.
        unsafe {
            prefetch::<S, F>(first.wrapping_add(at + AHEAD_BYTES));
            let [mut a, mut b, mut c, mut d] = F::load(first.add(at));
            for source in others {
                prefetch::<S, F>(source.wrapping_add(at + AHEAD_BYTES));
                let [e, f, g, h] = F::load(source.add(at));
                (a, b, c, d) = (S::add(a, e), S::add(b, f), S::add(c, g), S::add(d, h));
            }
            F::store([a, b, c, d], out.add(at));
        }
    }
}

/// Prefetches the bytes that a format loads at once.
///
/// # Safety
/// The processor must have the instructions of `S`.
#[inline(always)]
unsafe fn prefetch<S: Simd, F: VectorFormat<S>>(at: *const u8) {
    for line in (0..F::BYTES).step_by(LINE_BYTES) {
        // SAFETY: as promised by the caller; any address may be prefetched.
        unsafe { S::prefetch(at.wrapping_add(line)) };
    }
}

/// `sum` for one instruction set, in bytes.
type SumFn = unsafe fn(dtype: DType, out: *mut u8, sources: &[*const u8], bytes: usize) -> usize;

/// Adds the first elements of all sources, in order. Returns how many: all but the last few for
/// types with vector loops on this processor, none for others.
///
/// # Safety
/// Every source and `out` must be valid for `count` elements of `dtype`. `out` may be one of the
/// sources, but must not otherwise overlap one.
pub(super) unsafe fn sum(dtype: DType, out: *mut u8, sources: &[*const u8], count: usize) -> usize {
    let Some((_, sum)) = native::available().next() else { return 0 };
    // SAFETY: the processor has the instructions; the rest is as promised by the caller.
    let bytes = unsafe { sum(dtype, out, sources, count * dtype.size()) };
    bytes / dtype.size()
}

/// Other architectures have no vector loops.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod native {
    pub fn available() -> impl Iterator<Item = (&'static str, super::SumFn)> {
        std::iter::empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Op;
    use crate::reduce::portable::reduce_autovectorized;

    /// The sums of the same sources by the autovectorised loops and by vector instructions.
    fn by_both(sum: SumFn, dtype: DType, sources: &[&[u8]]) -> [Vec<u8>; 2] {
        let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr()).collect();
        let count = sources[0].len() / dtype.size();
        let mut sums = [(); 2].map(|()| vec![0; count * dtype.size()]);
        let [theirs, ours] = sums.each_mut().map(|sum| sum.as_mut_ptr());
        // SAFETY: all hold `count` elements, and the processor has the instructions of what
        // `available` returns.
        unsafe {
            reduce_autovectorized(dtype, Op::Sum, theirs, &pointers, 0..count);
            let done = sum(dtype, ours, &pointers, count * dtype.size()) / dtype.size();
            assert!(done <= count && count - done < 64);
            reduce_autovectorized(dtype, Op::Sum, ours, &pointers, done..count);
        }
        sums
    }

    /// True when sums have the same bits or are both NaN. The compiler chooses which of two NaNs is
    /// kept.
    fn agree(dtype: DType, [theirs, ours]: &[Vec<u8>; 2]) -> bool {
        let agree = |infinity: u32, a: u32, b: u32| {
            let sign = infinity.next_power_of_two();
            a == b || (a & !sign > infinity && b & !sign > infinity)
        };
        if dtype == DType::F32 {
            let (theirs, ours) = (theirs.as_chunks().0.iter(), ours.as_chunks().0.iter());
            let mut both = theirs.zip(ours).map(|(a, b)| (u32::from_ne_bytes(*a), u32::from_ne_bytes(*b)));
            return both.all(|(a, b)| agree(f32::INFINITY.to_bits(), a, b));
        }
        let infinity = if dtype == DType::F16 { half::f16::INFINITY.to_bits() } else { 0x7f80 };
        let (theirs, ours) = (theirs.as_chunks().0.iter(), ours.as_chunks().0.iter());
        let both = theirs.zip(ours).map(|(a, b)| (u16::from_ne_bytes(*a), u16::from_ne_bytes(*b)));
        // Without a branch, as there are billions of them.
        both.fold(true, |all, (a, b)| all & agree(infinity.into(), a.into(), b.into()))
    }

    /// Pairs, each in one of its two orders: all with `./test --long` (half a minute), otherwise
    /// every ninth number with all others.
    #[test]
    fn all_pairs_of_16_bit_floats_have_the_autovectorised_sum() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
        for (name, sum) in native::available() {
            for dtype in [DType::BF16, DType::F16] {
                for one in (0..=u16::MAX).step_by(if thunder_testing::is_long() { 1 } else { 9 }) {
                    let others = &all[usize::from(one) * 2..];
                    let sums = by_both(sum, dtype, &[&one.to_ne_bytes().repeat(others.len() / 2), others]);
                    assert!(agree(dtype, &sums), "{one:#x} and others, {dtype:?} by {name}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_bits_of_any_number_of_sources_have_the_autovectorised_sum(
            sources in (1usize..=5, 0usize..700).prop_flat_map(|(ranks, length)| {
                prop::collection::vec(prop::collection::vec(any::<u8>(), length + 8), ranks)
            }),
            skew in 0usize..8,
        ) {
            let sources: Vec<&[u8]> = sources.iter().map(|source| &source[skew..]).collect();
            for (name, sum) in native::available() {
                for dtype in [DType::F32, DType::BF16, DType::F16] {
                    let sums = by_both(sum, dtype, &sources);
                    prop_assert!(agree(dtype, &sums), "{dtype:?} by {name}");
                }
            }
        }
    }

    #[test]
    fn the_result_may_overwrite_a_source() {
        let floats = |factor: f32| -> Vec<f32> { (0..300).map(|index| factor * index as f32).collect() };
        for (name, sum) in native::available() {
            for place in 0..3 {
                let mut sources = [floats(1.0), floats(10.0), floats(100.0)];
                let pointers = sources.each_mut().map(|source| source.as_mut_ptr().cast::<u8>());
                let read = pointers.map(|source| source.cast_const());
                // SAFETY: all hold 300 floats, and the processor has the instructions of what
                // `available` returns.
                let done = unsafe { sum(DType::F32, pointers[place], &read, 300 * size_of::<f32>()) };
                let done = done / size_of::<f32>();
                let right = sources[place][..done].iter().enumerate().all(|(i, x)| *x == 111.0 * i as f32);
                assert!(done >= 256 && right, "place {place} by {name}");
            }
        }
    }
}
