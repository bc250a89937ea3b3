//! How weights and activations are stored in memory (docs/kernels.md).

pub(super) mod bf16_rows;
pub(super) mod block32;
pub(super) mod fixed_point;
pub(super) mod matrix;
pub(super) mod pack;
pub(super) mod region;
