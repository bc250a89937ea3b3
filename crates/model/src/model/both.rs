//! A feed-forward that consists of an MLP and of experts in parallel (Gemma 4).

use std::ops::Range;

use thunder_compute::{Backend, ComputeError, LinearInput, Norm};

use super::feed_forward::{Experts, Mlp};
use super::{After, Norms, Pass, disjoint};

/// An MLP and experts. Each reads a norm of the residual stream, each has a norm of its result.
pub(super) struct Both<B: Backend> {
    pub mlp: Mlp<B>,
    pub mlp_after: Norm<B::Vector>,
    pub experts: Experts<B>,
    /// Of what the router reads.
    pub router_norm: Norm<B::Vector>,
    /// Multiply the weights of the experts.
    pub factors: Vec<f32>,
    pub experts_norm: Norm<B::Vector>,
    pub experts_after: Norm<B::Vector>,
    pub routed_buffer: usize,
}

impl<B: Backend> Both<B> {
    /// Adds both to the residual stream, in one reduction. `norms.before` is the MLP's.
    pub fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Self { mlp, experts, .. } = self;
        let Some(after) = &norms.after else { unreachable!("loading refuses this without a norm after it") };
        let Pass { backend, step, residual, normed: shared, inner, .. } = pass;
        let x = norms.input(residual, shared);
        let [channels, sum] = disjoint(inner, [mlp.channels_buffer, after.sum_buffer]);
        mlp.channels(x, rows.clone(), *backend, channels)?;
        backend.linear(LinearInput::Gated(channels), rows.clone(), &mlp.down, sum)?;
        let [normed, logits, choices, routed] = disjoint(
            inner,
            [experts.normed_buffer, experts.logits_buffer, experts.choices_buffer, self.routed_buffer],
        );
        backend.rms_norm(residual, rows.clone(), &self.router_norm, normed)?;
        experts.choose(normed, rows.clone(), step, *backend, (logits, &mut *choices))?;
        backend.weigh_choices(&self.factors, rows.clone(), choices)?;
        backend.rms_norm(residual, rows.clone(), &self.experts_norm, normed)?;
        backend.expert_sum(normed, rows.clone(), choices, &experts.experts, routed)?;
        self.add(after, rows, pass)
    }

    /// Adds the norm of the two results' norms to the residual stream.
    fn add(&self, after: &After<B>, rows: Range<usize>, pass: &mut Pass<'_, B>) -> Result<(), ComputeError> {
        let Pass { backend, residual, inner, .. } = pass;
        let [sum, routed, of_mlp, of_experts] = disjoint(
            inner,
            [after.sum_buffer, self.routed_buffer, after.normed_buffer, self.experts.normed_buffer],
        );
        // The layer before may have left the other part's sum under way.
        backend.settle(residual)?;
        backend.all_reduce_both([&mut *sum, &mut *routed], rows.clone())?;
        backend.rms_norm(sum, rows.clone(), &self.mlp_after, of_mlp)?;
        backend.rms_norm(routed, rows.clone(), &self.experts_after, of_experts)?;
        backend.add(of_experts, rows.clone(), of_mlp)?;
        backend.rms_norm(of_mlp, rows.clone(), &after.norm, sum)?;
        backend.add(sum, rows, residual)
    }

    /// Bytes of the weights that a token reads.
    pub fn bytes(&self) -> usize {
        self.mlp.bytes() + self.experts.bytes()
    }
}
