//! Every operation, type and transport with 1 to 5 ranks and odd sizes; ranks are threads.

#![allow(clippy::unwrap_used, reason = "a test's helpers may panic as its tests do")]

use half::{bf16, f16};
use proptest::prelude::*;
use thunder_collectives::{Algorithm, CommError, Element, Group, Op, Pending, TransportChoice, local};

const TRANSPORTS: [TransportChoice; 2] = [TransportChoice::Shm, TransportChoice::Tcp];

/// Makes a type's value from a small integer, exact in all types, and reduces by the reference.
trait Sample: Element {
    fn of(value: u32) -> Self;
    fn reduce(values: &[Self], op: Op) -> Self;
}

macro_rules! sample {
    ($($type:ty, $from:expr, $sum:expr, $prod:expr, $max:expr, $min:expr;)*) => {$(
        impl Sample for $type {
            fn of(value: u32) -> Self {
                ($from)(value)
            }
            fn reduce(values: &[Self], op: Op) -> Self {
                let combine: fn($type, $type) -> $type = match op {
                    Op::Sum => $sum,
                    Op::Prod => $prod,
                    Op::Max => $max,
                    Op::Min => $min,
                };
                values[1..].iter().fold(values[0], |a, b| combine(a, *b))
            }
        }
    )*};
}

macro_rules! integer {
    ($($type:ty),*) => {
        sample! {$(
            $type, |v| v as $type, |a, b| a.wrapping_add(b), |a, b| a.wrapping_mul(b), |a, b| a.max(b), |a, b| a.min(b);
        )*}
    };
}

integer!(i8, i16, i32, i64, u8, u16, u32, u64);
sample! {
    f32, |v| v as f32 - 3.0, |a, b| a + b, |a, b| a * b, f32::max, f32::min;
    f64, |v| f64::from(v) - 3.0, |a, b| a + b, |a, b| a * b, f64::max, f64::min;
    f16, |v| f16::from_f32(v as f32 - 3.0), |a, b| a + b, |a, b| a * b, f16::max, f16::min;
    bf16, |v| bf16::from_f32((v % 5) as f32 - 2.0), |a, b| a + b, |a, b| a * b, bf16::max, bf16::min;
    bool, |v| v % 3 == 1, |a, b| a | b, |a, b| a & b, |a, b| a | b, |a, b| a & b;
}

fn values<T: Sample>(rank: usize, count: usize) -> Vec<T> {
    (0..count).map(|index| T::of(((index * 7 + rank * 5) % 6) as u32)).collect()
}

fn reduced<T: Sample>(size: usize, count: usize, op: Op) -> Vec<T> {
    (1..size).fold(values(0, count), |mut sums: Vec<T>, rank| {
        sums.iter_mut()
            .zip(values(rank, count))
            .for_each(|(sum, value)| *sum = T::reduce(&[*sum, value], op));
        sums
    })
}

/// Every operation once, with this many elements, checked against the definition.
fn exercise<T: Sample>(group: &mut Group, count: usize) -> Result<(), CommError> {
    exercise_reductions::<T>(group, count)?;
    exercise_gathers::<T>(group, count)?;
    exercise_all_to_all::<T>(group, count)?;
    exercise_send_and_recv::<T>(group, count)?;
    group.barrier()
}

fn exercise_reductions<T: Sample>(group: &mut Group, count: usize) -> Result<(), CommError> {
    let (rank, size) = (group.rank(), group.size());
    for op in [Op::Sum, Op::Prod, Op::Max, Op::Min] {
        for algorithm in Algorithm::ALL.map(Some).into_iter().chain([None]) {
            group.force_algorithm(algorithm);
            let mut data = values::<T>(rank, count);
            group.all_reduce(&mut data, op)?;
            assert_eq!(data, reduced::<T>(size, count, op), "all_reduce {op:?} {algorithm:?}");
        }
        let mut out = vec![T::default(); count];
        group.all_reduce_into(&values::<T>(rank, count), &mut out, op)?;
        assert_eq!(out, reduced::<T>(size, count, op), "all_reduce_into {op:?}");

        let counts: Vec<usize> = (0..size).map(|rank| count * (rank % 3) + rank).collect();
        let total: usize = counts.iter().sum();
        let at: usize = counts[..rank].iter().sum();
        let mut part = vec![T::default(); counts[rank]];
        group.reduce_scatter(&values::<T>(rank, total), &mut part, &counts, op)?;
        let expected = &reduced::<T>(size, total, op)[at..at + counts[rank]];
        assert_eq!(part, expected, "reduce_scatter {op:?}");
        let mut data = values::<T>(rank, total);
        group.reduce_scatter_in_place(&mut data, &counts, op)?;
        let mut around = values::<T>(rank, total);
        around[at..at + counts[rank]].copy_from_slice(expected);
        assert_eq!(data, around, "reduce_scatter_in_place {op:?}");
    }
    Ok(())
}

fn exercise_gathers<T: Sample>(group: &mut Group, count: usize) -> Result<(), CommError> {
    let (rank, size) = (group.rank(), group.size());
    let counts: Vec<usize> = (0..size).map(|rank| count * (rank % 3) + rank).collect();
    let total: usize = counts.iter().sum();
    let everything: Vec<T> = (0..size).flat_map(|rank| values::<T>(rank, counts[rank])).collect();
    let own = values::<T>(rank, counts[rank]);

    let mut all = vec![T::default(); total];
    group.all_gather(&own, &mut all, &counts)?;
    assert_eq!(all, everything, "all_gather");

    for root in [0, size - 1] {
        let mut data = if rank == root { values::<T>(9, count) } else { vec![T::default(); count] };
        group.broadcast(root, &mut data)?;
        assert_eq!(data, values::<T>(9, count), "broadcast");
        data = if rank == root { data } else { vec![T::default(); count] };
        group.broadcast_idle(root, &mut data)?;
        assert_eq!(data, values::<T>(9, count), "broadcast_idle");

        data.fill(T::default());
        let send = values::<T>(9, count);
        group.broadcast_into(root, (rank == root).then_some(&send), &mut data)?;
        assert_eq!(data, send, "broadcast_into");

        let mut gathered = vec![T::default(); total];
        group.gather(root, &own, (rank == root).then_some(&mut gathered[..]), &counts)?;
        if rank == root {
            assert_eq!(gathered, everything, "gather");
        }
        let mut part = vec![T::default(); counts[rank]];
        group.scatter(root, (rank == root).then_some(&everything[..]), &mut part, &counts)?;
        assert_eq!(part, own, "scatter");

        let mut alone = vec![T::default(); total];
        let at: usize = counts[..rank].iter().sum();
        alone[at..at + own.len()].copy_from_slice(&own);
        let mut data = alone.clone();
        group.gather_in_place(root, &mut data, &counts)?;
        assert_eq!(&data, if rank == root { &everything } else { &alone }, "gather_in_place");
        data = if rank == root { everything.clone() } else { vec![T::default(); total] };
        group.scatter_in_place(root, &mut data, &counts)?;
        assert_eq!(&data, if rank == root { &everything } else { &alone }, "scatter_in_place");
    }
    Ok(())
}

fn exercise_all_to_all<T: Sample>(group: &mut Group, count: usize) -> Result<(), CommError> {
    let (rank, size) = (group.rank(), group.size());
    // Rank a sends a + 2b + count elements to rank b.
    let length = |from: usize, to: usize| from + 2 * to + count;
    let send_counts: Vec<usize> = (0..size).map(|to| length(rank, to)).collect();
    let recv_counts: Vec<usize> = (0..size).map(|from| length(from, rank)).collect();
    let send: Vec<T> = (0..size).flat_map(|to| values::<T>(10 * rank + to, length(rank, to))).collect();
    let mut recv = vec![T::default(); recv_counts.iter().sum()];
    group.all_to_all(&send, &send_counts, &mut recv, &recv_counts)?;
    let expected: Vec<T> =
        (0..size).flat_map(|from| values::<T>(10 * from + rank, length(from, rank))).collect();
    assert_eq!(recv, expected, "all_to_all");

    // In place, what is sent is as long as what is received.
    let counts: Vec<usize> = (0..size).map(|peer| count + peer + rank).collect();
    let whole = |way: &dyn Fn(usize) -> usize| -> Vec<T> {
        (0..size).flat_map(|peer| values::<T>(way(peer), counts[peer])).collect()
    };
    let mut data = whole(&|to| 10 * rank + to);
    group.all_to_all_in_place(&mut data, &counts)?;
    assert_eq!(data, whole(&|from| 10 * from + rank), "all_to_all_in_place");
    Ok(())
}

fn exercise_send_and_recv<T: Sample>(group: &mut Group, count: usize) -> Result<(), CommError> {
    let (rank, size) = (group.rank(), group.size());
    // Around the ring, one rank after the other.
    if size > 1 {
        let mut data = values::<T>(3, count);
        if rank == 0 {
            group.send(1, &data)?;
            data.fill(T::default());
            group.recv(size - 1, &mut data)?;
        } else {
            data.fill(T::default());
            group.recv_idle(rank - 1, &mut data)?;
            group.send((rank + 1) % size, &data)?;
        }
        assert_eq!(data, values::<T>(3, count), "send and recv");
    }
    Ok(())
}

fn every_type(size: usize, transport: TransportChoice, count: usize) {
    let results = local::run(size, transport, |mut group| {
        exercise::<f32>(&mut group, count)?;
        exercise::<f64>(&mut group, count)?;
        exercise::<f16>(&mut group, count)?;
        exercise::<bf16>(&mut group, count)?;
        exercise::<i8>(&mut group, count)?;
        exercise::<i16>(&mut group, count)?;
        exercise::<i32>(&mut group, count)?;
        exercise::<i64>(&mut group, count)?;
        exercise::<u8>(&mut group, count)?;
        exercise::<u16>(&mut group, count)?;
        exercise::<u32>(&mut group, count)?;
        exercise::<u64>(&mut group, count)?;
        exercise::<bool>(&mut group, count)
    });
    for (rank, result) in results.unwrap().into_iter().enumerate() {
        result.unwrap_or_else(|error| panic!("{size} ranks, {transport:?}, {count}, rank {rank}: {error}"));
    }
}

#[test]
fn every_operation_is_right_with_every_type_and_transport() {
    for transport in TRANSPORTS {
        for size in 1..=5 {
            for count in [0, 1031] {
                every_type(size, transport, count);
            }
        }
    }
}

#[test]
fn long_messages_wrap_the_rings() {
    for transport in TRANSPORTS {
        for size in 2..=3 {
            let results = local::run(size, transport, |mut group| {
                exercise::<f32>(&mut group, 150_007)?;
                exercise::<u8>(&mut group, 600_003)
            });
            assert!(results.unwrap().into_iter().all(|result| result.is_ok()));
        }
    }
}

#[test]
fn every_operation_is_right_on_hosts_of_several_ranks() {
    for count in [0, 1, 1031, 150_007] {
        let groups = local::groups_with(5, |config| {
            config.host = Some(format!("{} of {}", [0, 0, 1, 2, 2][config.rank], std::process::id()));
        });
        let results = local::run_on(groups.unwrap(), |mut group| {
            exercise::<f32>(&mut group, count)?;
            exercise::<bf16>(&mut group, count.min(1031))?;
            exercise::<bool>(&mut group, count)
        });
        assert!(results.into_iter().all(|result| result == Ok(())));
    }
}

#[test]
fn every_operation_is_right_over_several_connections() {
    // If two ranks want different numbers, the smaller is used.
    let groups = local::groups_with(3, |config| {
        config.transport = TransportChoice::Tcp;
        config.connections = 2 + config.rank;
    });
    let results = local::run_on(groups.unwrap(), |mut group| {
        exercise::<f32>(&mut group, 150_007)?;
        exercise::<u8>(&mut group, 1031)
    });
    assert!(results.into_iter().all(|result| result == Ok(())));
}

#[test]
fn every_operation_is_right_over_encrypted_links() {
    for connections in [1, 3] {
        // It is enough that one rank wants it.
        let groups = local::groups_with(3, |config| {
            config.transport = TransportChoice::Tcp;
            config.connections = connections;
            config.encrypt = config.rank == 1;
            config.secret = b"secret".to_vec();
        });
        let results = local::run_on(groups.unwrap(), |mut group| {
            for count in [0, 1, 1031, 150_007] {
                exercise::<f32>(&mut group, count)?;
            }
            exercise::<u8>(&mut group, 1031)
        });
        assert!(results.into_iter().all(|result| result == Ok(())));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn any_sequence_of_sizes_is_right(
        size in 1usize..=5,
        tcp in any::<bool>(),
        counts in prop::collection::vec(prop_oneof![0usize..20, 0usize..30_000], 1..4),
    ) {
        let transport = TRANSPORTS[usize::from(tcp)];
        let results = local::run(size, transport, |mut group| {
            counts.iter().try_for_each(|count| {
                exercise::<f32>(&mut group, *count)?;
                exercise::<u8>(&mut group, count / 3)?;
                exercise::<bf16>(&mut group, count / 5)
            })
        });
        for result in results.unwrap() {
            prop_assert_eq!(result, Ok(()));
        }
    }
}

#[test]
fn split_makes_independent_groups() {
    for transport in TRANSPORTS {
        let results = local::run(5, transport, |mut group| {
            let rank = group.rank() as u32;
            // Even and odd ranks, in reverse order.
            let mut smaller = group.split(rank % 2, 10 - rank).unwrap();
            let mut sum = [rank];
            smaller.all_reduce(&mut sum, Op::Sum).unwrap();
            let mut all = [rank];
            group.all_reduce(&mut all, Op::Sum).unwrap();
            (smaller.rank(), smaller.size(), sum[0], all[0])
        });
        assert_eq!(
            results.unwrap(),
            [(2, 3, 6, 10), (1, 2, 4, 10), (1, 3, 6, 10), (0, 2, 4, 10), (0, 3, 6, 10)]
        );
    }
}

#[test]
fn wrong_arguments_leave_the_group_good() {
    let results = local::run(2, TransportChoice::Auto, |mut group| {
        let mut data = [0f32; 4];
        assert!(matches!(group.broadcast(2, &mut data), Err(CommError::Argument { .. })));
        assert!(matches!(group.all_gather(&[1f32], &mut data, &[1, 1]), Err(CommError::Argument { .. })));
        assert!(matches!(group.send(group.rank(), &data), Err(CommError::Argument { .. })));
        group.all_reduce(&mut data, Op::Sum)
    });
    assert_eq!(results.unwrap(), [Ok(()), Ok(())]);
}

#[test]
fn ranks_in_different_operations_get_an_error() {
    for transport in TRANSPORTS {
        let results = local::run(2, transport, |mut group| {
            if group.rank() == 0 { group.all_reduce(&mut [1f32; 8], Op::Sum) } else { group.barrier() }
        });
        for result in results.unwrap() {
            let error = result.unwrap_err();
            assert!(
                matches!(error, CommError::Mismatch { .. } | CommError::Aborted { .. }),
                "unexpected: {error}"
            );
        }
    }
}

#[test]
fn stats_count_operations_bytes_and_time() {
    let results = local::run(2, TransportChoice::Auto, |mut group| {
        group.all_reduce(&mut [1f32; 100], Op::Sum).unwrap();
        group.barrier().unwrap();
        let stats = group.reset_stats();
        assert_eq!(group.stats().operations, 0);
        stats
    });
    for stats in results.unwrap() {
        assert_eq!((stats.operations, stats.bytes), (2, 400));
        assert!(!stats.time.is_zero());
    }
}

/// Polls until the operation has ended.
fn polled(mut pending: Pending<'_>) -> Result<(), CommError> {
    let mut polls = 0u64;
    while !pending.poll()? {
        polls += 1;
    }
    assert!(pending.poll()?, "it stays done after {polls} polls");
    Ok(())
}

/// The non-blocking form of every operation gives the result of the blocking one.
#[test]
fn started_operations_move_on_while_polled() {
    for transport in TRANSPORTS {
        for size in 1..=3 {
            for count in [3, 50_000] {
                let results = local::run(size, transport, |mut group| {
                    start_all::<f32>(&mut group, count)?;
                    start_all::<bool>(&mut group, count)
                });
                assert!(results.unwrap().into_iter().all(|result| result == Ok(())));
            }
        }
    }
}

fn start_all<T: Sample>(group: &mut Group, count: usize) -> Result<(), CommError> {
    start_reductions::<T>(group, count)?;
    start_gathers::<T>(group, count)?;
    start_exchanges::<T>(group, count)?;
    group.start_barrier()?.wait()
}

fn start_reductions<T: Sample>(group: &mut Group, count: usize) -> Result<(), CommError> {
    let (rank, size) = (group.rank(), group.size());
    let empty = |count: usize| vec![T::default(); count];
    let sums = reduced::<T>(size, count, Op::Sum);
    let mut data = values::<T>(rank, count);
    polled(group.start_all_reduce(&mut data, Op::Sum)?)?;
    assert_eq!(data, sums, "all_reduce");
    data = empty(count);
    group.start_all_reduce_into(&values::<T>(rank, count), &mut data, Op::Sum)?.wait()?;
    assert_eq!(data, sums, "all_reduce_into");

    let counts: Vec<usize> = (0..size).map(|rank| count + rank).collect();
    let total: usize = counts.iter().sum();
    let at: usize = counts[..rank].iter().sum();
    let own_place = at..at + counts[rank];
    let mut part = empty(counts[rank]);
    let send = values::<T>(rank, total);
    let sums = &reduced::<T>(size, total, Op::Sum)[own_place.clone()];
    polled(group.start_reduce_scatter(&send, &mut part, &counts, Op::Sum)?)?;
    assert_eq!(part, sums, "reduce_scatter");
    let mut data = send.clone();
    polled(group.start_reduce_scatter_in_place(&mut data, &counts, Op::Sum)?)?;
    assert_eq!(&data[own_place], sums, "reduce_scatter_in_place");
    Ok(())
}

fn start_gathers<T: Sample>(group: &mut Group, count: usize) -> Result<(), CommError> {
    let (rank, size) = (group.rank(), group.size());
    let empty = |count: usize| vec![T::default(); count];
    let counts: Vec<usize> = (0..size).map(|rank| count + rank).collect();
    let total: usize = counts.iter().sum();
    let at: usize = counts[..rank].iter().sum();
    let own_place = at..at + counts[rank];
    let everything: Vec<T> = (0..size).flat_map(|rank| values::<T>(rank, counts[rank])).collect();
    let own = &everything[own_place.clone()];
    let mut alone = empty(total);
    alone[own_place.clone()].copy_from_slice(own);

    let mut all = empty(total);
    polled(group.start_all_gather(own, &mut all, &counts)?)?;
    assert_eq!(all, everything, "all_gather");
    all = alone.clone();
    polled(group.start_all_gather_in_place(&mut all, &counts)?)?;
    assert_eq!(all, everything, "all_gather_in_place");

    let root = size - 1;
    let on_root = |data| (rank == root).then_some(data);
    let mut data = if rank == root { everything.clone() } else { empty(total) };
    polled(group.start_broadcast(root, &mut data)?)?;
    assert_eq!(data, everything, "broadcast");
    data = empty(total);
    polled(group.start_broadcast_into(root, on_root(&everything[..]), &mut data)?)?;
    assert_eq!(data, everything, "broadcast_into");

    let expected = if rank == root { &everything } else { &alone };
    let mut gathered = alone.clone();
    polled(group.start_gather(root, own, (rank == root).then_some(&mut gathered[..]), &counts)?)?;
    assert_eq!(&gathered, expected, "gather");
    gathered = alone.clone();
    polled(group.start_gather_in_place(root, &mut gathered, &counts)?)?;
    assert_eq!(&gathered, expected, "gather_in_place");
    let mut part = empty(counts[rank]);
    polled(group.start_scatter(root, on_root(&everything[..]), &mut part, &counts)?)?;
    assert_eq!(part, own, "scatter");
    let mut scattered = if rank == root { everything.clone() } else { empty(total) };
    polled(group.start_scatter_in_place(root, &mut scattered, &counts)?)?;
    assert_eq!(&scattered, expected, "scatter_in_place");
    Ok(())
}

fn start_exchanges<T: Sample>(group: &mut Group, count: usize) -> Result<(), CommError> {
    let (rank, size) = (group.rank(), group.size());
    let empty = |count: usize| vec![T::default(); count];
    let send: Vec<T> = (0..size).flat_map(|to| values::<T>(10 * rank + to, count)).collect();
    let expected: Vec<T> = (0..size).flat_map(|from| values::<T>(10 * from + rank, count)).collect();
    let counts = vec![count; size];
    let mut recv = empty(count * size);
    polled(group.start_all_to_all(&send, &counts, &mut recv, &counts)?)?;
    assert_eq!(recv, expected, "all_to_all");
    recv = send;
    polled(group.start_all_to_all_in_place(&mut recv, &counts)?)?;
    assert_eq!(recv, expected, "all_to_all_in_place");

    if size > 1 && rank == 0 {
        // Dropped without a wait: the data still arrive.
        drop(group.start_send(1, &values::<T>(3, count))?);
    } else if rank == 1 {
        let mut data = empty(count);
        group.start_recv(0, &mut data)?.wait()?;
        assert_eq!(data, values::<T>(3, count), "send and recv");
    }
    Ok(())
}

#[test]
fn a_leaked_operation_ends_the_group() {
    let results = local::run(2, TransportChoice::Shm, |mut group| {
        if group.rank() == 0 {
            let mut data = vec![0f32; 1 << 20];
            std::mem::forget(group.start_all_reduce(&mut data, Op::Sum).unwrap());
        }
        group.barrier()
    });
    assert!(results.unwrap().into_iter().all(|result| result.is_err()));
}
