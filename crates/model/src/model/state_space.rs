//! State space layers (Mamba-2, arXiv 2405.21060), as Nemotron-H and Granite 4 have them.

use std::ops::Range;

use thunder_compute::{Activation, Backend, ComputeError, PartNorm, StateSpaceSpec};

use super::mixer::HeadNorms;
use super::{Norms, Pass, disjoint};

/// A layer's state space.
pub(super) struct StateSpace<B: Backend> {
    pub spec: StateSpaceSpec<B::Vector>,
    /// Gates of the results.
    pub gates: B::Matrix,
    /// The heads' inputs, then the groups' input and output vectors.
    pub inputs: B::Matrix,
    /// The heads' time steps.
    pub times: B::Matrix,
    pub norms: StateNorms<B>,
    pub out: B::Matrix,
    pub cache: usize,
    pub inputs_buffer: usize,
    pub times_buffer: usize,
    pub heads_buffer: usize,
    /// Gates and results side by side.
    pub both_buffer: usize,
    pub gated_buffer: usize,
}

/// Norms of each group's gated results.
pub(super) enum StateNorms<B: Backend> {
    /// A rank's groups are whole.
    Whole(HeadNorms<B>),
    /// Several ranks have heads of a group.
    Divided(Vec<PartNorm<B::Vector>>),
}

impl<B: Backend> StateSpace<B> {
    pub fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, normed, inner, caches, .. } = pass;
        for (matrix, to) in [
            (&self.inputs, self.inputs_buffer),
            (&self.times, self.times_buffer),
            (&self.gates, self.both_buffer),
        ] {
            backend.linear(norms.input(residual, normed), rows.clone(), matrix, &mut inner[to])?;
        }
        let [inputs, times, heads] =
            disjoint(inner, [self.inputs_buffer, self.times_buffer, self.heads_buffer]);
        let cache = (&mut **caches, self.cache);
        backend.state_space(&self.spec, step, rows.clone(), (inputs, times), cache, heads)?;
        let [heads, both, gated] = disjoint(inner, [self.heads_buffer, self.both_buffer, self.gated_buffer]);
        let width = self.spec.width();
        backend.copy_columns((heads, 0), rows.clone(), (both, width..2 * width))?;
        backend.gate(both, rows.clone(), Activation::Silu, gated)?;
        match &self.norms {
            StateNorms::Whole(norms) => norms.apply(*backend, rows.clone(), inner, self.gated_buffer)?,
            StateNorms::Divided(norms) => {
                backend.norm_parts(norms, rows.clone(), &mut inner[self.gated_buffer])?;
            }
        }
        norms.add_product((self.gated_buffer, false), rows, &self.out, pass)
    }
}
