//! Sums over ranks in mailboxes: GPU ranks with and without mailboxes, and CPU ranks.

use thunder_collectives::{CommError, Group, TransportChoice, local};
use thunder_compute::{Activations, Backend, ComputeError, CpuBackend, CpuConfig, Device, Isa};

use super::{device, devices, devices_apart, exchanging};
use crate::buffer::stride;
use crate::mailbox::{MAX_WORDS, Mailbox};
use crate::relay::Relay;
use crate::sums::Sums;
use crate::{Found, GpuBackend, GpuConfig, Mailboxes, SumForm};

/// Rows and widths of sums: padded and not, for one kernel and for two, and more than a mailbox can
/// hold.
const SHAPES: [[usize; 2]; 5] = [[1, 64], [5, 40], [1, 3], [7, 1056], [40, 2048]];

fn gpu(found: &Found, mailboxes: Mailboxes, group: Group) -> GpuBackend {
    let activations = Activations::F32;
    let config = GpuConfig { activations, mailboxes, ..GpuConfig::default() };
    let backend = GpuBackend::new(found, config, group).unwrap();
    assert_eq!(backend.has_mailbox(), mailboxes == Mailboxes::Always);
    backend
}

fn cpu(group: Group) -> CpuBackend {
    CpuBackend::new(&CpuConfig::new(1, Isa::detect().unwrap(), Activations::F32), group)
}

/// Sums of all shapes one after the other, most of them in one submission. Returns the bits of all
/// results.
fn sum_all<B: Backend>(mut backend: B, rank: usize) -> Vec<u32> {
    let mut random = thunder_testing::Random::new(rank as u64 + 1);
    let mut buffers = Vec::new();
    for [rows, width] in SHAPES {
        let mut x = backend.buffer(rows, width).unwrap();
        backend.write(&random.floats(rows * width), &mut x).unwrap();
        buffers.push(x);
    }
    for _ in 0..3 {
        for x in &mut buffers {
            let (rows, _) = backend.extent(x);
            backend.all_reduce(x, 0..rows).unwrap();
            // A part of the rows, which are the same on all ranks now.
            backend.all_reduce(x, rows / 2..rows).unwrap();
        }
        // Other operations use the group in between.
        backend.group().barrier().unwrap();
    }
    let mut bits = Vec::new();
    for x in &buffers {
        let (rows, width) = backend.extent(x);
        let mut values = vec![0.0; rows * width];
        backend.read(x, 0..rows, &mut values).unwrap();
        bits.extend(values.iter().map(|value| value.to_bits()));
    }
    bits
}

#[test]
fn mailboxes_and_hosts_sum_to_the_same_bits() {
    let Some(found) = device("mailboxes_and_hosts_sum_to_the_same_bits") else { return };
    let (with, without) = (Some(Mailboxes::Always), Some(Mailboxes::Never));
    for kinds in [&[with, None][..], &[with, with], &[with, None, without], &[None, with, with]] {
        // On a shared GPU, the waiting kernel of one rank would block the other ranks.
        let Some(devices) = devices_apart(&found, kinds.iter().flatten().count()) else { continue };
        let bits = local::run(kinds.len(), TransportChoice::Shm, |group| {
            let rank = group.rank();
            match kinds[rank] {
                Some(mailboxes) => {
                    let turn = kinds[..rank].iter().flatten().count();
                    sum_all(gpu(&devices[turn], mailboxes, group), rank)
                }
                None => sum_all(cpu(group), rank),
            }
        });
        let bits = bits.unwrap();
        let expected = local::run(kinds.len(), TransportChoice::Shm, |group| {
            let rank = group.rank();
            sum_all(cpu(group), rank)
        });
        assert!(bits.iter().all(|bits| *bits == expected.as_ref().unwrap()[0]), "{kinds:?}");
    }
}

#[test]
fn devices_and_hosts_sum_to_the_same_bits() {
    let Some(found) = device("devices_and_hosts_sum_to_the_same_bits") else { return };
    // Waiting kernels of three ranks need more cores than some machines have.
    for ranks in if found.info.is_real() { 2..4 } else { 2..3 } {
        let Some(devices) = devices_apart(&found, ranks) else { continue };
        let bits = local::run(ranks, TransportChoice::Shm, |group| {
            let rank = group.rank();
            sum_all(super::relaying(&devices[rank], Activations::F32, group), rank)
        });
        let expected = local::run(ranks, TransportChoice::Shm, |group| {
            let rank = group.rank();
            sum_all(cpu(group), rank)
        });
        assert!(bits.unwrap().iter().all(|bits| *bits == expected.as_ref().unwrap()[0]), "{ranks} ranks");
    }
}

#[test]
fn a_few_long_rows_are_summed_in_parts() {
    let Some(devices) = devices("a_few_long_rows_are_summed_in_parts", 2) else { return };
    for form in [SumForm::Relay, SumForm::Mailbox] {
        local::run(2, TransportChoice::Shm, |group| {
            let rank = group.rank();
            let mut backend = exchanging(&devices[rank], form, Activations::F32, group);
            backend.tune(64, 0).unwrap();
            // Whatever the time that was measured.
            backend.sums.sums_logits = true;
            for (rows, width) in [(1, 150_001), (2, 100_000), (1, 4 * MAX_WORDS), (2, 40_000)] {
                let mut x = backend.buffer(3, width).unwrap();
                let number = |at: usize, rank: usize| ((at + 7 * rank) % 1000) as f32;
                let values: Vec<f32> = (0..3 * width).map(|at| number(at, rank)).collect();
                backend.write(&values, &mut x).unwrap();
                let exchanges = last_exchange(&backend);
                backend.all_reduce(&mut x, 1..1 + rows).unwrap();
                let made = last_exchange(&backend) - exchanges;
                assert_eq!(made as usize, (rows * stride(width)).div_ceil(MAX_WORDS), "{rows} x {width}");
                let mut sums = vec![0.0; 3 * width];
                backend.read(&x, 0..3, &mut sums).unwrap();
                for (at, sum) in sums.into_iter().enumerate() {
                    let is_summed = (1..1 + rows).contains(&(at / width));
                    let expected = if is_summed { number(at, 0) + number(at, 1) } else { values[at] };
                    assert_eq!(sum, expected, "{form:?}: number {at} of {rows} x {width}");
                }
            }
            backend.group().barrier().unwrap();
        })
        .unwrap();
    }
}

/// The number of the last exchange.
fn last_exchange(backend: &GpuBackend) -> u32 {
    let Sums { relay, mailbox, .. } = &backend.sums;
    relay.as_ref().map(Relay::number).or(mailbox.as_ref().map(Mailbox::number)).unwrap()
}

/// Reads a sum that rank 0's GPU has recorded.
fn sum_once(backend: &mut GpuBackend) -> Result<f32, ComputeError> {
    let mut x = backend.buffer(1, 64)?;
    backend.write(&[1.0; 64], &mut x)?;
    backend.all_reduce(&mut x, 0..1)?;
    let mut values = [0.0; 64];
    backend.read(&x, 0..1, &mut values)?;
    Ok(values[63])
}

#[test]
fn a_lost_peer_ends_the_step_and_the_device_works_afterwards() {
    let Some(found) = device("a_lost_peer_ends_the_step_and_the_device_works_afterwards") else { return };
    local::run(2, TransportChoice::Shm, |mut group| {
        if group.rank() == 1 {
            group.all_reduce(&mut [1.0f32; 64], thunder_collectives::Op::Sum).unwrap();
            return group.barrier().unwrap();
        }
        let mut backend = gpu(&found, Mailboxes::Always, group);
        assert_eq!(sum_once(&mut backend).unwrap(), 2.0);
        backend.group().barrier().unwrap();
        let error = sum_once(&mut backend).unwrap_err();
        assert!(matches!(error, ComputeError::Comm(CommError::PeerLost { rank: 1, .. })), "{error}");
        assert!(!backend.has_mailbox());
        // The group is lost, but the device works.
        backend.sums = crate::sums::Sums::new(Group::solo());
        assert_eq!(sum_once(&mut backend).unwrap(), 1.0);
    })
    .unwrap();
}

#[test]
fn after_a_late_sum_sums_wait_at_gates() {
    let Some(found) = device("after_a_late_sum_sums_wait_at_gates") else { return };
    local::run(2, TransportChoice::Shm, |mut group| {
        let sum = |group: &mut Group| {
            let mut values = [1.0f32; 64];
            group.all_reduce(&mut values, thunder_collectives::Op::Sum).unwrap();
            assert_eq!(values[0], 2.0);
        };
        if group.rank() == 1 {
            sum(&mut group);
            group.barrier().unwrap();
            // Longer than the patience of the device below.
            std::thread::sleep(std::time::Duration::from_millis(300));
            sum(&mut group);
            sum(&mut group);
            sum(&mut group);
            return;
        }
        let mut backend = gpu(&found, Mailboxes::Always, group);
        assert_eq!(sum_once(&mut backend).unwrap(), 2.0);
        backend.group().barrier().unwrap();
        backend.sums.mailbox.as_mut().unwrap().looks = 1;
        let error = sum_once(&mut backend).unwrap_err().to_string();
        assert!(error.contains("did not come back to it in time"), "{error}");
        assert!(!backend.has_mailbox());
        // Both hosts have answered the late sum, so the group continues in step, at gates.
        assert_eq!(sum_once(&mut backend).unwrap(), 2.0);
        assert_eq!(sum_once(&mut backend).unwrap(), 2.0);
        assert!(backend.sums.mailbox.as_ref().unwrap().is_gated() && !backend.has_mailbox());
    })
    .unwrap();
}
