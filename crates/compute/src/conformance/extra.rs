//! Operations of few families. Those that the backend does not support are skipped.

use super::data::{BLOCKS_OF_SLOT, Piece, SLOTS, Stored, columns, filled, step, workload};
use super::{Suite, Work};
use crate::backend::{
    AttentionSpec, Backend, CacheShape, ComputeError, Decays, DeltaSpec, Expert, Extra, GatedConvSpec,
    HeadSharing, KvFormat, LatentSpec, Norm, Scoring, SelectionSpec, StateSpaceSpec,
};
use crate::source::{Encoding, Float};

/// Rows of each piece, by its sequence's positions.
pub(super) fn inputs(of_slot: &[Vec<f32>], width: usize, pieces: &[Piece]) -> Vec<f32> {
    let rows = |p: &Piece| &of_slot[p.slot][p.start * width..(p.start + p.tokens) * width];
    pieces.iter().flat_map(rows).copied().collect()
}

struct Scored<'a> {
    spec: &'a AttentionSpec<Vec<f32>>,
    scoring: Scoring,
    qkv: &'a [Vec<f32>],
}

impl Work for Scored<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let spec = self.spec.clone().try_map(&mut |values| backend.vector(&values))?;
        let (width, outputs) = (spec.qkv_width(), spec.heads() * spec.value_dim);
        let mut caches = backend.caches(&CacheShape {
            format: KvFormat::F16,
            caches: vec![spec.cache()],
            blocks: SLOTS * BLOCKS_OF_SLOT,
            slots: SLOTS,
        })?;
        let mut results = Vec::new();
        for pieces in workload() {
            let step = step(&pieces, SLOTS);
            let mut qkv = filled(backend, &inputs(self.qkv, width, &pieces), width)?;
            let mut out = backend.buffer(step.rows(), outputs)?;
            for rows in backend.begin(&step, &[])? {
                backend.prepare_heads(&spec, &step, rows.clone(), &mut qkv)?;
                backend.append(&spec, &step, rows.clone(), &qkv, (&mut caches, 0))?;
                let cache = (&mut caches, 0);
                backend.attend_by(&spec, self.scoring, &step, rows, &qkv, cache, &mut out)?;
            }
            results.extend(columns(backend, &out, 0..step.rows(), (outputs, outputs))?);
        }
        Ok(results)
    }
}

struct Ungated<'a> {
    x: &'a [f32],
    choices: &'a [f32],
    /// Up and down of each expert.
    experts: &'a [[Stored; 2]],
}

impl Work for Ungated<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let [up, down] = &self.experts[0];
        let (cols, width, rows) = (up.cols, down.rows, self.x.len() / up.cols);
        let mut experts = Vec::new();
        for [up, down] in self.experts {
            let gate_up = backend.matrix(&[up.source()])?;
            experts.push(Expert { gate_up, down: backend.matrix(&[down.source()])?, down_bias: None });
        }
        let experts = backend.ungated_experts(experts)?;
        let x = filled(backend, self.x, cols)?;
        let choices = filled(backend, self.choices, self.choices.len() / rows)?;
        let mut out = backend.buffer(rows, width)?;
        backend.expert_sum(&x, 0..rows, &choices, &experts, &mut out)?;
        columns(backend, &out, 0..rows, (width, width))
    }
}

/// The delta rule with a decay for each channel, a state space, or a gated convolution.
enum Recurrence<'a> {
    Conv(&'a GatedConvSpec<Vec<f32>>),
    Delta(&'a DeltaSpec<Vec<f32>>),
    Space(&'a StateSpaceSpec<Vec<f32>>),
}

struct Recurrent<'a> {
    of: Recurrence<'a>,
    /// The convolved rows, write strengths or times, decays.
    rows: [&'a [Vec<f32>]; 3],
}

impl Work for Recurrent<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let (cache, widths, width) = match &self.of {
            Recurrence::Delta(spec) => {
                let widths = [spec.channels(), spec.value_heads, spec.value_heads * spec.key_dim];
                (spec.cache(), widths, spec.value_heads * spec.value_dim)
            }
            Recurrence::Space(spec) => (spec.cache(), [spec.channels(), spec.heads, 1], spec.width()),
            Recurrence::Conv(spec) => (spec.cache(), [3 * spec.channels, 1, 1], spec.channels),
        };
        let mut caches = backend.caches(&CacheShape {
            format: KvFormat::F16,
            caches: vec![cache],
            blocks: 1,
            slots: SLOTS,
        })?;
        let mut results = Vec::new();
        for pieces in workload() {
            let step = step(&pieces, SLOTS);
            let [x, second, third] =
                [0, 1, 2].map(|i| filled(backend, &inputs(self.rows[i], widths[i], &pieces), widths[i]));
            let (mut x, second, third) = (x?, second?, third?);
            let mut out = backend.buffer(step.rows(), width)?;
            for rows in backend.begin(&step, &[])? {
                match &self.of {
                    Recurrence::Delta(spec) => {
                        let spec = (*spec).clone().try_map(&mut |values| backend.vector(&values))?;
                        backend.short_conv(&spec, &step, rows.clone(), &mut x, (&mut caches, 0))?;
                        let (inputs, cache) = ([&x, &second, &third], (&mut caches, 0));
                        backend.channel_delta_rule(&spec, &step, rows, inputs, cache, &mut out)?;
                    }
                    Recurrence::Space(spec) => {
                        let spec = (*spec).clone().try_map(&mut |values| backend.vector(&values))?;
                        let (inputs, cache) = ((&mut x, &second), (&mut caches, 0));
                        backend.state_space(&spec, &step, rows, inputs, cache, &mut out)?;
                    }
                    Recurrence::Conv(spec) => {
                        let spec = (*spec).clone().try_map(&mut |values| backend.vector(&values))?;
                        backend.gated_conv(&spec, &step, rows, &mut x, (&mut caches, 0), &mut out)?;
                    }
                }
            }
            results.extend(columns(backend, &out, 0..step.rows(), (width, width))?);
        }
        Ok(results)
    }
}

struct Selected<'a> {
    spec: &'a LatentSpec<Vec<f32>>,
    selection: SelectionSpec,
    /// Absorbed queries, queries, latent rows; the indexer's queries, weights and keys.
    rows: [&'a [Vec<f32>]; 6],
}

impl Work for Selected<'_> {
    fn run<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, ComputeError> {
        let LatentSpec { heads, rank, rotated, .. } = *self.spec;
        let spec = self.spec.clone().try_map(&mut |values| backend.vector(&values))?;
        let SelectionSpec { heads: index_heads, dim, .. } = self.selection;
        let mut caches = backend.caches(&CacheShape {
            format: KvFormat::F16,
            caches: vec![spec.cache(), self.selection.cache()],
            blocks: SLOTS * BLOCKS_OF_SLOT,
            slots: SLOTS,
        })?;
        let out_width = heads * rank;
        let widths =
            [out_width, heads * spec.query_dim(), rank + rotated, index_heads * dim, index_heads, dim];
        let columns_of_selection = self.selection.columns();
        let mut results = Vec::new();
        for pieces in workload() {
            let step = step(&pieces, SLOTS);
            let mut buffers = Vec::new();
            for (rows, width) in self.rows.iter().zip(widths) {
                buffers.push(filled(backend, &inputs(rows, width, &pieces), width)?);
            }
            let Ok([absorbed, mut queries, mut latent, index_queries, weights, keys]) =
                <[B::Buffer; 6]>::try_from(buffers)
            else {
                unreachable!("there is a buffer for each width")
            };
            let mut selection = backend.buffer(step.rows(), columns_of_selection)?;
            let mut out = backend.buffer(step.rows(), out_width)?;
            for rows in backend.begin(&step, &[])? {
                backend.prepare_latent(&spec, &step, rows.clone(), &mut queries, &mut latent)?;
                backend.append_latent(&spec, &step, rows.clone(), &latent, (&mut caches, 0))?;
                backend.append_latent(&spec, &step, rows.clone(), &keys, (&mut caches, 1))?;
                let (inputs, cache) = ((&index_queries, &weights), (&mut caches, 1));
                backend.select(&self.selection, &step, rows.clone(), inputs, cache, &mut selection)?;
                let (inputs, cache) = ([&absorbed, &queries, &selection], (&mut caches, 0));
                backend.attend_selected(&spec, &step, rows, inputs, cache, &mut out)?;
            }
            results.extend(columns(backend, &out, 0..step.rows(), (out_width, out_width))?);
        }
        Ok(results)
    }
}

impl<B: Backend> Suite<'_, B> {
    pub(super) fn extras(&mut self) {
        if self.backend.offers(Extra::Scoring) {
            self.scorings();
        }
        if self.backend.offers(Extra::UngatedExperts) {
            self.ungated();
        }
        if self.backend.offers(Extra::ChannelDeltaRule) {
            self.channel_delta_rules();
        }
        if self.backend.offers(Extra::StateSpace) {
            self.state_spaces();
        }
        if self.backend.offers(Extra::GatedConv) {
            self.gated_convs();
        }
        if self.backend.offers(Extra::Selection) {
            self.selections();
        }
    }

    /// A random row for each position of each sequence.
    pub(super) fn of_slots(&mut self, width: usize) -> Vec<Vec<f32>> {
        (0..SLOTS).map(|_| self.random.numbers(120 * width)).collect()
    }

    fn scorings(&mut self) {
        let some = |cap, chunk| Scoring { cap, chunk, after: 0 };
        let ahead = |after| Scoring { after, ..Scoring::default() };
        let later = [(16, ahead(usize::MAX)), (32, ahead(9)), (64, ahead(usize::MAX))];
        let later = later.into_iter().filter(|_| self.backend.offers(Extra::LaterTokens));
        let later: Vec<_> = later.collect();
        for (dim, scoring) in [
            (16, some(Some(1.5), None)),
            (48, some(None, Some(20))),
            (64, some(Some(0.7), Some(32))),
            (32, Scoring::default()),
        ]
        .into_iter()
        .chain(later)
        {
            let spec = AttentionSpec {
                key_dim: dim,
                value_dim: dim,
                queries_of: vec![0..2, 2..4],
                scale: 0.5,
                window: (scoring.chunk.is_none() && scoring.after < usize::MAX).then_some(41),
                qk_norm: None,
                rope: None,
                sinks: None,
                temperature: None,
                out_column: 0,
            };
            let qkv = self.of_slots(spec.qkv_width());
            let work = Scored { spec: &spec, scoring, qkv: &qkv };
            self.compare(format!("attention of width {dim}, {scoring:?}"), self.limits.attention, work);
        }
    }

    fn ungated(&mut self) {
        let quantized = Encoding::Affine { bits: 4, group: 64, scales: Float::BF16 };
        for (encoding, rows) in [(Encoding::Float(Float::BF16), 1), (quantized, 1), (quantized, 19)] {
            let mut expert = |_| {
                [[128, 64], [70, 128]].map(|shape| Stored::random(shape, encoding, false, &mut self.random))
            };
            let experts: Vec<_> = (0..4).map(&mut expert).collect();
            let x = self.random.numbers(rows * 64);
            let of_row = |row: usize| [(row % 3) as f32, 3.0, 0.5, 1.5];
            let choices: Vec<f32> = (0..rows).flat_map(of_row).collect();
            let case = format!("experts without gates of {rows} rows, {encoding:?}");
            let limit = 2.0 * self.limits.product(encoding);
            self.compare(case, limit, Ungated { x: &x, choices: &choices, experts: &experts });
        }
    }

    fn channel_delta_rules(&mut self) {
        let bounded = Decays::Bounded { lowest: -5.0 };
        for (heads, key_dim, value_dim, decays) in [
            (1, 16, 16, Decays::Softplus),
            (3, 32, 37, Decays::Softplus),
            (3, 32, 37, bounded),
            (2, 16, 21, bounded),
        ] {
            let channels = heads * (2 * key_dim + value_dim);
            let spec = DeltaSpec {
                key_heads: heads,
                value_heads: heads,
                sharing: HeadSharing::Grouped,
                key_dim,
                value_dim,
                kernel: 4,
                taps: self.random.numbers(channels * 4),
                unit_eps: 0.25,
                decay: self.random.numbers(heads),
                decay_bias: self.random.numbers(heads * key_dim),
                norm: Norm { weight: vec![1.0; value_dim], eps: 1e-6 },
                decays,
            };
            let [x, beta, alpha] = [channels, heads, heads * key_dim].map(|width| self.of_slots(width));
            let work = Recurrent { of: Recurrence::Delta(&spec), rows: [&x, &beta, &alpha] };
            let case =
                format!("delta rule of {heads} heads of {key_dim} × {value_dim}, {decays:?} of channels");
            self.compare(case, self.limits.rows, work);
        }
    }

    fn state_spaces(&mut self) {
        for (heads, head_dim, groups, state_dim, biased) in [(2, 16, 1, 16, false), (6, 21, 3, 24, true)] {
            let channels = heads * head_dim + 2 * groups * state_dim;
            let spec = StateSpaceSpec {
                heads,
                head_dim,
                groups,
                state_dim,
                kernel: 4,
                taps: self.random.numbers(channels * 4),
                conv_bias: biased.then(|| self.random.numbers(channels)),
                rate: self.random.numbers(heads),
                time_bias: self.random.numbers(heads),
                skip: self.random.numbers(heads),
                time_limit: if biased { (0.4, 1.1) } else { (0.0, f32::INFINITY) },
            };
            let [x, times, unused] = [channels, heads, 1].map(|width| self.of_slots(width));
            let work = Recurrent { of: Recurrence::Space(&spec), rows: [&x, &times, &unused] };
            let case = format!("state space of {heads} heads of {head_dim}, {groups} groups of {state_dim}");
            self.compare(case, self.limits.rows, work);
        }
    }

    fn gated_convs(&mut self) {
        for (channels, kernel) in [(21, 3), (64, 7)] {
            let spec = GatedConvSpec { channels, kernel, taps: self.random.numbers(channels * kernel) };
            let [x, unused] = [3 * channels, 1].map(|width| self.of_slots(width));
            let work = Recurrent { of: Recurrence::Conv(&spec), rows: [&x, &unused, &unused] };
            let case = format!("gated convolution of {channels} channels, {kernel} taps");
            self.compare(case, self.limits.rows, work);
        }
    }

    fn selections(&mut self) {
        for (heads, rank, rotated, chosen) in [(2, 32, 16, 7), (20, 64, 32, 64)] {
            let norm = Norm { weight: self.random.numbers(rank), eps: 1e-6 };
            let spec = LatentSpec { heads, rank, rotated, plain: 16, scale: 0.3, norm, rope: None };
            let selection = SelectionSpec { heads: 3, dim: 32, chosen, every: 1 };
            let widths = [heads * rank, heads * spec.query_dim(), rank + rotated, 3 * 32, 3, 32];
            let mut rows = widths.map(|width| self.of_slots(width));
            // Keys that f16 holds exactly: a rounded one could change what is selected.
            rows[5].iter_mut().flatten().for_each(|x| *x = (*x * 64.0).round() / 64.0);
            let rows = rows.each_ref().map(Vec::as_slice);
            let case = format!("latent attention of {heads} heads to {chosen} selected tokens");
            self.compare(case, self.limits.attention, Selected { spec: &spec, selection, rows });
        }
    }
}
