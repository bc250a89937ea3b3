//! What works on each token of a layer by itself.

use std::ops::Range;

use thunder_compute::{Activation, Backend, ComputeError, LinearInput, RouterSpec};

use super::{Norms, Pass, disjoint};

/// A layer's feed-forward.
pub(super) enum FeedForward<B: Backend> {
    Gated(Gated<B>),
    Experts(Box<Experts<B>>),
}

/// `down(activation(gate(x), up(x)))`.
pub(super) struct Gated<B: Backend> {
    /// Both, one after the other.
    pub gate_up: B::Matrix,
    pub activation: Activation,
    pub down: B::Matrix,
    pub channels_buffer: usize,
}

/// Gated MLPs. A router chooses some of them for each token.
pub(super) struct Experts<B: Backend> {
    pub spec: RouterSpec<B::Vector>,
    /// Logits of all experts, and the shared expert's gate if it has one.
    pub router: B::Matrix,
    pub experts: B::Experts,
    /// Bytes of the experts' weights that a token reads, on average.
    pub bytes_per_token: usize,
    pub normed_buffer: usize,
    pub logits_buffer: usize,
    pub choices_buffer: usize,
}

impl<B: Backend> FeedForward<B> {
    /// Adds the feed-forward to the residual stream, for these rows.
    pub fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        match self {
            Self::Gated(gated) => gated.forward(norms, rows, pass),
            Self::Experts(experts) => experts.forward(norms, rows, pass),
        }
    }

    /// Bytes of the weights that a token reads.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Gated(gated) => B::matrix_bytes(&gated.gate_up) + B::matrix_bytes(&gated.down),
            Self::Experts(experts) => B::matrix_bytes(&experts.router) + experts.bytes_per_token,
        }
    }
}

impl<B: Backend> Gated<B> {
    fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, residual, inner, .. } = pass;
        let channels = &mut inner[self.channels_buffer];
        let next = (self.activation, &self.down);
        backend.linear_gated(norms.input(residual), rows.clone(), &self.gate_up, next, channels)?;
        norms.add_product((self.channels_buffer, true), rows, &self.down, pass)
    }
}

impl<B: Backend> Experts<B> {
    fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, residual, inner, .. } = pass;
        let [normed, logits, choices] =
            disjoint(inner, [self.normed_buffer, self.logits_buffer, self.choices_buffer]);
        let Some(norm) = &norms.before else { unreachable!("loading refuses experts without a norm") };
        backend.rms_norm(residual, rows.clone(), norm, normed)?;
        backend.linear(LinearInput::Precise(normed), rows.clone(), &self.router, logits)?;
        backend.route(&self.spec, logits, rows.clone(), choices)?;
        let Some(after) = &norms.after else {
            return backend.experts_reduce_add(normed, rows, choices, &self.experts, residual);
        };
        let [normed, choices, sum] =
            disjoint(inner, [self.normed_buffer, self.choices_buffer, after.sum_buffer]);
        backend.expert_sum(normed, rows.clone(), choices, &self.experts, sum)?;
        after.add_sum(rows, pass)
    }
}
