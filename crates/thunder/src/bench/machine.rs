//! `thunder bench machine`: what the placement of models has to know of a machine.

#[cfg(feature = "gpu")]
mod gpu;

use std::fs::File;
use std::time::{Duration, Instant, SystemTime};

use anyhow::bail;
use clap::Args;
use thunder_collectives::Group;
use thunder_compute::cpu::measure::arithmetic::median;
use thunder_compute::cpu::pool::Pool;
use thunder_compute::{Activations, CpuBackend, CpuConfig, Isa, KvFormat, PackedFormat, memory};
use thunder_engine::assembly::device::DeviceChoice;
use thunder_model::error::human_bytes;
use thunder_node::report::{GpuReport, NodeReport, SpeedReport};

use super::kernels::operations;
use crate::table;
use operations::{Attention, MATRIX, Product, Subject};

/// Bytes read to measure memory bandwidth, and bytes of weights. More where this is less than some
/// last caches: a cache keeps a part of what is read again and again. At most this part of what is
/// free.
const BANDWIDTH_BYTES: usize = 512 << 20;
const WEIGHT_BYTES: usize = 256 << 20;
const BEYOND_CACHES: usize = 4;
const BEYOND_PART: u64 = 16;
/// Time of reading memory.
const BANDWIDTH_TIME: Duration = Duration::from_millis(400);
/// Time for each product.
const PRODUCT_TIME: Duration = Duration::from_millis(300);
/// Jobs of a run, and the time for runs. They are measured after each product, and the least
/// counts: threads that another program has put to sleep take 100 times as long.
const JOBS: u32 = 20;
const JOBS_TIME: Duration = Duration::from_millis(50);
/// Most that a node may be late for a short measurement with others; for a longer one, half of its
/// time. What is left is measured while they measure.
const MOST_LATE: Duration = Duration::from_millis(100);
/// Rows of one request, of a batch, and of a prompt.
const ROWS: [usize; 3] = [1, 16, 256];

/// Measure the speeds of this machine that the placement of models needs, in about 2 seconds
///
/// All cores read memory, and multiply with 4-bit weights: one row as in decode, 16 rows as in a
/// batch, 256 rows as in a prompt. Then they compute attention of one row over 2048 tokens. If
/// ranks would use a GPU, the command measures the same there, and the cost of kernels and of sums
/// over ranks, in a few more seconds.
///
/// `thunder up` runs this command once and keeps the figures for `thunder cluster plan`. The
/// machine should do nothing else during the measurement.
#[derive(Args)]
pub struct MachineCommand {
    /// Threads to measure with [default: the number of cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Time to start, in milliseconds of Unix time, so that several nodes of this machine measure
    /// together and share its processor. `thunder up` uses this if several nodes run on one machine
    /// [default: start now, alone]
    #[arg(long, value_name = "MS")]
    together_at: Option<u64>,
    /// Pause between two measurements of nodes that measure together, in milliseconds. Raise it, on
    /// all of them alike, if one is reported as too busy
    #[arg(long, value_name = "MS", default_value_t = 100, requires = "together_at",
        value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pause: u64,
    /// Device that ranks would compute on: auto, cpu, gpu or gpu:N, as for --device of `thunder
    /// serve`
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Auto, env = "THUNDER_DEVICE")]
    device: DeviceChoice,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl MachineCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let _lock = lock(self.together_at.is_some());
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let pause = Duration::from_millis(self.pause);
        let next = |ms| Timing::Together { next: SystemTime::UNIX_EPOCH + Duration::from_millis(ms), pause };
        let timing = self.together_at.map_or(Timing::Alone, next);
        let mut measured = measure(self.threads.map_or(cores, usize::from), timing)?;
        if self.together_at.is_none() {
            measured.gpu = measure_gpu(self.device)?;
        }
        if self.json {
            println!("{}", serde_json::to_string(&measured)?);
            return Ok(());
        }
        let mut rows = table::new(&["what", "figure"]);
        let SpeedReport { memory_bytes_s, weight_bytes_s, decode_flops, prompt_flops, .. } = measured;
        let SpeedReport { attention_flops, job_ns, gpu, .. } = measured;
        let giga = |number: u64, unit: &str| format!("{:.1} {unit}", number as f64 / 1e9);
        rows.add_row(["memory".to_owned(), giga(memory_bytes_s, "GB/s")]);
        rows.add_row(["4-bit weights, 1 row".to_owned(), giga(weight_bytes_s, "GB/s")]);
        rows.add_row(["4-bit weights, 16 rows".to_owned(), giga(decode_flops, "Gop/s")]);
        rows.add_row(["4-bit weights, 256 rows".to_owned(), giga(prompt_flops, "Gop/s")]);
        rows.add_row(["attention, 1 row".to_owned(), giga(attention_flops, "Gop/s")]);
        rows.add_row(["a job for all threads".to_owned(), format!("{:.1} us", job_ns as f64 / 1e3)]);
        println!("{rows}");
        match &gpu {
            Some(gpu) => print_gpu(gpu),
            None => println!("ranks compute on the processor"),
        }
        Ok(())
    }
}

#[cfg(feature = "gpu")]
fn measure_gpu(choice: DeviceChoice) -> anyhow::Result<Option<GpuReport>> {
    gpu::measure(choice)
}

#[cfg(not(feature = "gpu"))]
fn measure_gpu(choice: DeviceChoice) -> anyhow::Result<Option<GpuReport>> {
    thunder_engine::assembly::device::first_device(choice, &[]).map_err(anyhow::Error::msg)?;
    Ok(None)
}

fn print_gpu(gpu: &GpuReport) {
    let mut rows = table::new(&["what", "figure"]);
    let giga = |number: u64, unit: &str| format!("{:.1} {unit}", number as f64 / 1e9);
    let micros = |ns: u64| format!("{:.1} us", ns as f64 / 1e3);
    let whose = if gpu.has_own_memory { "its own" } else { "the machine's" };
    rows.add_row([
        "memory that it may use".to_owned(),
        format!("{}, {whose}", human_bytes(gpu.memory_bytes)),
    ]);
    rows.add_row(["largest buffer".to_owned(), human_bytes(gpu.largest_buffer)]);
    rows.add_row(["for experts of a prompt".to_owned(), human_bytes(gpu.expert_bytes)]);
    rows.add_row(["memory".to_owned(), giga(gpu.memory_bytes_s, "GB/s")]);
    rows.add_row(["4-bit weights, 1 row".to_owned(), giga(gpu.weight_bytes_s, "GB/s")]);
    rows.add_row(["4-bit weights, 16 rows".to_owned(), giga(gpu.decode_flops, "Gop/s")]);
    rows.add_row(["4-bit weights, a prompt".to_owned(), giga(gpu.prompt_flops, "Gop/s")]);
    rows.add_row(["a kernel".to_owned(), micros(gpu.kernel_ns)]);
    rows.add_row(["the host between two steps".to_owned(), micros(gpu.submit_ns)]);
    let ways = [
        ("a sum to the host and back, in the queue", gpu.queue_way),
        ("by the host", Some(gpu.host_way)),
        ("a sum of two GPUs that hosts relay", gpu.relay_way),
        ("a prompt's sum of two GPUs in the host's memory", gpu.pieces_way),
    ];
    for (name, way) in ways {
        let figure = way.map_or_else(
            || "not possible".to_owned(),
            |way| format!("{}, {}", micros(way.latency_ns), giga(way.bytes_s, "GB/s")),
        );
        rows.add_row([name.to_owned(), figure]);
    }
    println!("{gpu}, one of {} that ranks take in turn\n{rows}", gpu.count);
}

/// Waits until no other measurement of this kind runs on this machine: nodes that share one would
/// each take the memory's bandwidth for theirs in part. Those that measure `together` wait only for
/// those that measure alone. Without a folder for the lock nobody waits.
fn lock(together: bool) -> Option<File> {
    let path = std::env::temp_dir().join("thunder-bench-machine.lock");
    let file = File::options().create(true).truncate(false).write(true).open(path).ok()?;
    if together { file.lock_shared() } else { file.lock() }.ok()?;
    Some(file)
}

/// How runs are timed.
enum Timing {
    /// One after the other: the median of the runs counts. What other programs take now and then is
    /// not the machine's speed.
    Alone,
    /// From a time on that other nodes of the machine have too. Runs follow each other directly,
    /// and their mean counts, since others may hold up a few of them for long.
    Together {
        /// When the next measurement begins.
        next: SystemTime,
        /// Pause after it, in which the operands of the one after it are made.
        pause: Duration,
    },
}

impl Timing {
    /// Seconds of a run, of those that fit into `time`. The first run touches new memory, and is
    /// not timed.
    fn seconds<E>(&mut self, time: Duration, mut run: impl FnMut() -> Result<(), E>) -> anyhow::Result<f64>
    where
        anyhow::Error: From<E>,
    {
        run()?;
        let mut left = time;
        if let Self::Together { next, pause } = self {
            match next.duration_since(SystemTime::now()) {
                Ok(early) => std::thread::sleep(early),
                // It ends with the others, so that it is in time for the next measurement.
                Err(late) if late.duration() <= (time / 2).max(MOST_LATE) => {
                    left = time.saturating_sub(late.duration());
                }
                Err(late) => bail!(
                    "the other nodes of this machine began {} ms ago: it is too busy to be measured; end what else \
                     computes on it, and ask again",
                    late.duration().as_millis()
                ),
            }
            *next += time + *pause;
        }
        let (began, mut runs) = (Instant::now(), Vec::new());
        while began.elapsed() < left || runs.is_empty() {
            let start = Instant::now();
            run()?;
            runs.push(start.elapsed().as_secs_f64());
        }
        let seconds = match self {
            Self::Alone => median(&mut runs),
            Self::Together { .. } => began.elapsed().as_secs_f64() / runs.len() as f64,
        };
        Ok(seconds.max(1e-9))
    }
}

/// Bytes of the last cache; 0 where the system does not say.
fn last_cache_bytes() -> usize {
    let size = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size");
    let kib = size.ok().and_then(|text| text.trim().strip_suffix('K')?.parse::<usize>().ok());
    kib.unwrap_or(0) << 10
}

fn measure(threads: usize, mut timing: Timing) -> anyhow::Result<SpeedReport> {
    let isa = Isa::detect().map_err(anyhow::Error::msg)?;
    let most = NodeReport::of_this_machine().memory_free / BEYOND_PART;
    let beyond_caches = (BEYOND_CACHES * last_cache_bytes()).min(most as usize);
    let bytes = BANDWIDTH_BYTES.max(beyond_caches);
    let mut reader = memory::Reader::new(threads, bytes, isa)?;
    let activations = Activations::Auto;
    let mut backend = CpuBackend::new(&CpuConfig::new(threads, isa, activations), Group::solo());
    let format = PackedFormat::Affine { bits: 4, group: 64 };
    let mut subject = Product::new(format, MATRIX, WEIGHT_BYTES.max(beyond_caches), &mut backend)?;
    let mut attention = Attention::new(KvFormat::F16, 1, &mut backend)?;
    let pass_s = timing.seconds(BANDWIDTH_TIME, || {
        reader.pass();
        anyhow::Ok(())
    })?;
    drop(reader);
    let (mut rates, mut jobs_s) = ([[0.0; 2]; ROWS.len()], Vec::new());
    for (rates, rows) in rates.iter_mut().zip(ROWS) {
        let work = subject.begin(&mut backend, (isa, activations), rows)?;
        let seconds = timing.seconds(PRODUCT_TIME, || subject.run(&mut backend, rows))?;
        *rates = [work.bytes, work.operations].map(|amount| amount as f64 / seconds);
        let mut pool = Pool::new(threads, None);
        jobs_s.push(timing.seconds(JOBS_TIME, || {
            (0..JOBS).for_each(|_| pool.run(&|_| ()));
            anyhow::Ok(())
        })?);
    }
    let work = attention.begin(&mut backend, (isa, activations), 1)?;
    let attention_s = timing.seconds(PRODUCT_TIME, || attention.run(&mut backend, 1))?;
    Ok(SpeedReport {
        attention_flops: (work.operations as f64 / attention_s) as u64,
        memory_bytes_s: (bytes as f64 / pass_s) as u64,
        weight_bytes_s: rates[0][0] as u64,
        decode_flops: rates[1][1] as u64,
        prompt_flops: rates[2][1] as u64,
        job_ns: (jobs_s.into_iter().fold(f64::MAX, f64::min) / f64::from(JOBS) * 1e9) as u64,
        gpu: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_a_little_late_ends_with_the_others_and_a_late_one_is_refused_with_a_remedy() {
        let (window, short) = (Duration::from_millis(300), Duration::from_millis(100));
        let begun_ago = |ms, pause| {
            let began = SystemTime::now() - Duration::from_millis(ms);
            let mut timing = Timing::Together { next: began, pause };
            let run = || {
                std::thread::sleep(Duration::from_millis(1));
                anyhow::Ok(())
            };
            timing.seconds(window, run).map(|_| (began, timing))
        };
        let Ok((began, Timing::Together { next, .. })) = begun_ago(36, short) else {
            panic!("36 ms are not much")
        };
        assert_eq!(next, began + window + short);
        // A long pause is no reason to measure after the others.
        for (late, pause) in [(1000, short), (250, Duration::from_secs(1))] {
            let refused = begun_ago(late, pause).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(refused.contains("too busy") && refused.contains("ask again"), "{refused}");
        }
    }
}
