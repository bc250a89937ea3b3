//! The crate on real devices: two to four ranks over UC and RC, and what must fail by name.
//!
//! Without devices every test is ignored, so that nothing passes that did not run. Soft-RoCE brings them to any Linux:
//! `tools/rdma-vm/run --ranks 4 --links 2 -- TEST_BINARY --ignored --test-threads 1`.

#![allow(clippy::unwrap_used)] // clippy takes only #[test] functions for tests

mod failures;
mod streams;
mod world;

use libtest_mimic::{Arguments, Failed, Trial};
use thunder_testing::allocations::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() {
    // The kill tests start this program again as the peer that dies.
    if let Some(role) = std::env::var_os(failures::PEER_ENV) {
        failures::peer_that_dies(&role.to_string_lossy());
    }
    let tests = [streams::tests(), failures::tests()].concat();
    let trials = tests.into_iter().map(|(name, test)| {
        let run = move || {
            test();
            Ok::<(), Failed>(())
        };
        Trial::test(name, run).with_ignored_flag(true)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}
