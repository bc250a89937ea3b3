//! What this machine can do at best: arithmetic and memory bandwidth.

pub mod arithmetic;
pub(crate) mod bandwidth;
