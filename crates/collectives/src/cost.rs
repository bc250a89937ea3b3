//! What an all-reduce costs by each algorithm, so that the cheapest can be chosen: a line per algorithm, from a guess at
//! first, from a probe once the group has been tuned.

use std::time::Instant;

use serde::Serialize;

use crate::{Algorithm, CommError, Group, Op};

/// The two sizes that the probe fits a line through: one where latency decides, one where bandwidth does.
const PROBE_BYTES: [usize; 2] = [1 << 10, 512 << 10];
/// Calls per probe. The fastest counts: what disturbs a call says nothing about the algorithm.
const PROBE_CALLS: usize = 24;

/// The cost of one algorithm: `fixed_us + bytes * us_per_kib / 1024`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Of the shortest message, in µs.
    pub fixed_us: f64,
    /// Of each further KiB, in µs.
    pub us_per_kib: f64,
}

impl Cost {
    /// The time that a message of this many bytes should take, in µs.
    pub fn predict_us(&self, bytes: usize) -> f64 {
        self.fixed_us + self.us_per_kib * bytes as f64 / 1024.0
    }
}

/// A cost per algorithm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Model([Cost; Algorithm::ALL.len()]);

impl Model {
    /// A guess from the number of ranks and whether all share memory. A step costs a latency, each byte the wire's
    /// time, each byte that is added the loop's. The constants were measured on a 2-core virtual machine.
    pub fn guess(ranks: usize, local: bool) -> Self {
        let (step_us, wire_us_per_kib) = if local { (0.6, 0.12) } else { (5.0, 0.25) };
        let add_us_per_kib = 0.05;
        let others = (ranks.max(2) - 1) as f64;
        let part = 1.0 / ranks.max(2) as f64;
        Self(Algorithm::ALL.map(|algorithm| {
            let (steps, sent, added) = match algorithm {
                Algorithm::OneShot => (1.0, others, others),
                Algorithm::Mesh => (2.0, 2.0 * others * part, others * part),
                Algorithm::Chain => (2.0 * others, if others > 1.0 { 2.0 } else { 1.0 }, 1.0),
            };
            Cost {
                algorithm,
                fixed_us: steps * step_us,
                us_per_kib: sent * wire_us_per_kib + added * add_us_per_kib,
            }
        }))
    }

    /// The cheapest algorithm for this many bytes.
    pub fn choose(&self, bytes: usize) -> Algorithm {
        let mut best = &self.0[0];
        for cost in &self.0[1..] {
            if cost.predict_us(bytes) < best.predict_us(bytes) {
                best = cost;
            }
        }
        best.algorithm
    }

    pub fn costs(&self) -> [Cost; Algorithm::ALL.len()] {
        self.0
    }
}

impl Group {
    /// Measures each algorithm (some 10 ms) and from then on chooses by what it found. All ranks must call it; rank 0's
    /// figures count.
    ///
    /// # Errors
    /// [`CommError`], as every operation.
    pub fn tune(&mut self) -> Result<(), CommError> {
        let mut figures = [0.0f64; 2 * Algorithm::ALL.len()];
        let mut data = vec![0f32; PROBE_BYTES[1] / size_of::<f32>()];
        for (algorithm, figures) in Algorithm::ALL.into_iter().zip(figures.chunks_exact_mut(2)) {
            let forced = self.force_algorithm(Some(algorithm));
            let times = PROBE_BYTES.map(|bytes| self.fastest(&mut data[..bytes / size_of::<f32>()]));
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
        self.set_model(Model(costs));
        Ok(())
    }

    fn fastest(&mut self, data: &mut [f32]) -> Result<f64, CommError> {
        let mut fastest = f64::INFINITY;
        for _ in 0..PROBE_CALLS {
            let start = Instant::now();
            self.all_reduce(data, Op::Sum)?;
            fastest = fastest.min(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(fastest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TransportChoice, local};

    #[test]
    fn short_messages_go_at_once_and_long_ones_in_parts() {
        for ranks in 2..=8 {
            for local in [true, false] {
                let model = Model::guess(ranks, local);
                assert_eq!(model.choose(64), Algorithm::OneShot);
                assert_eq!(model.choose(1 << 20), Algorithm::Mesh);
            }
        }
    }

    #[test]
    fn all_ranks_choose_alike_after_tuning() {
        let chosen = local::run(3, TransportChoice::Auto, |mut group| {
            group.tune().map(|()| [64, 8 << 10, 100 << 10, 8 << 20].map(|bytes| group.algorithm(bytes)))
        });
        let chosen = chosen.unwrap();
        assert!(chosen[0].is_ok());
        assert!(chosen.iter().all(|choice| *choice == chosen[0]));
    }
}
