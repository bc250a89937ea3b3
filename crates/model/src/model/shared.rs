//! Compressed tokens that layers share, and the choice of them (DeepSeek V4.1).

use std::ops::Range;

use thunder_compute::{
    Backend, CompressionSpec, ComputeError, LatentSpec, LinearInput, Rounding, SelectionBlocks, SelectionSpec,
};

use super::compressed::Compressed;
use super::mixer::HeadNorms;
use super::{Norms, Pass, disjoint, normed};

/// The tokens to which a layer attends outside its window: compressed tokens, and a choice among
/// them. The layer computes each itself, or uses that of an earlier layer.
pub(super) struct Shared<B: Backend> {
    /// The cache of compressed tokens.
    pub entries: usize,
    /// Where the choice of them is.
    pub selection_buffer: usize,
    pub maker: Option<Maker<B>>,
    pub chooser: Option<Chooser<B>>,
}

/// Makes compressed tokens. Every rank makes all.
pub(super) struct Maker<B: Backend> {
    /// Tokens that become one.
    pub every: usize,
    /// Projection from the residual stream to the vectors that are averaged into compressed tokens.
    pub values: B::Matrix,
    /// `None`: a token is its own mean.
    pub pool: Option<Pool<B>>,
    pub norm: HeadNorms<B>,
    pub append: LatentSpec<B::Vector>,
    pub entries_buffer: usize,
    pub keys: Option<Keys<B>>,
}

/// The weights of the means.
pub(super) struct Pool<B: Backend> {
    pub spec: CompressionSpec<B::Vector>,
    pub gates: B::Matrix,
    /// The cache of tokens that are in no mean yet.
    pub state: usize,
    pub values_buffer: usize,
    pub gates_buffer: usize,
}

/// Keys of compressed tokens, by which these are chosen.
pub(super) struct Keys<B: Backend> {
    /// From a compressed token, before it is rotated.
    pub matrix: B::Matrix,
    pub norm: HeadNorms<B>,
    pub dim: usize,
    pub append: LatentSpec<B::Vector>,
    pub cache: usize,
    pub buffer: usize,
}

/// Chooses compressed tokens. Every rank chooses the same.
pub(super) struct Chooser<B: Backend> {
    pub spec: SelectionSpec,
    /// Projections from compressed queries to the chooser's queries, and from the residual stream
    /// to their weights.
    pub query: B::Matrix,
    pub weights: B::Matrix,
    /// The cache of keys.
    pub keys: usize,
    pub blocks: Option<ChosenBlocks>,
    pub queries_buffer: usize,
    pub weights_buffer: usize,
}

/// Blocks of keys.
pub(super) struct ChosenBlocks {
    pub spec: SelectionBlocks,
    /// True if this layer chooses the blocks; otherwise it chooses within them.
    pub chooses: bool,
    pub buffer: usize,
}

impl<B: Backend> Shared<B> {
    /// Computes and chooses what `layer` has itself. Its compressed queries are already computed.
    pub fn forward(
        &self,
        norms: &Norms<B>,
        layer: &Compressed<B>,
        (positions, rows): (&[usize], Range<usize>),
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        if let Some(maker) = &self.maker {
            maker.forward(norms, layer, (positions, rows.clone()), (self.entries, &mut *pass))?;
        }
        match &self.chooser {
            Some(chooser) => chooser.forward(norms, layer, (positions, rows), (self.selection_buffer, pass)),
            None => Ok(()),
        }
    }

    /// Its matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &B::Matrix> {
        let of_maker = self.maker.iter().flat_map(|maker| {
            let gates = maker.pool.iter().map(|pool| &pool.gates);
            [&maker.values].into_iter().chain(gates).chain(maker.keys.iter().map(|keys| &keys.matrix))
        });
        of_maker.chain(self.chooser.iter().flat_map(|chooser| [&chooser.query, &chooser.weights]))
    }
}

impl<B: Backend> Maker<B> {
    fn forward(
        &self,
        norms: &Norms<B>,
        layer: &Compressed<B>,
        (positions, rows): (&[usize], Range<usize>),
        (cache, pass): (usize, &mut Pass<'_, B>),
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, normed: shared, inner, caches, .. } = pass;
        let to = self.pool.as_ref().map_or(self.entries_buffer, |pool| pool.values_buffer);
        backend.linear(norms.input(residual, shared), rows.clone(), &self.values, &mut inner[to])?;
        if let Some(pool) = &self.pool {
            let [values, gates, entries] =
                disjoint(inner, [pool.values_buffer, pool.gates_buffer, self.entries_buffer]);
            backend.linear(norms.input(residual, shared), rows.clone(), &pool.gates, gates)?;
            let state = (&mut **caches, pool.state);
            backend.pool(&pool.spec, step, rows.clone(), (values, gates), state, entries)?;
        }
        self.norm.apply(*backend, rows.clone(), inner, self.entries_buffer)?;
        // A compressed token is where its first token is.
        let firsts: Vec<usize> =
            positions.iter().map(|position| position / self.every * self.every).collect();
        if let Some(keys) = &self.keys {
            let [entries, made] = disjoint(inner, [self.entries_buffer, keys.buffer]);
            backend.linear(LinearInput::Plain(entries), rows.clone(), &keys.matrix, made)?;
            keys.norm.apply(*backend, rows.clone(), inner, keys.buffer)?;
            let made = &mut inner[keys.buffer];
            let column = keys.dim - layer.spec.rotated;
            backend.rotate_parts((&layer.rope, false), &firsts, &[column], rows.clone(), made)?;
            backend.round(Rounding::E2m1, rows.clone(), made)?;
            backend.append_latent(&keys.append, step, rows.clone(), made, (&mut **caches, keys.cache))?;
        }
        let entries = &mut inner[self.entries_buffer];
        let column = layer.spec.dim - layer.spec.rotated;
        backend.rotate_parts((&layer.rope, false), &firsts, &[column], rows.clone(), entries)?;
        backend.round(Rounding::ScaledE2m1, rows.clone(), entries)?;
        backend.append_latent(&self.append, step, rows, entries, (caches, cache))
    }
}

impl<B: Backend> Chooser<B> {
    fn forward(
        &self,
        norms: &Norms<B>,
        layer: &Compressed<B>,
        (positions, rows): (&[usize], Range<usize>),
        (selection, pass): (usize, &mut Pass<'_, B>),
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, normed: shared, inner, caches, .. } = pass;
        let down = &layer.query_down;
        let [compressed, queries, weights] =
            disjoint(inner, [down.buffer, self.queries_buffer, self.weights_buffer]);
        backend.linear(normed::<B>(compressed, &down.norm), rows.clone(), &self.query, queries)?;
        let (dim, rotated) = (self.spec.dim, layer.spec.rotated);
        let firsts: Vec<usize> = (0..self.spec.heads).map(|head| (head + 1) * dim - rotated).collect();
        backend.rotate_parts((&layer.rope, false), positions, &firsts, rows.clone(), queries)?;
        backend.round(Rounding::E2m1, rows.clone(), queries)?;
        backend.linear(norms.input(residual, shared), rows.clone(), &self.weights, weights)?;
        let Some(blocks) = &self.blocks else {
            let [queries, weights, selection] =
                disjoint(inner, [self.queries_buffer, self.weights_buffer, selection]);
            let from = (&mut **caches, self.keys);
            return backend.select(&self.spec, step, rows, (queries, weights), from, selection);
        };
        let [queries, weights, chosen, selection] =
            disjoint(inner, [self.queries_buffer, self.weights_buffer, blocks.buffer, selection]);
        if !blocks.chooses {
            let (inputs, from) = ([&*queries, &*weights, &*chosen], (&mut **caches, self.keys));
            return backend.select_within(&self.spec, blocks.spec, step, rows, inputs, from, selection);
        }
        let (inputs, from) = ((&*queries, &*weights), (&mut **caches, self.keys));
        backend.select_blocks(&self.spec, blocks.spec, step, rows.clone(), inputs, from, chosen)?;
        backend.select(&self.spec, step, rows, inputs, (&mut **caches, self.keys), selection)
    }
}
