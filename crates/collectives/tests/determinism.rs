//! The same input gives the same bits: on every rank, in every run, with every algorithm, however the ranks are delayed.

#![allow(clippy::unwrap_used, reason = "a test's helpers may panic as its tests do")]

use std::time::{Duration, Instant};

use half::{bf16, f16};
use thunder_collectives::{Algorithm, Element, Group, Op, TransportChoice, local};

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
    let mut state = 77 + rank as u64;
    (0..COUNT).map(|_| convert(value(&mut state))).collect()
}

/// Sums in rank order, accumulated in f32.
fn expected<T: Copy>(ranks: usize, convert: impl Fn(f32) -> T + Copy, back: impl Fn(T) -> f32) -> Vec<T> {
    let inputs: Vec<Vec<T>> = (0..ranks).map(|rank| input(rank, convert)).collect();
    (0..COUNT)
        .map(|index| {
            let sum = inputs[1..].iter().fold(back(inputs[0][index]), |sum, input| sum + back(input[index]));
            convert(sum)
        })
        .collect()
}

fn pause(state: &mut u64) {
    let until = Instant::now() + Duration::from_micros(random(state) % 30);
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

fn all_runs<T: Element>(group: &mut Group, input: &[T], expected: &[T], runs: u64) {
    let rank = group.rank() as u64;
    for algorithm in Algorithm::ALL {
        group.force_algorithm(Some(algorithm));
        let mut state = 1 + rank;
        for run in 0..runs {
            pause(&mut state);
            let mut data = input.to_vec();
            group.all_reduce(&mut data, Op::Sum).unwrap();
            assert!(data == expected, "{algorithm:?}, rank {rank}, run {run}");
        }
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
