//! How weights and activations lie in memory.

pub(super) mod bf16_rows;
pub(super) mod block32;
pub(super) mod fixed_point;
pub(super) mod matrix;
pub(super) mod pack;
pub(super) mod region;
