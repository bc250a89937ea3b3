//! Failures of ranks that use RDMA, on the devices of `tools/rdma-vm`.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::Test;
use crate::cables::{self, End};
use crate::cases::{self, LIMIT, setting};
use crate::ranks::{Ranks, Setting};
use crate::series::{Fault, series};

const MODES: [&str; 3] = ["rdma uc", "rdma rc", "rdma rc-write"];
/// Longer than any operation that is not cut.
const STALL_LIMIT: Duration = Duration::from_secs(2);
/// The emulated machine shares its host's cores, so now and then everything in it takes ten times
/// as long. A real slowness shows in every attempt.
const ATTEMPTS: usize = 3;
/// Longer than a port takes to come up.
const PORT_LIMIT: Duration = Duration::from_secs(5);

pub fn tests() -> Vec<Test> {
    vec![
        ("series_kill_rdma_uc", || series(Fault::Kill, MODES[0]), true),
        ("series_kill_rdma_rc", || series(Fault::Kill, MODES[1]), true),
        ("series_kill_rdma_rc_write", || series(Fault::Kill, MODES[2]), true),
        ("series_stop_rdma_uc", || series(Fault::Stop, MODES[0]), true),
        ("series_stop_rdma_rc", || series(Fault::Stop, MODES[1]), true),
        ("series_stop_rdma_rc_write", || series(Fault::Stop, MODES[2]), true),
        ("a_killed_rank_of_two_and_of_four_is_noticed", killed, true),
        ("a_cable_that_is_cut_is_a_lost_rank_at_both_ends", cut, true),
        ("an_idle_wait_notices_any_cut_cable", cut_while_idle, true),
        ("survivors_over_cables_continue_without_the_rank_and_then_with_it", rebuilt, true),
    ]
}

/// A cable that is down until this is dropped.
struct Cut {
    end: End,
}

impl Cut {
    /// Cuts the first cable between two ranks.
    fn new(rank: usize, peer: usize) -> Self {
        let mut ends = cables::ends().into_iter();
        let cut = Self { end: ends.find(|end| (end.rank, end.peer) == (rank, peer)).expect("a cable") };
        run(&["ip", "link", "set", interface(&cut.end.device), "down"]);
        cut
    }
}

impl Drop for Cut {
    fn drop(&mut self) {
        let (here, there) = (interface(&self.end.device), interface(&self.end.peer_device));
        run(&["ip", "link", "set", here, "up"]);
        // The kernel removed the neighbour entry with the cut.
        let address = std::fs::read_to_string(format!("/sys/class/net/{there}/address")).unwrap();
        let neighbour = ["ip", "neigh", "replace", &self.end.peer_ip, "dev", here, "lladdr", address.trim()];
        run(&[&neighbour[..], &["nud", "permanent"]].concat());
        let started = Instant::now();
        for device in [&self.end.device, &self.end.peer_device] {
            let state = format!("/sys/class/infiniband/{device}/ports/1/state");
            while !std::fs::read_to_string(&state).unwrap().contains("ACTIVE") {
                assert!(started.elapsed() < PORT_LIMIT, "{device} does not come up again");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

fn interface(device: &str) -> &str {
    device.strip_prefix("rdma_").expect("named after its interface")
}

fn run(words: &[&str]) {
    let status = Command::new(words[0]).args(&words[1..]).status();
    assert!(status.unwrap().success(), "{words:?} failed");
}

fn killed() {
    for mode in MODES {
        for size in [2, 4] {
            let mut ranks = Ranks::start_ready(Setting { size, ..setting("large", mode, STALL_LIMIT) });
            std::thread::sleep(Duration::from_millis(21));
            let killed = Instant::now();
            ranks.signal(1, libc::SIGKILL);
            for rank in (0..size).filter(|rank| *rank != 1) {
                let after = ranks.wait_for(rank, "lost 1 over rdma ").0 - killed;
                assert!(after < LIMIT, "{mode}: rank {rank} of {size} took {after:?}");
            }
        }
    }
}

fn cut() {
    let works = ["small", "large", "barrier", "all_to_all"];
    for (m, mode) in MODES.into_iter().enumerate() {
        // Each mode with two works, each work with a mode or two; all of them with `./test --long`.
        for work in works.into_iter().cycle().skip(m).take(thunder_testing::runs(2, works.len())) {
            cut_during(work, mode, Duration::from_millis(21), [1, 2]);
        }
    }
}

fn cut_while_idle() {
    // Longer than the stall limit, which does not apply here.
    for mode in MODES {
        cut_during("idle", mode, 2 * STALL_LIMIT, [0, 2]);
        // Both wait for rank 0.
        cut_during("idle", mode, Duration::from_millis(21), [1, 2]);
    }
}

/// Cuts the cable between two of three ranks. The third rank keeps its cables, and is told.
fn cut_during(work: &str, mode: &str, moment: Duration, ends: [usize; 2]) {
    let in_time = (0..ATTEMPTS).any(|_| cut_once(work, mode, moment, ends) < LIMIT);
    assert!(in_time, "{work} over {mode} took more than {LIMIT:?} {ATTEMPTS} times");
}

/// Returns the time until the last rank reported the loss.
fn cut_once(work: &str, mode: &str, moment: Duration, ends: [usize; 2]) -> Duration {
    let mut ranks = Ranks::start_ready(setting(work, mode, STALL_LIMIT));
    std::thread::sleep(moment);
    let struck = Instant::now();
    let _cut = Cut::new(ends[0], ends[1]);
    let mut slowest = Duration::ZERO;
    for rank in 0..3 {
        let (came, line) = ranks.next_line(rank);
        let lost = ends.iter().any(|end| *end != rank && line.starts_with(&format!("lost {end} over rdma ")));
        assert!(lost, "{work} over {mode}: rank {rank} says {line}");
        let after = came - struck;
        println!("{work} over {mode}: rank {rank} says {line} after {after:?}");
        slowest = slowest.max(after);
    }
    slowest
}

fn rebuilt() {
    for (m, mode) in MODES.into_iter().enumerate() {
        // Another victim in each mode; every victim in each with `./test --long`.
        cases::rebuilt_over(mode, (m..3).chain(0..m).take(thunder_testing::runs(1, 3)));
    }
}
