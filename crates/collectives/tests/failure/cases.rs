//! Chosen failures, the same in every run.

use std::time::{Duration, Instant};

use thunder_collectives::{CommError, TransportChoice, local};

use crate::Test;
use crate::ranks::{Ranks, Setting};
use thunder_testing::idle::falls_quiet;

/// Limit from the death of a rank to the error on every survivor.
pub const LIMIT: Duration = Duration::from_secs(2);

pub fn tests() -> Vec<Test> {
    vec![
        ("a_killed_rank_ends_every_kind_of_operation_on_all_ranks", killed, false),
        ("a_rank_that_exits_normally_is_lost_to_ranks_that_wait_for_it", exits, false),
        ("a_stopped_rank_is_named_after_the_stall_limit", stopped, false),
        ("a_rank_that_is_stopped_for_less_than_the_limit_continues", resumed, false),
        ("survivors_continue_without_the_killed_rank_and_then_with_it", rebuilt, false),
        ("an_idle_wait_costs_no_processor_time", idle, false),
    ]
}

pub fn setting<'a>(work: &'a str, transport: &'a str, stall_limit: Duration) -> Setting<'a> {
    Setting { size: 3, work, transport, stall_limit, hosts: None }
}

/// In "idle" and "send" some survivors do not exchange data with the victim. The random series
/// covers the other operations.
fn killed() {
    let works = ["small", "large", "all_reduce_ring", "barrier", "all_to_all", "idle", "send", "computing"];
    for transport in ["shm", "tcp"] {
        for work in works {
            for (victim, moment_us) in [(0, 100), (2, 21_000)] {
                let mut ranks = Ranks::start_ready(setting(work, transport, Duration::from_secs(20)));
                std::thread::sleep(Duration::from_micros(moment_us));
                let killed = Instant::now();
                ranks.signal(victim, libc::SIGKILL);
                for rank in (0..3).filter(|rank| *rank != victim) {
                    let (came, _) = ranks.wait_for(rank, &format!("lost {victim}"));
                    let after = came - killed;
                    assert!(after < LIMIT, "{work} over {transport}: rank {rank} took {after:?}");
                }
            }
        }
    }
}

fn exits() {
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let results = local::run(3, transport, |mut group| {
            group.barrier()?;
            if group.rank() == 1 {
                return Ok(());
            }
            group.barrier()
        });
        let results = results.unwrap();
        assert_eq!(results[1], Ok(()));
        for rank in [0, 2] {
            assert!(matches!(results[rank], Err(CommError::PeerLost { rank: 1, .. })), "{:?}", results[rank]);
        }
    }
}

fn stopped() {
    let stall = Duration::from_secs(1);
    for transport in ["shm", "tcp"] {
        for work in ["small", "large"] {
            let mut ranks = Ranks::start_ready(setting(work, transport, stall));
            std::thread::sleep(Duration::from_millis(21));
            let stopped = Instant::now();
            ranks.signal(1, libc::SIGSTOP);
            for rank in [0, 2] {
                let after = ranks.wait_for(rank, "stalled 1").0 - stopped;
                assert!(after >= stall && after < stall + 2 * LIMIT, "{work} over {transport}: {after:?}");
            }
        }
    }
}

fn resumed() {
    for transport in ["shm", "tcp"] {
        let mut ranks = Ranks::start_ready(setting("steady", transport, Duration::from_secs(20)));
        std::thread::sleep(Duration::from_millis(100));
        ranks.signal(1, libc::SIGSTOP);
        std::thread::sleep(Duration::from_millis(600));
        ranks.signal(1, libc::SIGCONT);
        for rank in 0..3 {
            ranks.wait_for(rank, "done");
            ranks.wait_for_end(rank);
        }
    }
}

fn rebuilt() {
    ["shm", "tcp"].into_iter().for_each(|transport| rebuilt_over(transport, 0..3));
}

/// Also without rank 0, which every group needs to form.
pub fn rebuilt_over(transport: &str, victims: impl Iterator<Item = usize>) {
    for victim in victims {
        let setting = setting("rebuild", transport, Duration::from_secs(20));
        let mut ranks = Ranks::start(setting);
        let ports: Vec<u16> =
            (0..3).map(|rank| ranks.wait_for(rank, "ready ").1["ready ".len()..].parse().unwrap()).collect();
        ranks.signal(victim, libc::SIGKILL);
        let survivors: Vec<usize> = (0..3).filter(|rank| *rank != victim).collect();
        for rank in &survivors {
            ranks.wait_for(*rank, &format!("without {victim}: 2"));
        }
        ranks.replace(Setting { work: "rejoin", ..setting }, victim, ports[0]);
        if victim == 0 {
            ranks.wait_for(0, "port");
        }
        for rank in 0..3 {
            ranks.wait_for(rank, "whole 3");
            ranks.wait_for_end(rank);
        }
    }
}

fn idle() {
    for transport in ["shm", "tcp"] {
        let limit = Duration::from_millis(800);
        let ranks = Ranks::start_ready(Setting { size: 2, ..setting("idle", transport, limit) });
        // Longer than the stall limit, which does not apply here.
        let is_quiet = falls_quiet(
            &[ranks.process(0), ranks.process(1)],
            Duration::from_secs(3),
            Duration::from_millis(60),
        );
        assert!(is_quiet, "waiting over {transport} is never quiet");
    }
}
