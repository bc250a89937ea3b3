//! Measures each algorithm, so that the group chooses by measured costs.

use std::time::Instant;

use super::Group;
use crate::{Algorithm, CommError, Op};

/// The two sizes between which the probe fits a line: latency decides at the first, bandwidth at
/// the second.
pub(crate) const PROBE_BYTES: [usize; 2] = [1 << 10, 256 << 10];

/// Calls per probe, and the time that they may take. There are two probes per algorithm.
const PROBE_CALLS: f64 = 24.0;
const PROBE_US: f64 = 4000.0;

impl Group {
    /// Measures each algorithm, which takes about 30 ms over fast links. From then on the group
    /// chooses by the measured costs. All ranks must call it. All use rank 0's measurements, so
    /// that all choose the same algorithm.
    ///
    /// # Errors
    /// [`CommError`], like every operation.
    pub fn tune(&mut self) -> Result<(), CommError> {
        if self.size() == 1 {
            return Ok(());
        }
        let mut figures = [0.0f64; 2 * Algorithm::ALL.len()];
        let mut data = vec![0f32; PROBE_BYTES[1] / size_of::<f32>()];
        for (algorithm, figures) in Algorithm::ALL.into_iter().zip(figures.chunks_exact_mut(2)) {
            let forced = self.force_algorithm(Some(algorithm));
            let times = PROBE_BYTES.map(|bytes| self.probe(&mut data[..bytes / size_of::<f32>()]));
            self.force_algorithm(forced);
            let [short, long] = times;
            let (short, long) = (short?, long?);
            let kib = (PROBE_BYTES[1] - PROBE_BYTES[0]) as f64 / 1024.0;
            let us_per_kib = ((long - short) / kib).max(0.0);
            figures[0] = (short - us_per_kib * PROBE_BYTES[0] as f64 / 1024.0).max(0.0);
            figures[1] = us_per_kib;
        }
        self.broadcast(0, &mut figures)?;
        let mut costs = self.costs();
        for (cost, figures) in costs.iter_mut().zip(figures.chunks_exact(2)) {
            (cost.fixed_us, cost.us_per_kib) = (figures[0], figures[1]);
        }
        self.set_costs(costs);
        Ok(())
    }

    /// The time of the fastest of some calls, in µs; slower calls were disturbed.
    fn probe(&mut self, data: &mut [f32]) -> Result<f64, CommError> {
        // The first call allocates memory. The second shows how many more calls there is time for.
        self.all_reduce(data, Op::Sum)?;
        let first = self.time(data)?;
        let mut calls = [(PROBE_US / first.max(1.0)).min(PROBE_CALLS) as u32];
        self.broadcast(0, &mut calls)?;
        let mut fastest = first;
        for _ in 0..calls[0] {
            fastest = fastest.min(self.time(data)?);
        }
        Ok(fastest)
    }

    fn time(&mut self, data: &mut [f32]) -> Result<f64, CommError> {
        let start = Instant::now();
        self.all_reduce(data, Op::Sum)?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, TransportChoice, local};

    #[test]
    fn all_ranks_choose_alike_after_tuning() {
        let chosen = local::run(3, TransportChoice::Auto, |mut group| {
            group.tune().map(|()| {
                [64, 8 << 10, 100 << 10, 8 << 20].map(|bytes| group.algorithm(bytes, DType::F32, Op::Sum))
            })
        });
        let chosen = chosen.unwrap();
        assert!(chosen[0].is_ok());
        assert!(chosen.iter().all(|choice| *choice == chosen[0]));
    }
}
