//! `thunder bench kernels`.

#[cfg(feature = "gpu")]
mod gpu;
pub mod operations;

use std::convert::Infallible;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use clap::Args;
use serde::Serialize;
use serde_json::json;
use thunder_collectives::Group;
use thunder_compute::cpu::measure::arithmetic::{self, Arithmetic};
use thunder_compute::cpu::pool::Pool;
use thunder_compute::{CpuBackend, CpuConfig, Isa, memory};
use thunder_engine::assembly::device::DeviceChoice;

use crate::engine_args::ActivationsArg;
use crate::{progress, table};
use operations::Operation;

/// Bytes read to measure memory bandwidth; more than caches hold.
const BANDWIDTH_BYTES: usize = 1 << 30;

/// Measure each kernel, as a share of memory bandwidth and peak arithmetic
///
/// By default, measures every operation with every instruction set of this CPU, which takes 4
/// minutes. --kernel and --op select some. With few rows, memory limits an operation; with many
/// rows, arithmetic does. The peak is that of the arithmetic that the kernel uses.
#[derive(Args)]
pub struct KernelsCommand {
    /// Instruction sets to measure, by their names in `thunder doctor` [default: all of this CPU]
    #[arg(long = "kernel", value_name = "NAME", value_delimiter = ',')]
    kernels: Vec<String>,
    /// Operations to measure: products by weight format (BITS/GROUP like 4/64, bf16, f16, f32),
    /// attention, attention-int8, latent, experts, router, norm, swiglu, delta-rule, conv,
    /// state-space, gated-conv [default: all]
    #[arg(long = "op", value_name = "OP", value_delimiter = ',')]
    operations: Vec<Operation>,
    /// Rows to compute together: 1 for the decode of one request, 512 for a prompt
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,4,16,512",
          value_parser = clap::value_parser!(u16).range(1..=operations::MAX_ROWS as i64))]
    rows: Vec<u16>,
    /// Precision of activations in products with weights
    #[arg(long, value_enum, default_value_t = ActivationsArg::Auto)]
    activations: ActivationsArg,
    /// Threads to measure with
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Milliseconds for each figure; a longer time gives steadier figures
    #[arg(long, value_name = "MS", default_value_t = 100)]
    time: u64,
    /// Device to measure: cpu, gpu, or gpu:N with the numbers of `thunder devices list`
    ///
    /// On a GPU, each operation waits for the previous one, as in a model.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// One figure.
#[derive(Serialize)]
struct Row {
    kernel: String,
    operation: String,
    rows: usize,
    us: f64,
    bytes_per_s: f64,
    memory_share: f64,
    operations_per_s: f64,
    /// What the kernel computes with.
    arithmetic: &'static str,
    peak_share: f64,
}

impl KernelsCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        if self.device != DeviceChoice::Cpu {
            return self.run_on_gpu();
        }
        let threads = usize::from(self.threads);
        let time = Duration::from_millis(self.time);
        let kernels = kernels(&self.kernels)?;
        let operations = if self.operations.is_empty() { Operation::all() } else { self.operations };
        let isa = Isa::detect().map_err(anyhow::Error::msg)?;
        let bandwidth =
            memory::Reader::new(threads, BANDWIDTH_BYTES, isa)?.bytes_per_s(Duration::from_secs(1));
        let mut rows = Vec::new();
        let bar = progress::measurements(kernels.len() * operations.len() * self.rows.len());
        for isa in kernels {
            bar.set_message(format!("peak of {}", isa.name()));
            let peak = |kind| arithmetic::operations_per_s(isa, kind, threads, Duration::from_millis(200));
            let peaks = Arithmetic::ALL.map(|arithmetic| (arithmetic, peak(arithmetic)));
            let activations = self.activations.into();
            for &operation in &operations {
                bar.set_message(format!("{} {operation}", isa.name()));
                let config = CpuConfig::new(threads, isa, activations);
                let mut backend = CpuBackend::new(&config, Group::solo());
                let mut subject = operation.subject(&mut backend)?;
                for &step in &self.rows {
                    let step = usize::from(step);
                    let work = subject.begin(&mut backend, (isa, activations), step)?;
                    let us = median_us(time, || subject.run(&mut backend, step))?;
                    let of_work = peaks.iter().find(|(arithmetic, _)| *arithmetic == work.arithmetic);
                    let peak = of_work.map_or(0.0, |(_, peak)| *peak);
                    let bytes_per_s = work.bytes as f64 / us * 1e6;
                    let operations_per_s = work.operations as f64 / us * 1e6;
                    rows.push(Row {
                        kernel: isa.name().to_owned(),
                        operation: operation.to_string(),
                        rows: step,
                        us,
                        bytes_per_s,
                        memory_share: bytes_per_s / bandwidth,
                        operations_per_s,
                        arithmetic: name_of(work.arithmetic),
                        peak_share: operations_per_s / peak,
                    });
                    bar.inc(1);
                }
            }
        }
        bar.finish_and_clear();
        let hand_over_us = hand_over_us(threads.max(2));
        if self.json {
            let object = json!({
                "threads": threads, "activations": self.activations, "memory_bytes_per_s": bandwidth,
                "hand_over_threads": threads.max(2), "hand_over_us": hand_over_us, "rows": rows,
            });
            println!("{object}");
        } else {
            print(&rows);
            println!("{threads} thread(s) read {:.1} GB/s from memory", bandwidth / 1e9);
            println!("an empty job takes {} threads {hand_over_us:.2} µs", threads.max(2));
        }
        Ok(())
    }
}

impl KernelsCommand {
    #[cfg(not(feature = "gpu"))]
    fn run_on_gpu(self) -> anyhow::Result<()> {
        anyhow::bail!("--device {}: this program was built without GPUs", self.device)
    }

    #[cfg(feature = "gpu")]
    fn run_on_gpu(self) -> anyhow::Result<()> {
        if !self.kernels.is_empty() {
            anyhow::bail!(
                "--kernel names instruction sets of the CPU: leave it out with --device {}",
                self.device
            );
        }
        let operations = if self.operations.is_empty() { Operation::all() } else { self.operations };
        let work = (&*operations, &*self.rows, self.activations.into());
        let figures = gpu::measure(self.device, work, Duration::from_millis(self.time))?;
        if self.json {
            let object = json!({
                "device": figures.device, "activations": self.activations, "memory_bytes_per_s": figures.memory,
                "peak_operations_per_s": figures.peaks(), "rows": figures.rows,
            });
            println!("{object}");
        } else {
            print(&figures.rows);
            println!("{} reads {:.1} GB/s from memory", figures.device, figures.memory / 1e9);
            let peaks = figures.peaks().into_iter();
            let peaks: Vec<_> =
                peaks.map(|(name, peak)| format!("{:.2} T/s of {name}", peak / 1e12)).collect();
            println!("it multiplies and adds {}", peaks.join(", "));
        }
        Ok(())
    }
}

fn name_of(arithmetic: Arithmetic) -> &'static str {
    match arithmetic {
        Arithmetic::Bytes => "bytes",
        Arithmetic::Floats => "f32",
        Arithmetic::Bf16 => "bf16 tiles",
        Arithmetic::Tiles => "byte tiles",
    }
}

/// The named instruction sets, or all of this CPU.
fn kernels(names: &[String]) -> anyhow::Result<Vec<Isa>> {
    if names.is_empty() {
        return Ok(Isa::available());
    }
    names.iter().map(|name| Isa::named(name).map_err(|error| anyhow!("--kernel {name}: {error}"))).collect()
}

/// Median time of a run in µs. The first run touches new memory, so it counts only if no other fits
/// into `time`.
fn median_us<E>(time: Duration, mut run: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    let mut timed = || {
        let start = Instant::now();
        run()?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    };
    let (began, first) = (Instant::now(), timed()?);
    let mut all = Vec::new();
    while began.elapsed() < time {
        all.push(timed()?);
    }
    Ok(if all.is_empty() { first } else { arithmetic::median(&mut all) })
}

/// Time in µs to run an empty job on all threads of a pool.
fn hand_over_us(threads: usize) -> f64 {
    const JOBS: u32 = 1000;
    let mut pool = Pool::new(threads, None);
    let Ok(us) = median_us(Duration::from_millis(100), || {
        (0..JOBS).for_each(|_| pool.run(&|_| ()));
        Ok::<_, Infallible>(())
    });
    us / f64::from(JOBS)
}

fn print(rows: &[Row]) {
    let headings =
        ["kernel", "operation", "rows", "µs", "GB/s", "of memory", "Gop/s", "of peak", "arithmetic"];
    let mut table = table::new(&headings);
    for row in rows {
        table.add_row([
            row.kernel.clone(),
            row.operation.clone(),
            row.rows.to_string(),
            format!("{:.1}", row.us),
            format!("{:.2}", row.bytes_per_s / 1e9),
            format!("{:.0} %", 100.0 * row.memory_share),
            format!("{:.1}", row.operations_per_s / 1e9),
            format!("{:.0} %", 100.0 * row.peak_share),
            row.arithmetic.to_owned(),
        ]);
    }
    println!("{table}");
}
