//! Vectors that layers get of each token, in addition to the residual stream (Gemma 4 E2B and E4B).

use std::ops::Range;

use thunder_compute::{Activation, Backend, ComputeError, LinearInput, Norm, PartNorm, Step};

use super::{Pass, Vocabulary, disjoint};

/// What makes the inputs of all layers, side by side.
pub(super) struct LayerInputs<B: Backend> {
    /// This rank's rows of the table.
    pub table: Vocabulary<B>,
    /// Multiplies the table's rows.
    pub scale: f32,
    /// From the embedding. Every rank has the whole matrix.
    pub projection: B::Matrix,
    /// Of each layer's part of the projection.
    pub norms: Vec<PartNorm<B::Vector>>,
    pub sums_buffer: usize,
    pub projected_buffer: usize,
    pub inputs_buffer: usize,
}

impl<B: Backend> LayerInputs<B> {
    /// Computes the inputs of a step's tokens. `embedded` are their embeddings.
    pub fn make(
        &self,
        (backend, step): (&mut B, &Step),
        embedded: &B::Buffer,
        inner: &mut [B::Buffer],
    ) -> Result<(), ComputeError> {
        let rows = 0..step.rows();
        let [inputs, projected, sums] =
            disjoint(inner, [self.inputs_buffer, self.projected_buffer, self.sums_buffer]);
        backend.embed(&self.table.matrix, &step.tokens, self.table.rows.start as u32, self.scale, inputs)?;
        // Each rank has some rows of the table, and zeros for the others.
        backend.all_reduce(inputs, rows.clone())?;
        // Three products follow each other, and all are small, so none is of rounded rows.
        backend.linear(LinearInput::Precise(embedded), rows.clone(), &self.projection, projected)?;
        backend.square_sums(&self.norms, projected, rows.clone(), sums)?;
        backend.norm_by_sums(&self.norms, sums, rows.clone(), projected)?;
        backend.add(projected, rows, inputs)
    }
}

/// What a layer does with its input. Every rank has the whole matrices.
pub(super) struct LayerInput<B: Backend> {
    /// From the residual stream.
    pub gate: B::Matrix,
    /// To the residual stream.
    pub out: B::Matrix,
    pub norm: Norm<B::Vector>,
    /// First column of the layer's input among all.
    pub first: usize,
    pub inputs_buffer: usize,
    /// Gates and inputs side by side.
    pub both_buffer: usize,
    pub gated_buffer: usize,
    pub sum_buffer: usize,
    pub normed_buffer: usize,
}

impl<B: Backend> LayerInput<B> {
    /// Adds to the residual stream. No sum is pending there.
    pub fn add(&self, rows: Range<usize>, pass: &mut Pass<'_, B>) -> Result<(), ComputeError> {
        let Pass { backend, residual, inner, .. } = pass;
        let [inputs, both, gated, sum, normed] = disjoint(
            inner,
            [self.inputs_buffer, self.both_buffer, self.gated_buffer, self.sum_buffer, self.normed_buffer],
        );
        let (_, width) = backend.extent(gated);
        backend.linear(LinearInput::Precise(residual), rows.clone(), &self.gate, both)?;
        backend.copy_columns((inputs, self.first), rows.clone(), (both, width..2 * width))?;
        backend.gate(both, rows.clone(), Activation::Gelu, gated)?;
        backend.linear(LinearInput::Precise(gated), rows.clone(), &self.out, sum)?;
        backend.rms_norm(sum, rows.clone(), &self.norm, normed)?;
        backend.add(normed, rows, residual)
    }
}
