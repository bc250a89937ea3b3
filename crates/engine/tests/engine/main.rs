//! The engine's tests, in one program: several would each compile the same generic code.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod adapters;
mod ahead;
mod caches;
mod common;
mod counters;
mod damaged_model;
mod disk_cache;
mod draft_model;
// Here and not in `crates/gpu`, whose tests would wait for the models' crate to compile.
#[cfg(feature = "gpu")]
mod gpu_encoders;
#[cfg(feature = "gpu")]
mod gpu_golden;
#[cfg(feature = "gpu")]
mod gpu_ranks;
mod guesses;
mod models;
mod outputs;
mod preemption;
mod prefix_cache;
mod resumption;
mod speculation;
mod states;
mod work;
