//! What works on each token of a layer by itself.

use std::ops::Range;

use thunder_compute::{Activation, Backend, ComputeError, LinearInput, RouterSpec};

use super::adapters::Adapters;
use super::{Before, Norms, Pass, disjoint};

/// A layer's feed-forward.
pub(super) enum FeedForward<B: Backend> {
    Gated(Gated<B>),
    Experts(Box<Experts<B>>),
}

/// `down(activation(gate(x), up(x)))`.
pub(super) struct Gated<B: Backend> {
    /// Both, one after the other.
    pub gate_up: B::Matrix,
    pub gate_up_adapters: Adapters<B>,
    pub activation: Activation,
    pub down: B::Matrix,
    pub down_adapters: Adapters<B>,
    pub channels_buffer: usize,
}

/// Gated MLPs. A router chooses some of them for each token.
pub(super) struct Experts<B: Backend> {
    pub spec: RouterSpec<B::Vector>,
    /// Logits of all experts, and the shared expert's gate if it has one.
    pub router: B::Matrix,
    pub experts: B::Experts,
    /// The shared expert, where it is not one of `experts`.
    pub apart: Option<Apart<B>>,
    /// True if the weight of a token's only expert multiplies its input.
    pub weighs_input: bool,
    /// Bytes of the experts' weights that a token reads, on average.
    pub bytes_per_token: usize,
    pub normed_buffer: usize,
    pub logits_buffer: usize,
    pub choices_buffer: usize,
}

/// A gated MLP next to the experts, which reads what they read.
pub(super) struct Apart<B: Backend> {
    pub gated: Gated<B>,
    /// Where its results and those of the experts are added.
    pub sum_buffers: [usize; 2],
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
            Self::Gated(gated) => gated.bytes(),
            Self::Experts(experts) => {
                let apart = experts.apart.as_ref().map_or(0, |apart| apart.gated.bytes());
                B::matrix_bytes(&experts.router) + experts.bytes_per_token + apart
            }
        }
    }
}

impl<B: Backend> Gated<B> {
    fn bytes(&self) -> usize {
        B::matrix_bytes(&self.gate_up) + B::matrix_bytes(&self.down)
    }

    fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, normed, inner, .. } = pass;
        let (x, channels) = (norms.input(residual, normed), &mut inner[self.channels_buffer]);
        let adapted = [&self.gate_up_adapters, &self.down_adapters].map(|of| of.change(step, &rows));
        if adapted.contains(&true) {
            // Adapters need the gates and ups themselves, and the channels in f32.
            let ((height, _), (_, width)) = (backend.extent(x.buffer()), backend.extent(channels));
            let mut both = backend.scratch(height, 2 * width)?;
            backend.linear(x, rows.clone(), &self.gate_up, &mut both)?;
            self.gate_up_adapters.add(&x, (step, rows.clone()), backend, &mut both)?;
            backend.gate(&both, rows.clone(), self.activation, channels)?;
            backend.give_back(both);
        } else {
            backend.linear_gated(x, rows.clone(), &self.gate_up, (self.activation, &self.down), channels)?;
        }
        let down = (&self.down, &self.down_adapters);
        norms.add_adapted_product((self.channels_buffer, true), rows, down, pass)
    }
}

impl<B: Backend> Experts<B> {
    fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, residual, normed: shared, inner, .. } = pass;
        let [normed, logits, choices] =
            disjoint(inner, [self.normed_buffer, self.logits_buffer, self.choices_buffer]);
        match &norms.before {
            Before::Norm(norm) => backend.rms_norm(residual, rows.clone(), norm, normed)?,
            Before::Shared => {
                let (_, width) = backend.extent(normed);
                backend.copy_columns((shared, 0), rows.clone(), (normed, 0..width))?;
            }
            Before::Stream => unreachable!("loading refuses experts without a norm"),
        }
        backend.linear(LinearInput::Precise(normed), rows.clone(), &self.router, logits)?;
        backend.route(&self.spec, logits, rows.clone(), choices)?;
        if let Some(apart) = &self.apart {
            return self.add_with(apart, rows, pass);
        }
        let Some(after) = &norms.after else {
            return backend.experts_reduce_add(normed, rows, choices, &self.experts, residual);
        };
        let [normed, choices, sum] =
            disjoint(inner, [self.normed_buffer, self.choices_buffer, after.sum_buffer]);
        backend.expert_sum(normed, rows.clone(), choices, &self.experts, sum)?;
        after.add_sum(rows, pass)
    }

    /// Adds the experts and the one apart, in one reduction.
    fn add_with(
        &self,
        apart: &Apart<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, residual, inner, .. } = pass;
        let Apart { gated, sum_buffers: [sum, routed] } = apart;
        let [normed, channels, sum, routed, choices] =
            disjoint(inner, [self.normed_buffer, gated.channels_buffer, *sum, *routed, self.choices_buffer]);
        let next = (gated.activation, &gated.down);
        backend.linear_gated(LinearInput::Plain(normed), rows.clone(), &gated.gate_up, next, channels)?;
        backend.linear(LinearInput::Gated(channels), rows.clone(), &gated.down, sum)?;
        if self.weighs_input {
            backend.weigh_input(choices, rows.clone(), normed)?;
        }
        backend.expert_sum(normed, rows.clone(), choices, &self.experts, routed)?;
        backend.add(routed, rows.clone(), sum)?;
        // The layer before may have left the other part's sum under way.
        backend.settle(residual)?;
        backend.all_reduce(sum, rows.clone())?;
        backend.add(sum, rows, residual)
    }
}
