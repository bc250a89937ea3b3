//! The part of a layer that moves information between tokens.

use std::ops::Range;

use thunder_compute::{
    Activation, AttentionSpec, Backend, ComputeError, DeltaSpec, Heads, LatentSpec, Norm, PartNorm, Scoring,
    Step,
};

use super::adapters::Adapters;
use super::channel_delta::ChannelDelta;
use super::compressed::Compressed;
use super::gated_conv::GatedConv;
use super::selection::Selected;
use super::state_space::StateSpace;
use super::{Norms, Pass, disjoint, normed};
use crate::spec::Temperature;

/// A layer's mixer.
pub(super) enum Mixer<B: Backend> {
    None,
    Attention(Box<Attention<B>>),
    Latent(Box<Latent<B>>),
    Delta(Box<Delta<B>>),
    ChannelDelta(Box<ChannelDelta<B>>),
    StateSpace(Box<StateSpace<B>>),
    GatedConv(Box<GatedConv<B>>),
    Compressed(Box<Compressed<B>>),
}

/// Grouped-query attention.
pub(super) struct Attention<B: Backend> {
    pub spec: AttentionSpec<B::Vector>,
    pub qkv: B::Matrix,
    pub qkv_adapters: Adapters<B>,
    /// Norms of all queries and of all keys, if they are not norms of heads.
    pub part_norms: Vec<PartNorm<B::Vector>>,
    /// Norms of heads that [`AttentionSpec`] does not have: before rotation, and after.
    pub head_norms: [Option<HeadNorms<B>>; 2],
    /// Temperature tuning that [`AttentionSpec`] does not have.
    pub temperature: Option<Temperature>,
    pub scoring: Scoring,
    /// Multiplies the heads' results, as it would their values.
    pub value_scale: f32,
    /// False if the keys and values of an earlier layer are read.
    pub appends: bool,
    pub gate: Option<OutputGate<B>>,
    pub head_gates: Option<HeadGates<B>>,
    pub out: B::Matrix,
    pub out_adapters: Adapters<B>,
    pub cache: usize,
    pub qkv_buffer: usize,
    /// The heads' results; with a gate, gates and results side by side.
    pub heads_buffer: usize,
}

/// Norms of heads in a buffer, each on its own.
pub(super) struct HeadNorms<B: Backend> {
    pub norms: Vec<PartNorm<B::Vector>>,
    /// Columns whose mean is subtracted first.
    pub centered: Vec<Range<usize>>,
    pub sums_buffer: usize,
}

impl<B: Backend> HeadNorms<B> {
    /// Norms rows of the buffer `of` in place.
    pub fn apply(
        &self,
        backend: &mut B,
        rows: Range<usize>,
        inner: &mut [B::Buffer],
        of: usize,
    ) -> Result<(), ComputeError> {
        let [x, sums] = disjoint(inner, [of, self.sums_buffer]);
        if !self.centered.is_empty() {
            backend.center(&self.centered, rows.clone(), x)?;
        }
        if !self.norms.is_empty() {
            backend.square_sums(&self.norms, x, rows.clone(), sums)?;
            backend.norm_by_sums(&self.norms, sums, rows, x)?;
        }
        Ok(())
    }
}

/// Multiplies these columns of rows with the temperature factors of their positions.
fn tune<B: Backend>(
    temperature: Temperature,
    columns: Range<usize>,
    (step, rows): (&Step, Range<usize>),
    backend: &mut B,
    x: &mut B::Buffer,
) -> Result<(), ComputeError> {
    let mut factors = Vec::with_capacity(rows.len());
    for sequence in &step.sequences {
        factors.extend(sequence.rows_within(&rows).map(|row| temperature.factor(sequence.position(row))));
    }
    match factors.iter().all(|factor| *factor == 1.0) {
        true => Ok(()),
        false => backend.scale(columns, &factors, rows, x),
    }
}

/// The gate of attention's results.
pub(super) struct OutputGate<B: Backend> {
    pub matrix: B::Matrix,
    pub gated_buffer: usize,
}

/// Gates of attention's results, a number for each head.
pub(super) struct HeadGates<B: Backend> {
    pub matrix: B::Matrix,
    pub buffer: usize,
}

/// Latent attention. Queries are multiplied with the key part of `kv_b` and results with its value
/// part, so that keys and values of heads are never computed (the absorbed form of DeepSeek V2's
/// MLA).
pub(super) struct Latent<B: Backend> {
    pub spec: LatentSpec<B::Vector>,
    /// From the residual stream to compressed queries, and their norm.
    pub query_down: Option<QueryDown<B>>,
    /// To the heads' queries.
    pub query: B::Matrix,
    /// Projection from the residual stream to the compressed vector and the rotated key part.
    pub latent: B::Matrix,
    /// Each head's `[rank, plain]`: the transposed key part of `kv_b`.
    pub absorb: Heads<B::Matrix>,
    /// Each head's `[value_dim, rank]`: the value part of `kv_b`.
    pub expand: Heads<B::Matrix>,
    pub out: B::Matrix,
    pub temperature: Option<Temperature>,
    pub selected: Selected<B>,
    pub cache: usize,
    pub queries_buffer: usize,
    pub latent_buffer: usize,
    pub absorbed_buffer: usize,
    pub attended_buffer: usize,
    pub heads_buffer: usize,
    pub gate: Option<LatentGate<B>>,
}

/// The gate of latent attention's results.
pub(super) struct LatentGate<B: Backend> {
    pub matrix: B::Matrix,
    /// Gates and results side by side.
    pub both_buffer: usize,
    pub gated_buffer: usize,
}

/// Compression of queries.
pub(super) struct QueryDown<B: Backend> {
    pub matrix: B::Matrix,
    pub norm: Norm<B::Vector>,
    pub buffer: usize,
}

/// Gated delta rule.
pub(super) struct Delta<B: Backend> {
    pub spec: DeltaSpec<B::Vector>,
    pub qkv: B::Matrix,
    /// Write strengths, then decays.
    pub gates: B::Matrix,
    pub output_gate: B::Matrix,
    pub out: B::Matrix,
    pub cache: usize,
    pub qkv_buffer: usize,
    pub gates_buffer: usize,
    pub output_gate_buffer: usize,
    pub heads_buffer: usize,
}

impl<B: Backend> Mixer<B> {
    /// Adds the mixer to the residual stream, for these rows.
    pub fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        match self {
            Self::Attention(attention) => attention.forward(norms, rows, pass),
            Self::Latent(latent) => latent.forward(norms, rows, pass),
            Self::Delta(delta) => delta.forward(norms, rows, pass),
            Self::ChannelDelta(delta) => delta.forward(norms, rows, pass),
            Self::StateSpace(space) => space.forward(norms, rows, pass),
            Self::GatedConv(conv) => conv.forward(norms, rows, pass),
            Self::Compressed(compressed) => compressed.forward(norms, rows, pass),
            Self::None => Ok(()),
        }
    }

    /// Bytes of its weights.
    pub fn bytes(&self) -> usize {
        let sum = |matrices: &[&B::Matrix]| matrices.iter().map(|matrix| B::matrix_bytes(matrix)).sum();
        match self {
            Self::Attention(a) => {
                let gates = a.gate.iter().map(|gate| &gate.matrix);
                let gates = gates.chain(a.head_gates.iter().map(|gates| &gates.matrix));
                sum(&[&a.qkv, &a.out]) + gates.map(B::matrix_bytes).sum::<usize>()
            }
            Self::Latent(l) => {
                let heads = l
                    .absorb
                    .matrices
                    .iter()
                    .chain(&l.expand.matrices)
                    .chain(l.query_down.as_ref().map(|d| &d.matrix));
                let indexer = match &l.selected {
                    Selected::Own(indexer, _) => sum(&indexer.matrices()),
                    Selected::All | Selected::Before(_) => 0,
                };
                let gate = l.gate.as_ref().map_or(0, |gate| B::matrix_bytes(&gate.matrix));
                let heads = heads.map(B::matrix_bytes).sum::<usize>();
                heads + sum(&[&l.query, &l.latent, &l.out]) + indexer + gate
            }
            Self::Delta(d) => sum(&[&d.qkv, &d.gates, &d.output_gate, &d.out]),
            Self::ChannelDelta(d) => d.matrices().map(B::matrix_bytes).sum(),
            Self::StateSpace(s) => sum(&[&s.gates, &s.inputs, &s.times, &s.out]),
            Self::GatedConv(c) => sum(&[&c.inputs, &c.out]),
            Self::Compressed(c) => c.matrices().map(B::matrix_bytes).sum(),
            Self::None => 0,
        }
    }
}

impl<B: Backend> Attention<B> {
    fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, normed, inner, caches, .. } = pass;
        let [qkv, heads] = disjoint(inner, [self.qkv_buffer, self.heads_buffer]);
        let x = norms.input(residual, normed);
        backend.linear(x, rows.clone(), &self.qkv, qkv)?;
        self.qkv_adapters.add(&x, (step, rows.clone()), backend, qkv)?;
        if !self.part_norms.is_empty() {
            backend.norm_parts(&self.part_norms, rows.clone(), qkv)?;
        }
        if let Some(gate) = &self.gate {
            backend.linear(norms.input(residual, normed), rows.clone(), &gate.matrix, heads)?;
        }
        if self.is_usual() {
            backend.attention(&self.spec, step, rows.clone(), qkv, (caches, self.cache), heads)?;
        } else {
            self.attend_in_steps(rows.clone(), pass)?;
        }
        if let Some(gates) = &self.head_gates {
            self.gate_heads(gates, norms, rows.clone(), pass)?;
        }
        let Pass { backend, inner, .. } = pass;
        if self.value_scale != 1.0 {
            let first = self.spec.out_column;
            let heads = first..first + self.spec.heads() * self.spec.value_dim;
            let factors = vec![self.value_scale; rows.len()];
            backend.scale(heads, &factors, rows.clone(), &mut inner[self.heads_buffer])?;
        }
        let Some(gate) = &self.gate else {
            let out = (&self.out, &self.out_adapters);
            return norms.add_adapted_product((self.heads_buffer, false), rows, out, pass);
        };
        let [both, gated] = disjoint(inner, [self.heads_buffer, gate.gated_buffer]);
        backend.gate(both, rows.clone(), Activation::Sigmoid, gated)?;
        let out = (&self.out, &self.out_adapters);
        norms.add_adapted_product((gate.gated_buffer, false), rows, out, pass)
    }
}

impl<B: Backend> Attention<B> {
    /// True if [`AttentionSpec`] describes everything.
    fn is_usual(&self) -> bool {
        let plain = self.scoring == Scoring::default() && self.temperature.is_none();
        plain && self.appends && self.head_norms.iter().all(Option::is_none)
    }

    /// Multiplies each head's result with the sigmoid of its gate.
    fn gate_heads(
        &self,
        gates: &HeadGates<B>,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        // A rank may have none of the heads.
        if self.spec.heads() == 0 {
            return Ok(());
        }
        let Pass { backend, residual, normed, inner, .. } = pass;
        let [numbers, heads] = disjoint(inner, [gates.buffer, self.heads_buffer]);
        backend.linear(norms.input(residual, normed), rows.clone(), &gates.matrix, numbers)?;
        backend.gate_heads(numbers, (self.spec.out_column, self.spec.value_dim), rows, heads)
    }

    /// Attention by its plain operations, with what is unusual between them.
    fn attend_in_steps(&self, rows: Range<usize>, pass: &mut Pass<'_, B>) -> Result<(), ComputeError> {
        let Pass { backend, step, inner, caches, .. } = pass;
        let (spec, [before, after]) = (&self.spec, &self.head_norms);
        if let Some(norms) = before {
            norms.apply(*backend, rows.clone(), inner, self.qkv_buffer)?;
        }
        let qkv = &mut inner[self.qkv_buffer];
        backend.prepare_heads(spec, step, rows.clone(), qkv)?;
        if let Some(temperature) = self.temperature {
            let queries = 0..spec.heads() * spec.key_dim;
            tune(temperature, queries, (step, rows.clone()), *backend, qkv)?;
        }
        if let Some(norms) = after {
            norms.apply(*backend, rows.clone(), inner, self.qkv_buffer)?;
        }
        let [qkv, heads] = disjoint(inner, [self.qkv_buffer, self.heads_buffer]);
        if self.appends {
            backend.append(spec, step, rows.clone(), qkv, (caches, self.cache))?;
        }
        backend.attend_by(spec, self.scoring, step, rows, qkv, (caches, self.cache), heads)
    }
}

impl<B: Backend> Latent<B> {
    fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, normed: shared, inner, caches, .. } = pass;
        let x = || norms.input(residual, shared);
        match &self.query_down {
            Some(down) => {
                let [compressed, queries] = disjoint(inner, [down.buffer, self.queries_buffer]);
                backend.linear(x(), rows.clone(), &down.matrix, compressed)?;
                backend.linear(normed::<B>(compressed, &down.norm), rows.clone(), &self.query, queries)?;
            }
            None => backend.linear(x(), rows.clone(), &self.query, &mut inner[self.queries_buffer])?,
        }
        let [queries, latent, absorbed] =
            disjoint(inner, [self.queries_buffer, self.latent_buffer, self.absorbed_buffer]);
        backend.linear(x(), rows.clone(), &self.latent, latent)?;
        let inputs = (&mut *queries, latent);
        let cache = (&mut **caches, self.cache);
        backend.prepare_and_append_latent(&self.spec, step, rows.clone(), inputs, cache)?;
        if let Some(temperature) = self.temperature {
            let columns = 0..self.spec.heads * self.spec.query_dim();
            tune(temperature, columns, (step, rows.clone()), *backend, queries)?;
        }
        backend.head_products(queries, self.spec.query_dim(), rows.clone(), &self.absorb, absorbed)?;
        if let (Selected::Own(indexer, selection), Some(down)) = (&self.selected, &self.query_down) {
            indexer.select(norms, (down, *selection), rows.clone(), pass)?;
        }
        self.attend(rows.clone(), pass)?;
        let Pass { backend, residual, normed: shared, inner, .. } = pass;
        let [attended, heads] = disjoint(inner, [self.attended_buffer, self.heads_buffer]);
        backend.head_products(attended, self.spec.rank, rows.clone(), &self.expand, heads)?;
        let Some(gate) = &self.gate else {
            return norms.add_product((self.heads_buffer, false), rows, &self.out, pass);
        };
        let [heads, both, gated] = disjoint(inner, [self.heads_buffer, gate.both_buffer, gate.gated_buffer]);
        backend.linear(norms.input(residual, shared), rows.clone(), &gate.matrix, both)?;
        let (_, width) = backend.extent(heads);
        backend.copy_columns((heads, 0), rows.clone(), (both, width..2 * width))?;
        backend.gate(both, rows.clone(), Activation::Sigmoid, gated)?;
        norms.add_product((gate.gated_buffer, false), rows, &self.out, pass)
    }
}

impl<B: Backend> Latent<B> {
    /// Attends to all tokens, or to those that are selected.
    fn attend(&self, rows: Range<usize>, pass: &mut Pass<'_, B>) -> Result<(), ComputeError> {
        let Pass { backend, step, inner, caches, .. } = pass;
        let cache = (&mut **caches, self.cache);
        let buffers = [self.queries_buffer, self.absorbed_buffer, self.attended_buffer];
        let Some(selection) = self.selected.buffer() else {
            let [queries, absorbed, attended] = disjoint(inner, buffers);
            return backend.attend_latent(&self.spec, step, rows, absorbed, queries, cache, attended);
        };
        let [queries, absorbed, attended] = buffers;
        let [queries, absorbed, attended, selection] =
            disjoint(inner, [queries, absorbed, attended, selection]);
        let inputs = [&*absorbed, &*queries, &*selection];
        backend.attend_selected(&self.spec, step, rows, inputs, cache, attended)
    }
}

impl<B: Backend> Delta<B> {
    fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, normed, inner, caches, .. } = pass;
        let [qkv, gates, output_gate, heads] =
            disjoint(inner, [self.qkv_buffer, self.gates_buffer, self.output_gate_buffer, self.heads_buffer]);
        backend.linear(norms.input(residual, normed), rows.clone(), &self.qkv, qkv)?;
        backend.linear(norms.input(residual, normed), rows.clone(), &self.gates, gates)?;
        backend.linear(norms.input(residual, normed), rows.clone(), &self.output_gate, output_gate)?;
        backend.short_conv(&self.spec, step, rows.clone(), qkv, (caches, self.cache))?;
        let cache = (&mut **caches, self.cache);
        backend.delta_rule(&self.spec, step, rows.clone(), (qkv, gates), cache, heads)?;
        backend.norm_gated(&self.spec, output_gate, rows.clone(), heads)?;
        norms.add_product((self.heads_buffer, false), rows, &self.out, pass)
    }
}
