//! Why a rank cannot continue.

use thunder_collectives::{CommError, InitError};
use thunder_compute::ComputeError;
use thunder_model::ModelError;

use crate::disk::DiskError;
use crate::protocol::BadMessage;

/// Why a rank cannot continue. Its group cannot be used afterwards.
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
    /// The folder of the prefix cache cannot be used.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The ranks were started with different models or options. Found before any weights are
    /// loaded.
    #[error("{setting} is {other} on rank {rank}, but {first} on rank 0: start all ranks alike")]
    Mismatch {
        /// The rank that differs.
        rank: usize,
        /// The setting that differs.
        setting: String,
        /// Its value on rank 0.
        first: String,
        /// Its value on the other rank.
        other: String,
    },
}

impl EngineError {
    /// The loss or failure in the group that caused this error, whichever part noticed it.
    pub fn group_failure(&self) -> Option<&CommError> {
        match self {
            Self::Comm(error)
            | Self::Init(InitError::Comm(error))
            | Self::Compute(ComputeError::Comm(error))
            | Self::Model(ModelError::Compute(ComputeError::Comm(error))) => Some(error),
            _ => None,
        }
    }
}
