//! A pass that only reads, to know what memory gives.

use super::affine::PREFETCH_BYTES;
use super::isa::{self, Isa};
use super::memory::Region;
use super::pool::Pool;
use super::simd::{LANES, Simd};

/// Bytes that are really there: each page has been written.
pub(crate) fn region(bytes: usize) -> std::io::Result<Region> {
    let mut region = Region::zeroed(bytes)?;
    region.fill(1);
    Ok(region)
}

/// Reads all of it, a contiguous part on each thread.
pub(crate) fn read(region: &Region, isa: Isa, pool: &mut Pool) {
    const PIECE: usize = 4 * LANES * size_of::<f32>();
    pool.split(region.len() / PIECE, &|range| {
        let mut sum = 0.0;
        // SAFETY: the pieces lie within the region.
        unsafe { isa::sum_bytes(isa, &region[range.start * PIECE..range.end * PIECE], &mut sum) };
        std::hint::black_box(sum);
    });
}

/// Adds up bytes as floats, which is nonsense as a number and all of the loads.
///
/// # Safety
/// The CPU has `S`; the length is a multiple of four vectors.
#[inline(always)]
pub(super) unsafe fn sum<S: Simd>(bytes: &[u8], out: &mut f32) {
    // SAFETY: within the slice.
    unsafe {
        let mut acc = [S::splat(0.0); 4];
        for piece in bytes.chunks_exact(4 * LANES * size_of::<f32>()) {
            for (i, acc) in acc.iter_mut().enumerate() {
                let line = piece.as_ptr().add(i * LANES * size_of::<f32>());
                // As the kernels do: without it, this would read more slowly than they.
                S::prefetch(line.wrapping_add(PREFETCH_BYTES));
                *acc = S::add(*acc, S::load(line.cast()));
            }
        }
        *out = S::reduce_add(S::add(S::add(acc[0], acc[1]), S::add(acc[2], acc[3])));
    }
}
