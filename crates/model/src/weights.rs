//! The weights of a model by role: where each tensor is in the files, and how it is stored.
//!
//! [`WeightSource`] is what loading asks; [`HuggingFace`] answers from safetensors, and
//! [`GgufWeights`](crate::gguf::GgufWeights) from GGUF files. Another file format is another
//! implementation, with its own table from [`Role`] to names.

mod adapter;
mod hugging_face;
pub(crate) mod mapped;
mod names;
mod quantization;
mod role;
mod safetensors;
mod stored;
#[cfg(test)]
mod tests;
mod watched_file;

use std::fmt;

use thunder_compute::{Encoding, FilePages};

use crate::error::ModelError;
pub(crate) use adapter::AdaptedOutputs;
pub use adapter::Adapter;
pub use hugging_face::HuggingFace;
pub(crate) use hugging_face::float_tensor;
pub use mapped::MappedFiles;
pub use quantization::Quantization;
pub use role::{ExpertRole, LatentHeadRole, LayerRole, Role};
pub use stored::StoredMatrix;

/// The weights of one model, found by role.
///
/// Opening a source reads headers only. A matrix is handed out as the bytes where it lies, so that
/// a rank reads only the pages of its own windows; [`FilePages`] tells the source which these are.
pub trait WeightSource: FilePages + fmt::Debug + Send {
    /// True if the files have a tensor for this role.
    fn has(&self, role: Role) -> bool;

    /// How the elements of a matrix are stored.
    ///
    /// # Errors
    /// When the tensor is missing or of an unknown type.
    fn format(&self, role: Role) -> Result<Encoding, ModelError>;

    /// The whole matrix of a role; `shape` is `[outputs, inputs]`. For a [`Role::Expert`] and a
    /// [`Role::LatentHead`] it is one matrix of the stack, if the files stack them.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    fn matrix(&self, role: Role, shape: [usize; 2]) -> Result<StoredMatrix<'_>, ModelError>;

    /// True if the files have an expert's matrix of `shape`, `[outputs, inputs]`, as `[inputs,
    /// outputs]`. If the shape is ambiguous, `usual` decides.
    fn is_transposed(&self, _role: Role, _shape: [usize; 2], _usual: bool) -> bool {
        false
    }

    /// The bias of a matrix, `len` numbers.
    ///
    /// # Errors
    /// When the tensor is missing or has another shape.
    fn bias(&self, role: Role, len: usize) -> Result<Vec<f32>, ModelError>;

    /// The numbers of a role that is not a matrix (norms, convolutions, decays), row-major.
    ///
    /// # Errors
    /// When the tensor is missing or has another shape.
    fn vector(&self, role: Role, shape: &[usize]) -> Result<Vec<f32>, ModelError>;

    /// The integers of a role, from 0 on, row-major.
    ///
    /// # Errors
    /// When the tensor is missing, of another shape or of another type, or the format has none.
    fn indices(&self, role: Role, _shape: &[usize]) -> Result<Vec<u32>, ModelError> {
        Err(ModelError::NoTensor {
            name: format!("{role:?}"),
            hint: ": this file format has no tables of integers".into(),
        })
    }

    /// True if the weights of norms are as in Hugging Face's files, which for some families store
    /// them minus one. Converters to other formats add the one.
    fn norms_less_one(&self) -> bool {
        false
    }

    /// Bytes of all tensors in the files.
    fn bytes(&self) -> u64;

    /// Names of the tensors that were not requested so far, sorted. Empty for formats without
    /// useless tensors.
    fn unread(&self) -> Vec<String> {
        Vec::new()
    }

    /// True if matrices are quantized by default.
    fn is_quantized(&self) -> bool;

    /// The files, which also record what is read of them in addition to matrices.
    fn files(&self) -> &MappedFiles;

    /// Identifies these weights: names, types, shapes and places of all tensors, and samples of
    /// their contents.
    fn fingerprint(&self) -> [u8; 32];
}
