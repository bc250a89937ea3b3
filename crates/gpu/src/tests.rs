//! Tests on a software driver (Mesa's llvmpipe), or on the GPU that `THUNDER_TEST_GPU` numbers.

mod attention;
mod attention_speed;
mod attention_stages;
mod batch;
mod conformance;
mod families;
mod following;
mod latency;
mod latent;
mod leaving;
mod loads;
mod matrices;
mod pairs;
mod recording;
mod refusals;
mod speed;
mod stress;
mod sums;
mod switching;
mod translation;

use thunder_collectives::Group;
use thunder_compute::Activations;

use crate::{Found, GpuBackend, GpuConfig, Mailboxes, SumForm};

/// The device to test on. Reports a skipped test if there is none.
pub(crate) fn device(test: &str) -> Option<Found> {
    let found = crate::for_tests();
    if found.is_none() {
        thunder_testing::skip(test, thunder_testing::NO_VULKAN);
    }
    found
}

/// Devices for `count` ranks, some of which wait for others within a kernel. A software driver
/// serves all ranks with separate threads; real GPUs must be one for each rank, otherwise `None`.
pub(super) fn devices_apart(found: &Found, count: usize) -> Option<Vec<Found>> {
    match found.info.is_real() {
        false => (0..count).map(|_| crate::for_tests()).collect(),
        true if count == 1 => Some(vec![found.clone()]),
        true if count > crate::real_count() => None,
        true => (0..count).map(|turn| crate::real(turn).ok()).collect(),
    }
}

/// The same, of the test device. Reports a skipped test if there is none.
pub(crate) fn devices(test: &str, count: usize) -> Option<Vec<Found>> {
    devices_apart(&device(test)?, count)
}

/// A rank whose device sums with those of all other ranks, through their hosts.
pub(crate) fn relaying(found: &Found, activations: Activations, group: Group) -> GpuBackend {
    exchanging(found, SumForm::Relay, activations, group)
}

/// A rank whose device exchanges sums within its submissions in this form, and so do all others.
pub(crate) fn exchanging(found: &Found, form: SumForm, activations: Activations, group: Group) -> GpuBackend {
    let mailboxes = if form == SumForm::Relay { Mailboxes::Always } else { Mailboxes::Host };
    let config = GpuConfig { activations, mailboxes, peers: true, ..GpuConfig::default() };
    let backend = GpuBackend::new(found, config, group).unwrap();
    assert_eq!(backend.sum_form(), form);
    backend
}

pub(super) fn backend(found: &Found, activations: Activations, group: Group) -> GpuBackend {
    let config = GpuConfig { activations, ..GpuConfig::default() };
    GpuBackend::new(found, config, group).unwrap()
}
