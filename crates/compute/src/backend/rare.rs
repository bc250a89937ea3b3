//! Operations that few families need.

use std::ops::Range;

use super::{
    CompressedSpec, CompressionSpec, ComputeError, Curve, DeltaSpec, Device, Expert, Extra, GatedConvSpec,
    LatentSpec, LayerNorm, Outcome, RecentSpec, Rope, Rounding, RouterSpec, SelectionBlocks, SelectionSpec,
    StateSpaceSpec, StreamSpec, add_value,
};
use crate::step::Step;

/// One row of [`RareOperations::mix`], given that row of each sum.
pub(crate) fn mix_row<'a>(
    sums: impl Iterator<Item = &'a [f32]> + Clone,
    (weight, eps): (&[f32], f32),
    out: &mut [f32],
) {
    let score = |x: &[f32]| {
        let (dot, squares) =
            x.iter().zip(weight).fold((0.0, 0.0), |(dot, squares), (x, w)| (dot + x * w, squares + x * x));
        dot / (squares / x.len() as f32 + eps).sqrt()
    };
    // No list of scores: rows are mixed while tokens are generated.
    let largest = sums.clone().map(score).fold(f32::NEG_INFINITY, f32::max);
    let total: f32 = sums.clone().map(|x| (score(x) - largest).exp()).sum();
    out.fill(0.0);
    for x in sums {
        let share = (score(x) - largest).exp() / total;
        out.iter_mut().zip(x).for_each(|(out, x)| *out += share * x);
    }
}

/// Rows with keys and values on the host at the same time: 3 MB for DeepSeek V4.1-Flash.
const HOST_ROWS: usize = 32;

/// Operations that few families need. Those that change rows have defaults that run on the host:
/// correct on every backend, and slow on those with their own memory. The others are [`Extra`]s.
///
/// # Errors
/// As [`super::Backend`]'s.
#[allow(clippy::missing_errors_doc, reason = "the trait's documentation says when operations fail")]
pub trait RareOperations: Device {
    /// True if the backend has an operation that some lack.
    fn offers(&self, _operation: Extra) -> bool {
        false
    }
    /// Changes rows in place, on the host. `change` gets the number of a row, counted from the
    /// first of `rows`, and the row.
    fn change_rows(
        &mut self,
        x: &mut Self::Buffer,
        rows: Range<usize>,
        change: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Outcome {
        let (height, width) = self.extent(x);
        // A rank may have none of the columns.
        if width == 0 {
            return Ok(());
        }
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
    /// `x[r] = curve(x[r])` in place: a feed-forward's activation without a gate.
    fn bend(&mut self, curve: Curve, rows: Range<usize>, x: &mut Self::Buffer) -> Outcome {
        self.change_rows(x, rows, &|_, row| row.iter_mut().for_each(|x| *x = curve.of(*x)))
    }
    /// [`LayerNorm::apply`] to each row, in place.
    fn layer_norm(&mut self, norm: &LayerNorm, rows: Range<usize>, x: &mut Self::Buffer) -> Outcome {
        self.change_rows(x, rows, &|_, row| norm.apply(row))
    }
    /// Sets all columns of these rows to zero.
    fn clear(&mut self, rows: Range<usize>, x: &mut Self::Buffer) -> Outcome {
        self.change_rows(x, rows, &|_, row| row.fill(0.0))
    }
    /// [`Rounding::apply`] to each row, in place.
    fn round(&mut self, rounding: Rounding, rows: Range<usize>, x: &mut Self::Buffer) -> Outcome {
        self.change_rows(x, rows, &|_, row| rounding.apply(row))
    }
    /// Multiplies each head of a row with the sigmoid of its gate, in place. A row of `gates` has a
    /// number for each head; the heads, `dim` columns each, begin at column `first` of `x`.
    fn gate_heads(
        &mut self,
        gates: &Self::Buffer,
        (first, dim): (usize, usize),
        rows: Range<usize>,
        x: &mut Self::Buffer,
    ) -> Outcome {
        let (_, heads) = self.extent(gates);
        let mut factors = vec![0.0; rows.len() * heads];
        self.read(gates, rows.clone(), &mut factors)?;
        factors.iter_mut().for_each(|gate| *gate = 1.0 / (1.0 + (-*gate).exp()));
        self.change_rows(x, rows, &|index, row| {
            let columns = row[first..first + heads * dim].chunks_exact_mut(dim);
            for (head, factor) in columns.zip(&factors[index * heads..]) {
                head.iter_mut().for_each(|x| *x *= factor);
            }
        })
    }
    /// [`add_value`] to each row of residual streams. A row of `made` has the keys and the value.
    fn add_values(
        &mut self,
        (weights, eps): (&[f32], f32),
        made: &Self::Buffer,
        rows: Range<usize>,
        streams: &mut Self::Buffer,
    ) -> Outcome {
        let (_, columns) = self.extent(made);
        let mut values = vec![0.0; rows.len().min(HOST_ROWS) * columns];
        for first in rows.clone().step_by(HOST_ROWS) {
            let rows = first..rows.end.min(first + HOST_ROWS);
            let values = &mut values[..rows.len() * columns];
            self.read(made, rows.clone(), values)?;
            self.change_rows(streams, rows, &|index, row| {
                add_value((weights, eps), &values[index * columns..][..columns], row);
            })?;
        }
        Ok(())
    }
    /// `out[r][to] = x[r][from..]`, as many columns as `to` has. Does not change the other columns
    /// of `out`.
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
    /// Multiplies the weight of each routed expert in rows of [`super::Backend::route`]'s choices
    /// with its own factor, `[experts]`.
    fn weigh_choices(&mut self, factors: &[f32], rows: Range<usize>, choices: &mut Self::Buffer) -> Outcome {
        self.change_rows(choices, rows, &|_, row| {
            let (indices, weights) = row.split_at_mut(row.len() / 2);
            for (index, weight) in indices.iter().zip(weights) {
                *weight *= factors.get(*index as usize).copied().unwrap_or(1.0);
            }
        })
    }
    /// Rotates parts of each row by `rope`, or back, in place: the columns from each of `firsts`
    /// on. `positions` has a position for each of `rows`.
    fn rotate_parts(
        &mut self,
        (rope, back): (&Rope, bool),
        positions: &[usize],
        firsts: &[usize],
        rows: Range<usize>,
        x: &mut Self::Buffer,
    ) -> Outcome {
        self.change_rows(x, rows, &|index, row| {
            let turns: Vec<_> = rope.turns(positions[index]).collect();
            firsts.iter().for_each(|first| rope.rotate(&turns, back, &mut row[*first..]));
        })
    }
    /// [`StreamSpec::weigh`] of each row, in place.
    fn weigh_streams(
        &mut self,
        spec: &StreamSpec,
        rows: Range<usize>,
        weights: &mut Self::Buffer,
    ) -> Outcome {
        self.change_rows(weights, rows, &|_, row| spec.weigh(&mut row[..spec.columns()]))
    }
    /// [`StreamSpec::collapse`] of each row, to all columns of `out`.
    fn collapse_streams(
        &mut self,
        spec: &StreamSpec,
        (weights, streams): (&Self::Buffer, &Self::Buffer),
        rows: Range<usize>,
        out: &mut Self::Buffer,
    ) -> Outcome {
        let ((height, width), (old_height, out_width)) = (self.extent(streams), self.extent(out));
        let (_, columns) = self.extent(weights);
        let (mut of_rows, mut values) = (vec![0.0; rows.len() * columns], vec![0.0; rows.len() * width]);
        self.read(weights, rows.clone(), &mut of_rows)?;
        self.read(streams, rows.clone(), &mut values)?;
        let (kept, mut all) = (old_height.min(height), vec![0.0; height * out_width]);
        self.read(out, 0..kept, &mut all[..kept * out_width])?;
        let written = all[rows.start * out_width..rows.end * out_width].chunks_exact_mut(out_width);
        for ((out, x), weights) in written.zip(values.chunks_exact(width)).zip(of_rows.chunks_exact(columns))
        {
            spec.collapse(weights, x, out);
        }
        self.write(&all, out)
    }
    /// [`StreamSpec::expand`] of each row.
    fn expand_streams(
        &mut self,
        spec: &StreamSpec,
        (weights, result): (&Self::Buffer, &Self::Buffer),
        rows: Range<usize>,
        streams: &mut Self::Buffer,
    ) -> Outcome {
        let ((_, columns), (_, width)) = (self.extent(weights), self.extent(result));
        let (mut of_rows, mut results) = (vec![0.0; rows.len() * columns], vec![0.0; rows.len() * width]);
        self.read(weights, rows.clone(), &mut of_rows)?;
        self.read(result, rows.clone(), &mut results)?;
        self.change_rows(streams, rows, &|index, row| {
            let weights = &of_rows[index * columns..][..columns];
            spec.expand(weights, &results[index * width..][..width], row);
        })
    }
    /// Like [`super::Backend::route`], but with given routed experts: `assigned` has `chosen`
    /// different ones for each of `rows`.
    fn route_assigned(
        &mut self,
        spec: &RouterSpec<Self::Vector>,
        assigned: &[u16],
        logits: &Self::Buffer,
        rows: Range<usize>,
        choices: &mut Self::Buffer,
    ) -> Outcome {
        let ((height, width), (old_height, out_width)) = (self.extent(logits), self.extent(choices));
        let mut of_rows = vec![0.0; rows.len() * width];
        self.read(logits, rows.clone(), &mut of_rows)?;
        let (kept, mut all) = (old_height.min(height), vec![0.0; height * out_width]);
        self.read(choices, 0..kept, &mut all[..kept * out_width])?;
        let written = all[rows.start * out_width..rows.end * out_width].chunks_exact_mut(out_width);
        let of_rows = of_rows.chunks_exact(width).zip(assigned.chunks_exact(spec.chosen));
        for (out, (logits, assigned)) in written.zip(of_rows) {
            spec.assign(assigned, logits, out);
        }
        self.write(&all, choices)
    }
    /// Mixes sums of the residual stream (Kimi K3's attention residuals): `out[r] = Σ_i p[i] *
    /// x_i[r]`, where the `x_i` are the buffers `before` and then `x`, and `p` is the softmax of
    /// `weight · x_i[r] / sqrt(mean(x_i[r]²) + eps)`.
    fn mix(
        &mut self,
        before: &[Self::Buffer],
        x: &Self::Buffer,
        rows: Range<usize>,
        (weight, eps): (&[f32], f32),
        out: &mut Self::Buffer,
    ) -> Outcome {
        let (height, width) = self.extent(x);
        if rows.is_empty() {
            return Ok(());
        }
        let mut values = vec![0.0; (before.len() + 1) * rows.len() * width];
        for (x, values) in before.iter().chain([x]).zip(values.chunks_exact_mut(rows.len() * width)) {
            self.read(x, rows.clone(), values)?;
        }
        let (kept, mut all) = (self.extent(out).0.min(height), vec![0.0; height * width]);
        self.read(out, 0..kept, &mut all[..kept * width])?;
        for (index, out) in all[rows.start * width..rows.end * width].chunks_exact_mut(width).enumerate() {
            let sums = values.chunks_exact(rows.len() * width).map(|all| &all[index * width..][..width]);
            mix_row(sums, (weight, eps), out);
        }
        self.write(&all, out)
    }
    /// Weighs the input of each row's only expert instead of its output: `x[r] *= weight`, and the
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
    /// Collects a layer's experts with the channels `max(up, 0)²`; their `gate_up` is `up` alone.
    ///
    /// # Errors
    /// [`ComputeError::Lacks`] if the backend does not offer [`Extra::UngatedExperts`].
    fn ungated_experts(
        &mut self,
        _experts: Vec<Expert<Self::Matrix>>,
    ) -> Result<Self::Experts, ComputeError> {
        Err(ComputeError::Lacks(Extra::UngatedExperts))
    }
    /// [`super::Backend::delta_rule`] with a decay for each column of a key (Kimi Delta Attention,
    /// arXiv 2510.26692). `inputs` are `(qkv, beta, alpha)`: a row of `alpha` is `[value_heads,
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
    /// groups]`; first it is convolved in place, as by [`super::Backend::short_conv`], with a
    /// bias. A row of `times` has a number for each head. With `S = 0` before position 0, for each
    /// head with input `x`, and `B` and `C` of its group:
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
    /// A gated short convolution. A row of `x` is `[input gates, output gates, inputs]`, and has
    /// arbitrary content afterwards: `out = output gate * conv(input gate * input)`, with zeros
    /// before position 0.
    ///
    /// # Errors
    /// [`ComputeError::Lacks`] if the backend does not offer [`Extra::GatedConv`].
    fn gated_conv(
        &mut self,
        _spec: &GatedConvSpec<Self::Vector>,
        _step: &Step,
        _rows: Range<usize>,
        _x: &mut Self::Buffer,
        _state: (&mut Self::Caches, usize),
        _out: &mut Self::Buffer,
    ) -> Outcome {
        Err(ComputeError::Lacks(Extra::GatedConv))
    }
    /// Selects the tokens that each row attends to, or the compressed ones: those with the largest
    /// `Σ_h weights[h] * max(queries[h] · key, 0)` among the visible ones; of equal ones, the
    /// first. A row of `selection` is their number and their positions in ascending order. Keys are
    /// in a cache of [`SelectionSpec::cache`], to which [`super::Backend::append_latent`] appended
    /// them.
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
    /// Compresses tokens. Stores values and gates of these rows, `inputs`, in a cache of
    /// [`CompressionSpec::state`], the first of `to`, and appends completed compressed tokens to a
    /// cache of [`CompressionSpec::cache`], the second.
    ///
    /// # Errors
    /// [`ComputeError::Lacks`] if the backend does not offer [`Extra::Compression`].
    fn compress(
        &mut self,
        _spec: &CompressionSpec<Self::Vector>,
        _step: &Step,
        _rows: Range<usize>,
        _inputs: (&Self::Buffer, &Self::Buffer),
        _to: (&mut Self::Caches, [usize; 2]),
    ) -> Outcome {
        Err(ComputeError::Lacks(Extra::Compression))
    }
    /// Stores values and gates like [`Self::compress`], in a cache of [`CompressionSpec::state`],
    /// and writes the mean of each compressed token, neither normed nor rotated, to the row of its
    /// last token. Other rows of `out` among these become zero.
    ///
    /// # Errors
    /// [`ComputeError::Lacks`] if the backend does not offer [`Extra::Pooling`].
    fn pool(
        &mut self,
        _spec: &CompressionSpec<Self::Vector>,
        _step: &Step,
        _rows: Range<usize>,
        _inputs: (&Self::Buffer, &Self::Buffer),
        _state: (&mut Self::Caches, usize),
        _out: &mut Self::Buffer,
    ) -> Outcome {
        Err(ComputeError::Lacks(Extra::Pooling))
    }
    /// Chooses blocks of keys for each row, scored as by [`Self::select`]: the block of the newest
    /// visible key, and those with the largest score of a key; of equal ones, the first. A row of
    /// `chosen` has the number of blocks, and the blocks in ascending order.
    ///
    /// # Errors
    /// [`ComputeError::Lacks`] if the backend does not offer [`Extra::Pooling`].
    #[allow(clippy::too_many_arguments, reason = "the operation's operands")]
    fn select_blocks(
        &mut self,
        _spec: &SelectionSpec,
        _blocks: SelectionBlocks,
        _step: &Step,
        _rows: Range<usize>,
        _inputs: (&Self::Buffer, &Self::Buffer),
        _from: (&mut Self::Caches, usize),
        _chosen: &mut Self::Buffer,
    ) -> Outcome {
        Err(ComputeError::Lacks(Extra::Pooling))
    }
    /// [`Self::select`] among the keys of blocks that [`Self::select_blocks`] chose. `inputs` are
    /// `(queries, weights, blocks)`.
    ///
    /// # Errors
    /// [`ComputeError::Lacks`] if the backend does not offer [`Extra::Pooling`].
    #[allow(clippy::too_many_arguments, reason = "the operation's operands")]
    fn select_within(
        &mut self,
        _spec: &SelectionSpec,
        _blocks: SelectionBlocks,
        _step: &Step,
        _rows: Range<usize>,
        _inputs: [&Self::Buffer; 3],
        _from: (&mut Self::Caches, usize),
        _selection: &mut Self::Buffer,
    ) -> Outcome {
        Err(ComputeError::Lacks(Extra::Pooling))
    }
    /// Stores the tokens of these rows in a cache of [`RecentSpec::cache`], and returns for each
    /// row the ids before it, [`RecentSpec::count`] of them, the last one first;
    /// [`RecentSpec::NONE`] if there is none.
    ///
    /// # Errors
    /// [`ComputeError::Lacks`] if the backend does not offer [`Extra::RecentTokens`].
    fn recent_tokens(
        &mut self,
        _spec: RecentSpec,
        _step: &Step,
        _rows: Range<usize>,
        _state: (&mut Self::Caches, usize),
    ) -> Result<Vec<u32>, ComputeError> {
        Err(ComputeError::Lacks(Extra::RecentTokens))
    }
    /// Attends to single tokens in a window and to compressed tokens. The single tokens were
    /// appended by [`super::Backend::append_latent`] to the first cache of `from`, of
    /// [`CompressedSpec::cache`]. If [`CompressedSpec::every`] is given, the compressed ones are in
    /// the second cache: those with all their tokens present, or those that [`Self::select`]
    /// selected. A head's query, `[dim]`, includes the factor of the scores; keys and values are
    /// the tokens' vectors. `inputs` are `(queries, selection)`.
    ///
    /// # Errors
    /// [`ComputeError::Lacks`] if the backend does not offer [`Extra::Compression`].
    fn attend_compressed(
        &mut self,
        _spec: &CompressedSpec<Self::Vector>,
        _step: &Step,
        _rows: Range<usize>,
        _inputs: (&Self::Buffer, Option<&Self::Buffer>),
        _from: (&mut Self::Caches, [usize; 2]),
        _out: &mut Self::Buffer,
    ) -> Outcome {
        Err(ComputeError::Lacks(Extra::Compression))
    }
    /// Converts a selection of compressed tokens by [`Self::select`] into a selection of their
    /// tokens, `every` each, and of the last tokens, which are not compressed yet. `positions` has
    /// one for each of `rows`. A row of `selection` has at least as many columns.
    fn select_members(
        &mut self,
        every: usize,
        positions: &[usize],
        (compressed, rows): (&Self::Buffer, Range<usize>),
        selection: &mut Self::Buffer,
    ) -> Outcome {
        let (_, width) = self.extent(compressed);
        self.copy_columns((compressed, 0), rows.clone(), (selection, 0..width))?;
        self.change_rows(selection, rows, &|index, row| {
            let selected: Vec<usize> =
                row[1..=row[0] as usize].iter().map(|number| *number as usize).collect();
            let visible = positions[index] + 1;
            let members = selected.into_iter().flat_map(|number| number * every..(number + 1) * every);
            let all = members.chain(visible / every * every..visible);
            let mut count = 0;
            for (to, position) in row[1..].iter_mut().zip(all) {
                *to = position as f32;
                count += 1;
            }
            row[0] = count as f32;
        })
    }
    /// [`super::Backend::attend_latent`] to the tokens that [`Self::select`] selected. `inputs` are
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
}
