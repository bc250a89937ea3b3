//! `thunder bench machine`: what the placement of models has to know of a machine.

use std::convert::Infallible;
use std::fs::File;
use std::time::{Duration, Instant};

use clap::Args;
use thunder_collectives::Group;
use thunder_compute::cpu::pool::Pool;
use thunder_compute::{Activations, CpuBackend, CpuConfig, Isa, PackedFormat, memory};
use thunder_node::report::SpeedReport;

use super::kernels::operations;
use crate::table;
use operations::{Operation, Subject};

/// Bytes read to measure memory bandwidth; more than caches hold.
const BANDWIDTH_BYTES: usize = 512 << 20;
/// Time of reading memory.
const BANDWIDTH_TIME: Duration = Duration::from_millis(400);
/// Time for each product.
const PRODUCT_TIME: Duration = Duration::from_millis(300);
/// Jobs of a run, and the time for runs.
const JOBS: u32 = 20;
const JOBS_TIME: Duration = Duration::from_millis(50);
/// Rows of one request, of a batch, and of a prompt.
const ROWS: [usize; 3] = [1, 16, 256];

/// Measure what the placement of models has to know of this machine, in about 2 seconds
///
/// All cores read memory, and multiply with 4-bit weights: one row as in decode, 16 rows as in a
/// batch, 256 rows as in a prompt. `thunder up` runs this once and keeps the figures, for
/// `thunder cluster plan`. The machine should do nothing else meanwhile.
#[derive(Args)]
pub struct MachineCommand {
    /// Threads to measure with [default: the number of cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl MachineCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let _alone = alone();
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let measured = measure(self.threads.map_or(cores, usize::from))?;
        if self.json {
            println!("{}", serde_json::to_string(&measured)?);
            return Ok(());
        }
        let mut rows = table::new(&["what", "figure"]);
        let SpeedReport { memory_bytes_s, weight_bytes_s, decode_flops, prompt_flops, job_ns } = measured;
        let giga = |number: u64, unit: &str| format!("{:.1} {unit}", number as f64 / 1e9);
        rows.add_row(["memory".to_owned(), giga(memory_bytes_s, "GB/s")]);
        rows.add_row(["4-bit weights, 1 row".to_owned(), giga(weight_bytes_s, "GB/s")]);
        rows.add_row(["4-bit weights, 16 rows".to_owned(), giga(decode_flops, "Gop/s")]);
        rows.add_row(["4-bit weights, 256 rows".to_owned(), giga(prompt_flops, "Gop/s")]);
        rows.add_row(["a job for all threads".to_owned(), format!("{:.1} us", job_ns as f64 / 1e3)]);
        println!("{rows}");
        Ok(())
    }
}

/// Waits until no other measurement of this kind runs on this machine: nodes that share one would
/// each take the memory's bandwidth for theirs in part. Without a folder for the lock nobody waits.
fn alone() -> Option<File> {
    let path = std::env::temp_dir().join("thunder-bench-machine.lock");
    let file = File::options().create(true).truncate(false).write(true).open(path).ok()?;
    file.lock().ok()?;
    Some(file)
}

/// The fastest of the runs that fit into `time`, in seconds: what other programs take is not the
/// machine's speed. The first run touches new memory.
fn best_s<E>(time: Duration, mut run: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    run()?;
    let (began, mut best) = (Instant::now(), f64::MAX);
    while best == f64::MAX || began.elapsed() < time {
        let start = Instant::now();
        run()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best.max(1e-9))
}

fn measure(threads: usize) -> anyhow::Result<SpeedReport> {
    let isa = Isa::detect().map_err(anyhow::Error::msg)?;
    let memory_bytes_s = memory::Reader::new(threads, BANDWIDTH_BYTES, isa)?.bytes_per_s(BANDWIDTH_TIME);
    let activations = Activations::Auto;
    let mut backend = CpuBackend::new(&CpuConfig::new(threads, isa, activations), Group::solo());
    let product = Operation::Linear(PackedFormat::Affine { bits: 4, group: 64 });
    let mut subject = Subject::new(product, &mut backend)?;
    let mut rates = [[0.0; 2]; ROWS.len()];
    for (rates, rows) in rates.iter_mut().zip(ROWS) {
        let work = subject.begin(&mut backend, (isa, activations), rows)?;
        let seconds = best_s(PRODUCT_TIME, || subject.run(&mut backend, rows))?;
        *rates = [work.bytes, work.operations].map(|amount| amount as f64 / seconds);
    }
    let mut pool = Pool::new(threads, None);
    let Ok(jobs_s) = best_s(JOBS_TIME, || {
        (0..JOBS).for_each(|_| pool.run(&|_| ()));
        Ok::<_, Infallible>(())
    });
    Ok(SpeedReport {
        memory_bytes_s: memory_bytes_s as u64,
        weight_bytes_s: rates[0][0] as u64,
        decode_flops: rates[1][1] as u64,
        prompt_flops: rates[2][1] as u64,
        job_ns: (jobs_s / f64::from(JOBS) * 1e9) as u64,
    })
}
