//! The operations that models are made of, and what one rank's device must provide.

mod cache;
mod compressed;
mod curve;
mod device;
mod error;
mod experts;
mod extra;
mod rare;
mod rounding;
mod spec;

use std::ops::Range;

use crate::choice::Choices;
use crate::step::Step;
pub use cache::{CacheKind, CachePart, CacheShape, KvFormat};
pub(crate) use compressed::add_value;
pub use compressed::{CompressedSpec, CompressionSpec, RecentSpec, StreamSpec};
pub use curve::{Curve, LayerNorm};
pub(crate) use curve::{ERF, ERF_STEP};
pub use device::Device;
pub use error::ComputeError;
pub(crate) use experts::root_softplus;
pub use experts::{Activation, Expert, ExpertGroups, RouterSpec, Scores, SharedExpert};
pub use extra::{Extra, GatedConvSpec, Scoring, SelectionBlocks, SelectionSpec, StateSpaceSpec};
pub use rare::RareOperations;
pub(crate) use rare::mix_row;
pub use rounding::Rounding;
pub use spec::{
    AttentionSpec, Decays, DeltaSpec, HeadSharing, Heads, Largest, LatentSpec, LinearInput, Norm, PartNorm,
    QkNorm, Rope,
};

/// The input rows of a backend's product.
pub type InputOf<'a, B> = LinearInput<'a, <B as Device>::Buffer, <B as Device>::Vector>;

type Outcome = Result<(), ComputeError>;

/// The operations of a transformer on one rank's [`Device`].
///
/// A buffer is `[rows, width]` in f32. Operations work on `rows` of the current step; an operation
/// that writes a buffer gives it as many rows as its input has, and defines only those in `rows`.
/// Reductions go over the tensor-parallel group that the backend was made with, so that a device
/// can use its own links for them.
///
/// A backend implements the plain operations. Models call the fused ones, whose defaults are made
/// of the plain ones; a backend overrides those that its kernels do faster. [`crate::conformance`]
/// holds both to the plain reference.
///
/// # Errors
/// Every operation fails with [`ComputeError::Comm`] when a peer is lost, and with the backend's
/// own errors. After an error the backend must not be used again.
#[allow(clippy::missing_errors_doc, reason = "the trait's documentation says when operations fail")]
pub trait Backend: RareOperations {
    // Plain operations.

    /// Begins a step: computes rotations, and returns the parts in which layers should process its
    /// rows, one after the other. The second may be empty. Called before any other operation of the
    /// step.
    fn begin(&mut self, step: &Step, ropes: &[Rope]) -> Result<[Range<usize>; 2], ComputeError>;
    /// `out[r] = scale * table[ids[r] - first]`; zero where the table does not hold the id.
    fn embed(
        &mut self,
        table: &Self::Matrix,
        ids: &[u32],
        first: u32,
        scale: f32,
        out: &mut Self::Buffer,
    ) -> Outcome;
    /// `out[r] = norm(x[r])`.
    fn rms_norm(
        &mut self,
        x: &Self::Buffer,
        rows: Range<usize>,
        norm: &Norm<Self::Vector>,
        out: &mut Self::Buffer,
    ) -> Outcome;
    /// `out[r][i] = Σ x[r][c]²` over the columns that norm `i` counts on this rank.
    fn square_sums(
        &mut self,
        norms: &[PartNorm<Self::Vector>],
        x: &Self::Buffer,
        rows: Range<usize>,
        out: &mut Self::Buffer,
    ) -> Outcome;
    /// Norms the columns of each norm in place, given the sums of all ranks:
    /// `x[r][c] *= weight[c] / sqrt(sums[r][i] / width + eps)`.
    fn norm_by_sums(
        &mut self,
        norms: &[PartNorm<Self::Vector>],
        sums: &Self::Buffer,
        rows: Range<usize>,
        x: &mut Self::Buffer,
    ) -> Outcome;
    /// `out[r] = W · x[r] + bias`, in the first columns of `out`.
    fn product(
        &mut self,
        x: &Self::Buffer,
        rows: Range<usize>,
        w: &Self::Matrix,
        out: &mut Self::Buffer,
    ) -> Outcome;
    /// `out[r] = activation(gate, up)`, where a row of `gate_up` is `[gate, up]`, each as wide as
    /// `out`.
    fn gate(
        &mut self,
        gate_up: &Self::Buffer,
        rows: Range<usize>,
        activation: Activation,
        out: &mut Self::Buffer,
    ) -> Outcome;
    /// Chooses each row's experts; [`RouterSpec`] describes `logits` and `choices`.
    fn route(
        &mut self,
        spec: &RouterSpec<Self::Vector>,
        logits: &Self::Buffer,
        rows: Range<usize>,
        choices: &mut Self::Buffer,
    ) -> Outcome;
    /// The norm of each row, and its experts, chosen by that norm's product with a router's matrix.
    /// `out`: the norms, space for the products (undefined afterwards), and the choices.
    fn norm_route(
        &mut self,
        x: &Self::Buffer,
        rows: Range<usize>,
        norm: &Norm<Self::Vector>,
        (router, spec): (&Self::Matrix, &RouterSpec<Self::Vector>),
        [normed, logits, choices]: [&mut Self::Buffer; 3],
    ) -> Outcome {
        self.rms_norm(x, rows.clone(), norm, normed)?;
        self.linear(LinearInput::Precise(normed), rows.clone(), router, logits)?;
        self.route(spec, logits, rows, choices)
    }
    /// `out[r] = Σ weight * (down · activation(gate · x[r], up · x[r]) + down_bias)` over the
    /// experts of row `r` of `choices`, as [`Backend::route`] made it, in ascending order. Only the
    /// weights of these experts are read.
    fn expert_sum(
        &mut self,
        x: &Self::Buffer,
        rows: Range<usize>,
        choices: &Self::Buffer,
        experts: &Self::Experts,
        out: &mut Self::Buffer,
    ) -> Outcome;
    /// `to[r] += x[r]`.
    fn add(&mut self, x: &Self::Buffer, rows: Range<usize>, to: &mut Self::Buffer) -> Outcome;
    /// Sums rows over the tensor-parallel group, in rank order.
    fn all_reduce(&mut self, x: &mut Self::Buffer, rows: Range<usize>) -> Outcome;
    /// `out[i] = x[rows[i]]`.
    fn take_rows(&mut self, x: &Self::Buffer, rows: &[u32], out: &mut Self::Buffer) -> Outcome;
    /// Maximum rows whose logits of all tokens [`Backend::all_reduce`] sums fast enough, because
    /// ranks' devices exchange them. All ranks of the tensor-parallel group answer alike.
    fn gathers(&self) -> usize {
        0
    }
    /// The largest output of each of the first rows, as many as `largest` has. All ranks of the
    /// tensor-parallel group call this together.
    fn read_largest(&mut self, x: &Self::Buffer, largest: &mut [Largest]) -> Outcome;
    /// Chosen outputs of the first rows, and their columns, as many as there are choices. The value
    /// is not finite if an output is NaN or infinite. Called once, for the last results of a step:
    /// edits may be applied to `x` in place. `likely` has [`Choices::likely_words`] numbers for
    /// each row.
    fn read_chosen(
        &mut self,
        x: &Self::Buffer,
        choices: &Choices<'_>,
        chosen: &mut [Largest],
        likely: &mut [f32],
    ) -> Outcome;
    /// Norms, rotates and scales the queries and keys of `qkv` in place.
    fn prepare_heads(
        &mut self,
        spec: &AttentionSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        qkv: &mut Self::Buffer,
    ) -> Outcome;
    /// Appends the keys and values of `qkv` to a cache of [`CacheKind::Heads`].
    fn append(
        &mut self,
        spec: &AttentionSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        qkv: &Self::Buffer,
        to: (&mut Self::Caches, usize),
    ) -> Outcome;
    /// Attends with the queries of `qkv`. The keys and values of these rows and of earlier ones
    /// have been appended.
    fn attend(
        &mut self,
        spec: &AttentionSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        qkv: &Self::Buffer,
        from: (&mut Self::Caches, usize),
        out: &mut Self::Buffer,
    ) -> Outcome;
    /// For latent attention: scales the queries, rotates their last columns and those of `latent`,
    /// and norms the compressed vectors, all in place. A row of `queries` is `[heads, plain +
    /// rotated]`, one of `latent` is `[rank + rotated]`.
    fn prepare_latent(
        &mut self,
        spec: &LatentSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        queries: &mut Self::Buffer,
        latent: &mut Self::Buffer,
    ) -> Outcome;
    /// Appends rows of `latent` to a cache of [`CacheKind::Latent`]. If several tokens share a
    /// vector, the row of the last one is appended.
    fn append_latent(
        &mut self,
        spec: &LatentSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        latent: &Self::Buffer,
        to: (&mut Self::Caches, usize),
    ) -> Outcome;
    /// Attends to compressed vectors: a head's key is `[compressed, rotated]`, its query
    /// `[absorbed, rotated columns of queries]`, its value the compressed vector. Rows of
    /// `absorbed` and of `out` are `[heads, rank]`.
    #[allow(clippy::too_many_arguments, reason = "the operation's operands")]
    fn attend_latent(
        &mut self,
        spec: &LatentSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        absorbed: &Self::Buffer,
        queries: &Self::Buffer,
        from: (&mut Self::Caches, usize),
        out: &mut Self::Buffer,
    ) -> Outcome;
    /// A product for each head: `out[r][h] = W_h · x[r][h]`, where `x[r][h]` begins at column `h *
    /// stride` and `out[r][h]` at `h * W_h.rows`.
    fn head_products(
        &mut self,
        x: &Self::Buffer,
        stride: usize,
        rows: Range<usize>,
        w: &Heads<Self::Matrix>,
        out: &mut Self::Buffer,
    ) -> Outcome;
    /// The gated delta rule's convolution, in place: `x[t] = silu(Σ_k taps[k] * x[t - kernel + 1 +
    /// k])` for each channel, over the sequence's tokens; before position 0 there are zeros. Keeps
    /// the last inputs in a cache of [`CacheKind::State`].
    fn short_conv(
        &mut self,
        spec: &DeltaSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        x: &mut Self::Buffer,
        state: (&mut Self::Caches, usize),
    ) -> Outcome;
    /// The gated delta rule, a token at a time. `inputs` are `(qkv, gates)`: a row of `qkv` is
    /// `[queries, keys, values]`, as [`Backend::short_conv`] left it; of `gates`, `[beta, alpha]`
    /// of the value heads; of `out`, the value heads' outputs. With unit vectors (each divided by
    /// `√(Σ x² + unit_eps)`) `q / √key_dim` and `k`, and `S = 0` before position 0, for each value
    /// head:
    ///
    /// `S *= exp(-exp(decay) * softplus(alpha + decay_bias))`, `S += k ⊗ (v - Sᵀk) *
    /// sigmoid(beta)`, `out = Sᵀq`.
    fn delta_rule(
        &mut self,
        spec: &DeltaSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Self::Buffer, &Self::Buffer),
        state: (&mut Self::Caches, usize),
        out: &mut Self::Buffer,
    ) -> Outcome;
    /// `x[r][h] = norm(x[r][h]) * silu(z[r][h])` for each value head, in place.
    fn norm_gated(
        &mut self,
        spec: &DeltaSpec<Self::Vector>,
        z: &Self::Buffer,
        rows: Range<usize>,
        x: &mut Self::Buffer,
    ) -> Outcome;
    /// Copies the states of one sequence to another's slot, in all caches of [`CacheKind::State`].
    fn copy_slot(&mut self, caches: &mut Self::Caches, from: usize, to: usize) -> Outcome;
    /// Appends the bytes of a part of all caches, in the backend's own form.
    fn read_cache(&mut self, caches: &mut Self::Caches, part: CachePart, out: &mut Vec<u8>) -> Outcome;
    /// Writes bytes of [`Backend::read_cache`] to a part of all caches. Returns false if there are
    /// too few or too many bytes; then nothing is written.
    fn write_cache(
        &mut self,
        caches: &mut Self::Caches,
        part: CachePart,
        bytes: &[u8],
    ) -> Result<bool, ComputeError>;
    /// [`Backend::attend`] with other scores.
    ///
    /// # Errors
    /// [`ComputeError::Lacks`] if the backend does not offer [`Extra::Scoring`].
    #[allow(clippy::too_many_arguments, reason = "the operation's operands")]
    fn attend_by(
        &mut self,
        spec: &AttentionSpec<Self::Vector>,
        scoring: Scoring,
        step: &Step,
        rows: Range<usize>,
        qkv: &Self::Buffer,
        from: (&mut Self::Caches, usize),
        out: &mut Self::Buffer,
    ) -> Outcome {
        match scoring == Scoring::default() {
            true => self.attend(spec, step, rows, qkv, from, out),
            false => Err(ComputeError::Lacks(Extra::Scoring)),
        }
    }

    // Fused operations.

    /// [`Backend::all_reduce`] of these rows of both. Backends of one group sum both in one
    /// message, or all of them in two.
    fn all_reduce_both(&mut self, [x, y]: [&mut Self::Buffer; 2], rows: Range<usize>) -> Outcome {
        self.all_reduce(x, rows.clone())?;
        self.all_reduce(y, rows)
    }
    /// [`Backend::product`] of any input.
    fn linear(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        w: &Self::Matrix,
        out: &mut Self::Buffer,
    ) -> Outcome {
        match x {
            LinearInput::Plain(x) | LinearInput::Gated(x) | LinearInput::Precise(x) => {
                self.product(x, rows, w, out)
            }
            LinearInput::Normed { x, weight, eps } => {
                let (height, width) = self.extent(x);
                let mut normed = self.scratch(height, width)?;
                let norm = Norm { weight: weight.clone(), eps };
                self.rms_norm(x, rows.clone(), &norm, &mut normed)?;
                self.product(&normed, rows, w, out)?;
                self.give_back(normed);
                Ok(())
            }
        }
    }
    /// Norms, in place, vectors that are divided among the ranks: [`Backend::square_sums`], an
    /// all-reduce of the sums, [`Backend::norm_by_sums`].
    fn norm_parts(
        &mut self,
        norms: &[PartNorm<Self::Vector>],
        rows: Range<usize>,
        x: &mut Self::Buffer,
    ) -> Outcome {
        let (height, _) = self.extent(x);
        let mut sums = self.scratch(height, norms.len())?;
        self.square_sums(norms, x, rows.clone(), &mut sums)?;
        self.all_reduce(&mut sums, rows.clone())?;
        self.norm_by_sums(norms, &sums, rows, x)?;
        self.give_back(sums);
        Ok(())
    }
    /// [`Backend::linear`] for the first `rows` rows, after which [`Backend::read_largest`] will be
    /// called for their largest outputs.
    fn linear_largest(
        &mut self,
        x: InputOf<'_, Self>,
        rows: usize,
        w: &Self::Matrix,
        out: &mut Self::Buffer,
    ) -> Outcome {
        self.linear(x, 0..rows, w, out)
    }
    /// `out = activation(x · Gᵀ + g, x · Uᵀ + u)`, where `gate_up` was packed from G and U. The
    /// next operation on these rows of `out` is a product with `next`: a backend may store them in
    /// the form that this product reads.
    fn linear_gated(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        gate_up: &Self::Matrix,
        (activation, _next): (Activation, &Self::Matrix),
        out: &mut Self::Buffer,
    ) -> Outcome {
        let (height, _) = self.extent(x.buffer());
        let (_, width) = self.extent(out);
        let mut both = self.scratch(height, 2 * width)?;
        self.linear(x, rows.clone(), gate_up, &mut both)?;
        self.gate(&both, rows, activation, out)?;
        self.give_back(both);
        Ok(())
    }
    /// `residual += all_reduce(x · Wᵀ + bias)`, summed in rank order. If the step has two parts,
    /// the sum of one may be pending, and not added yet, until this is called for the other part,
    /// or until [`Backend::settle`].
    fn linear_reduce_add(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        w: &Self::Matrix,
        residual: &mut Self::Buffer,
    ) -> Outcome {
        let (height, width) = self.extent(residual);
        let mut partial = self.scratch(height, width)?;
        self.linear(x, rows.clone(), w, &mut partial)?;
        self.all_reduce(&mut partial, rows.clone())?;
        self.add(&partial, rows, residual)?;
        self.give_back(partial);
        Ok(())
    }
    /// `residual += all_reduce(`[`Backend::expert_sum`]`)`, as [`Backend::linear_reduce_add`].
    fn experts_reduce_add(
        &mut self,
        x: &Self::Buffer,
        rows: Range<usize>,
        choices: &Self::Buffer,
        experts: &Self::Experts,
        residual: &mut Self::Buffer,
    ) -> Outcome {
        let (height, width) = self.extent(residual);
        let mut partial = self.scratch(height, width)?;
        self.expert_sum(x, rows.clone(), choices, experts, &mut partial)?;
        self.all_reduce(&mut partial, rows.clone())?;
        self.add(&partial, rows, residual)?;
        self.give_back(partial);
        Ok(())
    }
    /// Waits for the pending sum of an operation on one part of a step, and adds it.
    fn settle(&mut self, _residual: &mut Self::Buffer) -> Outcome {
        Ok(())
    }
    /// [`Backend::prepare_latent`] and [`Backend::append_latent`] of `(queries, latent)`. `latent`
    /// is not defined afterwards.
    fn prepare_and_append_latent(
        &mut self,
        spec: &LatentSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        (queries, latent): (&mut Self::Buffer, &mut Self::Buffer),
        to: (&mut Self::Caches, usize),
    ) -> Outcome {
        self.prepare_latent(spec, step, rows.clone(), queries, latent)?;
        self.append_latent(spec, step, rows, latent, to)
    }
    /// [`Backend::prepare_heads`], [`Backend::append`] and [`Backend::attend`]. `qkv` is not
    /// defined afterwards.
    fn attention(
        &mut self,
        spec: &AttentionSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        qkv: &mut Self::Buffer,
        (caches, cache): (&mut Self::Caches, usize),
        out: &mut Self::Buffer,
    ) -> Outcome {
        self.prepare_heads(spec, step, rows.clone(), qkv)?;
        self.append(spec, step, rows.clone(), qkv, (caches, cache))?;
        self.attend(spec, step, rows, qkv, (caches, cache), out)
    }
}

impl<'a, Buffer, Vector> LinearInput<'a, Buffer, Vector> {
    /// The buffer that the rows are in, or are made of.
    pub fn buffer(&self) -> &'a Buffer {
        match self {
            Self::Plain(x) | Self::Gated(x) | Self::Precise(x) | Self::Normed { x, .. } => x,
        }
    }
}
