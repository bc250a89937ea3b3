//! Compute threads, and the thread that runs all-reduces in the background.

pub mod pool;
pub(super) mod reducer;
