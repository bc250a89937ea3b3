//! A pass that only reads, to know what memory gives.

use std::time::{Duration, Instant};

use crate::cpu::dispatch::entry;
use crate::cpu::isa::Isa;
use crate::cpu::layout::region::Region;
use crate::cpu::measure::arithmetic::median;
use crate::cpu::product::affine::PREFETCH_BYTES;
use crate::cpu::simd::{LANES, Simd};
use crate::cpu::threads::pool::Pool;

/// Threads that read memory, to know how fast it is.
#[derive(Debug)]
pub struct Reader {
    region: Region,
    pool: Pool,
    isa: Isa,
}

impl Reader {
    /// `threads` threads and `bytes` bytes, which should be several times the last-level cache.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn new(threads: usize, bytes: usize, isa: Isa) -> std::io::Result<Self> {
        let mut region = Region::zeroed(bytes)?;
        // Each page is written, so that it is there.
        region.fill(1);
        Ok(Self { region, pool: Pool::new(threads, None), isa })
    }

    /// Bytes a second that the threads read together: the median of as many passes as take that long.
    pub fn bytes_per_s(&mut self, time: Duration) -> f64 {
        let (mut passes, began) = (Vec::new(), Instant::now());
        while began.elapsed() < time || passes.is_empty() {
            let pass = Instant::now();
            self.pass();
            passes.push(self.region.len() as f64 / pass.elapsed().as_secs_f64());
        }
        median(&mut passes)
    }

    /// Reads all of it, a contiguous part on each thread.
    fn pass(&mut self) {
        const PIECE: usize = 4 * LANES * size_of::<f32>();
        let (region, isa) = (&self.region, self.isa);
        self.pool.split(region.len() / PIECE, &|range| {
            let mut sum = 0.0;
            // SAFETY: the pieces lie within the region.
            unsafe { sum_on(isa, &region[range.start * PIECE..range.end * PIECE], &mut sum) };
            std::hint::black_box(sum);
        });
    }
}

entry! {
    /// Reads bytes.
    fn sum_on(bytes: &[u8], out: &mut f32) = sum
}

/// Adds up bytes as floats, which is nonsense as a number and all of the loads.
///
/// # Safety
/// The CPU has `S`; the length is a multiple of four vectors.
#[inline(always)]
unsafe fn sum<S: Simd>(bytes: &[u8], out: &mut f32) {
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
