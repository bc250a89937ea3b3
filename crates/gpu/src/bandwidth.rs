//! Measures the memory bandwidth of a kernel that only reads.

use std::time::Duration;

use thunder_compute::ComputeError;

use crate::adapter::Found;
use crate::device::Device;
use crate::kernel::Kernel;
use crate::series::seconds_of_run;

/// Bytes that a run reads, if a binding may be that large. More than any cache holds.
const BYTES: u64 = 1 << 30;
/// The same for a software driver: CPU caches are smaller, and the driver is slow.
const SOFTWARE_BYTES: u64 = 128 << 20;
/// How often a short and a long run read the bytes. Both include the cost of a submission.
const READS: [u32; 2] = [1, 9];
/// Workgroups of 256 threads.
const GROUPS: u32 = 4096;

/// Measures the memory bandwidth of a device, in bytes per second.
///
/// # Errors
/// If the device cannot be opened, or has less than 1 GiB of free memory.
pub fn bandwidth(found: &Found) -> Result<f64, ComputeError> {
    let mut device = Device::open(found, false)?;
    let most = if found.info.is_real() { BYTES } else { SOFTWARE_BYTES };
    let bytes = most.min(device.max_binding_bytes) / 16 * 16;
    let memory = device.memory(bytes as usize, "memory to read")?;
    let sums = device.memory(GROUPS as usize * 256 * 4, "sums of what was read")?;
    let stride = GROUPS * 256;
    let vectors = (bytes / 16) as u32 / (4 * stride) * (4 * stride);
    let mut run = |reads: u32| {
        for _ in 0..reads {
            device.dispatch(&Kernel::ReadAll, &[&memory, &sums], &[vectors, stride], [GROUPS, 1, 1])?;
        }
        device.submit()?;
        device.wait()
    };
    run(1)?;
    Ok(f64::from(vectors) * 16.0 / seconds_of_run(&found.info.name, Duration::ZERO, READS, run)?)
}
