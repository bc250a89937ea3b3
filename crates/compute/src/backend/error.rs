//! Why a backend could not do its work.

use thunder_collectives::CommError;

use super::Extra;

/// Why a backend could not do its work.
#[derive(Debug, thiserror::Error)]
pub enum ComputeError {
    /// An allocation failed. Nothing was changed.
    #[error("cannot allocate {bytes} bytes for {what}: {reason}")]
    Memory {
        /// The size of the allocation.
        bytes: usize,
        /// Its purpose.
        what: &'static str,
        /// The system's message.
        reason: String,
    },
    /// A shape that the backend's kernels do not support.
    #[error("{what} is {value}, but the {backend} backend needs {needs}")]
    Shape {
        /// The quantity.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The backend that refuses.
        backend: &'static str,
        /// The values it supports.
        needs: &'static str,
    },
    /// A device failed, was lost, or refused a command; the backend is unusable afterwards.
    #[error("{device} failed: {reason}")]
    Device {
        /// The device's name.
        device: String,
        /// The driver's error, or what was wrong.
        reason: String,
    },
    /// An operation that this backend lacks.
    #[error("this device's backend has no operation for {0}: run the model on the CPU")]
    Lacks(Extra),
    /// A collective failed; the group is unusable afterwards.
    #[error(transparent)]
    Comm(#[from] CommError),
}
