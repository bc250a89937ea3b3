//! The public conformance suite.

use thunder_collectives::{Group, TransportChoice, local};
use thunder_compute::{Activations, conformance};

use super::{backend, device, devices_apart};
use crate::{GpuBackend, GpuConfig, Mailboxes};
use conformance::Limits;

/// f32 activations. The limits are the cost of an f16 or int8 cache.
const F32: Limits = Limits {
    float_products: 1e-5,
    quantized_products: 1e-5,
    attention: 1e-3,
    attention_int8: 1.5e-2,
    rows: 1e-5,
};

/// The cost of 8-bit activations.
const BYTES: Limits = Limits { quantized_products: 2e-2, ..F32 };

/// The cost of f16 activations and weights in prompts, where cooperative matrices multiply them.
const HALVES: Limits = Limits { float_products: 1e-3, ..BYTES };

#[test]
fn f32_activations_conform() {
    let Some(found) = device("f32_activations_conform") else { return };
    let report = conformance::run(&mut backend(&found, Activations::F32, Group::solo()), &F32);
    assert!(report.failures.is_empty(), "{report}");
    assert!(report.compared > 300, "only {} results were compared", report.compared);
}

#[test]
fn bytes_conform() {
    let Some(found) = device("bytes_conform") else { return };
    // The suite takes a minute on Mesa's software driver. What only `int8` adds is bytes in gated
    // products.
    let all = [Activations::Auto, Activations::Int8];
    for &activations in if thunder_testing::is_long() { &all[..] } else { &all[..1] } {
        let mut backend = backend(&found, activations, Group::solo());
        let limits = if found.matrix_side().is_some() { &HALVES } else { &BYTES };
        let report = conformance::run(&mut backend, limits);
        let (kernels, time) = backend.device.compiled;
        println!("{activations:?}: {kernels} kernels were compiled in {time:.1?}");
        assert!(backend.refusals().is_empty(), "{:?}", backend.refusals());
        assert!(report.failures.is_empty(), "{activations:?}: {report}");
    }
}

#[test]
fn sums_over_ranks_conform() {
    let Some(found) = device("sums_over_ranks_conform") else { return };
    for ranks in if thunder_testing::is_long() { 1..4 } else { 3..4 } {
        let apart = devices_apart(&found, ranks);
        let reports = local::run(ranks, TransportChoice::Shm, |mut group| {
            let own = group.split(0, group.rank() as u32).unwrap();
            // Some ranks sum in mailboxes, others do not. None do if they share a GPU.
            let has_mailbox = group.rank() % 2 == 0 && apart.is_some();
            let found = apart.as_ref().map_or(&found, |devices| &devices[group.rank()]);
            let mailboxes = if has_mailbox { Mailboxes::Always } else { Mailboxes::Never };
            let config = GpuConfig { activations: Activations::F32, mailboxes, ..GpuConfig::default() };
            let mut backend = GpuBackend::new(found, config, own).unwrap();
            conformance::run_on_rank(&mut backend, group, &F32)
        });
        for report in reports.unwrap() {
            assert!(report.failures.is_empty(), "{ranks} ranks: {report}");
        }
    }
}
