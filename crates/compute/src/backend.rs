//! The operations that models are made of, and what one rank's device must provide.

mod cache;
mod error;
mod experts;
mod extra;
mod spec;

use std::ops::Range;

use thunder_collectives::{Group, Stats};

use crate::source::MatrixSource;
use crate::step::Step;
pub use cache::{CacheKind, CacheShape, KvFormat};
pub use error::ComputeError;
pub use experts::{Activation, Expert, ExpertGroups, RouterSpec, Scores, SharedExpert};
pub use extra::{Extra, Scoring, SelectionSpec, StateSpaceSpec};
pub use spec::{AttentionSpec, DeltaSpec, Largest, LatentSpec, LinearInput, Norm, PartNorm, QkNorm, Rope};

/// The rows that a backend's product takes.
pub type InputOf<'a, B> = LinearInput<'a, <B as Backend>::Buffer, <B as Backend>::Vector>;

type Outcome = Result<(), ComputeError>;

/// One rank's device: its memory, and the operations of a transformer on it.
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
pub trait Backend {
    /// Weights, packed for this device.
    type Matrix;
    /// A vector of weights.
    type Vector: Clone;
    /// Activations.
    type Buffer;
    /// All caches of the rank's layers.
    type Caches;
    /// The experts of one layer.
    type Experts;

    // Memory.

    /// Packs matrices that share their input into one, `[Σ rows, cols]`: their outputs follow each
    /// other.
    fn matrix(&mut self, parts: &[MatrixSource<'_>]) -> Result<Self::Matrix, ComputeError>;
    /// Uploads a vector.
    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector, ComputeError>;
    /// A zeroed buffer for up to `rows` rows.
    fn buffer(&mut self, rows: usize, width: usize) -> Result<Self::Buffer, ComputeError>;
    /// Empty caches.
    fn caches(&mut self, shape: &CacheShape) -> Result<Self::Caches, ComputeError>;
    /// Collects a layer's experts, whose gates apply `activation`.
    fn experts(
        &mut self,
        experts: Vec<Expert<Self::Matrix>>,
        activation: Activation,
    ) -> Result<Self::Experts, ComputeError>;
    /// Bytes that a packed matrix takes.
    fn matrix_bytes(matrix: &Self::Matrix) -> usize;
    /// A buffer for a fused operation's default to work in. Backends keep those that
    /// [`Backend::give_back`] returns.
    fn scratch(&mut self, rows: usize, width: usize) -> Result<Self::Buffer, ComputeError> {
        self.buffer(rows, width)
    }
    /// Takes back a buffer of [`Backend::scratch`].
    fn give_back(&mut self, _scratch: Self::Buffer) {}
    /// Copies rows to the host once they are computed; `out` holds `rows.len()` whole rows.
    fn read(&mut self, x: &Self::Buffer, rows: Range<usize>, out: &mut [f32]) -> Outcome;
    /// Gives a buffer the rows `values`.
    fn write(&mut self, values: &[f32], x: &mut Self::Buffer) -> Outcome;

    // The group.

    /// The tensor-parallel group.
    fn group(&mut self) -> &mut Group;
    /// Measures the group, so that reductions use what is fastest for each size. They will have
    /// rows of `width`, and for each this rank reads `weight_bytes` of weights. All ranks call this
    /// together, idle.
    fn tune(&mut self, width: usize, weight_bytes: usize) -> Outcome;
    /// Reductions since the last call, and the time that this rank waited for them.
    fn take_reduction_stats(&mut self) -> Stats;
    /// Called by the thread that will compute, before it does: keeps it to its core, if the backend
    /// has cores of its own.
    fn pin_caller(&self) {}

    // Plain operations.

    /// Begins a step: computes rotations, and returns the parts in which layers should take its
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
    /// `out[r] = Σ weight * (down · activation(gate · x[r], up · x[r]) + down_bias)` over the
    /// experts of row `r` of `choices`, as [`Backend::route`] made it, in ascending order. Of these
    /// experts only are weights read.
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
    /// The largest output of each of the first rows, as many as `largest` has.
    fn read_largest(&mut self, x: &Self::Buffer, largest: &mut [Largest]) -> Outcome;

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
    /// Appends rows of `latent` to a cache of [`CacheKind::Latent`].
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
    /// stride` and `out[r][h]` at `h * W_h.rows`. All heads' matrices have one shape.
    fn head_products(
        &mut self,
        x: &Self::Buffer,
        stride: usize,
        rows: Range<usize>,
        w: &[Self::Matrix],
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
    /// of the value heads; of `out`, the value heads' outputs. With unit vectors `q / √key_dim` and
    /// `k`, and `S = 0` before position 0, for each value head:
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

    // Operations of few families. Defaults that work on the host are right on every backend, and
    // slow on those whose memory is elsewhere.

    /// True if the backend has an operation that some lack.
    fn offers(&self, _operation: Extra) -> bool {
        false
    }
    /// Changes rows in place, on the host. `change` is given the number of a row, counted from the
    /// first of `rows`, and the row.
    fn change_rows(
        &mut self,
        x: &mut Self::Buffer,
        rows: Range<usize>,
        change: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Outcome {
        let (height, width) = self.extent(x);
        let mut all = vec![0.0; height * width];
        self.read(x, 0..height, &mut all)?;
        all[rows.start * width..rows.end * width]
            .chunks_exact_mut(width)
            .enumerate()
            .for_each(|(index, row)| change(index, row));
        self.write(&all, x)
    }
    /// Subtracts from each of these parts of a row its mean, in place.
    fn center(&mut self, parts: &[Range<usize>], rows: Range<usize>, x: &mut Self::Buffer) -> Outcome {
        self.change_rows(x, rows, &|_, row| {
            for part in parts {
                let part = &mut row[part.clone()];
                let mean = part.iter().sum::<f32>() / part.len().max(1) as f32;
                part.iter_mut().for_each(|x| *x -= mean);
            }
        })
    }
    /// `x[r][columns] += by`.
    fn shift(&mut self, first: usize, by: &[f32], rows: Range<usize>, x: &mut Self::Buffer) -> Outcome {
        self.change_rows(x, rows, &|_, row| {
            row[first..first + by.len()].iter_mut().zip(by).for_each(|(x, by)| *x += by);
        })
    }
    /// `x[r][columns] *= factors[r - rows.start]`.
    fn scale(
        &mut self,
        columns: Range<usize>,
        factors: &[f32],
        rows: Range<usize>,
        x: &mut Self::Buffer,
    ) -> Outcome {
        self.change_rows(x, rows, &|index, row| {
            row[columns.clone()].iter_mut().for_each(|x| *x *= factors[index]);
        })
    }
    /// `x[r] = max(x[r], 0)²` in place: a feed-forward's activation without a gate.
    fn square_positive(&mut self, rows: Range<usize>, x: &mut Self::Buffer) -> Outcome {
        self.change_rows(x, rows, &|_, row| row.iter_mut().for_each(|x| *x = x.max(0.0).powi(2)))
    }
    /// `out[r][to] = x[r][from..]`, as many columns as `to` has. Leaves the other columns of `out`.
    fn copy_columns(
        &mut self,
        (x, from): (&Self::Buffer, usize),
        rows: Range<usize>,
        (out, to): (&mut Self::Buffer, Range<usize>),
    ) -> Outcome {
        let ((height, width), (old_height, out_width)) = (self.extent(x), self.extent(out));
        let mut values = vec![0.0; rows.len() * width];
        self.read(x, rows.clone(), &mut values)?;
        let (kept, mut all) = (old_height.min(height), vec![0.0; height * out_width]);
        self.read(out, 0..kept, &mut all[..kept * out_width])?;
        let written = all[rows.start * out_width..rows.end * out_width].chunks_exact_mut(out_width);
        for (out, x) in written.zip(values.chunks_exact(width)) {
            out[to.clone()].copy_from_slice(&x[from..from + to.len()]);
        }
        self.write(&all, out)
    }
    /// Multiplies the weight of each routed expert in rows of [`Backend::route`]'s choices with its
    /// own factor, `[experts]`.
    fn weigh_choices(&mut self, factors: &[f32], rows: Range<usize>, choices: &mut Self::Buffer) -> Outcome {
        self.change_rows(choices, rows, &|_, row| {
            let (indices, weights) = row.split_at_mut(row.len() / 2);
            for (index, weight) in indices.iter().zip(weights) {
                *weight *= factors.get(*index as usize).copied().unwrap_or(1.0);
            }
        })
    }
    /// Weighs the input of each row's only expert in place of its output: `x[r] *= weight`, and the
    /// weight becomes 1.
    fn weigh_input(
        &mut self,
        choices: &mut Self::Buffer,
        rows: Range<usize>,
        x: &mut Self::Buffer,
    ) -> Outcome {
        let (_, width) = self.extent(choices);
        let mut of_rows = vec![0.0; rows.len() * width];
        self.read(choices, rows.clone(), &mut of_rows)?;
        self.change_rows(x, rows.clone(), &|index, row| {
            row.iter_mut().for_each(|x| *x *= of_rows[index * width + 1]);
        })?;
        self.change_rows(choices, rows, &|_, row| row[1] = 1.0)
    }
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
    /// Collects a layer's experts whose channels are `max(up, 0)²`: their `gate_up` is `up` alone.
    ///
    /// # Errors
    /// [`ComputeError::Lacks`] if the backend does not offer [`Extra::UngatedExperts`].
    fn ungated_experts(
        &mut self,
        _experts: Vec<Expert<Self::Matrix>>,
    ) -> Result<Self::Experts, ComputeError> {
        Err(ComputeError::Lacks(Extra::UngatedExperts))
    }
    /// [`Backend::delta_rule`] with a decay for each column of a key (Kimi Delta Attention, arXiv
    /// 2510.26692). `inputs` are `(qkv, beta, alpha)`: a row of `alpha` is `[value_heads,
    /// key_dim]`, as `spec.decay_bias` is. Row `k` of a head's matrix is multiplied with
    /// `exp(-exp(decay) * softplus(alpha[k] + decay_bias[k]))`.
    ///
    /// # Errors
    /// [`ComputeError::Lacks`] if the backend does not offer [`Extra::ChannelDeltaRule`].
    fn channel_delta_rule(
        &mut self,
        _spec: &DeltaSpec<Self::Vector>,
        _step: &Step,
        _rows: Range<usize>,
        _inputs: [&Self::Buffer; 3],
        _state: (&mut Self::Caches, usize),
        _out: &mut Self::Buffer,
    ) -> Outcome {
        Err(ComputeError::Lacks(Extra::ChannelDeltaRule))
    }
    /// A state space, a token at a time. A row of `x` is `[heads, inputs of groups, outputs of
    /// groups]`; first it is convolved in place, as by [`Backend::short_conv`], with a bias. A row
    /// of `times` has a number for each head. With `S = 0` before position 0, for each head with
    /// input `x`, and `B` and `C` of its group:
    ///
    /// `t = softplus(time + time_bias)`, within the limits; `S *= exp(-exp(rate) * t)`,
    /// `S += B ⊗ (t * x)`, `out = Sᵀ C + skip * x`.
    ///
    /// # Errors
    /// [`ComputeError::Lacks`] if the backend does not offer [`Extra::StateSpace`].
    fn state_space(
        &mut self,
        _spec: &StateSpaceSpec<Self::Vector>,
        _step: &Step,
        _rows: Range<usize>,
        _inputs: (&mut Self::Buffer, &Self::Buffer),
        _state: (&mut Self::Caches, usize),
        _out: &mut Self::Buffer,
    ) -> Outcome {
        Err(ComputeError::Lacks(Extra::StateSpace))
    }
    /// Selects the tokens that each row attends to: those with the largest `Σ_h weights[h] *
    /// max(queries[h] · key, 0)` among the visible ones; of equal ones, the first. A row of
    /// `selection` is their number and their positions in ascending order. Keys are in a cache of
    /// [`SelectionSpec::cache`], to which [`Backend::append_latent`] appended them.
    ///
    /// # Errors
    /// [`ComputeError::Lacks`] if the backend does not offer [`Extra::Selection`].
    fn select(
        &mut self,
        _spec: &SelectionSpec,
        _step: &Step,
        _rows: Range<usize>,
        _inputs: (&Self::Buffer, &Self::Buffer),
        _from: (&mut Self::Caches, usize),
        _selection: &mut Self::Buffer,
    ) -> Outcome {
        Err(ComputeError::Lacks(Extra::Selection))
    }
    /// [`Backend::attend_latent`] to the tokens that [`Backend::select`] selected. `inputs` are
    /// `(absorbed, queries, selection)`.
    ///
    /// # Errors
    /// [`ComputeError::Lacks`] if the backend does not offer [`Extra::Selection`].
    fn attend_selected(
        &mut self,
        _spec: &LatentSpec<Self::Vector>,
        _step: &Step,
        _rows: Range<usize>,
        _inputs: [&Self::Buffer; 3],
        _from: (&mut Self::Caches, usize),
        _out: &mut Self::Buffer,
    ) -> Outcome {
        Err(ComputeError::Lacks(Extra::Selection))
    }

    // Fused operations.

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
    /// Norms, in place, vectors that the ranks have parts of: [`Backend::square_sums`], an
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
    /// [`Backend::linear`] of the first `rows` rows, whose largest outputs
    /// [`Backend::read_largest`] will be asked for.
    fn linear_largest(
        &mut self,
        x: InputOf<'_, Self>,
        rows: usize,
        w: &Self::Matrix,
        out: &mut Self::Buffer,
    ) -> Outcome {
        self.linear(x, 0..rows, w, out)
    }
    /// `out = activation(x · Gᵀ + g, x · Uᵀ + u)`, where `gate_up` was packed of G and U. The next
    /// operation on these rows of `out` is a product with `next`: a backend may leave them in the
    /// form that this product takes.
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
    /// the sum of one may still be under way, and not added yet, until this is called for the other
    /// part, or [`Backend::settle`].
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
    /// Waits for the sum that an operation on one part of a step left under way, and adds it.
    fn settle(&mut self, _residual: &mut Self::Buffer) -> Outcome {
        Ok(())
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
    /// Rows and width of a buffer.
    fn extent(&self, x: &Self::Buffer) -> (usize, usize);
}

impl<'a, Buffer, Vector> LinearInput<'a, Buffer, Vector> {
    /// The buffer that the rows are in, or are made of.
    pub fn buffer(&self) -> &'a Buffer {
        match self {
            Self::Plain(x) | Self::Gated(x) | Self::Precise(x) | Self::Normed { x, .. } => x,
        }
    }
}
