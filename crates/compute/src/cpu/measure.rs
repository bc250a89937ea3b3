//! Measures this machine's peaks: arithmetic and memory bandwidth.

pub mod arithmetic;
pub mod bandwidth;
