//! Failures at random moments of random operations, seeded. Each survivor must name the victim in
//! time, free everything that the group used, and end by itself. So must the victim, if it lives.

use std::time::{Duration, Instant};

use thunder_testing::Random;

use crate::hosts::{self, Hosts};
use crate::ranks::{Ranks, Setting};
use crate::{Test, cases};

const SIZE: usize = 3;
/// The stall limit of ranks that may be stopped.
const STALL: Duration = Duration::from_secs(1);
/// The same on emulated processors.
const STALL_EMULATED: Duration = Duration::from_secs(2);
/// The failure happens within this time after all ranks have begun.
const MOMENT_US: u64 = 60_000;

const WORKS: [&str; 15] = [
    "small",
    "large",
    "chain",
    "all_reduce_ring",
    "background",
    "barrier",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "ring",
    "idle",
    "send",
];
/// The last two works wait as long as the peers live, stopped or not.
const BOUNDED_WORKS: usize = 13;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    Kill,
    Stop,
    CutLink,
}

pub fn tests() -> Vec<Test> {
    vec![
        ("series_kill_shm", || series(Fault::Kill, "shm"), false),
        ("series_kill_tcp", || series(Fault::Kill, "tcp"), false),
        ("series_stop_shm", || series(Fault::Stop, "shm"), false),
        ("series_stop_tcp", || series(Fault::Stop, "tcp"), false),
        ("series_cut_link", || series(Fault::CutLink, "tcp"), !hosts::are_possible()),
    ]
}

pub fn series(fault: Fault, transport: &str) {
    let number = |name, default| std::env::var(name).map_or(default, |value| value.parse().expect(name));
    // 50 with `./test --long`. On the emulated machine of tools/rdma-vm a run takes 5 s, and the
    // fixed cases cover every mode.
    let short = if transport.starts_with("rdma") { 1 } else { 3 };
    let runs = number("THUNDER_FAILURE_RUNS", thunder_testing::runs(short, 50) as u64);
    // A seed per transport, so that short series do not repeat one case.
    let seed = number("THUNDER_FAILURE_SEED", transport.bytes().map(u64::from).sum());
    let hosts = (fault == Fault::CutLink).then(|| Hosts::new(SIZE));
    let mut random = Random::new(seed);
    let mut took = Vec::new();
    for run in 0..runs {
        let works = if fault == Fault::Stop { &WORKS[..BOUNDED_WORKS] } else { &WORKS };
        let work = works[random.below(works.len() as u64) as usize];
        let victim = random.below(SIZE as u64) as usize;
        let moment = Duration::from_micros(random.below(MOMENT_US));
        println!(
            "run {run} of seed {seed}: {fault:?} of rank {victim} after {moment:?} of {work}, {transport}"
        );
        took.push(strike(fault, transport, hosts.as_ref(), work, victim, moment));
    }
    took.sort();
    let (median, slowest) = (took[took.len() / 2], took[took.len() - 1]);
    println!(
        "{fault:?}, {transport}: {runs} of {runs} runs right, noticed after {median:?} (median), {slowest:?} (slowest)"
    );
}

/// One run. Returns how long the slowest survivor took to notice.
fn strike(
    fault: Fault,
    transport: &str,
    hosts: Option<&Hosts>,
    work: &str,
    victim: usize,
    moment: Duration,
) -> Duration {
    let stall = if transport.starts_with("rdma") { STALL_EMULATED } else { STALL };
    let stall_limit = if fault == Fault::Stop { stall } else { Duration::from_secs(20) };
    let begun = Instant::now();
    let mut ranks = Ranks::start_ready(Setting { size: SIZE, work, transport, stall_limit, hosts });
    std::thread::sleep(moment);
    let struck = Instant::now();
    match (fault, hosts) {
        (Fault::Kill, _) => ranks.signal(victim, libc::SIGKILL),
        (Fault::Stop, _) => ranks.signal(victim, libc::SIGSTOP),
        (Fault::CutLink, hosts) => hosts.expect("created for this fault").cut(victim),
    }
    let (word, limit) = match fault {
        Fault::Stop => ("stalled", stall + 2 * cases::LIMIT),
        Fault::Kill | Fault::CutLink => ("lost", cases::LIMIT),
    };
    let mut slowest = Duration::ZERO;
    for rank in (0..SIZE).filter(|rank| *rank != victim) {
        let (came, line) = ranks.wait_for(rank, &format!("{word} {victim} over {} after ", over(transport)));
        let after = time_in(&line);
        assert!(after <= came - begun, "rank {rank} says {line}, all began {:?} before", came - begun);
        slowest = slowest.max(came - struck);
        assert!(slowest < limit, "rank {rank} took {:?}", came - struck);
    }
    if fault == Fault::Stop {
        ranks.signal(victim, libc::SIGCONT);
    }
    if fault != Fault::Kill {
        // Whichever rank it blames: from its side, the others are gone.
        ranks.next_line(victim);
    }
    for rank in (0..SIZE).filter(|rank| fault != Fault::Kill || *rank != victim) {
        // Data for a dead rank are not waited for. The goodbye to a stopped or disconnected rank
        // takes up to a second.
        let limit =
            if fault == Fault::Kill { Duration::from_millis(900) } else { Duration::from_millis(2500) };
        let (_, line) = ranks.wait_for(rank, "dropped in ");
        assert!(time_in(&line) < limit, "rank {rank}: {line}");
        let (_, line) = ranks.next_line(rank);
        assert_eq!(line, "clean", "rank {rank}");
        ranks.wait_for_end(rank);
    }
    if let Some(hosts) = hosts {
        hosts.mend(victim);
    }
    slowest
}

/// The time in a line that ends with "TIME us".
fn time_in(line: &str) -> Duration {
    let micros = line.split(' ').nth_back(1).and_then(|number| number.parse().ok());
    Duration::from_micros(micros.expect("a time"))
}

/// The name of a transport in errors.
fn over(transport: &str) -> &str {
    if transport == "shm" { "shared memory" } else { transport.split(' ').next().unwrap_or(transport) }
}
