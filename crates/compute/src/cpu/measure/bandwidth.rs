//! Memory bandwidth: threads that read and do nothing else.

use std::time::{Duration, Instant};

use crate::cpu::dispatch::entry;
use crate::cpu::isa::Isa;
use crate::cpu::layout::region::Region;
use crate::cpu::measure::arithmetic::median;
use crate::cpu::product::affine::PREFETCH_BYTES;
use crate::cpu::simd::{LANES, Simd};
use crate::cpu::threads::pool::Pool;

/// Measures memory bandwidth with a pool of threads.
#[derive(Debug)]
pub struct Reader {
    region: Region,
    pool: Pool,
    isa: Isa,
}

impl Reader {
    /// `threads` threads read `bytes` bytes. `bytes` should be several times the last-level cache.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    pub fn new(threads: usize, bytes: usize, isa: Isa) -> std::io::Result<Self> {
        let mut region = Region::zeroed(bytes)?;
        // Writes each page, so that the system provides it.
        region.fill(1);
        Ok(Self { region, pool: Pool::new(threads, None), isa })
    }

    /// Bytes per second that all threads read together: the median of the passes that fit into
    /// `time`.
    pub fn bytes_per_s(&mut self, time: Duration) -> f64 {
        let (mut passes, began) = (Vec::new(), Instant::now());
        while began.elapsed() < time || passes.is_empty() {
            let pass = Instant::now();
            self.pass();
            passes.push(self.region.len() as f64 / pass.elapsed().as_secs_f64());
        }
        median(&mut passes)
    }

    /// Reads the region once, a contiguous part on each thread.
    pub fn pass(&mut self) {
        const PIECE: usize = 4 * LANES * size_of::<f32>();
        let (region, isa) = (&self.region, self.isa);
        self.pool.split(region.len() / PIECE, &|range| {
            let mut sum = 0.0;
            // SAFETY: the range is within the region; the set was detected.
            unsafe { sum_on(isa, &region[range.start * PIECE..range.end * PIECE], &mut sum) };
            std::hint::black_box(sum);
        });
    }
}

entry! {
    /// Reads all bytes.
    fn sum_on(bytes: &[u8], out: &mut f32) = sum
}

/// Adds up bytes as floats. The sum has no meaning; it only keeps the loads.
///
/// # Safety
/// The CPU has `S`; the length is a multiple of four vectors.
#[inline(always)]
unsafe fn sum<S: Simd>(bytes: &[u8], out: &mut f32) {
    // SAFETY: all offsets are within the slice.
    unsafe {
        let mut acc = [S::splat(0.0); 4];
        for piece in bytes.chunks_exact(4 * LANES * size_of::<f32>()) {
            for (i, acc) in acc.iter_mut().enumerate() {
                let line = piece.as_ptr().add(i * LANES * size_of::<f32>());
                // The kernels prefetch too: without this, they would read faster than this
                // measurement.
                S::prefetch(line.wrapping_add(PREFETCH_BYTES));
                *acc = S::add(*acc, S::load(line.cast()));
            }
        }
        *out = S::reduce_add(S::add(S::add(acc[0], acc[1]), S::add(acc[2], acc[3])));
    }
}
