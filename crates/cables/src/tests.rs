//! Whole desks: recorded and random ones, against doubles of their commands.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod doubles;
mod fake;
#[allow(dead_code, reason = "the tests of thunder use the rest")]
mod farm;
mod faults;
mod findings;
mod linux;
mod parsers;
mod random;
mod setups;
mod simulation;
