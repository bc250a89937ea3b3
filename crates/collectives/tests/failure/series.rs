//! Blows at random moments of random operations, seeded. Each survivor must name the rank that was hit, in time, give back
//! all that the group used, and end by itself; so must the one that was hit, if it lives.

use std::time::{Duration, Instant};

use thunder_testing::Random;

use crate::hosts::{self, Hosts};
use crate::ranks::{Ranks, Setting};
use crate::{Test, cases};

const SIZE: usize = 3;
/// The stall limit of ranks that may be stopped.
const STALL: Duration = Duration::from_millis(500);
/// And on emulated processors.
const STALL_EMULATED: Duration = Duration::from_secs(2);
/// A blow falls within this time after all ranks have begun.
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
/// The last two wait for as long as the peers live, stopped or not.
const BOUNDED_WORKS: usize = 13;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Blow {
    Kill,
    Stop,
    CutLink,
}

pub fn tests() -> Vec<Test> {
    vec![
        ("series_kill_shm", || series(Blow::Kill, "shm"), false),
        ("series_kill_tcp", || series(Blow::Kill, "tcp"), false),
        ("series_stop_shm", || series(Blow::Stop, "shm"), false),
        ("series_stop_tcp", || series(Blow::Stop, "tcp"), false),
        ("series_cut_link", || series(Blow::CutLink, "tcp"), !hosts::are_possible()),
    ]
}

pub fn series(blow: Blow, transport: &str) {
    let number = |name, default| std::env::var(name).map_or(default, |value| value.parse().expect(name));
    // `./test --long` makes 50. On the emulated machine of tools/rdma-vm one takes 5 s, and the fixed cases cover every mode.
    let short = if transport.starts_with("rdma") { 1 } else { 3 };
    let runs = number("THUNDER_FAILURE_RUNS", thunder_testing::runs(short, 50) as u64);
    // Another seed for each transport, so that a short series does not repeat one case.
    let seed = number("THUNDER_FAILURE_SEED", transport.bytes().map(u64::from).sum());
    let hosts = (blow == Blow::CutLink).then(|| Hosts::new(SIZE));
    let mut random = Random::new(seed);
    let mut took = Vec::new();
    for run in 0..runs {
        let works = if blow == Blow::Stop { &WORKS[..BOUNDED_WORKS] } else { &WORKS };
        let work = works[random.below(works.len() as u64) as usize];
        let victim = random.below(SIZE as u64) as usize;
        let moment = Duration::from_micros(random.below(MOMENT_US));
        println!(
            "run {run} of seed {seed}: {blow:?} of rank {victim} after {moment:?} of {work}, {transport}"
        );
        took.push(strike(blow, transport, hosts.as_ref(), work, victim, moment));
    }
    took.sort();
    let (median, slowest) = (took[took.len() / 2], took[took.len() - 1]);
    println!(
        "{blow:?}, {transport}: {runs} of {runs} runs right, noticed after {median:?} (median), {slowest:?} (slowest)"
    );
}

/// One run; how long the slowest survivor took to notice.
fn strike(
    blow: Blow,
    transport: &str,
    hosts: Option<&Hosts>,
    work: &str,
    victim: usize,
    moment: Duration,
) -> Duration {
    let stall = if transport.starts_with("rdma") { STALL_EMULATED } else { STALL };
    let stall_limit = if blow == Blow::Stop { stall } else { Duration::from_secs(20) };
    let begun = Instant::now();
    let mut ranks = Ranks::start_ready(Setting { size: SIZE, work, transport, stall_limit, hosts });
    std::thread::sleep(moment);
    let struck = Instant::now();
    match (blow, hosts) {
        (Blow::Kill, _) => ranks.signal(victim, libc::SIGKILL),
        (Blow::Stop, _) => ranks.signal(victim, libc::SIGSTOP),
        (Blow::CutLink, hosts) => hosts.expect("made for this blow").cut(victim),
    }
    let (word, limit) = match blow {
        Blow::Stop => ("stalled", stall + cases::LIMIT),
        Blow::Kill | Blow::CutLink => ("lost", cases::LIMIT),
    };
    let mut slowest = Duration::ZERO;
    for rank in (0..SIZE).filter(|rank| *rank != victim) {
        let (came, line) = ranks.wait_for(rank, &format!("{word} {victim} over {} after ", over(transport)));
        let after = time_in(&line);
        assert!(after <= came - begun, "rank {rank} says {line}, all began {:?} before", came - begun);
        slowest = slowest.max(came - struck);
        assert!(slowest < limit, "rank {rank} took {:?}", came - struck);
    }
    if blow == Blow::Stop {
        ranks.signal(victim, libc::SIGCONT);
    }
    if blow != Blow::Kill {
        // Whomever it blames: from where it is, the others are gone.
        ranks.next_line(victim);
    }
    for rank in (0..SIZE).filter(|rank| blow != Blow::Kill || *rank != victim) {
        // What was on its way to a dead rank is not waited for; the goodbye to a stopped one, or one cut off, is for a second.
        let limit = if blow == Blow::Kill { Duration::from_millis(500) } else { Duration::from_millis(1500) };
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

/// The time before a line's last word, which is `us`.
fn time_in(line: &str) -> Duration {
    let micros = line.split(' ').nth_back(1).and_then(|number| number.parse().ok());
    Duration::from_micros(micros.expect("a time"))
}

/// What a transport is called in errors.
fn over(transport: &str) -> &str {
    if transport == "shm" { "shared memory" } else { transport.split(' ').next().unwrap_or(transport) }
}
