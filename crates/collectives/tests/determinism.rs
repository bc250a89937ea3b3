//! The same input gives the same bits: on every rank, in every run, with every algorithm, whatever
//! the delays of the ranks.

#![allow(clippy::unwrap_used, reason = "a test's helpers may panic as its tests do")]

#[path = "common/order.rs"]
mod order;

use half::bf16;
use order::{COUNT, all_runs, expected, expected_of, input, input_of, pause, runs, runs_of};
use thunder_collectives::{Algorithm, CommError, Group, Op, TransportChoice, Wire, local};
use thunder_testing::Random;

#[test]
fn repeated_sums_of_every_algorithm_have_the_bits_of_rank_order() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        for ranks in 2..=5 {
            let done = local::run(ranks, transport, |mut group| order::check(&mut group));
            assert_eq!(done.unwrap().len(), ranks);
        }
    }
}

/// All ranks must have the bits of the ring's order. With more than two ranks these differ from
/// those of rank order.
#[test]
fn repeated_ring_sums_have_the_bits_of_the_rings_order() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        for ranks in 2..=5 {
            let floats = order::ring::<f32>(ranks);
            assert_eq!(floats == expected::<f32>(ranks), ranks == 2, "the order makes no difference");
            let done = local::run(ranks, transport, |mut group| order::check_ring(&mut group));
            assert_eq!(done.unwrap().len(), ranks);
        }
    }
}

/// From 2 MiB on, ranks of a host read each other's memory.
#[test]
fn long_messages_give_the_same_bits() {
    const F32_COUNT: usize = 1_300_003;
    const BF16_COUNT: usize = 1_048_577;
    for ranks in 2..=5 {
        let sums = expected_of::<f32>(F32_COUNT, ranks);
        let bf16_sums = expected_of::<bf16>(BF16_COUNT, ranks);
        let done = local::run(ranks, TransportChoice::Shm, |mut group| {
            let rank = group.rank();
            all_runs(&mut group, &input_of(F32_COUNT, rank), &sums, 5);
            // `OneShot`, as the group would choose.
            let input = input_of(BF16_COUNT, rank);
            runs_of(&mut group, Algorithm::OneShot, &input, &bf16_sums, runs());
        });
        assert_eq!(done.unwrap().len(), ranks);
    }
}

/// A group on several hosts; `host_of[rank]` is a rank's host.
fn on_hosts(host_of: &[usize], work: impl Fn(Group) + Sync) {
    let groups = local::groups_with(host_of.len(), |config| {
        config.host = Some(format!("{} of {}", host_of[config.rank], std::process::id()));
    });
    assert_eq!(local::run_on(groups.unwrap(), work).len(), host_of.len());
}

#[test]
fn hosts_of_several_ranks_give_the_same_bits() {
    for host_of in [&[0, 0, 1, 1][..], &[0, 0, 0, 1], &[0, 1, 1], &[0, 0, 1, 2, 2]] {
        on_hosts(host_of, |mut group| order::check(&mut group));
    }
}

/// If a host's ranks are not consecutive, the hierarchical sum is host by host: 0, 2, then 1, 3.
#[test]
fn scattered_hosts_are_added_host_by_host() {
    let order = [0, 2, 1, 3];
    let inputs = order.map(input::<f32>);
    let by_host: Vec<f32> = (0..COUNT)
        .map(|index| inputs[1..].iter().fold(inputs[0][index], |sum, input| sum + input[index]))
        .collect();
    assert!(by_host != expected::<f32>(4), "the order makes no difference to these inputs");
    on_hosts(&[0, 1, 0, 1], |mut group| {
        group.force_algorithm(Some(Algorithm::Hierarchical));
        for _ in 0..runs() {
            let mut data = input::<f32>(group.rank());
            group.all_reduce(&mut data, Op::Sum).unwrap();
            assert!(data == by_host);
        }
    });
}

/// With int8: the same bits on all ranks and in all runs, and each value's error within the bound
/// of the levels.
#[test]
fn int8_gives_the_same_bits_everywhere_and_a_bounded_error() {
    const BLOCK: usize = 64;
    for ranks in 2..=5 {
        let groups = local::groups_with(ranks, |config| {
            config.transport = TransportChoice::Tcp;
            config.wire = Wire::Int8;
        });
        let exact = expected::<f32>(ranks);
        let inputs: Vec<Vec<f32>> = (0..ranks).map(input).collect();
        // A mesh's blocks begin with its parts, so a block's largest value may be on either side.
        let bound = |index: usize| -> f32 {
            let near = index.saturating_sub(BLOCK)..COUNT.min(index + BLOCK);
            let largest = |values: &[f32]| values[near.clone()].iter().fold(0f32, |a, b| a.max(b.abs()));
            let sent: f32 = inputs.iter().map(|values| largest(values)).sum();
            (2.0 * sent + largest(&exact)) / 254.0 * 1.01
        };
        let results = local::run_on(groups.unwrap(), |mut group| {
            let mut random = Random::new(5 + group.rank() as u64);
            [Algorithm::OneShot, Algorithm::Mesh].map(|algorithm| {
                group.force_algorithm(Some(algorithm));
                let mut results = (0..runs()).map(|_| {
                    pause(&mut random);
                    let mut data = inputs[group.rank()].clone();
                    group.all_reduce(&mut data, Op::Sum).unwrap();
                    data
                });
                let first = results.next().unwrap();
                assert!(results.all(|run| run == first), "{algorithm:?}");
                first
            })
        });
        assert!(results.iter().all(|result| *result == results[0]));
        for result in &results[0] {
            assert!(result != &exact, "nothing was rounded");
            let wrong = (0..COUNT).find(|index| (result[*index] - exact[*index]).abs() > bound(*index));
            assert_eq!(wrong, None, "{ranks} ranks");
        }
    }
}

#[test]
fn ranks_with_different_wire_formats_get_an_error() {
    let groups = local::groups_with(2, |config| {
        config.transport = TransportChoice::Tcp;
        config.wire = if config.rank == 0 { Wire::Exact } else { Wire::Int8 };
    });
    let errors = local::run_on(groups.unwrap(), |mut group| group.all_reduce(&mut [1f32; 4096], Op::Sum));
    assert!(errors.iter().any(|error| matches!(error, Err(CommError::Mismatch { .. }))), "{errors:?}");
}
