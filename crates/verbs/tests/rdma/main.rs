//! Tests on RDMA devices: two to four ranks over UC and RC, and failures.
//!
//! All tests are marked as ignored, so that none passes without devices. Soft-RoCE provides devices
//! on any Linux machine: `tools/rdma-vm/run --ranks 4 --links 2 -- TEST_BINARY --ignored
//! --test-threads 1`.

#![allow(clippy::unwrap_used)] // clippy exempts #[test] functions only

mod failures;
mod streams;
mod world;

use libtest_mimic::{Arguments, Failed, Trial};
use thunder_testing::allocations::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() {
    // `a_killed_peer_ends_the_wait` starts this program again as the peer to kill.
    if let Some(role) = std::env::var_os(failures::PEER_ENV) {
        failures::peer_that_dies(&role.to_string_lossy());
    }
    let tests = [streams::tests(), failures::tests()].concat();
    let trials = tests.into_iter().map(|(name, test)| {
        let timed_name = name.clone();
        let run = move || {
            thunder_testing::timed(&timed_name, || test());
            Ok::<(), Failed>(())
        };
        Trial::test(name, run).with_ignored_flag(true)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}
