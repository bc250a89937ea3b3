//! The same operations on a GPU.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, anyhow};
use thunder_collectives::Group;
use thunder_compute::{Activations, ComputeError, Isa};
use thunder_engine::assembly::device::{DeviceChoice, first_gpu};
use thunder_gpu::{GpuArithmetic, GpuBackend, GpuConfig, seconds_of_run};

use super::Row;
use super::operations::{Operation, Subject};
use crate::progress;

/// Runs of an operation in the shorter of two series.
const FEW_RUNS: u32 = 16;

/// Figures of a GPU.
pub struct Figures {
    pub device: String,
    /// Bytes per second that it reads from its memory.
    pub memory: f64,
    /// Multiplications and additions per second of each arithmetic that it has.
    peaks: Vec<(GpuArithmetic, f64)>,
    pub rows: Vec<Row>,
}

impl Figures {
    /// The peaks by the arithmetic's name.
    pub fn peaks(&self) -> BTreeMap<&'static str, f64> {
        self.peaks.iter().map(|(arithmetic, peak)| (arithmetic.name(), *peak)).collect()
    }
}

/// Measures operations with each number of rows.
pub fn measure(
    device: DeviceChoice,
    (operations, rows, activations): (&[Operation], &[u16], Activations),
    time: Duration,
) -> anyhow::Result<Figures> {
    let found = first_gpu(device).map_err(anyhow::Error::msg)?;
    let found = found.ok_or_else(|| anyhow!("--device {device}: there is no GPU; give cpu"))?;
    let memory = thunder_gpu::bandwidth(&found)?;
    let peaks = thunder_gpu::peak_arithmetic(&found)?;
    let isa = Isa::detect().map_err(anyhow::Error::msg)?;
    let bar = progress::measurements(operations.len() * rows.len());
    let mut figures = Vec::new();
    for &operation in operations {
        bar.set_message(operation.to_string());
        // Each with a device of its own: operands take up to a gigabyte.
        let config = GpuConfig { activations, remembers: true, ..GpuConfig::default() };
        let mut backend = GpuBackend::new(&found, config, Group::solo())?;
        let mut subject = operation.subject(&mut backend)?;
        for &step in rows {
            let step = usize::from(step);
            let work = subject.begin(&mut backend, (isa, activations), step)?;
            let (arithmetic, us) = run_us(&found.info.name, time, &mut backend, &mut *subject, step)
                .with_context(|| format!("{operation} with {step} rows"))?;
            let arithmetic = if work.counts_floats { GpuArithmetic::Floats } else { arithmetic };
            let peak = peaks.iter().find(|(of, _)| *of == arithmetic).map_or(0.0, |(_, peak)| *peak);
            let (bytes_per_s, operations_per_s) =
                (work.bytes as f64 / us * 1e6, work.operations as f64 / us * 1e6);
            figures.push(Row {
                kernel: format!("gpu:{}", found.info.number),
                operation: operation.to_string(),
                rows: step,
                us,
                bytes_per_s,
                memory_share: bytes_per_s / memory,
                operations_per_s,
                arithmetic: arithmetic.name(),
                peak_share: operations_per_s / peak,
            });
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let device = format!("gpu:{} ({})", found.info.number, found.info.name);
    Ok(Figures { device, memory, peaks, rows: figures })
}

/// What a run computes with, and its time in µs, of runs that follow each other without a wait of
/// the host.
fn run_us(
    device: &str,
    time: Duration,
    backend: &mut GpuBackend,
    subject: &mut dyn Subject<GpuBackend>,
    rows: usize,
) -> Result<(GpuArithmetic, f64), ComputeError> {
    // The first one compiles kernels and proves them.
    subject.series(backend, rows, 1)?;
    let arithmetic = backend.arithmetic_of(|backend| subject.series(backend, rows, 1))?;
    let series = |runs| subject.series(backend, rows, runs);
    Ok((arithmetic, 1e6 * seconds_of_run(device, time, [FEW_RUNS, 4 * FEW_RUNS], series)?))
}
