//! Decoding a token allocates nothing.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Barrier;

use thunder_collectives::{Group, TransportChoice, local};
use thunder_compute::{Activations, CpuBackend, CpuConfig, Isa, KvFormat, Step};
use thunder_model::{Capacity, Model, ModelFolder, Parallelism, ShardPlan};
use thunder_testing::allocations::{self, CountingAllocator};
use thunder_testing::builtin_model;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Decodes two sequences from different positions across the end of a block. Returns the
/// allocations of the last steps.
fn decode(group: Group, done: &Barrier, ranks: usize, activations: Activations) -> usize {
    const WARM: usize = 4;
    let folder = ModelFolder::open(&builtin_model()).unwrap();
    let plan = ShardPlan::new(&folder.spec, Parallelism::Tensor, &vec![1.0; ranks]).unwrap();
    let config = CpuConfig::new(2, Isa::detect().unwrap(), activations);
    let rank = group.rank();
    let mut backend = CpuBackend::new(&config, group);
    let capacity = Capacity { rows: 40, logit_rows: 2, kv_blocks: 8, slots: 2, kv_format: KvFormat::F16 };
    let mut model = Model::load(&folder, &plan, rank, capacity, &mut backend, &mut |_, _| {
        std::ops::ControlFlow::Continue(())
    })
    .unwrap();
    let mut step = Step::default();
    let prompt: Vec<u32> = (5..45).collect();
    step.push(&prompt[..27], 0, &[6, 1], 0, true);
    step.push(&prompt[..8], 0, &[3], 1, true);
    model.forward(&mut backend, &step, None).unwrap();
    let mut before = 0;
    for index in 0..WARM + 32 {
        if index == WARM {
            before = allocations::total();
        }
        step.clear();
        step.push(&[7], 27 + index, &[6, 1], 0, true);
        step.push(&[9], 8 + index, &[3, 0], 1, true);
        model.forward(&mut backend, &step, None).unwrap();
    }
    let after = allocations::total();
    assert!(before > 0, "allocations are not counted");
    // A rank allocates when it ends, so all ranks count before any ends.
    done.wait();
    after - before
}

// One test: others in this process would allocate at the same time.
#[test]
fn decoding_allocates_nothing() {
    for activations in
        [Activations::Auto, Activations::Bf16, Activations::Int8, Activations::Int16, Activations::F32]
    {
        assert_eq!(decode(Group::solo(), &Barrier::new(1), 1, activations), 0, "{activations:?}");
    }
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let done = Barrier::new(2);
        let counts = local::run(2, transport, |group| decode(group, &done, 2, Activations::Auto)).unwrap();
        assert_eq!(counts, [0, 0], "over {transport:?}");
    }
}
