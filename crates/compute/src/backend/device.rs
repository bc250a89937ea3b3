//! A rank's device: its memory, and the group that it is one of.

use std::ops::Range;

use thunder_collectives::{Group, Stats};

use super::{Activation, CacheKind, CacheShape, ComputeError, Expert, Heads, KvFormat, Outcome};
use crate::source::MatrixSource;

/// The memory of one rank's device, and its group. [`super::Backend`] computes on it.
///
/// # Errors
/// As [`super::Backend`]'s.
#[allow(clippy::missing_errors_doc, reason = "the trait's documentation says when operations fail")]
pub trait Device {
    /// Weights, packed for this device.
    type Matrix;
    /// A vector of weights.
    type Vector: Clone;
    /// Activations.
    type Buffer;
    /// All caches of the rank's layers.
    type Caches;
    /// The experts of one layer.
    type Experts;

    /// Packs matrices that share their input into one, `[Σ rows, cols]`: their outputs follow each
    /// other.
    fn matrix(&mut self, parts: &[MatrixSource<'_>]) -> Result<Self::Matrix, ComputeError>;
    /// Packs matrices of experts, each of parts as for [`Self::matrix`]. A backend may give the
    /// parts of a matrix one format that represents them all exactly.
    fn expert_matrices(&mut self, all: &[&[MatrixSource<'_>]]) -> Result<Vec<Self::Matrix>, ComputeError> {
        all.iter().map(|parts| self.matrix(parts)).collect()
    }
    /// Packs a matrix for each head, all of one shape.
    fn heads(&mut self, all: &[MatrixSource<'_>]) -> Result<Heads<Self::Matrix>, ComputeError> {
        let matrices = all.iter().map(|head| self.matrix(std::slice::from_ref(head)));
        Ok(Heads { count: all.len(), matrices: matrices.collect::<Result<_, _>>()? })
    }
    /// Uploads a vector.
    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector, ComputeError>;
    /// A zeroed buffer for up to `rows` rows.
    fn buffer(&mut self, rows: usize, width: usize) -> Result<Self::Buffer, ComputeError>;
    /// Says before weights are uploaded that layers attend to such a cache, with at most `queries`
    /// query heads for each of its heads, so that the device can prepare meanwhile.
    fn expect_attention(&mut self, _cache: CacheKind, _queries: usize, _format: KvFormat) {}
    /// Empty caches.
    fn caches(&mut self, shape: &CacheShape) -> Result<Self::Caches, ComputeError>;
    /// Collects a layer's experts, with `activation` in their gates.
    fn experts(
        &mut self,
        experts: Vec<Expert<Self::Matrix>>,
        activation: Activation,
    ) -> Result<Self::Experts, ComputeError>;
    /// Bytes of a packed matrix.
    fn matrix_bytes(matrix: &Self::Matrix) -> usize;
    /// A scratch buffer for the default of a fused operation. Backends keep the buffers that
    /// [`Self::give_back`] returns.
    fn scratch(&mut self, rows: usize, width: usize) -> Result<Self::Buffer, ComputeError> {
        self.buffer(rows, width)
    }
    /// Takes back a buffer of [`Self::scratch`].
    fn give_back(&mut self, _scratch: Self::Buffer) {}
    /// Copies rows to the host once they are computed; `out` holds `rows.len()` whole rows.
    fn read(&mut self, x: &Self::Buffer, rows: Range<usize>, out: &mut [f32]) -> Outcome;
    /// Gives a buffer the rows `values`.
    fn write(&mut self, values: &[f32], x: &mut Self::Buffer) -> Outcome;
    /// The tensor-parallel group.
    fn group(&mut self) -> &mut Group;
    /// Called once all weights are uploaded, before ranks wait for each other: completes what the
    /// device was still preparing.
    fn loaded(&mut self) -> Outcome {
        Ok(())
    }
    /// Measures the group, so that reductions use the fastest algorithm for each size. They will
    /// have rows of `width`, and for each this rank reads `weight_bytes` of weights. All ranks call
    /// this together while idle.
    fn tune(&mut self, width: usize, weight_bytes: usize) -> Outcome;
    /// Says, before [`Device::tune`], that something is computed between steps, so the device must
    /// not get a step before it is begun.
    fn never_ahead(&mut self) {}
    /// Takes back a step that the device has got before it was begun. All ranks of the
    /// tensor-parallel group call this before an operation that some of them may leave out.
    fn take_back_ahead(&mut self) -> Outcome {
        Ok(())
    }
    /// Reductions since the last call, and the time that this rank waited for them.
    fn take_reduction_stats(&mut self) -> Stats;
    /// Called by the computing thread before it computes: pins it to its core, if the backend has
    /// cores of its own.
    fn pin_caller(&self) {}
    /// Rows and width of a buffer.
    fn extent(&self, x: &Self::Buffer) -> (usize, usize);
}
