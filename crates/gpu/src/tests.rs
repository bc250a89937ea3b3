//! Tests on a software driver (Mesa's llvmpipe), or on the GPU that `THUNDER_TEST_GPU` numbers.

mod attention;
mod attention_speed;
mod conformance;
mod families;
mod following;
mod latency;
mod matrices;
mod recording;
mod refusals;
mod speed;
mod stress;
mod sums;
mod translation;

use thunder_collectives::Group;
use thunder_compute::Activations;

use crate::{Found, GpuBackend, GpuConfig};

/// The device to test on. Notes a skipped test if there is none.
pub(crate) fn device(test: &str) -> Option<Found> {
    let found = crate::for_tests();
    if found.is_none() {
        thunder_testing::skip(test, thunder_testing::NO_VULKAN);
    }
    found
}

pub(super) fn backend(found: &Found, activations: Activations, group: Group) -> GpuBackend {
    let config = GpuConfig { activations, ..GpuConfig::default() };
    GpuBackend::new(found, config, group).unwrap()
}
