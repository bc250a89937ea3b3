//! Relayed exchanges on the test device or on several GPUs: correct, refused, late and lost ones.

use std::time::{Duration, Instant};

use thunder_collectives::{CommError, Group, Op, TransportChoice, local};
use thunder_compute::{Activations, ComputeError, Device as _};
use thunder_testing::{Random, is_long};

use super::{HEADER_VECTORS, Relay, SLOT_VECTORS, To};
use crate::device::Device;
use crate::device::shared::{Place, check};
use crate::kernel::{Kernel, Look, Relay as Form};
use crate::mailbox::{Poison, Rows};
use crate::tests::{device, devices, relaying};
use crate::{Found, GpuBackend, SumForm};

fn backend(found: &Found, group: Group) -> GpuBackend {
    relaying(found, Activations::Auto, group)
}

/// Reads a sum that this rank's GPU has recorded.
fn sum_once(backend: &mut GpuBackend) -> Result<f32, ComputeError> {
    let mut x = backend.buffer(1, 64)?;
    backend.write(&[1.0; 64], &mut x)?;
    thunder_compute::Backend::all_reduce(backend, &mut x, 0..1)?;
    let mut values = [0.0; 64];
    backend.read(&x, 0..1, &mut values)?;
    Ok(values[63])
}

#[test]
fn ranks_exchange_between_their_devices() {
    let Some(devices) = devices("ranks_exchange_between_their_devices", 2) else { return };
    local::run(2, TransportChoice::Shm, |group| {
        let rank = group.rank();
        let mut backend = backend(&devices[rank], group);
        assert_eq!(backend.sum_form(), SumForm::Relay);
        assert_eq!(sum_once(&mut backend).unwrap(), 2.0);
        // The group can be used between sums.
        let mut values = [rank as u32];
        backend.group().all_reduce(&mut values, Op::Sum).unwrap();
        assert_eq!(values, [1]);
        assert_eq!(sum_once(&mut backend).unwrap(), 2.0);
        backend.group().barrier().unwrap();
    })
    .unwrap();
}

#[test]
fn one_rank_that_takes_wrong_words_keeps_all_from_it() {
    let Some(devices) = devices("one_rank_that_takes_wrong_words_keeps_all_from_it", 2) else { return };
    let wrong: [fn(&Kernel, String) -> String; 3] = [
        |_, text| text.replace("take(at, sum.x)", "take(at, sum.y)"),
        // Wrong only in sums that are added to rows.
        |_, text| text.replace("to[args.first + at] += sum", "to[args.first + at] = sum"),
        // A device that never gives up would hang; one that gives up at once would get no sum.
        |_, text| text.replace("looks >= args.looks", "looks >= 1u"),
    ];
    for sabotage in wrong {
        let refused = local::run(2, TransportChoice::Shm, |group| {
            let found = &devices[group.rank()];
            let mut device = Device::open(found, true).unwrap();
            device.sabotage = (group.rank() == 1).then_some(sabotage);
            let group = Box::new(group);
            Relay::agreed(&mut device, group, found.info.is_real()).unwrap().1.err()
        });
        let refused = refused.unwrap();
        assert!(refused.iter().all(Option::is_some), "{refused:?}");
    }
}

#[test]
fn a_rank_that_leaves_wrong_levels_sums_without_them() {
    let Some(devices) = devices("a_rank_that_leaves_wrong_levels_sums_without_them", 2) else { return };
    let wrong: [fn(&Kernel, String) -> String; 2] = [
        |_, text| text.replace("left[at % (4u * LEFT_QUADS)] = all", "left[at % (4u * LEFT_QUADS)] = sum"),
        |_, text| text.replace("to[args.first + at] = all", "to[args.first + at] = sum"),
    ];
    for sabotage in wrong {
        let can_leave = local::run(2, TransportChoice::Shm, |group| {
            let (rank, found) = (group.rank(), &devices[group.rank()]);
            let mut device = Device::open(found, true).unwrap();
            device.sabotage = (rank == 1).then_some(sabotage);
            let (mut group, relay) =
                Relay::agreed(&mut device, Box::new(group), found.info.is_real()).unwrap();
            group.barrier().unwrap();
            relay.unwrap().can_leave
        });
        assert_eq!(can_leave.unwrap(), [true, false]);
    }
}

#[test]
fn a_vector_with_an_old_word_is_not_taken() {
    let Some(devices) = devices("a_vector_with_an_old_word_is_not_taken", 2) else { return };
    local::run(2, TransportChoice::Shm, |group| {
        let found = &devices[group.rank()];
        let mut device = Device::open(found, true).unwrap();
        let agreed = Relay::agreed(&mut device, Box::new(group), found.info.is_real());
        let (mut group, relay) = agreed.unwrap();
        let mut relay = relay.unwrap();
        if group.rank() == 1 {
            return group.barrier().unwrap();
        }
        let number = relay.number() + 1;
        let slot = HEADER_VECTORS + (2 + number as usize % 2) * SLOT_VECTORS;
        let numbers = [1.0f32, 2.0, 3.0].map(f32::to_bits);
        let leave = |relay: &Relay, at: usize, [a, b, c]: [u32; 3], check: u32| {
            relay.host.inbox.write(4 * (slot + at), &[a, b, c, check]);
            relay.host.inbox.write_through();
        };
        // What rank 1 would store, except for one vector: first that of an older exchange, then a
        // mixed one.
        let whole = check(numbers, number);
        (0..11).for_each(|at| leave(&relay, at, numbers, whole));
        let patience = std::mem::replace(&mut relay.looks, 100);
        let x = device.memory(4 * 32, "test").unwrap();
        let rows = Rows { x: &x, first: 0, rows: 1, width: 32, stride: 32 };
        let [a, b, c] = numbers;
        for (numbers, check) in [
            (numbers, check(numbers, number - 2)),
            ([a, c, c], whole),
            ([b, b, c], whole),
            ([a, b, a], whole),
        ] {
            leave(&relay, 7, numbers, check);
            // The thread that watches a lent group does not see exchanges after its return.
            relay.begin(group);
            std::thread::sleep(Duration::from_millis(5));
            group = relay.take_group().0.unwrap();
            relay.dispatch(&mut device, number, rows, To::Place).unwrap();
            device.submit().unwrap();
            device.wait().unwrap();
            assert_eq!(relay.verdict(), Some((number, Poison::Late)));
            std::thread::sleep(Duration::from_millis(5));
            relay.reset(&mut device).unwrap();
            device.upload(&x, 0, &[0; 32]).unwrap();
        }
        leave(&relay, 7, numbers, whole);
        relay.looks = patience;
        relay.dispatch(&mut device, number, rows, To::Place).unwrap();
        let mut found = Vec::new();
        device.read(&x, 0..32, &mut found).unwrap();
        let expected: Vec<u32> = (0..32).map(|at| numbers[at % 3]).collect();
        assert_eq!(found, expected);
        group.barrier().unwrap();
    })
    .unwrap();
}

#[test]
fn parts_of_three_ranks_are_added_in_rank_order() {
    let Some(found) = device("parts_of_three_ranks_are_added_in_rank_order") else { return };
    let mut device = Device::open(&found, true).unwrap();
    let bytes = 16 * (HEADER_VECTORS + 6 * SLOT_VECTORS);
    let [inbox, ended] = [bytes, 256].map(|bytes| device.shared(bytes, Place::Device).unwrap().unwrap());
    let [outbox, state] = [bytes, 16].map(|bytes| device.memory(bytes, "test").unwrap());
    // Their sum is 1 in any other order.
    let parts = [1e8f32, 1.0, -1e8].map(f32::to_bits);
    let look = if found.info.is_real() { Look::Once } else { Look::Often };
    for rank in 0..3 {
        let number = 7 + rank as u32;
        for other in (0..3).filter(|other| *other != rank) {
            let first = HEADER_VECTORS + (2 * other + number as usize % 2) * SLOT_VECTORS;
            let vector = [parts[other]; 3];
            let [a, b, c] = vector;
            (0..11).for_each(|at| inbox.write(4 * (first + at), &[a, b, c, check(vector, number)]));
        }
        inbox.write_through();
        let x = device.filled(&[parts[rank]; 32], "test").unwrap();
        let kernel = Kernel::Relay(Form { rank, ranks: 3, adds: false, leaves: false, look });
        let buffers = [&x, &outbox, &inbox.memory, &state, &ended.memory];
        let arguments = [0, 32, number, 1000, 32, 32];
        device.dispatch(&kernel, &buffers, &arguments, [1, 1, 1]).unwrap();
        let mut sums = Vec::new();
        device.read(&x, 0..32, &mut sums).unwrap();
        assert_eq!(sums, [0; 32], "rank {rank}");
    }
}

#[test]
fn a_lost_rank_ends_the_step_and_the_device_works_afterwards() {
    let test = "a_lost_rank_ends_the_step_and_the_device_works_afterwards";
    let Some(devices) = devices(test, 2) else { return };
    local::run(2, TransportChoice::Shm, |group| {
        let rank = group.rank();
        let mut backend = backend(&devices[rank], group);
        assert_eq!(sum_once(&mut backend).unwrap(), 2.0);
        // A rank that sees the other one leave has no sum, even one that it could read.
        backend.group().barrier().unwrap();
        if rank == 1 {
            return;
        }
        let began = Instant::now();
        let error = sum_once(&mut backend).unwrap_err();
        assert!(matches!(error, ComputeError::Comm(CommError::PeerLost { rank: 1, .. })), "{error}");
        // The device's own limit is 1.8 s, and several times as much in software.
        let limit = Duration::from_millis(if devices[rank].info.is_real() { 1500 } else { 5000 });
        assert!(began.elapsed() < limit, "the device waited until its own limit");
        backend.sums = crate::sums::Sums::new(Group::solo());
        assert_eq!(sum_once(&mut backend).unwrap(), 1.0);
    })
    .unwrap();
}

#[test]
fn after_a_late_sum_sums_go_by_the_host() {
    let Some(devices) = devices("after_a_late_sum_sums_go_by_the_host", 2) else { return };
    local::run(2, TransportChoice::Shm, |group| {
        let rank = group.rank();
        let mut backend = backend(&devices[rank], group);
        assert_eq!(sum_once(&mut backend).unwrap(), 2.0);
        backend.group().barrier().unwrap();
        if rank == 0 {
            backend.sums.relay.as_mut().unwrap().looks = 1;
            let error = sum_once(&mut backend).unwrap_err().to_string();
            assert!(error.contains("did not come back to it in time"), "{error}");
        } else {
            std::thread::sleep(Duration::from_millis(300));
            // Rank 0's part is present, unless this rank has seen before that rank 0 gave up.
            match sum_once(&mut backend) {
                Ok(sum) => assert_eq!(sum, 2.0),
                Err(error) => assert!(error.to_string().contains("in time"), "{error}"),
            }
        }
        assert_eq!(sum_once(&mut backend).unwrap(), 2.0);
        assert_eq!(backend.sum_form(), SumForm::Mailbox);
        assert_eq!(sum_once(&mut backend).unwrap(), 2.0);
        backend.group().barrier().unwrap();
    })
    .unwrap();
}

/// Ranks that are late at random. For a long run on several GPUs: `THUNDER_LONG=1
/// THUNDER_TEST_GPU=0`.
#[test]
fn relayed_sums_are_never_wrong() {
    let Some(devices) = devices("relayed_sums_are_never_wrong", 2) else { return };
    let buffers = if devices[0].info.is_real() { 12 } else { 1 };
    let limit = Duration::from_secs(if is_long() { 40 } else { 2 });
    local::run(2, TransportChoice::Shm, |group| {
        let (rank, began) = (group.rank(), Instant::now());
        let (mut random, mut shapes) = (Random::new(rank as u64 + 5), Random::new(5));
        let mut backend = backend(&devices[rank], group);
        let mut all: Vec<_> = (0..buffers).map(|_| backend.buffer(4, 4096).unwrap()).collect();
        let mut sums = 0u64;
        loop {
            // Sums of sums: whole numbers below 2^24 stay exact.
            let of_round = |shapes: &mut Random| [1 + shapes.below(4), 1 + shapes.below(10)];
            let rounds: Vec<_> = all.iter().map(|_| of_round(&mut shapes)).collect();
            for (index, (x, [rows, count])) in all.iter_mut().zip(&rounds).enumerate() {
                let rows = *rows as usize;
                let values: Vec<f32> = (0..rows * 4096).map(|at| part(rank, sums, index, at)).collect();
                backend.write(&values, x).unwrap();
                if random.below(100) == 0 {
                    std::thread::sleep(Duration::from_micros(random.below(2000)));
                }
                for _ in 0..*count {
                    thunder_compute::Backend::all_reduce(&mut backend, x, 0..rows).unwrap();
                }
            }
            for (index, (x, [rows, count])) in all.iter().zip(&rounds).enumerate() {
                let rows = *rows as usize;
                let mut found = vec![0.0; rows * 4096];
                backend.read(x, 0..rows, &mut found).unwrap();
                let expected =
                    |at| (1 << (count - 1)) as f32 * (part(0, sums, index, at) + part(1, sums, index, at));
                let wrong = (0..found.len()).find(|at| found[*at] != expected(*at));
                assert_eq!(wrong, None, "{count} sums of {rows} rows after {sums}");
            }
            sums += rounds.iter().map(|[_, count]| count).sum::<u64>();
            let mut go_on = [u64::from(began.elapsed() < limit)];
            backend.group().all_reduce(&mut go_on, Op::Min).unwrap();
            if go_on == [0] {
                break;
            }
        }
        println!("rank {rank}: {sums} sums, all right");
    })
    .unwrap();
}

fn part(rank: usize, sum: u64, index: usize, at: usize) -> f32 {
    ((sum as usize * 31 + index * 17 + at * 7 + rank * 13) % 1021) as f32
}
