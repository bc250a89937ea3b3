//! The part of a layer that works on each token separately.

use std::ops::Range;

use thunder_compute::{
    Activation, Backend, ComputeError, Curve, InputOf, LinearInput, Norm, RouterSpec, Step,
};

use super::adapters::Adapters;
use super::both::Both;
use super::{Before, Norms, Pass, disjoint};

/// A layer's feed-forward.
pub(super) enum FeedForward<B: Backend> {
    None,
    Mlp(Mlp<B>),
    Experts(Box<Experts<B>>),
    Both(Box<Both<B>>),
}

/// `down(activation(gate(x), up(x)))`, or `down(curve(up(x)))`.
pub(super) struct Mlp<B: Backend> {
    /// Both, one after the other, or up alone.
    pub gate_up: B::Matrix,
    pub gate_up_adapters: Adapters<B>,
    /// `None`: there is no gate.
    pub activation: Option<Activation>,
    /// Applied to channels without a gate.
    pub curve: Curve,
    pub down: B::Matrix,
    pub down_adapters: Adapters<B>,
    pub channels_buffer: usize,
}

/// MLPs. A router chooses some of them for each token.
pub(super) struct Experts<B: Backend> {
    pub spec: RouterSpec<B::Vector>,
    /// Logits of all experts, and the shared expert's gate if it has one.
    pub router: B::Matrix,
    pub experts: B::Experts,
    /// The experts of each token id, `[vocabulary, chosen]`, if these are given.
    pub table: Option<Vec<u16>>,
    /// The shared expert, if it is not one of `experts`.
    pub apart: Option<Apart<B>>,
    /// True if the weight of a token's only expert multiplies its input.
    pub weighs_input: bool,
    /// Bytes of the experts' weights that a token reads, on average.
    pub bytes_per_token: usize,
    pub normed_buffer: usize,
    pub logits_buffer: usize,
    pub choices_buffer: usize,
}

/// An MLP in parallel with the experts. It reads the residual stream's norm.
pub(super) struct Apart<B: Backend> {
    pub mlp: Mlp<B>,
    pub narrow: Option<Narrow<B>>,
    /// Buffers in which its results and those of the experts are added.
    pub sum_buffers: [usize; 2],
}

/// Projections around experts that are narrower than the residual stream. Every rank has all of
/// them. The second is applied to partial sums, so that one reduction suffices.
pub(super) struct Narrow<B: Backend> {
    pub down: B::Matrix,
    /// Norm of the experts' sum. With a norm, the sum is reduced before `up`, which all ranks apply
    /// to the whole sum.
    pub norm: Option<Norm<B::Vector>>,
    pub up: B::Matrix,
    /// The experts' input, and the sum of their outputs.
    pub buffers: [usize; 2],
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
            Self::None => Ok(()),
            Self::Mlp(mlp) => mlp.forward(norms, rows, pass),
            Self::Experts(experts) => experts.forward(norms, rows, pass),
            Self::Both(both) => both.forward(norms, rows, pass),
        }
    }

    /// Bytes of the weights that a token reads.
    pub fn bytes(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Mlp(mlp) => mlp.bytes(),
            Self::Experts(experts) => experts.bytes(),
            Self::Both(both) => both.bytes(),
        }
    }
}

impl<B: Backend> Apart<B> {
    fn bytes(&self) -> usize {
        let narrow = self.narrow.as_ref().map_or(0, |of| B::matrix_bytes(&of.down) + B::matrix_bytes(&of.up));
        self.mlp.bytes() + narrow
    }
}

impl<B: Backend> Mlp<B> {
    /// Bytes of its weights.
    pub fn bytes(&self) -> usize {
        B::matrix_bytes(&self.gate_up) + B::matrix_bytes(&self.down)
    }

    /// Computes the channels of these rows.
    pub fn channels(
        &self,
        x: InputOf<'_, B>,
        rows: Range<usize>,
        backend: &mut B,
        channels: &mut B::Buffer,
    ) -> Result<(), ComputeError> {
        match self.activation {
            Some(activation) => {
                backend.linear_gated(x, rows, &self.gate_up, (activation, &self.down), channels)
            }
            None => {
                backend.linear(x, rows.clone(), &self.gate_up, channels)?;
                backend.bend(self.curve, rows, channels)
            }
        }
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
        match self.activation {
            Some(activation) if adapted.contains(&true) => {
                // Adapters need the gates and ups themselves, and the channels in f32.
                let ((height, _), (_, width)) = (backend.extent(x.buffer()), backend.extent(channels));
                let mut both = backend.scratch(height, 2 * width)?;
                backend.linear(x, rows.clone(), &self.gate_up, &mut both)?;
                self.gate_up_adapters.add(&x, (step, rows.clone()), backend, &mut both)?;
                backend.gate(&both, rows.clone(), activation, channels)?;
                backend.give_back(both);
            }
            None if adapted.contains(&true) => {
                backend.linear(x, rows.clone(), &self.gate_up, channels)?;
                self.gate_up_adapters.add(&x, (step, rows.clone()), backend, channels)?;
                backend.bend(self.curve, rows.clone(), channels)?;
            }
            _ => self.channels(x, rows.clone(), backend, channels)?,
        }
        let down = (&self.down, &self.down_adapters);
        norms.add_adapted_product((self.channels_buffer, true), rows, down, pass)
    }
}

impl<B: Backend> Experts<B> {
    /// Bytes of the weights that a token reads.
    pub fn bytes(&self) -> usize {
        let apart = self.apart.as_ref().map_or(0, Apart::bytes);
        B::matrix_bytes(&self.router) + self.bytes_per_token + apart
    }

    /// Chooses the experts of these rows of what the router reads.
    pub fn choose(
        &self,
        x: &B::Buffer,
        rows: Range<usize>,
        step: &Step,
        backend: &mut B,
        (logits, choices): (&mut B::Buffer, &mut B::Buffer),
    ) -> Result<(), ComputeError> {
        backend.linear(LinearInput::Precise(x), rows.clone(), &self.router, logits)?;
        let Some(table) = &self.table else { return backend.route(&self.spec, logits, rows, choices) };
        let chosen = self.spec.chosen;
        let of_token = |id: &u32| table[*id as usize * chosen..][..chosen].iter().copied();
        let assigned: Vec<u16> = step.tokens[rows.clone()].iter().flat_map(of_token).collect();
        backend.route_assigned(&self.spec, &assigned, logits, rows, choices)
    }

    fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, normed: shared, inner, .. } = pass;
        let [normed, logits, choices] =
            disjoint(inner, [self.normed_buffer, self.logits_buffer, self.choices_buffer]);
        let mut is_chosen = false;
        match &norms.before {
            Before::Norm(norm) if self.table.is_none() => {
                let (router, out) = ((&self.router, &self.spec), [&mut *normed, logits, choices]);
                backend.norm_route(residual, rows.clone(), norm, router, out)?;
                is_chosen = true;
            }
            Before::Norm(norm) => backend.rms_norm(residual, rows.clone(), norm, normed)?,
            Before::Mixed(norm) => backend.rms_norm(shared, rows.clone(), norm, normed)?,
            Before::Shared => {
                let (_, width) = backend.extent(normed);
                backend.copy_columns((shared, 0), rows.clone(), (normed, 0..width))?;
            }
            Before::Stream => {
                // The layer before may have left its sum under way.
                backend.settle(residual)?;
                let (_, width) = backend.extent(normed);
                backend.copy_columns((residual, 0), rows.clone(), (normed, 0..width))?;
            }
        }
        if !is_chosen {
            self.choose(normed, rows.clone(), step, *backend, (logits, &mut *choices))?;
        }
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
        let Apart { mlp, narrow, sum_buffers: [sum, routed] } = apart;
        let (normed, choices) = (self.normed_buffer, self.choices_buffer);
        let [x, channels, to] = disjoint(inner, [normed, mlp.channels_buffer, *sum]);
        mlp.channels(LinearInput::Plain(x), rows.clone(), *backend, channels)?;
        backend.linear(LinearInput::Gated(channels), rows.clone(), &mlp.down, to)?;
        if self.weighs_input {
            let [x, choices] = disjoint(inner, [normed, choices]);
            backend.weigh_input(choices, rows.clone(), x)?;
        }
        match narrow {
            None => {
                let [x, choices, routed] = disjoint(inner, [normed, choices, *routed]);
                backend.expert_sum(x, rows.clone(), choices, &self.experts, routed)?;
            }
            Some(narrow) => {
                let [read, written] = narrow.buffers;
                let [x, choices, read, written, sum, routed] =
                    disjoint(inner, [normed, choices, read, written, *sum, *routed]);
                backend.linear(LinearInput::Plain(x), rows.clone(), &narrow.down, read)?;
                backend.expert_sum(read, rows.clone(), choices, &self.experts, written)?;
                if let Some(norm) = &narrow.norm {
                    // The layer before may have left the other part's sum under way.
                    backend.settle(residual)?;
                    backend.all_reduce_both([&mut *sum, &mut *written], rows.clone())?;
                    backend.linear(super::normed::<B>(written, norm), rows.clone(), &narrow.up, routed)?;
                    backend.add(routed, rows.clone(), residual)?;
                    return backend.add(sum, rows, residual);
                }
                backend.linear(LinearInput::Plain(written), rows.clone(), &narrow.up, routed)?;
            }
        }
        let [sum, routed] = disjoint(inner, [*sum, *routed]);
        backend.add(routed, rows.clone(), sum)?;
        // The layer before may have left the other part's sum under way.
        backend.settle(residual)?;
        backend.all_reduce(sum, rows.clone())?;
        backend.add(sum, rows, residual)
    }
}
