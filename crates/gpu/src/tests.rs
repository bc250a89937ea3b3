//! Tests on a software driver (Mesa's llvmpipe), or on the GPU that `THUNDER_TEST_GPU` numbers.

mod conformance;
mod families;
mod refusals;
mod translation;

use thunder_collectives::Group;
use thunder_compute::Activations;

use crate::{Found, GpuBackend, GpuConfig};

/// The device to test on. Notes a skipped test if there is none.
pub(super) fn device(test: &str) -> Option<Found> {
    let mut devices = crate::devices();
    let wanted = std::env::var("THUNDER_TEST_GPU").ok().and_then(|number| number.parse::<usize>().ok());
    let number = wanted.or_else(|| devices.iter().position(|found| !found.info.is_real()));
    match number.filter(|number| *number < devices.len()) {
        Some(number) => Some(devices.swap_remove(number)),
        None => {
            thunder_testing::skip(
                test,
                "no software Vulkan driver: apt-get install mesa-vulkan-drivers libvulkan1",
            );
            None
        }
    }
}

pub(super) fn backend(found: &Found, activations: Activations, group: Group) -> GpuBackend {
    let config = GpuConfig { activations, ..GpuConfig::default() };
    GpuBackend::new(found, config, group).unwrap()
}
