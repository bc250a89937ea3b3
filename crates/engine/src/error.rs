//! Why a rank cannot go on.

use thunder_collectives::{CommError, InitError};
use thunder_compute::ComputeError;
use thunder_model::ModelError;

use crate::protocol::BadMessage;

/// Why a rank cannot go on. The rank's group is of no use afterwards.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A peer or a link was lost.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The groups inside the world could not be formed.
    #[error(transparent)]
    Init(#[from] InitError),
    /// The model could not be loaded.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The backend failed.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// Rank 0 runs another version.
    #[error(transparent)]
    BadMessage(#[from] BadMessage),
    /// The ranks were started with different models or plans. Found before any weights are loaded.
    #[error(
        "rank {rank} has another model or plan than rank 0: start all ranks with the same model (the same files), --split, \
         --parallel, --activations, --overlap, --kv, --context and --max-batch"
    )]
    Mismatch {
        /// The rank that differs.
        rank: usize,
    },
}
