//! What moves information between the tokens of a layer.

use std::ops::Range;

use thunder_compute::{
    Activation, AttentionSpec, Backend, ComputeError, DeltaSpec, LatentSpec, Norm, PartNorm,
};

use super::{Norms, Pass, disjoint, normed};

/// A layer's mixer.
pub(super) enum Mixer<B: Backend> {
    Attention(Box<Attention<B>>),
    Latent(Box<Latent<B>>),
    Delta(Box<Delta<B>>),
}

/// Grouped-query attention.
pub(super) struct Attention<B: Backend> {
    pub spec: AttentionSpec<B::Vector>,
    pub qkv: B::Matrix,
    /// Norms of all queries and of all keys, if they are not norms of heads.
    pub part_norms: Vec<PartNorm<B::Vector>>,
    pub gate: Option<OutputGate<B>>,
    pub out: B::Matrix,
    pub cache: usize,
    pub qkv_buffer: usize,
    /// The heads' results; with a gate, gates and results side by side.
    pub heads_buffer: usize,
}

/// The gate of attention's results.
pub(super) struct OutputGate<B: Backend> {
    pub matrix: B::Matrix,
    pub gated_buffer: usize,
}

/// Latent attention. Queries are multiplied with the key part of `kv_b` and results with its value
/// part, so that keys and values of heads are never made (the absorbed form of DeepSeek V2's MLA).
pub(super) struct Latent<B: Backend> {
    pub spec: LatentSpec<B::Vector>,
    /// From the residual stream to compressed queries, and their norm.
    pub query_down: Option<QueryDown<B>>,
    /// To the heads' queries.
    pub query: B::Matrix,
    /// From the residual stream to the compressed vector and the rotated key part.
    pub latent: B::Matrix,
    /// Each head's `[rank, plain]`: the transposed key part of `kv_b`.
    pub absorb: Vec<B::Matrix>,
    /// Each head's `[value_dim, rank]`: the value part of `kv_b`.
    pub expand: Vec<B::Matrix>,
    pub out: B::Matrix,
    pub cache: usize,
    pub queries_buffer: usize,
    pub latent_buffer: usize,
    pub absorbed_buffer: usize,
    pub attended_buffer: usize,
    pub heads_buffer: usize,
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
        }
    }

    /// Bytes of its weights.
    pub fn bytes(&self) -> usize {
        let sum = |matrices: &[&B::Matrix]| matrices.iter().map(|matrix| B::matrix_bytes(matrix)).sum();
        match self {
            Self::Attention(a) => {
                sum(&[&a.qkv, &a.out]) + a.gate.as_ref().map_or(0, |gate| B::matrix_bytes(&gate.matrix))
            }
            Self::Latent(l) => {
                let heads = l.absorb.iter().chain(&l.expand).chain(l.query_down.as_ref().map(|d| &d.matrix));
                heads.map(B::matrix_bytes).sum::<usize>() + sum(&[&l.query, &l.latent, &l.out])
            }
            Self::Delta(d) => sum(&[&d.qkv, &d.gates, &d.output_gate, &d.out]),
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
        let Pass { backend, step, residual, inner, caches } = pass;
        let [qkv, heads] = disjoint(inner, [self.qkv_buffer, self.heads_buffer]);
        backend.linear(norms.input(residual), rows.clone(), &self.qkv, qkv)?;
        if !self.part_norms.is_empty() {
            backend.norm_parts(&self.part_norms, rows.clone(), qkv)?;
        }
        if let Some(gate) = &self.gate {
            backend.linear(norms.input(residual), rows.clone(), &gate.matrix, heads)?;
        }
        backend.attention(&self.spec, step, rows.clone(), qkv, (caches, self.cache), heads)?;
        let Some(gate) = &self.gate else {
            return norms.add_product((self.heads_buffer, false), rows, &self.out, pass);
        };
        let [both, gated] = disjoint(inner, [self.heads_buffer, gate.gated_buffer]);
        backend.gate(both, rows.clone(), Activation::Sigmoid, gated)?;
        norms.add_product((gate.gated_buffer, false), rows, &self.out, pass)
    }
}

impl<B: Backend> Latent<B> {
    fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, inner, caches } = pass;
        let x = || norms.input(residual);
        match &self.query_down {
            Some(down) => {
                let [compressed, queries] = disjoint(inner, [down.buffer, self.queries_buffer]);
                backend.linear(x(), rows.clone(), &down.matrix, compressed)?;
                backend.linear(normed::<B>(compressed, &down.norm), rows.clone(), &self.query, queries)?;
            }
            None => backend.linear(x(), rows.clone(), &self.query, &mut inner[self.queries_buffer])?,
        }
        let [queries, latent, absorbed, attended, heads] = disjoint(
            inner,
            [
                self.queries_buffer,
                self.latent_buffer,
                self.absorbed_buffer,
                self.attended_buffer,
                self.heads_buffer,
            ],
        );
        backend.linear(x(), rows.clone(), &self.latent, latent)?;
        backend.prepare_latent(&self.spec, step, rows.clone(), queries, latent)?;
        backend.append_latent(&self.spec, step, rows.clone(), latent, (caches, self.cache))?;
        backend.head_products(queries, self.spec.query_dim(), rows.clone(), &self.absorb, absorbed)?;
        let cache = (&mut **caches, self.cache);
        backend.attend_latent(&self.spec, step, rows.clone(), absorbed, queries, cache, attended)?;
        backend.head_products(attended, self.spec.rank, rows.clone(), &self.expand, heads)?;
        norms.add_product((self.heads_buffer, false), rows, &self.out, pass)
    }
}

impl<B: Backend> Delta<B> {
    fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, inner, caches } = pass;
        let [qkv, gates, output_gate, heads] =
            disjoint(inner, [self.qkv_buffer, self.gates_buffer, self.output_gate_buffer, self.heads_buffer]);
        backend.linear(norms.input(residual), rows.clone(), &self.qkv, qkv)?;
        backend.linear(norms.input(residual), rows.clone(), &self.gates, gates)?;
        backend.linear(norms.input(residual), rows.clone(), &self.output_gate, output_gate)?;
        backend.short_conv(&self.spec, step, rows.clone(), qkv, (caches, self.cache))?;
        let cache = (&mut **caches, self.cache);
        backend.delta_rule(&self.spec, step, rows.clone(), (qkv, gates), cache, heads)?;
        backend.norm_gated(&self.spec, output_gate, rows.clone(), heads)?;
        norms.add_product((self.heads_buffer, false), rows, &self.out, pass)
    }
}
