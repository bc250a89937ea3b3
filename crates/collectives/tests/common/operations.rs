//! Calls every operation of a group once and checks the results: for links that are slow, lossy or
//! of another kind.

use half::{bf16, f16};
use thunder_collectives::{Algorithm, Element, Group, Op, Pending};

/// Values repeat with this period, so that long buffers are compared at the speed of memory.
const PERIOD: usize = 1000;

/// The values of a rank: small integers, whose sums are exact in f32.
fn value(rank: usize, index: usize) -> f32 {
    ((index * 7 + rank * 13) % PERIOD) as f32
}

/// One period of every rank's values, combined.
fn expected(ranks: usize, combine: impl Fn(f32, f32) -> f32) -> Vec<f32> {
    let combined = |index| (0..ranks).map(|rank| value(rank, index)).reduce(&combine);
    (0..PERIOD).map(|index| combined(index).expect("a group has a rank")).collect()
}

fn assert_periodic(data: &[f32], period: &[f32], what: &str) {
    for (at, chunk) in data.chunks(PERIOD).enumerate() {
        assert!(
            chunk == &period[..chunk.len()],
            "{what}: {} elements, wrong from {}",
            data.len(),
            at * PERIOD
        );
    }
}

/// An all-reduce of `length` elements with the algorithm that the group chooses.
pub fn check_all_reduce(group: &mut Group, length: usize) {
    let mut data: Vec<f32> = (0..length).map(|index| value(group.rank(), index)).collect();
    group.all_reduce(&mut data, Op::Sum).expect("all_reduce");
    assert_periodic(&data, &expected(group.size(), |a, b| a + b), "all_reduce");
}

/// An all-reduce of `length` equal elements.
fn check_uniform<T: Element>(group: &mut Group, length: usize, own: T, op: Op, expected: T) {
    let mut data = vec![own; length];
    group.all_reduce(&mut data, op).expect("all_reduce");
    assert!(data.iter().all(|value| *value == expected), "all_reduce of {length} times {own:?}");
}

/// Polls until the operation has ended.
fn polled(mut pending: Pending<'_>) {
    while !pending.poll().expect("poll") {
        std::thread::yield_now();
    }
}

/// Calls every operation on about `length` elements, with parts of different lengths where
/// possible.
pub fn check_all(group: &mut Group, length: usize) {
    let parts = Parts::new(group.rank(), group.size(), length);
    check_all_reduces(group, length);
    check_parts(group, length, &parts);
    check_in_place(group, length, &parts);
    check_pairs(group, length, &parts);
    group.barrier().expect("barrier");
}

/// Data for the operations on parts.
struct Parts {
    counts: Vec<usize>,
    total: usize,
    /// All ranks' parts, and this rank's.
    whole: Vec<u32>,
    part: Vec<u32>,
}

impl Parts {
    /// Rank r's part is r + 1 times the first rank's: `length` and a little more in total.
    fn new(rank: usize, ranks: usize, length: usize) -> Self {
        let first = 2 * length / (ranks * (ranks + 1)) + 1;
        let counts: Vec<usize> = (0..ranks).map(|rank| first * (rank + 1)).collect();
        let whole: Vec<u32> =
            counts.iter().enumerate().flat_map(|(rank, count)| vec![rank as u32 + 1; *count]).collect();
        let part = vec![rank as u32 + 1; counts[rank]];
        Self { total: whole.len(), counts, whole, part }
    }
}

fn check_all_reduces(group: &mut Group, length: usize) {
    let (rank, ranks) = (group.rank(), group.size());
    let own: Vec<f32> = (0..length).map(|index| value(rank, index)).collect();

    for algorithm in Algorithm::ALL {
        group.force_algorithm(Some(algorithm));
        check_all_reduce(group, length);
    }
    group.force_algorithm(None);
    let mut data = own.clone();
    group.all_reduce(&mut data, Op::Max).expect("all_reduce");
    assert_periodic(&data, &expected(ranks, f32::max), "all_reduce of maxima");
    data.copy_from_slice(&own);
    group.start_all_reduce(&mut data, Op::Min).expect("start_all_reduce").wait().expect("all_reduce");
    assert_periodic(&data, &expected(ranks, f32::min), "all_reduce, not blocking");
    let product = (2..ranks as i64 + 2).product::<i64>();
    check_uniform(group, length, rank as i64 + 2, Op::Prod, product);
    let sum = (0..ranks).sum::<usize>() as f32;
    check_uniform(group, length, f16::from_f32(rank as f32), Op::Sum, f16::from_f32(sum));
    check_uniform(group, length, bf16::from_f32(rank as f32), Op::Sum, bf16::from_f32(sum));
    check_uniform(group, length, rank == 0, Op::Sum, true);
    check_uniform(group, length, rank == 0, Op::Prod, ranks == 1);
}

fn check_parts(group: &mut Group, length: usize, parts: &Parts) {
    let (rank, ranks) = (group.rank(), group.size());
    let Parts { counts, total, whole, part } = parts;
    let total = *total;
    let mut gathered = vec![0; total];
    group.all_gather(part, &mut gathered, counts).expect("all_gather");
    assert!(gathered == *whole, "all_gather of {counts:?}");

    let mut reduced = vec![0; counts[rank]];
    group.reduce_scatter(whole, &mut reduced, counts, Op::Sum).expect("reduce_scatter");
    assert_eq!(reduced, vec![(rank + 1) as u32 * ranks as u32; counts[rank]]);

    let root = 1 % ranks;
    let mut text = if rank == root { whole.clone() } else { vec![0; total] };
    group.broadcast(root, &mut text).expect("broadcast");
    assert!(text == *whole, "broadcast of {total}");

    reduced.fill(0);
    let pending = group.start_reduce_scatter(whole, &mut reduced, counts, Op::Max);
    polled(pending.expect("start_reduce_scatter"));
    assert_eq!(reduced, *part, "reduce_scatter, not blocking");
    let mut flags = vec![rank == root; length];
    polled(group.start_broadcast(root, &mut flags).expect("start_broadcast"));
    assert!(flags.iter().all(|flag| *flag), "broadcast, not blocking");
    polled(group.start_barrier().expect("start_barrier"));

    let mut collected = vec![0; if rank == root { total } else { 0 }];
    group.gather(root, part, (rank == root).then_some(&mut collected[..]), counts).expect("gather");
    assert!(rank != root || collected == *whole, "gather of {counts:?}");
    let mut own_part = vec![0; counts[rank]];
    group.scatter(root, (rank == root).then_some(&whole[..]), &mut own_part, counts).expect("scatter");
    assert!(own_part == *part, "scatter of {counts:?}");
}

/// What was gathered is scattered again, and reduced in place.
fn check_in_place(group: &mut Group, length: usize, parts: &Parts) {
    let (rank, ranks) = (group.rank(), group.size());
    let Parts { counts, total, whole, part } = parts;
    let total = *total;
    let root = 1 % ranks;
    let at: usize = counts[..rank].iter().sum();
    let mut placed = vec![0; total];
    placed[at..at + counts[rank]].copy_from_slice(part);
    group.gather_in_place(root, &mut placed, counts).expect("gather_in_place");
    assert!(rank != root || placed == *whole, "gather_in_place of {counts:?}");
    polled(group.start_scatter_in_place(root, &mut placed, counts).expect("start_scatter_in_place"));
    assert!(placed[at..at + counts[rank]] == part[..], "scatter_in_place of {counts:?}");
    placed.copy_from_slice(whole);
    group.reduce_scatter_in_place(&mut placed, counts, Op::Max).expect("reduce_scatter_in_place");
    assert!(placed == *whole, "reduce_scatter_in_place of {counts:?}");
    let mut swapped = vec![0u16; ranks * length];
    swapped.chunks_mut(length).zip(0..).for_each(|(part, peer)| part.fill(peer));
    polled(group.start_all_to_all_in_place(&mut swapped, &vec![length; ranks]).expect("start_all_to_all"));
    assert!(swapped.iter().all(|from| usize::from(*from) == rank), "all_to_all_in_place");
}

/// The operations with a message of its own for each pair.
fn check_pairs(group: &mut Group, length: usize, parts: &Parts) {
    let (rank, ranks) = (group.rank(), group.size());
    let Parts { counts, total, whole, .. } = parts;
    // Rank r sends counts[r] numbers to each rank, so that every pair's two messages differ in
    // length.
    let outgoing = vec![rank as u32 + 1; counts[rank] * ranks];
    let mut incoming = vec![0; *total];
    group.all_to_all(&outgoing, &vec![counts[rank]; ranks], &mut incoming, counts).expect("all_to_all");
    assert!(incoming == *whole, "all_to_all");

    // Once around the ring.
    let own: Vec<f32> = (0..length).map(|index| value(rank, index)).collect();

    let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut passed = vec![0.0f32; length];
    if rank == 0 {
        group.send(next, &own).expect("send");
        group.recv(before, &mut passed).expect("recv");
        assert!(passed == own, "the data came back changed");
    } else {
        group.recv(before, &mut passed).expect("recv");
        group.send(next, &passed).expect("send");
    }
}
