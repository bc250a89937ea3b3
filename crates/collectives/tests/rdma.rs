//! Groups over RDMA, on the devices that `tools/rdma-vm/run --ranks 4 --links 2` makes. Ignored elsewhere.

#![allow(clippy::unwrap_used, reason = "a test's helpers may panic as its tests do")]

#[path = "common/operations.rs"]
mod operations;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use thunder_collectives::{
    CommError, Config, Group, Op, RdmaConfig, RdmaMode, Transport, TransportChoice, local,
};

/// Set for a process that plays rank 1 until it is killed.
const VICTIM: &str = "COLLECTIVES_RDMA_VICTIM";
const MODES: [RdmaMode; 3] = [RdmaMode::Uc, RdmaMode::Rc, RdmaMode::RcWrite];

fn main() {
    if std::env::var_os(VICTIM).is_some() {
        victim();
    }
    let mut trials = Vec::new();
    let mut add = |name: String, test: Box<dyn FnOnce() + Send>| {
        let run = move || {
            test();
            Ok::<(), Failed>(())
        };
        trials.push(Trial::test(name, run).with_ignored_flag(true));
    };
    for mode in MODES {
        for (ranks, cables) in [(2, 1), (2, 2), (3, 1), (4, 2)] {
            let name = format!("every_operation_{mode:?}_{ranks}_ranks_{cables}_cables");
            add(name, Box::new(move || every_operation(mode, ranks, cables)));
        }
        add(format!("killed_rank_{mode:?}"), Box::new(move || killed_rank(mode)));
    }
    add("some_pairs_by_rdma_others_by_shared_memory".into(), Box::new(mixed));
    add("a_lost_frame_is_told_from_a_lost_rank".into(), Box::new(lost_frame));
    add("an_unknown_device_is_named".into(), Box::new(unknown_device));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// A rank's devices towards the others, from the file that the VM wrote: "RANK PEER LINK DEVICE …" lines.
fn devices(rank: usize, ranks: usize, cables: usize) -> RdmaConfig {
    let text = std::fs::read_to_string(std::env::var("RDMA_LINKS").unwrap()).unwrap();
    let mut config = RdmaConfig { devices: Default::default(), mode: None };
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [from, to, cable] = [0, 1, 2].map(|at| words[at].parse::<usize>().unwrap());
        if from == rank && to < ranks && cable < cables {
            config.devices.entry(to).or_default().push(words[3].to_string());
        }
    }
    config
}

fn groups(mode: RdmaMode, ranks: usize, cables: usize) -> Vec<Group> {
    local::groups_with(ranks, |config| {
        config.transport = TransportChoice::Rdma;
        config.rdma = Some(RdmaConfig { mode: Some(mode), ..devices(config.rank, ranks, cables) });
    })
    .unwrap()
}

fn every_operation(mode: RdmaMode, ranks: usize, cables: usize) {
    local::run_on(groups(mode, ranks, cables), |mut group| {
        let rank = group.rank();
        for peer in (0..ranks).filter(|peer| *peer != rank) {
            assert_eq!(group.transport(peer), Transport::Rdma);
        }
        // Around the borders of short frames, then over several long ones, then 16 MiB and an element.
        for length in [1, 3, 1013, 1014, 1015, 16_385, 65_543] {
            operations::check_all(&mut group, length);
        }
        operations::check_all_reduce(&mut group, (4 << 20) + 1);

        // In the other order, so that every rank but perhaps one has another number.
        let mut reversed = group.split(0, (ranks - rank) as u32).unwrap();
        assert_eq!(reversed.rank(), ranks - 1 - rank);
        assert_eq!(reversed.transport((reversed.rank() + 1) % ranks), Transport::Rdma);
        operations::check_all(&mut reversed, 9);
    });
}

fn mixed() {
    let groups = local::groups_with(3, |config| {
        config.transport = TransportChoice::Rdma;
        let mut rdma = devices(config.rank, 3, 1);
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
        for _ in 0..20 {
            let mut data = vec![1.0f32; 5000];
            group.all_reduce(&mut data, Op::Sum).unwrap();
            assert_eq!(data, vec![3.0; 5000]);
        }
    });
}

/// The first frame of an operation is dropped on its way from rank 0 to rank 1; UC says nothing.
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
            // Rank 0 has all that it needs for the first; the later ones show rank 1 what it lacks.
            loop {
                if let Err(error) = group.all_reduce(&mut [1.0f32; 10], Op::Sum) {
                    break error;
                }
            }
        })
    });
    assert!(matches!(errors[1], CommError::LinkFailed { rank: 0, .. }), "{errors:?}");
    assert!(errors[1].to_string().contains("lost"), "{errors:?}");
    assert!(matches!(errors[0], CommError::Aborted { by: 1, rank: 0, .. }), "{errors:?}");
    assert!(errors[0].to_string().contains("link"), "rank 0 is told why: {errors:?}");
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

/// Rank 1 of two, until it is killed.
fn victim() -> ! {
    let mut config = Config::from_env().unwrap().unwrap();
    let mode = config.rdma.as_ref().unwrap().mode;
    config.rdma = Some(RdmaConfig { mode, ..devices(1, 2, 1) });
    let mut group = Group::init(config).unwrap();
    loop {
        group.all_reduce(&mut [1.0f32; 3000], Op::Sum).unwrap();
    }
}

fn killed_rank(mode: RdmaMode) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut config = Config::new(0, 2, listener.local_addr().unwrap().to_string());
    config.transport = TransportChoice::Rdma;
    config.rdma = Some(RdmaConfig { mode: Some(mode), ..devices(0, 2, 1) });
    config.listener = Some(listener.into());
    let name = match mode {
        RdmaMode::Uc => "uc",
        RdmaMode::Rc => "rc",
        RdmaMode::RcWrite => "rc-write",
    };
    let file = std::env::temp_dir().join("thunder-rdma-devices.json");
    std::fs::write(&file, "[[null, null], [null, null]]").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(VICTIM, "1")
        .env("THUNDER_RANK", "1")
        .env("THUNDER_WORLD_SIZE", "2")
        .env("THUNDER_COORDINATOR", &config.coordinator)
        .env("THUNDER_TRANSPORT", "rdma")
        .env("THUNDER_RDMA_MODE", name)
        .env("THUNDER_RDMA_DEVICES", &file)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut group = Group::init(config).unwrap();
    for _ in 0..20 {
        group.all_reduce(&mut [1.0f32; 3000], Op::Sum).unwrap();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let killed = Instant::now();
    let error = loop {
        if let Err(error) = group.all_reduce(&mut [1.0f32; 3000], Op::Sum) {
            break error;
        }
    };
    let took = killed.elapsed();
    assert!(
        matches!(error, CommError::PeerLost { rank: 1, transport: Transport::Rdma, .. }),
        "{mode:?}: {error}"
    );
    assert!(took < Duration::from_secs(2), "{mode:?}: it took {took:?}");
    // What was on its way to the dead rank is not waited for.
    let dropped = Instant::now();
    drop(group);
    assert!(dropped.elapsed() < Duration::from_millis(500), "{mode:?}: the end took {:?}", dropped.elapsed());
    println!("{mode:?}: {took:?} after the kill: {error}");
}
