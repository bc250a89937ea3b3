//! Measures the arithmetic rate of a kernel that only multiplies and adds.

use std::time::{Duration, Instant};

use thunder_compute::ComputeError;

use crate::adapter::Found;
use crate::device::Device;
use crate::kernel::{FLOATS_OF_ROUND, Kernel, PEAK_THREADS, matrices_of_round};
use crate::series::seconds_of_run;

/// Number of workgroups, enough for every GPU.
const GROUPS: usize = 1024;
/// Minimum time of a run, so that the cost of its submission does not matter.
const LONG: Duration = Duration::from_millis(20);
/// Rounds of the first run, and the maximum.
const ROUNDS: [u32; 2] = [8, 1 << 20];

/// Measures the peak arithmetic of a device, in multiplications and additions per second: of f16
/// matrices with f32 sums if it has those that kernels use, otherwise of f32.
///
/// # Errors
/// If the device cannot be opened or fails.
pub fn peak_arithmetic(found: &Found) -> Result<f64, ComputeError> {
    let mut device = Device::open(found, false)?;
    let (kernel, of_round) = match device.matrix_side {
        Some(side) => (Kernel::PeakMatrices { side }, matrices_of_round(side)),
        None => (Kernel::PeakFloats, FLOATS_OF_ROUND * PEAK_THREADS),
    };
    let out = device.memory(4 * GROUPS * PEAK_THREADS, "results of arithmetic")?;
    let mut run = |rounds: u32| {
        let arguments = [rounds, 0.001f32.to_bits()];
        device.dispatch(&kernel, &[&out], &arguments, [GROUPS as u32, 1, 1])?;
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
    let seconds = seconds_of_run(&found.info.name, Duration::ZERO, [rounds, 2 * rounds], run)?;
    Ok((GROUPS * of_round) as f64 / seconds)
}
