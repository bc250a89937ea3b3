//! The reduction loops: any number of sources, taken in rank order, into one destination.

mod partial;
mod portable;
mod simd;

pub(crate) use partial::{accumulated_size, narrow, reduce_partial, widen};

use crate::{DType, Op};

/// Reduces `count` elements of each source, in order, into `out`.
///
/// # Safety
/// Every source and `out` must be valid for `count` elements of `dtype` (no alignment needed).
/// `out` may be one of the sources, but must not otherwise overlap one.
pub(crate) unsafe fn reduce(dtype: DType, op: Op, out: *mut u8, sources: &[*const u8], count: usize) {
    // SAFETY: as promised by the caller.
    unsafe {
        let done = if op == Op::Sum { simd::sum(dtype, out, sources, count) } else { 0 };
        portable::reduce_autovectorized(dtype, op, out, sources, done..count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_counts_and_unaligned_sources_are_reduced() {
        for count in [0usize, 1, 511, 512, 513, 1300] {
            let a: Vec<u8> =
                std::iter::once(0).chain((0..count).flat_map(|i| (i as f32).to_le_bytes())).collect();
            let b: Vec<u8> = (0..count).flat_map(|i| (2.0 * i as f32).to_le_bytes()).collect();
            let mut out = vec![0f32; count];
            // SAFETY: all three hold `count` elements.
            unsafe {
                reduce(DType::F32, Op::Sum, out.as_mut_ptr().cast(), &[a.as_ptr().add(1), b.as_ptr()], count);
            }
            assert!(out.iter().enumerate().all(|(i, x)| *x == 3.0 * i as f32));
        }
    }
}
