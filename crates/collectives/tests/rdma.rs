//! Groups over RDMA, on the devices that `tools/rdma-vm/run --ranks 4 --links 2` creates. Ignored
//! elsewhere.

#![allow(clippy::unwrap_used, reason = "a test's helpers may panic as its tests do")]

#[path = "common/cables.rs"]
#[allow(dead_code, reason = "the rest is for the tests that cut cables")]
mod cables;
#[path = "common/operations.rs"]
mod operations;
#[path = "common/order.rs"]
mod order;

use std::process::Command;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use thunder_collectives::{
    CommError, Group, Op, RdmaConfig, RdmaMode, Transport, TransportChoice, bench, local,
};

const MODES: [RdmaMode; 3] = [RdmaMode::Uc, RdmaMode::Rc, RdmaMode::RcWrite];

fn main() {
    let mut trials = Vec::new();
    let mut add = |name: String, test: Box<dyn FnOnce() + Send>| {
        let timed_name = name.clone();
        let run = move || {
            thunder_testing::timed(&timed_name, test);
            Ok::<(), Failed>(())
        };
        trials.push(Trial::test(name, run).with_ignored_flag(true));
    };
    for mode in MODES {
        for (ranks, cables) in [(2, 1), (2, 2), (3, 1), (3, 2), (4, 2)] {
            let name = format!("every_operation_{mode:?}_{ranks}_ranks_{cables}_cables");
            add(name, Box::new(move || every_operation(mode, ranks, cables)));
        }
        add(format!("repeated_sums_have_the_same_bits_{mode:?}"), Box::new(move || same_bits(mode)));
    }
    add("some_pairs_use_rdma_others_shared_memory".into(), Box::new(mixed));
    add("hosts_of_several_ranks_with_cables_between_them".into(), Box::new(hosts));
    add("a_lost_frame_is_distinguished_from_a_lost_rank".into(), Box::new(lost_frame));
    add("an_unknown_device_is_named".into(), Box::new(unknown_device));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn rdma(mode: Option<RdmaMode>, rank: usize, ranks: usize, cables: usize) -> RdmaConfig {
    RdmaConfig { devices: cables::devices(rank, ranks, cables), mode }
}

fn groups(mode: RdmaMode, ranks: usize, cables: usize) -> Vec<Group> {
    local::groups_with(ranks, |config| {
        config.transport = TransportChoice::Rdma;
        config.rdma = Some(rdma(Some(mode), config.rank, ranks, cables));
        // Emulated processors are slow between two operations on 16 MiB.
        config.stall_limit = Duration::from_secs(60);
    })
    .unwrap()
}

fn every_operation(mode: RdmaMode, ranks: usize, cables: usize) {
    local::run_on(groups(mode, ranks, cables), |mut group| {
        let rank = group.rank();
        for peer in (0..ranks).filter(|peer| *peer != rank) {
            assert_eq!(group.transport(peer), Transport::Rdma);
        }
        // Lengths around the limit of short frames, then several long frames. Last 16 MiB and one
        // element, which is slow on emulated processors: only with two ranks and two cables, or
        // with `./test --long` with two ranks in each mode and with more over RC.
        let short_case = ranks == 2 && cables == 2;
        let long_case = ranks == 2 || mode == RdmaMode::Rc;
        let is_long = if thunder_testing::is_long() { long_case } else { short_case };
        let long = if is_long { (4 << 20) + 1 } else { (1 << 18) + 1 };
        for length in [1, 3, 1013, 1014, 1015, 16_385, long] {
            operations::check_all(&mut group, length);
        }
        operations::check_all_reduce(&mut group, (4 << 20) + 1);

        // In reverse order, so that at most one rank keeps its number.
        let mut reversed = group.split(0, (ranks - rank) as u32).unwrap();
        assert_eq!(reversed.rank(), ranks - 1 - rank);
        assert_eq!(reversed.transport((reversed.rank() + 1) % ranks), Transport::Rdma);
        operations::check_all(&mut reversed, 9);
    });
}

fn same_bits(mode: RdmaMode) {
    // Two ranks have only one order.
    for ranks in [3, 4] {
        local::run_on(groups(mode, ranks, 1), |mut group| {
            order::check(&mut group);
            order::check_ring(&mut group);
        });
    }
}

fn mixed() {
    let groups = local::groups_with(3, |config| {
        config.transport = TransportChoice::Rdma;
        let mut rdma = rdma(None, config.rank, 3, 1);
        // No cable between ranks 0 and 2.
        let without = [2, 1, 0][config.rank];
        rdma.devices.retain(|peer, _| config.rank == 1 || *peer != without);
        config.rdma = Some(rdma);
    });
    local::run_on(groups.unwrap(), |mut group| {
        let expected = if group.rank() == 0 { Transport::Shm } else { Transport::Rdma };
        if group.rank() != 2 {
            assert_eq!(group.transport(2), expected);
        }
        operations::check_all(&mut group, 5000);
    });
}

/// The automatic choice: shared memory inside two hosts, cables between them, TCP where there is no
/// cable.
fn hosts() {
    let groups = local::groups_with(4, |config| {
        config.host = Some(format!("{} of {}", config.rank / 2, std::process::id()));
        let mut rdma = rdma(None, config.rank, 4, 2);
        rdma.devices.retain(|peer, _| config.rank + peer != 3);
        config.rdma = Some(rdma);
        config.stall_limit = Duration::from_secs(60);
    });
    local::run_on(groups.unwrap(), |mut group| {
        for peer in (0..4).filter(|peer| *peer != group.rank()) {
            let expected = match (peer / 2 == group.rank() / 2, peer + group.rank() == 3) {
                (true, _) => Transport::Shm,
                (_, true) => Transport::Tcp,
                _ => Transport::Rdma,
            };
            assert_eq!(group.transport(peer), expected, "from {} to {peer}", group.rank());
        }
        for length in [3, 1015, 65_543] {
            operations::check_all(&mut group, length);
        }
        order::check(&mut group);
        group.tune().unwrap();
        let measured = bench::run::<f32>(
            &mut group,
            &bench::BenchPlan {
                operations: bench::Operation::ALL.to_vec(),
                sizes: vec![8, 1 << 20],
                time_per_row: Duration::from_millis(1),
                ..Default::default()
            },
        );
        let rows = measured.unwrap();
        for transport in ["shared memory", "rdma", "tcp"] {
            assert!(rows[0].transport.contains(transport), "{}", rows[0].transport);
        }
    });
}

/// The first frame of an operation from rank 0 to rank 1 is dropped. UC does not report that.
fn lost_frame() {
    let tc = |verb: &str, rest: &[&str]| {
        let mut command = Command::new("tc");
        command.args(["qdisc", verb, "dev", "r0p1l0", "root"]).args(rest);
        assert!(command.status().unwrap().success(), "{command:?}");
    };
    let errors = local::run_on(groups(RdmaMode::Uc, 2, 1), |mut group| {
        group.barrier().unwrap();
        let rank = group.rank();
        if rank == 0 {
            tc("add", &["netem", "loss", "100%"]);
        }
        std::thread::scope(|scope| {
            if rank == 0 {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(300));
                    tc("del", &[]);
                });
            }
            // Rank 0 has all that it needs for the first operation. The later ones show rank 1 that
            // it lacks a frame.
            loop {
                if let Err(error) = group.all_reduce(&mut [1.0f32; 10], Op::Sum) {
                    break error;
                }
            }
        })
    });
    assert!(matches!(errors[1], CommError::LinkFailed { rank: 0, .. }), "{errors:?}");
    assert!(errors[1].to_string().contains("lost"), "{errors:?}");
    assert!(matches!(errors[0], CommError::LinkFailed { rank: 1, .. }), "rank 0 is told: {errors:?}");
}

fn unknown_device() {
    let error = local::groups_with(2, |config| {
        config.transport = TransportChoice::Rdma;
        config.rendezvous_limit = Duration::from_secs(5);
        let devices = [(1 - config.rank, vec!["rdma_en99".to_string()])].into();
        config.rdma = Some(RdmaConfig { devices, mode: None });
    })
    .err()
    .unwrap()
    .to_string();
    assert!(error.contains("rdma_en99") && error.contains("rdma_r0p1l0"), "{error}");
}
