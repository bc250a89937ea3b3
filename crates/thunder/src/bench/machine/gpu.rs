//! What the placement of models has to know of a GPU.

use std::time::{Duration, Instant};

use anyhow::Context;
use thunder_collectives::Group;
use thunder_compute::{Activations, ComputeError, Isa, PackedFormat};
use thunder_engine::assembly::device::{DeviceChoice, first_gpu, first_step_rows, gpu_of_turn};
use thunder_gpu::{Found, GpuBackend, GpuConfig, HostWay, host_ways, pair_ways, seconds_of_run};
use thunder_node::report::{GpuReport, HostWayReport};

use super::operations::{Norm, Product, Subject};

const WEIGHTS: PackedFormat = PackedFormat::Affine { bits: 4, group: 64 };
/// Time of the longer of two series whose difference tells a run's time, and its most runs.
const SERIES: Duration = Duration::from_millis(60);
const MOST_RUNS: u32 = 64;
/// Kernels of a product with a norm: levels are made of its input first.
const KERNELS_OF_NORM: f64 = 2.0;
/// Times that a step without a step ahead of it is timed.
const STEPS: usize = 15;

/// Sizes of what is measured.
struct Sizes {
    /// Outputs and inputs of the smaller and of the larger matrix. What a larger one takes more is
    /// reading: the rest is the same.
    matrices: [[usize; 2]; 2],
    /// Bytes of all matrices of a shape: more than a cache holds.
    bytes: usize,
    /// Rows of a prompt.
    prompt: usize,
}

/// Matrices of an 8B model and half a gigabyte of them.
const OF_A_GPU: Sizes = Sizes { matrices: [[8192, 2048], [16384, 4096]], bytes: 256 << 20, prompt: 512 };
/// A software driver is as slow as a core or two, and only for tests.
const OF_SOFTWARE: Sizes = Sizes { matrices: [[1024, 1024], [4096, 1024]], bytes: 8 << 20, prompt: 64 };

/// Measures the GPU that a first rank here takes; `None` if it takes the processor.
pub fn measure(choice: DeviceChoice) -> anyhow::Result<Option<GpuReport>> {
    let Some(found) = first_gpu(choice).map_err(anyhow::Error::msg)? else { return Ok(None) };
    let measured = measure_found(&found, choice);
    measured
        .with_context(|| {
            format!(
                "gpu:{} ({}) cannot be measured; THUNDER_DEVICE=cpu in the agent's environment leaves it out",
                found.info.number, found.info.name
            )
        })
        .map(Some)
}

fn measure_found(found: &Found, choice: DeviceChoice) -> anyhow::Result<GpuReport> {
    let sizes = if found.info.is_real() { OF_A_GPU } else { OF_SOFTWARE };
    let name = &found.info.name;
    let memory_bytes_s = thunder_gpu::bandwidth(found)?;
    // Operands are freed before the next ones are made.
    let of_product = |shape, rows: &[usize]| -> anyhow::Result<(usize, Vec<f64>)> {
        let mut backend = opened(found)?;
        let mut subject = Product::new(WEIGHTS, shape, sizes.bytes, &mut backend)?;
        let mut bytes = 0;
        let mut times = Vec::new();
        for rows in rows {
            let work = subject.begin(&mut backend, (Isa::Portable, Activations::Auto), *rows)?;
            let seconds = seconds(name, &mut backend, &mut subject, *rows)?;
            bytes = work.bytes;
            times.push(if *rows == 1 { seconds } else { work.operations as f64 / seconds });
        }
        Ok((bytes, times))
    };
    let (small_bytes, small) = of_product(sizes.matrices[0], &[1, sizes.prompt])?;
    let (large_bytes, large) = of_product(sizes.matrices[1], &[1, 16])?;
    let weight_bytes_s = (large_bytes - small_bytes) as f64 / (large[0] - small[0]).max(1e-9);
    let mut backend = opened(found)?;
    let mut norm = Norm::new(&mut backend)?;
    norm.begin(&mut backend, (Isa::Portable, Activations::Auto), 1)?;
    let norm_s = seconds(name, &mut backend, &mut norm, 1)?;
    let step_s = step_seconds(&mut backend, &mut norm)?;
    drop((norm, backend));
    let (in_queue, by_host) = host_ways(found)?;
    let of_pair = pair_ways(&others(found, choice))?;
    let nanos = |seconds: f64| (seconds * 1e9) as u64;
    let way = |way: HostWay| HostWayReport { latency_ns: nanos(way.latency_s), bytes_s: way.bytes_s as u64 };
    Ok(GpuReport {
        number: found.info.number as u32,
        name: found.info.name.clone(),
        count: match choice {
            DeviceChoice::Numbered(_) => 1,
            _ => thunder_gpu::real_count() as u32,
        },
        has_own_memory: found.info.has_own_memory(),
        memory_bytes: found.info.memory_bytes.unwrap_or(0),
        step_rows: first_step_rows(choice).map_err(anyhow::Error::msg)? as u32,
        memory_bytes_s: memory_bytes_s as u64,
        // Caches may hold what is read; memory gives no more than its bandwidth.
        weight_bytes_s: weight_bytes_s.min(memory_bytes_s) as u64,
        decode_flops: large[1] as u64,
        prompt_flops: small[1] as u64,
        kernel_ns: nanos(norm_s / KERNELS_OF_NORM),
        submit_ns: nanos((step_s - norm_s).max(0.0)),
        queue_way: in_queue.map(way),
        host_way: way(by_host),
        relay_way: of_pair.map(|pair| way(pair.relayed)),
        pieces_way: of_pair.and_then(|pair| pair.pieces).map(way),
        largest_buffer: found.info.max_binding_bytes,
        other_states: thunder_gpu::OTHER_STATES as u32,
        expert_bytes: thunder_gpu::EXPERT_BYTES,
    })
}

/// A GPU and another one that ranks take next to it; fewer if there is none.
fn others(found: &Found, choice: DeviceChoice) -> Vec<Found> {
    let is_numbered = matches!(choice, DeviceChoice::Numbered(_));
    let turns = if is_numbered || !found.info.is_real() { 0 } else { thunder_gpu::real_count().min(2) };
    (0..turns).filter_map(|turn| gpu_of_turn(choice, turn).ok().flatten()).collect()
}

fn opened(found: &Found) -> Result<GpuBackend, ComputeError> {
    let config = GpuConfig { remembers: true, ..GpuConfig::default() };
    GpuBackend::new(found, config, Group::solo())
}

/// Seconds of a run among others, without a wait of the host.
fn seconds(
    device: &str,
    backend: &mut GpuBackend,
    subject: &mut impl Subject<GpuBackend>,
    rows: usize,
) -> Result<f64, ComputeError> {
    let mut series = |runs| subject.series(backend, rows, runs);
    // The first one compiles kernels and proves them.
    series(1)?;
    let began = Instant::now();
    series(1)?;
    let many = SERIES.as_secs_f64() / began.elapsed().as_secs_f64().max(1e-9);
    let many = (many as u32).clamp(2, MOST_RUNS);
    seconds_of_run(device, Duration::ZERO, [(many / 4).max(1), many], series)
}

/// Median seconds of a run that the host submits alone, and whose result it reads.
fn step_seconds(
    backend: &mut GpuBackend,
    subject: &mut impl Subject<GpuBackend>,
) -> Result<f64, ComputeError> {
    let mut times = Vec::new();
    for _ in 0..STEPS {
        let began = Instant::now();
        subject.series(backend, 1, 1)?;
        times.push(began.elapsed().as_secs_f64());
    }
    Ok(thunder_compute::cpu::measure::arithmetic::median(&mut times))
}
