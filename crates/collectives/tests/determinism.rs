//! The same input gives the same bits: on every rank, in every run, with every algorithm, however the ranks are delayed.

#![allow(clippy::unwrap_used, reason = "a test's helpers may panic as its tests do")]

use std::time::{Duration, Instant};

use half::{bf16, f16};
use thunder_collectives::{Algorithm, CommError, Element, Group, Op, TransportChoice, Wire, local};

const RUNS: u64 = 100;
/// Not a multiple of anything, and long enough that every algorithm cuts it into parts.
const COUNT: usize = 3_001;

/// xorshift64*: numbers that look random and are the same in every run.
fn random(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

/// Values of very different size, so that every change of order changes the sum.
fn value(state: &mut u64) -> f32 {
    let mantissa = (random(state) >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
    mantissa * 2f32.powi((random(state) % 24) as i32 - 12)
}

fn input<T>(rank: usize, convert: impl Fn(f32) -> T) -> Vec<T> {
    input_of(COUNT, rank, convert)
}

fn input_of<T>(count: usize, rank: usize, convert: impl Fn(f32) -> T) -> Vec<T> {
    let mut state = 77 + rank as u64;
    (0..count).map(|_| convert(value(&mut state))).collect()
}

fn expected<T: Copy>(ranks: usize, convert: impl Fn(f32) -> T + Copy, back: impl Fn(T) -> f32) -> Vec<T> {
    expected_of(COUNT, ranks, convert, back)
}

/// Sums in rank order, accumulated in f32.
fn expected_of<T: Copy>(
    count: usize,
    ranks: usize,
    convert: impl Fn(f32) -> T + Copy,
    back: impl Fn(T) -> f32,
) -> Vec<T> {
    sums(count, ranks, convert, back, |_| (0..ranks).collect())
}

/// Sums in the order of ranks that an element has, accumulated in f32.
fn sums<T: Copy>(
    count: usize,
    ranks: usize,
    convert: impl Fn(f32) -> T + Copy,
    back: impl Fn(T) -> f32,
    order: impl Fn(usize) -> Vec<usize>,
) -> Vec<T> {
    let inputs: Vec<Vec<T>> = (0..ranks).map(|rank| input_of(count, rank, convert)).collect();
    let sum = |index| order(index).into_iter().map(|rank| back(inputs[rank][index])).reduce(|a, b| a + b);
    (0..count).map(|index| convert(sum(index).unwrap())).collect()
}

/// What a ring makes of it: the first half of the elements goes up the ranks, the other down, each in parts that begin on
/// cache lines, whose sums start at the rank with the part's number.
fn ring<T: Copy>(ranks: usize, convert: impl Fn(f32) -> T + Copy, back: impl Fn(T) -> f32) -> Vec<T> {
    let part = |count: usize, parts: usize| count.div_ceil(parts).next_multiple_of(64 / size_of::<T>());
    let up = if ranks == 2 { COUNT } else { part(COUNT, 2) };
    sums(COUNT, ranks, convert, back, |index| {
        let (at, length) = if index < up { (index, up) } else { (index - up, COUNT - up) };
        let first = at / part(length, ranks);
        let station = (0..ranks).map(|step| (first + step) % ranks);
        if index < up { station.collect() } else { station.map(|station| ranks - 1 - station).collect() }
    })
}

fn pause(state: &mut u64) {
    // Now and then so long that those who wait sleep.
    if random(state).is_multiple_of(64) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let until = Instant::now() + Duration::from_micros(random(state) % 30);
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

fn all_runs<T: Element>(group: &mut Group, input: &[T], expected: &[T], runs: u64) {
    // A ring has its own order.
    for algorithm in Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != Algorithm::Ring) {
        runs_of(group, algorithm, input, expected, runs);
    }
}

fn runs_of<T: Element>(group: &mut Group, algorithm: Algorithm, input: &[T], expected: &[T], runs: u64) {
    let rank = group.rank() as u64;
    group.force_algorithm(Some(algorithm));
    let mut state = 1 + rank;
    for run in 0..runs {
        pause(&mut state);
        let mut data = input.to_vec();
        group.all_reduce(&mut data, Op::Sum).unwrap();
        assert!(data == expected, "{algorithm:?}, rank {rank}, run {run}");
    }
}

#[test]
fn hundred_runs_of_every_algorithm_give_the_bits_of_the_sum_in_rank_order() {
    for (transport, runs) in [(TransportChoice::Shm, RUNS), (TransportChoice::Tcp, RUNS)] {
        for ranks in 2..=5 {
            let done = local::run(ranks, transport, |mut group| {
                let rank = group.rank();
                all_runs(&mut group, &input(rank, |v| v), &expected(ranks, |v| v, |v| v), runs);
                let halves = expected(ranks, bf16::from_f32, bf16::to_f32);
                all_runs(&mut group, &input(rank, bf16::from_f32), &halves, runs / 10);
                let halves = expected(ranks, f16::from_f32, f16::to_f32);
                all_runs(&mut group, &input(rank, f16::from_f32), &halves, runs / 10);
            });
            assert_eq!(done.unwrap().len(), ranks);
        }
    }
}

/// All ranks must have the bits of the ring's order, which for more than two ranks are not those of rank order.
#[test]
fn hundred_runs_of_a_ring_give_the_bits_of_its_order() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        for ranks in 2..=5 {
            let floats = ring(ranks, |v| v, |v| v);
            assert_eq!(floats == expected(ranks, |v| v, |v| v), ranks == 2, "the order makes no difference");
            let bf16s = ring(ranks, bf16::from_f32, bf16::to_f32);
            let f16s = ring(ranks, f16::from_f32, f16::to_f32);
            local::run(ranks, transport, |mut group| {
                let rank = group.rank();
                runs_of(&mut group, Algorithm::Ring, &input(rank, |v| v), &floats, RUNS);
                runs_of(&mut group, Algorithm::Ring, &input(rank, bf16::from_f32), &bf16s, RUNS);
                runs_of(&mut group, Algorithm::Ring, &input(rank, f16::from_f32), &f16s, RUNS);
            })
            .unwrap();
        }
    }
}

/// From 2 MiB on, ranks of a host read each other's memory.
#[test]
fn long_messages_give_the_same_bits() {
    const FLOATS: usize = 1_300_003;
    const HALVES: usize = 1_048_577;
    for ranks in 2..=5 {
        let sums = expected_of(FLOATS, ranks, |v| v, |v| v);
        let halves = expected_of(HALVES, ranks, bf16::from_f32, bf16::to_f32);
        let done = local::run(ranks, TransportChoice::Shm, |mut group| {
            let rank = group.rank();
            all_runs(&mut group, &input_of(FLOATS, rank, |v| v), &sums, 5);
            all_runs(&mut group, &input_of(HALVES, rank, bf16::from_f32), &halves, 5);
        });
        assert_eq!(done.unwrap().len(), ranks);
    }
}

/// Ranks on two hosts, each of which has several.
fn on_hosts(host_of: &[usize], work: impl Fn(Group) + Sync) {
    let groups = local::groups_with(host_of.len(), |config| {
        config.host = Some(format!("{} of {}", host_of[config.rank], std::process::id()));
    });
    assert_eq!(local::run_on(groups.unwrap(), work).len(), host_of.len());
}

#[test]
fn hosts_of_several_ranks_give_the_same_bits() {
    for host_of in [&[0, 0, 1, 1][..], &[0, 0, 0, 1], &[0, 1, 1], &[0, 0, 1, 2, 2]] {
        on_hosts(host_of, |mut group| {
            let (rank, ranks) = (group.rank(), host_of.len());
            all_runs(&mut group, &input(rank, |v| v), &expected(ranks, |v| v, |v| v), RUNS);
            let halves = expected(ranks, bf16::from_f32, bf16::to_f32);
            all_runs(&mut group, &input(rank, bf16::from_f32), &halves, RUNS / 10);
            let halves = expected(ranks, f16::from_f32, f16::to_f32);
            all_runs(&mut group, &input(rank, f16::from_f32), &halves, RUNS / 10);
        });
    }
}

/// Where a host's ranks are not consecutive, the hierarchical sum goes host by host: 0, 2, then 1, 3.
#[test]
fn scattered_hosts_are_added_host_by_host() {
    let order = [0, 2, 1, 3];
    let inputs = order.map(|rank| input(rank, |v| v));
    let by_host: Vec<f32> = (0..COUNT)
        .map(|index| inputs[1..].iter().fold(inputs[0][index], |sum, input| sum + input[index]))
        .collect();
    assert!(by_host != expected(4, |v| v, |v| v), "the order makes no difference to these inputs");
    on_hosts(&[0, 1, 0, 1], |mut group| {
        group.force_algorithm(Some(Algorithm::Hierarchical));
        for _ in 0..RUNS {
            let mut data = input(group.rank(), |v| v);
            group.all_reduce(&mut data, Op::Sum).unwrap();
            assert!(data == by_host);
        }
    });
}

/// In 8 bits: the same bits on all ranks and in all runs, each value off by no more than the levels allow.
#[test]
fn eight_bits_on_the_wire_give_the_same_bits_everywhere_and_a_bounded_error() {
    const BLOCK: usize = 64;
    for ranks in 2..=4 {
        let groups = local::groups_with(ranks, |config| {
            config.transport = TransportChoice::Tcp;
            config.wire = Wire::Int8;
        });
        let exact = expected(ranks, |v| v, |v| v);
        let inputs: Vec<Vec<f32>> = (0..ranks).map(|rank| input(rank, |v| v)).collect();
        // Blocks of a mesh begin with its parts, so a block's largest value is looked for on both sides.
        let bound = |index: usize| -> f32 {
            let near = index.saturating_sub(BLOCK)..COUNT.min(index + BLOCK);
            let largest = |values: &[f32]| values[near.clone()].iter().fold(0f32, |a, b| a.max(b.abs()));
            let sent: f32 = inputs.iter().map(|values| largest(values)).sum();
            (2.0 * sent + largest(&exact)) / 254.0 * 1.01
        };
        let results = local::run_on(groups.unwrap(), |mut group| {
            let mut state = 5 + group.rank() as u64;
            [Algorithm::OneShot, Algorithm::Mesh].map(|algorithm| {
                group.force_algorithm(Some(algorithm));
                let mut runs = (0..RUNS).map(|_| {
                    pause(&mut state);
                    let mut data = inputs[group.rank()].clone();
                    group.all_reduce(&mut data, Op::Sum).unwrap();
                    data
                });
                let first = runs.next().unwrap();
                assert!(runs.all(|run| run == first), "{algorithm:?}");
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
fn ranks_with_different_wire_formats_are_told() {
    let groups = local::groups_with(2, |config| {
        config.transport = TransportChoice::Tcp;
        config.wire = if config.rank == 0 { Wire::Exact } else { Wire::Int8 };
    });
    let errors = local::run_on(groups.unwrap(), |mut group| group.all_reduce(&mut [1f32; 4096], Op::Sum));
    assert!(errors.iter().any(|error| matches!(error, Err(CommError::Mismatch { .. }))), "{errors:?}");
}
