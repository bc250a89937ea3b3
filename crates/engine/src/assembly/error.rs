//! Why a rank could not be assembled.

use thunder_collectives::{CommError, InitError};
use thunder_model::ModelError;
use thunder_model::chat::ChatError;
use thunder_model::tokenizer::TokenizerError;

use super::draft::DraftError;
use super::spec::{PlanError, SpecError};
use crate::EngineError;

/// Why a rank could not be assembled.
#[derive(Debug, thiserror::Error)]
pub enum AssemblyError {
    /// The spec is wrong.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The model cannot be read, split or held.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model's tokenizer cannot be read.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The model's chat template cannot be read.
    #[error(transparent)]
    ChatTemplate(#[from] ChatError),
    /// The draft model cannot be used.
    #[error(transparent)]
    Draft(#[from] DraftError),
    /// The group could not be formed.
    #[error(transparent)]
    Group(#[from] InitError),
    /// A peer was lost before the model was loaded.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// This CPU has no kernels, or not those that `THUNDER_KERNEL` names.
    #[error("{0}")]
    Kernel(String),
    /// There is no such device.
    #[error("{0}")]
    Device(String),
    /// The shard could not be loaded.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The system refused a thread.
    #[error("cannot start the scheduler's thread: {0}")]
    Thread(std::io::Error),
}

impl From<PlanError> for AssemblyError {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::Spec(error) => error.into(),
            PlanError::Model(error) => error.into(),
        }
    }
}
