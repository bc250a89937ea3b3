//! Limits of the machine: memory bandwidth and arithmetic.

use std::time::Duration;

use thunder_compute::cpu::measure::arithmetic::{self, Arithmetic};
use thunder_compute::{Activations, Float, Isa, PackedFormat, memory};
use thunder_engine::assembly::ThreadCounts;
use thunder_engine::assembly::device::GpuLimits;

use super::ModelWork;

/// Bytes read to measure memory bandwidth; more than caches hold.
const BANDWIDTH_BYTES: usize = 1 << 30;
/// Time to read memory after each round.
const BANDWIDTH_TIME: Duration = Duration::from_millis(400);
/// Time to multiply after each round.
const PEAK_TIME: Duration = Duration::from_millis(100);

/// Limits of the computing machine. Measured after each round, because a machine's speed varies; a
/// GPU is measured once, before the model uses its memory.
///
/// Only this host can be measured; other hosts are assumed to be as fast.
pub enum Peaks {
    /// The engine's threads.
    Cpu(Box<Threads>),
    /// A GPU for each rank.
    Gpu { limits: GpuLimits, activations: Activations, is_quantized: bool, ranks: usize },
}

/// The engine's threads: memory bandwidth and arithmetic peak.
pub struct Threads {
    reader: memory::Reader,
    isa: Isa,
    activations: Activations,
    format: PackedFormat,
    threads: ThreadCounts,
}

impl Threads {
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
}

impl Peaks {
    /// Bytes per second, and operations per second of the arithmetic of products. `rows`: rows of a
    /// step, and whether they are a prompt's.
    pub fn measure(&mut self, rows: (usize, bool)) -> (f64, f64) {
        match self {
            Self::Gpu { limits, activations, is_quantized, ranks } => {
                let (_, is_prompt) = rows;
                let matrices = limits.matrix_operations.filter(|_| is_prompt && activations.allows_bf16());
                let has_bytes = matches!(activations, Activations::Auto | Activations::Int8);
                let operations = match matrices {
                    Some(matrices) => matrices,
                    None if !is_prompt && *is_quantized && has_bytes => limits.byte_operations,
                    None => limits.float_operations,
                };
                (*ranks as f64 * limits.bytes_per_s, *ranks as f64 * operations)
            }
            Self::Cpu(cpu) => {
                let arithmetic = Arithmetic::of_product(cpu.isa, cpu.activations, cpu.format, rows);
                let on_host = cpu.threads.on_host;
                let operations = arithmetic::operations_per_s(cpu.isa, arithmetic, on_host, PEAK_TIME);
                let hosts = cpu.threads.in_group as f64 / on_host as f64;
                (hosts * cpu.reader.bytes_per_s(BANDWIDTH_TIME), hosts * operations)
            }
        }
    }
}
