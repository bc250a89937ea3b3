//! What the machine could do at most: memory bandwidth and arithmetic.

use std::time::Duration;

use thunder_compute::cpu::measure::arithmetic::{self, Arithmetic};
use thunder_compute::{Activations, Float, Isa, PackedFormat, memory};
use thunder_engine::assembly::ThreadCounts;

use super::ModelWork;

/// Bytes read to measure memory bandwidth; more than caches hold.
const BANDWIDTH_BYTES: usize = 1 << 30;
/// Time to read memory after each round.
const BANDWIDTH_TIME: Duration = Duration::from_millis(400);
/// Time to multiply after each round.
const PEAK_TIME: Duration = Duration::from_millis(100);

/// Memory bandwidth and arithmetic peak of the engine's threads. Measured after each round, because
/// a machine's speed varies.
///
/// Only this host can be measured: other hosts are taken to give as much per thread.
pub struct Peaks {
    reader: memory::Reader,
    isa: Isa,
    activations: Activations,
    format: PackedFormat,
    threads: ThreadCounts,
}

impl Peaks {
    /// Allocates what is read.
    pub fn new(activations: Activations, work: &ModelWork, threads: ThreadCounts) -> anyhow::Result<Self> {
        let isa = Isa::detect().map_err(anyhow::Error::msg)?;
        let format = match work.is_quantized {
            true => PackedFormat::Affine { bits: 4, group: 64 },
            false => PackedFormat::Float(Float::BF16),
        };
        Ok(Self {
            reader: memory::Reader::new(threads.on_host, BANDWIDTH_BYTES, isa)?,
            isa,
            activations,
            format,
            threads,
        })
    }

    /// Bytes per second, and operations per second in products. `rows`: rows of a step, and whether
    /// they are a prompt's.
    pub fn measure(&mut self, rows: (usize, bool)) -> [f64; 2] {
        let arithmetic = Arithmetic::of_product(self.isa, self.activations, self.format, rows);
        let operations = arithmetic::operations_per_s(self.isa, arithmetic, self.threads.on_host, PEAK_TIME);
        let hosts = self.threads.in_group as f64 / self.threads.on_host as f64;
        [hosts * self.reader.bytes_per_s(BANDWIDTH_TIME), hosts * operations]
    }
}
