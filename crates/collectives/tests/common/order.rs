//! Sums whose bits show the order in which they were added, repeated with random delays.

use std::ops::Add;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use thunder_collectives::{Algorithm, Element, Group, Op};
use thunder_testing::Random;

/// Repetitions of each sum: 100 with `./test --long`. The emulated machine of tools/rdma-vm is ten
/// times as slow.
pub fn runs() -> u64 {
    let short = if std::env::var_os("RDMA_LINKS").is_some() { 10 } else { 20 };
    thunder_testing::runs(short, 100) as u64
}

/// Not a multiple of any block length, and long enough that every algorithm cuts it into parts.
pub const COUNT: usize = 3_001;

/// Values of very different magnitudes, so that every change of order changes the sum.
fn value(random: &mut Random) -> f32 {
    random.float() * 2f32.powi(random.below(24) as i32 - 12)
}

/// A type whose sums show their order.
pub trait Float: Element {
    /// The type of the accumulator.
    type Sum: Copy + Add<Output = Self::Sum>;
    fn of(value: f32) -> Self;
    fn widen(self) -> Self::Sum;
    fn narrow(sum: Self::Sum) -> Self;
}

macro_rules! float {
    ($type:ty, $sum:ty, $of:expr, $widen:expr, $narrow:expr) => {
        impl Float for $type {
            type Sum = $sum;
            fn of(value: f32) -> Self {
                $of(value)
            }
            fn widen(self) -> $sum {
                $widen(self)
            }
            fn narrow(sum: $sum) -> Self {
                $narrow(sum)
            }
        }
    };
}

float!(f32, f32, |v| v, |v| v, |v| v);
// Thirds fill the mantissa.
float!(f64, f64, |v| f64::from(v) / 3.0, |v| v, |v| v);
float!(bf16, f32, bf16::from_f32, bf16::to_f32, bf16::from_f32);
float!(f16, f32, f16::from_f32, f16::to_f32, f16::from_f32);

pub fn input<T: Float>(rank: usize) -> Vec<T> {
    input_of(COUNT, rank)
}

pub fn input_of<T: Float>(count: usize, rank: usize) -> Vec<T> {
    let mut random = Random::new(77 + rank as u64);
    (0..count).map(|_| T::of(value(&mut random))).collect()
}

pub fn expected<T: Float>(ranks: usize) -> Vec<T> {
    expected_of(COUNT, ranks)
}

/// Sums in rank order.
pub fn expected_of<T: Float>(count: usize, ranks: usize) -> Vec<T> {
    sums(count, ranks, |_| (0..ranks).collect())
}

/// Sums in the order of ranks that `order` gives for each element.
fn sums<T: Float>(count: usize, ranks: usize, order: impl Fn(usize) -> Vec<usize>) -> Vec<T> {
    let inputs: Vec<Vec<T>> = (0..ranks).map(|rank| input_of(count, rank)).collect();
    let sum = |index| order(index).into_iter().map(|rank| inputs[rank][index].widen()).reduce(|a, b| a + b);
    (0..count).map(|index| T::narrow(sum(index).unwrap())).collect()
}

/// The sums of a ring: the first half of the elements goes up the ranks, the other half down, each
/// in parts that begin on cache lines; a part's sum starts at the rank with its number.
pub fn ring<T: Float>(ranks: usize) -> Vec<T> {
    let part = |count: usize, parts: usize| count.div_ceil(parts).next_multiple_of(64 / size_of::<T>());
    let up = if ranks == 2 { COUNT } else { part(COUNT, 2) };
    sums(COUNT, ranks, |index| {
        let (at, length) = if index < up { (index, up) } else { (index - up, COUNT - up) };
        let first = at / part(length, ranks);
        let station = (0..ranks).map(|step| (first + step) % ranks);
        if index < up { station.collect() } else { station.map(|station| ranks - 1 - station).collect() }
    })
}

pub fn pause(random: &mut Random) {
    // Sometimes so long that waiting ranks sleep.
    if random.below(64) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let until = Instant::now() + Duration::from_micros(random.below(30));
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
    let mut random = Random::new(1 + rank);
    for run in 0..runs {
        pause(&mut random);
        let mut data = input.to_vec();
        group.all_reduce(&mut data, Op::Sum).unwrap();
        assert!(data == expected, "{algorithm:?}, rank {rank}, run {run}");
    }
}

/// Every algorithm with every float type, repeatedly.
pub fn check(group: &mut Group) {
    check_type::<f32>(group);
    check_type::<f64>(group);
    check_type::<bf16>(group);
    check_type::<f16>(group);
}

fn check_type<T: Float>(group: &mut Group) {
    let (rank, ranks) = (group.rank(), group.size());
    let (input, expected) = (input::<T>(rank), expected::<T>(ranks));
    all_runs(group, &input, &expected, runs());
    let counts: Vec<usize> =
        (0..ranks).map(|rank| COUNT * (rank + 1) / ranks - COUNT * rank / ranks).collect();
    let at: usize = counts[..rank].iter().sum();
    let mut random = Random::new(1 + rank as u64);
    let mut part = vec![T::default(); counts[rank]];
    for run in 0..runs() {
        pause(&mut random);
        group.reduce_scatter(&input, &mut part, &counts, Op::Sum).unwrap();
        assert!(part == expected[at..at + counts[rank]], "reduce_scatter, rank {rank}, run {run}");
    }
}

/// A ring with every float type, repeatedly.
pub fn check_ring(group: &mut Group) {
    fn check<T: Float>(group: &mut Group) {
        let (rank, ranks) = (group.rank(), group.size());
        runs_of(group, Algorithm::Ring, &input::<T>(rank), &ring::<T>(ranks), runs());
    }
    check::<f32>(group);
    check::<f64>(group);
    check::<bf16>(group);
    check::<f16>(group);
}
