//! The GPU backend: [`thunder_compute::Backend`] on `wgpu`, with kernels in WGSL, for Vulkan and
//! Metal.
//!
//! A step's operations are recorded and submitted where the host needs their results. Before a
//! kernel form is used it is run on small data and compared with the CPU's reference, so a form
//! that a driver computes wrongly is refused and not used.
//!
//! Without a Vulkan loader or a driver there is simply no device:
//!
//! ```
//! for found in thunder_gpu::devices() {
//!     println!("gpu:{} {}", found.info.number, found.info.name);
//! }
//! ```

mod adapter;
mod ahead;
mod backend;
mod bandwidth;
mod buffer;
mod caches;
mod device;
mod follow;
mod format;
mod kernel;
mod mailbox;
mod matrix;
mod memory;
mod operations;
mod peak;
mod pieces;
mod profile;
mod proof;
mod relay;
mod series;
mod slots;
mod spirv;
mod sums;
#[cfg(test)]
mod tests;
mod wait;
mod without;

pub use adapter::{ChoiceError, DeviceInfo, Found, devices, for_tests, numbered, real, real_count};
pub use backend::{GpuBackend, GpuConfig};
pub use bandwidth::bandwidth;
pub use buffer::{Buffer, Vector};
pub use caches::Caches;
pub use mailbox::{ExchangeForm, ExchangeTime, HostWay, exchange_times, host_ways};
pub use matrix::Matrix;
pub use operations::experts::Experts;
pub use operations::offers;
pub use operations::pairs::EXPERT_BYTES;
pub use peak::{GpuArithmetic, peak_arithmetic};
pub use profile::{KernelTime, Profile, start_profile, take_profile};
pub use relay::{PairWays, pair_ways};
pub use series::seconds_of_run;
pub use slots::OTHER_STATES;
pub use sums::{Mailboxes, SumForm};
pub use wait::Cores;
