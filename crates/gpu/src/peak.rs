//! Measures the rate of each arithmetic with kernels that only multiply and add.

use std::time::{Duration, Instant};

use thunder_compute::ComputeError;

use crate::adapter::Found;
use crate::device::Device;
use crate::kernel::{BYTES_OF_ROUND, FLOATS_OF_ROUND, Kernel, PEAK_THREADS, matrices_of_round};
use crate::series::seconds_of_run;

/// Number of workgroups, enough for every GPU.
const GROUPS: usize = 1024;
/// Minimum time of a run, so that the cost of its submission does not matter.
const LONG: Duration = Duration::from_millis(20);
/// Rounds of the first run, and the maximum.
const ROUNDS: [u32; 2] = [8, 1 << 20];

/// What a kernel multiplies and adds with, the slowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum GpuArithmetic {
    /// Multiply-adds of f32.
    #[default]
    Floats,
    /// Dot products of four bytes, summed in integers: products of generated tokens with quantized
    /// weights. Those of batches may use matrices of bytes, which are faster.
    Bytes,
    /// Cooperative matrices of f16 with sums in f32: products and attention of prompts.
    Matrices,
}

impl GpuArithmetic {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Floats => "f32",
            Self::Bytes => "bytes",
            Self::Matrices => "f16 matrices",
        }
    }
}

/// Measures the peaks of a device, in multiplications and additions per second, of each arithmetic
/// that its kernels use.
///
/// # Errors
/// If the device cannot be opened or fails.
pub fn peak_arithmetic(found: &Found) -> Result<Vec<(GpuArithmetic, f64)>, ComputeError> {
    let mut device = Device::open(found, false)?;
    let mut all = vec![
        (GpuArithmetic::Floats, Kernel::PeakFloats, FLOATS_OF_ROUND * PEAK_THREADS),
        (GpuArithmetic::Bytes, Kernel::PeakBytes, BYTES_OF_ROUND * PEAK_THREADS),
    ];
    if let Some(side) = device.matrix_side {
        all.push((GpuArithmetic::Matrices, Kernel::PeakMatrices { side }, matrices_of_round(side)));
    }
    let rates = all.into_iter().map(|(arithmetic, kernel, of_round)| {
        let rounds_per_s = rounds_per_s(&mut device, &found.info.name, &kernel)?;
        Ok((arithmetic, (GROUPS * of_round) as f64 * rounds_per_s))
    });
    rates.collect()
}

fn rounds_per_s(device: &mut Device, name: &str, kernel: &Kernel) -> Result<f64, ComputeError> {
    let out = device.memory(4 * GROUPS * PEAK_THREADS, "results of arithmetic")?;
    let mut run = |rounds: u32| {
        let arguments = [rounds, 0.001f32.to_bits()];
        device.dispatch(kernel, &[&out], &arguments, [GROUPS as u32, 1, 1])?;
        device.submit()?;
        device.wait()
    };
    let mut rounds = ROUNDS[0];
    loop {
        let start = Instant::now();
        run(rounds)?;
        if rounds >= ROUNDS[1] || start.elapsed() >= LONG {
            break;
        }
        rounds *= 2;
    }
    Ok(1.0 / seconds_of_run(name, Duration::ZERO, [rounds, 2 * rounds], run)?)
}
