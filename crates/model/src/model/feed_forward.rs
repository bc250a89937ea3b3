//! What works on each token of a layer by itself.

use std::ops::Range;

use thunder_compute::{Backend, ComputeError, LinearInput, Norm};

use super::{Pass, normed};

/// A layer's feed-forward.
pub(super) enum FeedForward<B: Backend> {
    /// `down(silu(gate(x)) * up(x))`.
    Gated {
        /// Both, one after the other.
        gate_up: B::Matrix,
        down: B::Matrix,
        channels_buffer: usize,
    },
}

impl<B: Backend> FeedForward<B> {
    /// Adds the feed-forward of `norm(residual)` to the residual stream, for these rows.
    pub fn forward(
        &self,
        norm: &Norm<B::Vector>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, residual, inner, .. } = pass;
        match self {
            Self::Gated { gate_up, down, channels_buffer } => {
                let channels = &mut inner[*channels_buffer];
                backend.linear_gated(normed::<B>(residual, norm), rows.clone(), gate_up, down, channels)?;
                backend.linear_reduce_add(LinearInput::Gated(channels), rows, down, residual)
            }
        }
    }

    /// Bytes of its weights.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Gated { gate_up, down, .. } => B::matrix_bytes(gate_up) + B::matrix_bytes(down),
        }
    }
}
