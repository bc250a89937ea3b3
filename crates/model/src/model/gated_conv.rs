//! Gated short convolutions, as LFM2 has them.

use std::ops::Range;

use thunder_compute::{Backend, ComputeError, GatedConvSpec};

use super::{Norms, Pass, disjoint};

/// A layer's convolution.
pub(super) struct GatedConv<B: Backend> {
    pub spec: GatedConvSpec<B::Vector>,
    /// Gates of the convolution's inputs, gates of its results, inputs.
    pub inputs: B::Matrix,
    pub out: B::Matrix,
    pub cache: usize,
    pub inputs_buffer: usize,
    pub results_buffer: usize,
}

impl<B: Backend> GatedConv<B> {
    pub fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, normed, inner, caches, .. } = pass;
        let [inputs, results] = disjoint(inner, [self.inputs_buffer, self.results_buffer]);
        backend.linear(norms.input(residual, normed), rows.clone(), &self.inputs, inputs)?;
        backend.gated_conv(&self.spec, step, rows.clone(), inputs, (caches, self.cache), results)?;
        norms.add_product((self.results_buffer, false), rows, &self.out, pass)
    }
}
