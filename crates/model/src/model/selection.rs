//! The indexer that selects the tokens of latent attention (DeepSeek V3.2, GLM-5).

use std::ops::Range;

use thunder_compute::{AttentionSpec, Backend, CompressionSpec, ComputeError, LatentSpec, SelectionSpec};

use super::compressed::positions;
use super::mixer::{HeadNorms, QueryDown};
use super::{Norms, Pass, disjoint, normed};

/// Which tokens a layer attends to.
pub(super) enum Selected<B: Backend> {
    /// All.
    All,
    /// Those in a buffer, which an earlier layer selected.
    Before(usize),
    /// Those that this layer selects, in a buffer.
    Own(Box<Indexer<B>>, usize),
}

impl<B: Backend> Selected<B> {
    /// The buffer that has the selection.
    pub const fn buffer(&self) -> Option<usize> {
        match self {
            Self::All => None,
            Self::Before(buffer) | Self::Own(_, buffer) => Some(*buffer),
        }
    }
}

/// A layer's indexer.
pub(super) struct Indexer<B: Backend> {
    pub spec: SelectionSpec,
    /// Rotates queries and the key, which follows them.
    pub heads: AttentionSpec<B::Vector>,
    /// Appends keys.
    pub keys: LatentSpec<B::Vector>,
    /// From compressed queries.
    pub query: B::Matrix,
    pub key: B::Matrix,
    /// The key's norm, and what is added to it.
    pub norm: HeadNorms<B>,
    pub bias: Vec<f32>,
    pub weights: B::Matrix,
    /// Compresses keys.
    pub pool: Option<Pool<B>>,
    pub cache: usize,
    pub heads_buffer: usize,
    pub key_buffer: usize,
    pub weights_buffer: usize,
}

/// The compression of keys. Each key represents several tokens, which are selected together.
pub(super) struct Pool<B: Backend> {
    pub spec: CompressionSpec<B::Vector>,
    pub gates: B::Matrix,
    /// The cache of keys that are not compressed yet.
    pub state: usize,
    pub gates_buffer: usize,
    pub selected_buffer: usize,
}

impl<B: Backend> Indexer<B> {
    /// Selects the tokens of these rows. Compressed queries are in `down`'s buffer.
    pub fn select(
        &self,
        norms: &Norms<B>,
        (down, selection_buffer): (&QueryDown<B>, usize),
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, normed: shared, inner, caches, .. } = pass;
        let all_queries = self.spec.heads * self.spec.dim;
        let [compressed, heads, key, weights] =
            disjoint(inner, [down.buffer, self.heads_buffer, self.key_buffer, self.weights_buffer]);
        backend.linear(normed::<B>(compressed, &down.norm), rows.clone(), &self.query, heads)?;
        backend.linear(norms.input(residual, shared), rows.clone(), &self.key, key)?;
        backend.linear(norms.input(residual, shared), rows.clone(), &self.weights, weights)?;
        self.norm.apply(*backend, rows.clone(), inner, self.key_buffer)?;
        let [heads, key, weights, selection] =
            disjoint(inner, [self.heads_buffer, self.key_buffer, self.weights_buffer, selection_buffer]);
        backend.shift(0, &self.bias, rows.clone(), key)?;
        // Queries and key are rotated together, and the key moves back to be appended.
        let place = all_queries..all_queries + self.spec.dim;
        backend.copy_columns((key, 0), rows.clone(), (heads, place.clone()))?;
        backend.prepare_heads(&self.heads, step, rows.clone(), heads)?;
        backend.copy_columns((heads, place.start), rows.clone(), (key, 0..self.spec.dim))?;
        let Some(pool) = &self.pool else {
            backend.append_latent(&self.keys, step, rows.clone(), key, (caches, self.cache))?;
            let cache = (&mut **caches, self.cache);
            return backend.select(&self.spec, step, rows, (heads, weights), cache, selection);
        };
        let [key, gates] = disjoint(inner, [self.key_buffer, pool.gates_buffer]);
        backend.linear(norms.input(residual, shared), rows.clone(), &pool.gates, gates)?;
        backend.compress(&pool.spec, step, rows.clone(), (key, gates), (caches, [pool.state, self.cache]))?;
        let [heads, weights, selected] =
            disjoint(inner, [self.heads_buffer, self.weights_buffer, pool.selected_buffer]);
        let cache = (&mut **caches, self.cache);
        backend.select(&self.spec, step, rows.clone(), (heads, weights), cache, selected)?;
        let [selected, selection] = disjoint(inner, [pool.selected_buffer, selection_buffer]);
        backend.select_members(self.spec.every, &positions(step, &rows), (selected, rows), selection)
    }

    /// Its matrices.
    pub fn matrices(&self) -> Vec<&B::Matrix> {
        let gates = self.pool.as_ref().map(|pool| &pool.gates);
        [&self.query, &self.key, &self.weights].into_iter().chain(gates).collect()
    }
}
