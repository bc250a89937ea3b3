//! The public conformance suite on this CPU's instruction sets, and on the reference itself.

use thunder_collectives::{TransportChoice, local};

use super::*;
use crate::conformance::{self, Limits};
use crate::reference::Reference;

/// The cost of int8 activations and bf16 prompts.
const INT8: Limits = Limits {
    float_products: 4e-3,
    quantized_products: 2e-2,
    attention: 1e-2,
    attention_int8: 2e-2,
    rows: 1e-5,
};

/// f32 activations. The limits are the cost of an f16 cache, an int8 cache and integer scales of
/// weights.
const F32: Limits = Limits {
    float_products: 1e-5,
    quantized_products: 6e-4,
    attention: 1e-3,
    attention_int8: 1.5e-2,
    rows: 1e-5,
};

#[test]
fn the_reference_conforms_to_itself() {
    let report = conformance::run(&mut Reference::new(Group::solo()), &Limits::EXACT);
    assert!(report.failures.is_empty(), "{report}");
    assert!(report.compared > 300, "only {} results were compared", report.compared);
}

#[test]
fn every_instruction_set_conforms() {
    for isa in Isa::available() {
        for (activations, limits) in
            [(Activations::F32, F32), (Activations::Auto, INT8), (Activations::Bf16, INT8)]
        {
            let report = conformance::run(&mut backend(isa, 2, activations), &limits);
            assert!(report.failures.is_empty(), "{activations:?} on {}: {report}", isa.name());
        }
    }
}

#[test]
fn sums_over_ranks_conform() {
    for ranks in [1, 2, 3] {
        let reports = local::run(ranks, TransportChoice::Shm, |mut group| {
            let own = group.split(0, group.rank() as u32).unwrap();
            let isa = *Isa::available().last().unwrap();
            let config = CpuConfig { overlap: Overlap::Always, ..CpuConfig::new(1, isa, Activations::F32) };
            conformance::run_on_rank(&mut CpuBackend::new(&config, own), group, &F32)
        });
        for report in reports.unwrap() {
            assert!(report.failures.is_empty(), "{ranks} ranks: {report}");
        }
    }
}

/// Rounding of int8 activations and f16 caches is too coarse for exact limits, so the tests must
/// detect it in each group of operations.
#[test]
fn a_wrong_backend_does_not_conform() {
    let coarse = Limits { rows: 0.0, attention: 0.0, ..Limits::EXACT };
    let report = conformance::run(&mut backend(Isa::Portable, 1, Activations::Auto), &coarse);
    let failed = |what: &str| report.failures.iter().any(|failure| failure.case.starts_with(what));
    for what in ["linear", "gated product", "attention", "latent attention", "delta rule"] {
        assert!(failed(what), "int8 activations and f16 caches pass for exact in {what:?}");
    }
}
