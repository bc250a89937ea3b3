//! Helpers for the tests of several crates: a seeded number generator, the built-in model's files,
//! a writer of GGUF files, a counting allocator, and a check that processes are idle.
//!
//! Name this crate only under `[dev-dependencies]`. It depends on no crate of the workspace, so
//! that unit tests do not see two copies of the types of their own crate.
//!
//! ```
//! let mut random = thunder_testing::Random::new(7);
//! assert!(random.below(10) < 10);
//! assert!(random.floats(100).iter().all(|x| (-1.0..1.0).contains(x)));
//! assert!(thunder_testing::builtin_model().join("config.json").exists());
//! ```

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

pub mod allocations;
pub mod gguf;
pub mod idle;
mod random;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub use random::Random;

/// The folder of the built-in model (`builtin/model` in the repository).
pub fn builtin_model() -> PathBuf {
    builtin("model")
}

/// The built-in model's golden answers, token by token (`builtin/golden.json`).
pub fn builtin_golden() -> PathBuf {
    builtin("golden.json")
}

fn builtin(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../builtin").join(name)
}

/// True in `./test --long`, which sets `THUNDER_LONG=1`: a test may take minutes to try every
/// combination.
pub fn is_long() -> bool {
    std::env::var_os("THUNDER_LONG").is_some_and(|value| value == "1")
}

/// The number of runs of a random or repeated test: `long` in `./test --long`, otherwise `short`.
pub fn runs(short: usize, long: usize) -> usize {
    if is_long() { long } else { short }
}

/// Runs a test and prints its time, for test binaries whose harness does not.
pub fn timed(name: &str, test: impl FnOnce()) {
    let started = Instant::now();
    test();
    println!("{name}: {:.1} s", started.elapsed().as_secs_f64());
}

/// Why a test of the GPU backend is skipped.
pub const NO_VULKAN: &str = "no software Vulkan driver: apt-get install mesa-vulkan-drivers libvulkan1";

/// Notes that a test could not run here and why. `./test` prints the notes in its summary; the test
/// returns after this.
pub fn skip(test: &str, reason: &str) {
    println!("skipped: {test}: {reason}");
    // `./test` sets a file for this, because nextest hides the output of a passing test.
    let Some(log) = std::env::var_os("THUNDER_SKIP_LOG") else { return };
    let mut log = std::fs::OpenOptions::new().create(true).append(true).open(log).unwrap();
    // One write, so that lines of parallel tests stay complete.
    log.write_all(format!("{test}: {reason}\n").as_bytes()).unwrap();
}
