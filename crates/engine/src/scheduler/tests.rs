//! The scheduler with a made-up model: single cases, and random workloads in which every step is
//! checked.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cases;
mod fake_disk;
mod fake_draft;
mod fake_model;
mod invariants;
mod pace;
mod prefixes;
mod whole;
mod workloads;
