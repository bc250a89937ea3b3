//! The norms around a layer's parts, and what a part adds to the residual stream.

use std::ops::Range;

use thunder_compute::{Backend, ComputeError, LayerNorm, LinearInput, Norm};

use super::adapters::Adapters;
use super::{Pass, disjoint};

/// A layer part's norms.
pub(super) struct Norms<B: Backend> {
    /// Of what the part reads from the residual stream.
    pub(super) before: Before<B>,
    /// Of what the part adds to the residual stream.
    pub(super) after: Option<After<B>>,
    /// Norm of the residual stream after the part was added.
    pub(super) of_stream: Option<LayerNorm>,
}

/// The input of a layer part.
pub(super) enum Before<B: Backend> {
    /// The residual stream itself.
    Stream,
    /// Its norm.
    Norm(Norm<B::Vector>),
    /// The norm of the mix of its sums, which is in [`super::Buffers::shared_norm`].
    Mixed(Norm<B::Vector>),
    /// The layer's shared norm, which is in [`super::Buffers::shared_norm`].
    Shared,
}

/// The norm of what a layer part adds to the residual stream.
pub(super) struct After<B: Backend> {
    pub(super) norm: Norm<B::Vector>,
    pub(super) sum_buffer: usize,
    pub(super) normed_buffer: usize,
}

impl<B: Backend> Norms<B> {
    /// The input of a layer part, from the residual stream or from the norm that parts share.
    pub(super) fn input<'a>(
        &'a self,
        residual: &'a B::Buffer,
        shared: &'a B::Buffer,
    ) -> LinearInput<'a, B::Buffer, B::Vector> {
        match &self.before {
            Before::Stream => LinearInput::Plain(residual),
            Before::Norm(norm) => normed::<B>(residual, norm),
            Before::Mixed(norm) => normed::<B>(shared, norm),
            Before::Shared => LinearInput::Plain(shared),
        }
    }

    /// Adds a layer part's result, the product of a buffer with `w`, to the residual stream. The
    /// buffer is [`LinearInput::Gated`] if `gated`.
    pub(super) fn add_product(
        &self,
        (buffer, gated): (usize, bool),
        rows: Range<usize>,
        w: &B::Matrix,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, residual, inner, .. } = pass;
        let input = |x| if gated { LinearInput::Gated(x) } else { LinearInput::Plain(x) };
        let Some(after) = &self.after else {
            return backend.linear_reduce_add(input(&inner[buffer]), rows, w, residual);
        };
        let [x, sum] = disjoint(inner, [buffer, after.sum_buffer]);
        backend.linear(input(x), rows.clone(), w, sum)?;
        after.add_sum(rows, pass)
    }

    /// Norms the residual stream after the part was added, if the part has such a norm.
    pub(super) fn norm_stream(&self, rows: Range<usize>, pass: &mut Pass<'_, B>) -> Result<(), ComputeError> {
        let Some(norm) = &self.of_stream else { return Ok(()) };
        pass.backend.settle(pass.residual)?;
        pass.backend.layer_norm(norm, rows, pass.residual)
    }

    /// As [`Norms::add_product`], with what `adapters` change of the product.
    pub(super) fn add_adapted_product(
        &self,
        (buffer, gated): (usize, bool),
        rows: Range<usize>,
        (w, adapters): (&B::Matrix, &Adapters<B>),
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        if !adapters.change(pass.step, &rows) {
            return self.add_product((buffer, gated), rows, w, pass);
        }
        let Pass { backend, step, residual, inner, .. } = pass;
        let input = |x| if gated { LinearInput::Gated(x) } else { LinearInput::Plain(x) };
        if let Some(after) = &self.after {
            let [x, sum] = disjoint(inner, [buffer, after.sum_buffer]);
            backend.linear(input(x), rows.clone(), w, sum)?;
            adapters.add(&input(x), (step, rows.clone()), backend, sum)?;
            return after.add_sum(rows, pass);
        }
        let (x, (height, width)) = (&inner[buffer], backend.extent(residual));
        let mut sum = backend.scratch(height, width)?;
        backend.linear(input(x), rows.clone(), w, &mut sum)?;
        // Each rank adds its inputs' part, so that one reduction sums both.
        adapters.add(&input(x), (step, rows.clone()), backend, &mut sum)?;
        // The layer before may have left the other part's sum under way.
        backend.settle(residual)?;
        backend.all_reduce(&mut sum, rows.clone())?;
        backend.add(&sum, rows, residual)?;
        backend.give_back(sum);
        Ok(())
    }
}

impl<B: Backend> After<B> {
    /// Adds the norm of the sum over all ranks to the residual stream.
    pub(super) fn add_sum(&self, rows: Range<usize>, pass: &mut Pass<'_, B>) -> Result<(), ComputeError> {
        let Pass { backend, residual, inner, .. } = pass;
        let [sum, normed] = disjoint(inner, [self.sum_buffer, self.normed_buffer]);
        // The layer before may have left the other part's sum under way.
        backend.settle(residual)?;
        backend.all_reduce(sum, rows.clone())?;
        backend.rms_norm(sum, rows.clone(), &self.norm, normed)?;
        backend.add(normed, rows, residual)
    }
}

/// The residual stream's norm as a product's input.
pub(super) fn normed<'a, B: Backend>(
    residual: &'a B::Buffer,
    norm: &'a Norm<B::Vector>,
) -> LinearInput<'a, B::Buffer, B::Vector> {
    LinearInput::Normed { x: residual, weight: &norm.weight, eps: norm.eps }
}
