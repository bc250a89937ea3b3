//! Ranks as processes, one of which is killed, stopped or cut off in the middle of an operation.
//!
//! The random series is short by default. A long one: `THUNDER_FAILURE_RUNS=50
//! THUNDER_FAILURE_SEED=8 cargo nextest run --release -p thunder-collectives --test failure
//! --no-capture series`. Tests that need network namespaces (root) are ignored where those cannot
//! be created; `./test` says so. Tests that need `sch_netem` or RDMA devices run in the machine of
//! tools/rdma-vm.

#![allow(clippy::unwrap_used, reason = "a test's helpers may panic as its tests do")]

#[path = "../common/cables.rs"]
mod cables;
mod cases;
mod cut_cables;
mod hosts;
#[path = "../common/operations.rs"]
mod operations;
mod ranks;
mod series;
mod slow_network;
#[cfg(target_os = "linux")]
mod unreadable;
mod work;

use libtest_mimic::{Arguments, Failed, Trial};

/// A test's name, the test, and whether it is ignored.
type Test = (&'static str, fn(), bool);

fn main() {
    if let Ok(name) = std::env::var(ranks::WORK) {
        return work::run(&name);
    }
    let tests = [
        cases::tests(),
        series::tests(),
        slow_network::tests(),
        cut_cables::tests(),
        #[cfg(target_os = "linux")]
        unreadable::tests(),
    ];
    let trials = tests.concat().into_iter().map(|(name, test, ignored)| {
        let run = move || {
            thunder_testing::timed(name, test);
            Ok::<(), Failed>(())
        };
        Trial::test(name, run).with_ignored_flag(ignored)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}
