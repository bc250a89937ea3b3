//! Threads that compute, and the thread that sums over the ranks.

pub mod pool;
pub(super) mod reducer;
