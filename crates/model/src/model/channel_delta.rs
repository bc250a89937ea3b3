//! The delta rule with a decay for each channel (Kimi Delta Attention, arXiv 2510.26692).

use std::ops::Range;

use thunder_compute::{Activation, Backend, ComputeError, DeltaSpec, InputOf, LinearInput};

use super::mixer::HeadNorms;
use super::{Norms, Pass, disjoint};

/// A layer's delta rule.
pub(super) struct ChannelDelta<B: Backend> {
    pub spec: DeltaSpec<B::Vector>,
    pub qkv: B::Matrix,
    /// Write strengths.
    pub beta: B::Matrix,
    pub decays: TwoProducts<B>,
    /// Gates of the heads' results.
    pub gates: Gates<B>,
    /// Norms of the heads' results.
    pub norms: HeadNorms<B>,
    pub out: B::Matrix,
    pub cache: usize,
    pub qkv_buffer: usize,
    pub beta_buffer: usize,
    pub decays_buffer: usize,
    pub heads_buffer: usize,
    /// Gates and results side by side.
    pub both_buffer: usize,
    pub gated_buffer: usize,
}

/// How gates of the heads' results are made.
pub(super) enum Gates<B: Backend> {
    Narrow(TwoProducts<B>),
    Whole(B::Matrix),
}

/// A product by way of a narrow vector.
pub(super) struct TwoProducts<B: Backend> {
    pub down: B::Matrix,
    pub up: B::Matrix,
    pub buffer: usize,
}

impl<B: Backend> TwoProducts<B> {
    fn matrices(&self) -> [&B::Matrix; 2] {
        [&self.down, &self.up]
    }

    /// The product of these rows of `x`, into the buffer `to`.
    fn multiply(
        &self,
        x: InputOf<'_, B>,
        rows: Range<usize>,
        (inner, to): (&mut [B::Buffer], usize),
        backend: &mut B,
    ) -> Result<(), ComputeError> {
        let [narrow, to] = disjoint(inner, [self.buffer, to]);
        backend.linear(x, rows.clone(), &self.down, narrow)?;
        backend.linear(LinearInput::Plain(narrow), rows, &self.up, to)
    }
}

impl<B: Backend> Gates<B> {
    fn matrices(&self) -> Vec<&B::Matrix> {
        match self {
            Self::Narrow(products) => products.matrices().into(),
            Self::Whole(matrix) => vec![matrix],
        }
    }
}

impl<B: Backend> ChannelDelta<B> {
    pub fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, normed, inner, caches, .. } = pass;
        let x = || norms.input(residual, normed);
        backend.linear(x(), rows.clone(), &self.qkv, &mut inner[self.qkv_buffer])?;
        backend.linear(x(), rows.clone(), &self.beta, &mut inner[self.beta_buffer])?;
        self.decays.multiply(x(), rows.clone(), (&mut **inner, self.decays_buffer), backend)?;
        match &self.gates {
            Gates::Narrow(products) => {
                products.multiply(x(), rows.clone(), (&mut **inner, self.both_buffer), backend)?;
            }
            Gates::Whole(matrix) => {
                backend.linear(x(), rows.clone(), matrix, &mut inner[self.both_buffer])?;
            }
        }
        let [qkv, beta, decays, heads] =
            disjoint(inner, [self.qkv_buffer, self.beta_buffer, self.decays_buffer, self.heads_buffer]);
        backend.short_conv(&self.spec, step, rows.clone(), qkv, (caches, self.cache))?;
        let (inputs, cache) = ([&*qkv, &*beta, &*decays], (&mut **caches, self.cache));
        backend.channel_delta_rule(&self.spec, step, rows.clone(), inputs, cache, heads)?;
        self.norms.apply(*backend, rows.clone(), inner, self.heads_buffer)?;
        let [heads, both, gated] = disjoint(inner, [self.heads_buffer, self.both_buffer, self.gated_buffer]);
        let (_, width) = backend.extent(heads);
        backend.copy_columns((heads, 0), rows.clone(), (both, width..2 * width))?;
        backend.gate(both, rows.clone(), Activation::Sigmoid, gated)?;
        norms.add_product((self.gated_buffer, false), rows, &self.out, pass)
    }

    /// Its matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &B::Matrix> {
        let products = self.decays.matrices().into_iter().chain(self.gates.matrices());
        products.chain([&self.qkv, &self.beta, &self.out])
    }
}
