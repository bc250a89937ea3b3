//! A network that is slow and loses packets.

use std::time::{Duration, Instant};

use crate::Test;
use crate::hosts::Hosts;
use crate::ranks::{Ranks, Setting};

pub fn tests() -> Vec<Test> {
    vec![("netem_every_operation_is_right_with_delay_and_loss", delay_and_loss, true)]
}

/// Four hosts, with 100 µs delay and 1 % loss between any two.
fn delay_and_loss() {
    const SIZE: usize = 4;
    let hosts = Hosts::new(SIZE);
    for host in 0..SIZE {
        hosts.disturb(host, &["delay", "100us", "loss", "1%", "limit", "100000"]);
    }
    let started = Instant::now();
    let stall_limit = Duration::from_secs(20);
    let mut ranks = Ranks::start(Setting {
        size: SIZE,
        work: "check",
        transport: "auto",
        stall_limit,
        hosts: Some(&hosts),
    });
    for rank in 0..SIZE {
        ranks.wait_for(rank, "right");
        ranks.wait_for_end(rank);
    }
    let lost: Vec<u64> = (0..SIZE).map(|host| hosts.lost(host)).collect();
    assert!(lost.iter().all(|lost| *lost > 0), "nothing was lost: {lost:?}");
    println!(
        "4 hosts, 100 us and 1 % loss: every operation is right, {lost:?} packets were lost, {:?}",
        started.elapsed()
    );
}
