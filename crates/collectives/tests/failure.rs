//! Ranks as processes, of which one is killed or stopped in the middle of an operation.

#![allow(clippy::unwrap_used, reason = "a test's helpers may panic as its tests do")]

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use thunder_collectives::{CommError, Config, Group, Op};

/// What the children do until they get an error.
const WORK: &str = "COLLECTIVES_TEST_WORK";
/// From the death of a rank to the error on every survivor.
const LIMIT: Duration = Duration::from_secs(2);

/// Not a test of its own: what each rank's process runs.
#[test]
fn child() {
    let Ok(work) = std::env::var(WORK) else { return };
    let mut group = Group::init(Config::from_env().unwrap().unwrap()).unwrap();
    group.barrier().unwrap();
    println!("ready");
    let error = loop {
        if let Err(error) = step(&mut group, &work) {
            break error;
        }
    };
    match error {
        CommError::PeerLost { rank, .. } => println!("lost {rank}"),
        CommError::Stalled { rank, .. } => println!("stalled {rank}"),
        error => println!("error {error}"),
    }
}

fn step(group: &mut Group, work: &str) -> Result<(), CommError> {
    let (rank, size) = (group.rank(), group.size());
    match work {
        "small" => group.all_reduce(&mut [1f32; 2048], Op::Sum),
        "large" => group.all_reduce(&mut vec![1f32; 1 << 20], Op::Sum),
        "barrier" => group.barrier(),
        "all_to_all" => {
            let data = vec![1u8; 50_000 * size];
            let mut out = data.clone();
            group.all_to_all(&data, &vec![50_000; size], &mut out, &vec![50_000; size])
        }
        // Everyone waits for rank 0, which waits for the last one: nobody talks to the ranks between.
        "idle" if rank == 0 => group.recv_idle(size - 1, &mut [0u8; 8]),
        "idle" => group.broadcast_idle(0, &mut [0u8; 8]),
        // Rank 0 sends more than fits to a rank that waits for another one.
        "send" if rank == 0 => group.send(1, &vec![0u8; 64 << 20]),
        "send" => group.recv_idle(size - rank, &mut [0u8; 1]),
        work => panic!("unknown work {work}"),
    }
}

struct Ranks {
    children: Vec<(Child, BufReader<std::process::ChildStdout>)>,
}

impl Ranks {
    fn start(size: usize, work: &str, transport: &str, stall: Duration) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let children = (0..size).map(|rank| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["child", "--exact", "--nocapture", "--quiet"])
                .env(WORK, work)
                .env("THUNDER_RANK", rank.to_string())
                .env("THUNDER_WORLD_SIZE", size.to_string())
                .env("THUNDER_COORDINATOR", format!("127.0.0.1:{port}"))
                .env("THUNDER_TRANSPORT", transport)
                .env("THUNDER_STALL_LIMIT_MS", stall.as_millis().to_string())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let output = BufReader::new(child.stdout.take().unwrap());
            (child, output)
        });
        let mut ranks = Self { children: children.collect() };
        for rank in 0..size {
            ranks.wait_for(rank, "ready");
        }
        ranks
    }

    /// The rest of the line that starts with `word`; what the test harness prints around it is skipped.
    fn wait_for(&mut self, rank: usize, word: &str) -> String {
        let mut seen = String::new();
        loop {
            let mut line = String::new();
            let count = self.children[rank].1.read_line(&mut line).unwrap();
            assert!(count > 0, "rank {rank} ended without {word:?}: {seen}");
            if let Some(at) = line.find(word) {
                return line[at..].trim().to_owned();
            }
            seen.push_str(&line);
        }
    }

    fn signal(&self, rank: usize, signal: i32) {
        // SAFETY: the process is a child that has not been waited for, so its id is still its own.
        assert_eq!(unsafe { libc::kill(self.children[rank].0.id() as i32, signal) }, 0);
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for (child, _) in &mut self.children {
            // Most have ended; the rest must not outlive the test.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A few different moments, the same in every run.
fn delay(round: usize) -> Duration {
    Duration::from_micros([100, 3_000, 21_000, 57_000][round % 4])
}

fn kill_one(work: &str, transport: &str, size: usize, victim: usize, round: usize) {
    let mut ranks = Ranks::start(size, work, transport, Duration::from_secs(20));
    std::thread::sleep(delay(round));
    let killed = Instant::now();
    ranks.signal(victim, libc::SIGKILL);
    for rank in (0..size).filter(|rank| *rank != victim) {
        let answer = ranks.wait_for(rank, "lost");
        let after = killed.elapsed();
        assert_eq!(answer, format!("lost {victim}"), "{work} over {transport}, rank {rank}");
        assert!(after < LIMIT, "{work} over {transport}: rank {rank} took {after:?}");
    }
}

#[test]
fn a_killed_rank_is_noticed_by_all_in_every_operation() {
    let mut round = 0;
    for transport in ["shm", "tcp"] {
        for work in ["small", "large", "barrier", "all_to_all", "idle", "send"] {
            // In "idle" and "send" some survivors do not talk to the victim.
            for victim in [0, 2] {
                kill_one(work, transport, 3, victim, round);
                round += 1;
            }
        }
    }
}

#[test]
fn a_rank_that_exits_in_good_order_is_lost_to_those_who_wait_for_it() {
    for transport in ["shm", "tcp"] {
        let results = thunder_collectives::local::run(
            3,
            if transport == "shm" {
                thunder_collectives::TransportChoice::Shm
            } else {
                thunder_collectives::TransportChoice::Tcp
            },
            |mut group| {
                group.barrier()?;
                if group.rank() == 1 {
                    return Ok(());
                }
                group.barrier()
            },
        );
        let results = results.unwrap();
        assert_eq!(results[1], Ok(()));
        for rank in [0, 2] {
            assert!(matches!(results[rank], Err(CommError::PeerLost { rank: 1, .. })), "{:?}", results[rank]);
        }
    }
}

#[test]
fn a_stopped_rank_is_named_after_the_stall_limit() {
    let stall = Duration::from_millis(500);
    for transport in ["shm", "tcp"] {
        for work in ["small", "large"] {
            let mut ranks = Ranks::start(3, work, transport, stall);
            std::thread::sleep(delay(2));
            let stopped = Instant::now();
            ranks.signal(1, libc::SIGSTOP);
            for rank in [0, 2] {
                assert_eq!(ranks.wait_for(rank, "stalled"), "stalled 1", "{work} over {transport}");
            }
            let after = stopped.elapsed();
            assert!(after >= stall && after < stall + LIMIT, "{after:?}");
        }
    }
}

#[test]
fn an_idle_wait_costs_no_processor_time() {
    for transport in ["shm", "tcp"] {
        let ranks = Ranks::start(2, "idle", transport, Duration::from_millis(200));
        std::thread::sleep(Duration::from_millis(100));
        let before: Vec<u64> = ranks.children.iter().map(|(child, _)| ticks(child.id())).collect();
        // Longer than the stall limit, which does not apply here.
        std::thread::sleep(Duration::from_secs(1));
        for ((child, _), before) in ranks.children.iter().zip(before) {
            let used = ticks(child.id()) - before;
            assert!(used <= 2, "{used} ticks of 10 ms over {transport}");
        }
    }
}

/// Processor time of a process, in clock ticks (user and system: fields 14 and 15 of /proc/PID/stat).
fn ticks(process: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = text.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn nothing_is_left_in_the_file_system() {
    let shared = || {
        let entries = std::fs::read_dir("/dev/shm").unwrap().chain(std::fs::read_dir("/tmp").unwrap());
        entries
            .filter_map(|entry| entry.unwrap().file_name().into_string().ok())
            .filter(|name| name.starts_with("thunder-") && !name.starts_with("thunder-hosts"))
            .count()
    };
    let before = shared();
    kill_one("small", "shm", 3, 1, 1);
    assert!(shared() <= before);
}
