//! Sums whose bits tell in which order they were added, over and over with random delays.

use std::time::{Duration, Instant};

use half::{bf16, f16};
use thunder_collectives::{Algorithm, Element, Group, Op};

pub const RUNS: u64 = 100;
/// Not a multiple of anything, and long enough that every algorithm cuts it into parts.
pub const COUNT: usize = 3_001;

/// xorshift64*: numbers that look random and are the same in every run.
pub fn random(state: &mut u64) -> u64 {
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

pub fn input<T>(rank: usize, convert: impl Fn(f32) -> T) -> Vec<T> {
    input_of(COUNT, rank, convert)
}

pub fn input_of<T>(count: usize, rank: usize, convert: impl Fn(f32) -> T) -> Vec<T> {
    let mut state = 77 + rank as u64;
    (0..count).map(|_| convert(value(&mut state))).collect()
}

pub fn expected<T: Copy>(ranks: usize, convert: impl Fn(f32) -> T + Copy, back: impl Fn(T) -> f32) -> Vec<T> {
    expected_of(COUNT, ranks, convert, back)
}

/// Sums in rank order, accumulated in f32.
pub fn expected_of<T: Copy>(
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
pub fn ring<T: Copy>(ranks: usize, convert: impl Fn(f32) -> T + Copy, back: impl Fn(T) -> f32) -> Vec<T> {
    let part = |count: usize, parts: usize| count.div_ceil(parts).next_multiple_of(64 / size_of::<T>());
    let up = if ranks == 2 { COUNT } else { part(COUNT, 2) };
    sums(COUNT, ranks, convert, back, |index| {
        let (at, length) = if index < up { (index, up) } else { (index - up, COUNT - up) };
        let first = at / part(length, ranks);
        let station = (0..ranks).map(|step| (first + step) % ranks);
        if index < up { station.collect() } else { station.map(|station| ranks - 1 - station).collect() }
    })
}

pub fn pause(state: &mut u64) {
    // Now and then so long that those who wait sleep.
    if random(state).is_multiple_of(64) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let until = Instant::now() + Duration::from_micros(random(state) % 30);
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

pub fn all_runs<T: Element>(group: &mut Group, input: &[T], expected: &[T], runs: u64) {
    // A ring has its own order.
    for algorithm in Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != Algorithm::Ring) {
        runs_of(group, algorithm, input, expected, runs);
    }
}

pub fn runs_of<T: Element>(group: &mut Group, algorithm: Algorithm, input: &[T], expected: &[T], runs: u64) {
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

/// Every algorithm in every type of float, often.
pub fn check(group: &mut Group) {
    let (rank, ranks) = (group.rank(), group.size());
    all_runs(group, &input(rank, |v| v), &expected(ranks, |v| v, |v| v), RUNS);
    let halves = expected(ranks, bf16::from_f32, bf16::to_f32);
    all_runs(group, &input(rank, bf16::from_f32), &halves, RUNS);
    let halves = expected(ranks, f16::from_f32, f16::to_f32);
    all_runs(group, &input(rank, f16::from_f32), &halves, RUNS);
}

/// A ring in every type of float, often.
pub fn check_ring(group: &mut Group) {
    let (rank, ranks) = (group.rank(), group.size());
    runs_of(group, Algorithm::Ring, &input(rank, |v| v), &ring(ranks, |v| v, |v| v), RUNS);
    let halves = ring(ranks, bf16::from_f32, bf16::to_f32);
    runs_of(group, Algorithm::Ring, &input(rank, bf16::from_f32), &halves, RUNS);
    let halves = ring(ranks, f16::from_f32, f16::to_f32);
    runs_of(group, Algorithm::Ring, &input(rank, f16::from_f32), &halves, RUNS);
}
