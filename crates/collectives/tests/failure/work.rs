//! What a rank's process does.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thunder_collectives::{Algorithm, CommError, Config, Group, Op};

use crate::operations;

/// How long finished threads may take to end.
const CLEAN_UP_LIMIT: Duration = Duration::from_secs(2);
/// How long `steady` runs.
const STEADY: Duration = Duration::from_millis(1200);

/// Joins the group of the environment and does `work` in it.
pub fn run(work: &str) {
    let config = with_listener(Config::from_env().unwrap().unwrap());
    let before = Resources::now();
    let mut group = Group::init(config.clone()).unwrap();
    match work {
        "check" => {
            for length in [1, 3, 1000, 16_385, 262_147] {
                operations::check_all(&mut group, length);
            }
            println!("right");
        }
        #[cfg(target_os = "linux")]
        "unreadable" => crate::unreadable::work(group),
        "steady" => steady(group),
        "rebuild" => rebuild(group, &config),
        "rejoin" => println!("whole {}", sum(&mut group)),
        work => {
            group.barrier().unwrap();
            println!("ready");
            let error = loop {
                if let Err(error) = step(&mut group, work) {
                    break error;
                }
            };
            println!("{}", describe(&error));
            let dropped = Instant::now();
            drop(group);
            println!("dropped in {} us", dropped.elapsed().as_micros());
            println!("{}", before.left());
        }
    }
}

/// Rank 0 lets the system choose its port and prints it, so that no other process can have taken
/// it.
fn with_listener(mut config: Config) -> Config {
    if config.rank == 0 {
        let listener = TcpListener::bind(&config.coordinator).unwrap();
        println!("port {}", listener.local_addr().unwrap().port());
        config.listener = Some(Arc::new(listener));
    }
    config
}

fn describe(error: &CommError) -> String {
    match error {
        CommError::PeerLost { rank, transport, after } => {
            format!("lost {rank} over {transport} after {} us", after.as_micros())
        }
        CommError::Stalled { rank, transport, after } => {
            format!("stalled {rank} over {transport} after {} us", after.as_micros())
        }
        error => format!("error {error}"),
    }
}

/// One operation; the caller repeats it.
fn step(group: &mut Group, work: &str) -> Result<(), CommError> {
    let (rank, size) = (group.rank(), group.size());
    let counts = vec![20_000; size];
    let (part, mut whole) = (vec![1u16; 20_000], vec![1u16; 20_000 * size]);
    match work {
        "small" => group.all_reduce(&mut [1f32; 2048], Op::Sum),
        "large" => group.all_reduce(&mut vec![1f32; 1 << 20], Op::Sum),
        "chain" => {
            group.force_algorithm(Some(Algorithm::Chain));
            group.all_reduce(&mut vec![1f32; 1 << 20], Op::Sum)
        }
        "all_reduce_ring" => {
            group.force_algorithm(Some(Algorithm::Ring));
            group.all_reduce(&mut vec![1f32; 1 << 20], Op::Sum)
        }
        "background" => group.start_all_reduce(&mut vec![1f32; 100_000], Op::Sum)?.wait(),
        "barrier" => group.barrier(),
        "broadcast" => group.broadcast(1, &mut whole),
        "all_gather" => group.all_gather(&part, &mut whole, &counts),
        "reduce_scatter" => group.reduce_scatter(&whole, &mut [0u16; 20_000], &counts, Op::Sum),
        "gather" => group.gather(2, &part, (rank == 2).then_some(&mut whole[..]), &counts),
        "scatter" => group.scatter(0, (rank == 0).then_some(&whole[..]), &mut [0u16; 20_000], &counts),
        "all_to_all" => {
            let data = whole.clone();
            group.all_to_all(&data, &counts, &mut whole, &counts)
        }
        "ring" => {
            let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
            if rank == 0 {
                group.send(next, &part)?;
                group.recv(before, &mut whole[..20_000])
            } else {
                group.recv(before, &mut whole[..20_000])?;
                group.send(next, &part)
            }
        }
        // All ranks wait for rank 0, which waits for the last one: no rank talks to the ranks in
        // between.
        "idle" if rank == 0 => group.recv_idle(size - 1, &mut [0u8; 8]),
        "idle" => group.broadcast_idle(0, &mut [0u8; 8]),
        // Rank 0 sends more than fits into the link to a rank that waits for another rank.
        "send" if rank == 0 => group.send(1, &vec![0u8; 64 << 20]),
        "send" => group.recv_idle(size - rank, &mut [0u8; 1]),
        // No operation for a while, as when a model loads.
        "computing" => {
            std::thread::sleep(Duration::from_millis(1));
            group.check()
        }
        work => panic!("unknown work {work}"),
    }
}

/// Runs for a while, whatever the ranks' pace.
fn steady(mut group: Group) {
    group.barrier().unwrap();
    println!("ready");
    let started = Instant::now();
    loop {
        operations::check_all_reduce(&mut group, 2048);
        let mut over = [u8::from(started.elapsed() > STEADY)];
        group.all_reduce(&mut over, Op::Max).unwrap();
        if over == [1] {
            break;
        }
    }
    println!("done");
}

/// After the loss of a rank, forms a group without it, whose coordinator is the lowest survivor,
/// and then one with all ranks.
fn rebuild(mut group: Group, config: &Config) {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let own = listeners.each_ref().map(|listener| listener.local_addr().unwrap().port());
    let mut ports = vec![0; 2 * group.size()];
    group.all_gather(&own, &mut ports, &vec![2; group.size()]).unwrap();
    println!("ready {}", own[1]);
    let lost = loop {
        match group.barrier() {
            Ok(()) => {}
            Err(CommError::PeerLost { rank, .. }) => break rank,
            Err(error) => panic!("{error}"),
        }
    };
    drop(group);
    let [for_survivors, for_all] = listeners.map(Arc::new);
    let form = |mut config: Config, port: u16, listener| {
        config.coordinator = format!("127.0.0.1:{port}");
        config.listener = (config.rank == 0).then_some(listener);
        Group::init(config).unwrap()
    };
    let first = usize::from(lost == 0);
    let mut survivors = form(config.without(lost).unwrap(), ports[2 * first], for_survivors);
    println!("without {lost}: {}", sum(&mut survivors));
    println!("whole {}", sum(&mut form(config.clone(), ports[1], for_all)));
}

fn sum(group: &mut Group) -> f32 {
    let mut data = vec![1f32; 70_000];
    group.all_reduce(&mut data, Op::Sum).unwrap();
    assert_eq!(data, vec![data[0]; data.len()]);
    data[0]
}

/// What a group uses and must free.
#[derive(Debug, PartialEq)]
struct Resources {
    descriptors: usize,
    threads: usize,
    shared_mappings: usize,
}

impl Resources {
    fn now() -> Self {
        let entries = |path| std::fs::read_dir(path).unwrap().count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        Self {
            descriptors: entries("/proc/self/fd"),
            threads: entries("/proc/self/task"),
            shared_mappings: maps.lines().filter(|line| line.contains("thunder-link")).count(),
        }
    }

    /// "clean" once everything is as before, otherwise what is not.
    fn left(&self) -> String {
        let deadline = Instant::now() + CLEAN_UP_LIMIT;
        loop {
            let now = Self::now();
            if now == *self {
                return "clean".to_owned();
            }
            if Instant::now() > deadline {
                return format!("clean it is not: {now:?}, before {self:?}");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
