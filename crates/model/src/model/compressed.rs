//! Attention to the last tokens and to compressed ones (DeepSeek V4).

use std::ops::Range;

use thunder_compute::{
    Backend, CompressedSpec, CompressionSpec, ComputeError, Heads, LatentSpec, Rope, Rounding, SelectionSpec,
    Step,
};

use super::mixer::{HeadNorms, QueryDown};
use super::shared::Shared;
use super::{Norms, Pass, disjoint, normed};

/// A layer's attention to the last tokens and to compressed ones.
pub(super) struct Compressed<B: Backend> {
    pub spec: CompressedSpec<B::Vector>,
    pub rope: Rope,
    /// From the residual stream to compressed queries, and their norm.
    pub query_down: QueryDown<B>,
    /// Projections to the heads' queries, and their norms, which include the scale of the scores.
    pub query: B::Matrix,
    pub query_norms: HeadNorms<B>,
    /// Factor of queries without norms.
    pub query_scale: Option<f32>,
    /// True if vectors are rounded before they are appended.
    pub rounds: bool,
    /// From the residual stream to a token's vector, and its norm.
    pub vector: B::Matrix,
    pub vector_norm: HeadNorms<B>,
    /// Appends vectors.
    pub append: LatentSpec<B::Vector>,
    pub compressor: Option<Compressor<B>>,
    pub selection: Option<Box<CompressedSelection<B>>>,
    /// In place of both, if layers share compressed tokens.
    pub shared: Option<Box<Shared<B>>>,
    /// Each group of heads' output projection.
    pub groups: Heads<B::Matrix>,
    /// Columns of a group's heads.
    pub group_columns: usize,
    pub out: B::Matrix,
    pub cache: usize,
    pub queries_buffer: usize,
    pub vector_buffer: usize,
    pub heads_buffer: usize,
    pub groups_buffer: usize,
}

/// Compresses tokens. Every rank compresses all.
pub(super) struct Compressor<B: Backend> {
    pub spec: CompressionSpec<B::Vector>,
    /// From the residual stream to values and to gates.
    pub matrices: [B::Matrix; 2],
    /// Of the state, and of compressed tokens.
    pub caches: [usize; 2],
    pub buffers: [usize; 2],
}

/// The choice of compressed tokens.
pub(super) struct CompressedSelection<B: Backend> {
    pub spec: SelectionSpec,
    /// Makes the keys.
    pub keys: Compressor<B>,
    /// Projections from compressed queries to the indexer's queries, and from the residual stream
    /// to their weights.
    pub query: B::Matrix,
    pub weights: B::Matrix,
    pub queries_buffer: usize,
    pub weights_buffer: usize,
    pub selection_buffer: usize,
}

/// Positions of rows.
pub(super) fn positions(step: &Step, rows: &Range<usize>) -> Vec<usize> {
    let of = |sequence: &thunder_compute::StepSequence| {
        let (start, first) = (sequence.start, sequence.rows.start);
        sequence.rows_within(rows).map(move |row| start + row - first)
    };
    step.sequences.iter().flat_map(of).collect()
}

impl<B: Backend> Compressor<B> {
    fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, normed: shared, inner, caches, .. } = pass;
        let [values, gates] = disjoint(inner, self.buffers);
        backend.linear(norms.input(residual, shared), rows.clone(), &self.matrices[0], values)?;
        backend.linear(norms.input(residual, shared), rows.clone(), &self.matrices[1], gates)?;
        backend.compress(&self.spec, step, rows, (values, gates), (caches, self.caches))
    }
}

impl<B: Backend> Compressed<B> {
    pub fn forward(
        &self,
        norms: &Norms<B>,
        rows: Range<usize>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        let Pass { backend, step, residual, normed: shared, inner, caches, .. } = pass;
        let (spec, down) = (&self.spec, &self.query_down);
        let positions = positions(step, &rows);
        let [compressed, queries, vector] =
            disjoint(inner, [down.buffer, self.queries_buffer, self.vector_buffer]);
        backend.linear(norms.input(residual, shared), rows.clone(), &down.matrix, compressed)?;
        backend.linear(normed::<B>(compressed, &down.norm), rows.clone(), &self.query, queries)?;
        backend.linear(norms.input(residual, shared), rows.clone(), &self.vector, vector)?;
        self.query_norms.apply(*backend, rows.clone(), inner, self.queries_buffer)?;
        self.vector_norm.apply(*backend, rows.clone(), inner, self.vector_buffer)?;
        let [queries, vector] = disjoint(inner, [self.queries_buffer, self.vector_buffer]);
        if let Some(scale) = self.query_scale {
            let (_, width) = backend.extent(queries);
            backend.scale(0..width, &vec![scale; rows.len()], rows.clone(), queries)?;
        }
        let rotated = |head: usize| (head + 1) * spec.dim - spec.rotated;
        let firsts: Vec<usize> = (0..spec.heads).map(rotated).collect();
        backend.rotate_parts((&self.rope, false), &positions, &firsts, rows.clone(), queries)?;
        backend.rotate_parts((&self.rope, false), &positions, &[rotated(0)], rows.clone(), vector)?;
        if self.rounds {
            backend.round(Rounding::E4m3, rows.clone(), vector)?;
        }
        backend.append_latent(&self.append, step, rows.clone(), vector, (caches, self.cache))?;
        if let Some(compressor) = &self.compressor {
            compressor.forward(norms, rows.clone(), pass)?;
        }
        if let Some(selection) = &self.selection {
            selection.select(norms, (down, self), (&positions, rows.clone()), pass)?;
        }
        if let Some(shared) = &self.shared {
            shared.forward(norms, self, (&positions, rows.clone()), pass)?;
        }
        self.attend(rows.clone(), pass)?;
        let Pass { backend, inner, .. } = pass;
        let [heads, groups] = disjoint(inner, [self.heads_buffer, self.groups_buffer]);
        // Values are rotated as keys are; the results are rotated back.
        backend.rotate_parts((&self.rope, true), &positions, &firsts, rows.clone(), heads)?;
        backend.head_products(heads, self.group_columns, rows.clone(), &self.groups, groups)?;
        norms.add_product((self.groups_buffer, false), rows, &self.out, pass)
    }

    fn attend(&self, rows: Range<usize>, pass: &mut Pass<'_, B>) -> Result<(), ComputeError> {
        let Pass { backend, step, inner, caches, .. } = pass;
        let (mut entries, mut selection) = (self.cache, None);
        if let Some(compressor) = &self.compressor {
            entries = compressor.caches[1];
            selection = self.selection.as_ref().map(|of| of.selection_buffer);
        }
        if let Some(shared) = &self.shared {
            (entries, selection) = (shared.entries, Some(shared.selection_buffer));
        }
        let from = (&mut **caches, [self.cache, entries]);
        let buffers = [self.queries_buffer, self.heads_buffer];
        match selection {
            None => {
                let [queries, heads] = disjoint(inner, buffers);
                backend.attend_compressed(&self.spec, step, rows, (queries, None), from, heads)
            }
            Some(selection) => {
                let [queries, heads] = buffers;
                let [queries, heads, selected] = disjoint(inner, [queries, heads, selection]);
                backend.attend_compressed(&self.spec, step, rows, (queries, Some(selected)), from, heads)
            }
        }
    }

    /// Its matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &B::Matrix> {
        let compressors = self.compressor.iter().chain(self.selection.iter().map(|of| &of.keys));
        let selection = self.selection.iter().flat_map(|of| [&of.query, &of.weights]);
        [&self.query_down.matrix, &self.query, &self.vector, &self.out]
            .into_iter()
            .chain(&self.groups.matrices)
            .chain(compressors.flat_map(|of| &of.matrices))
            .chain(selection)
            .chain(self.shared.iter().flat_map(|of| of.matrices()))
    }
}

impl<B: Backend> CompressedSelection<B> {
    fn select(
        &self,
        norms: &Norms<B>,
        (down, layer): (&QueryDown<B>, &Compressed<B>),
        (positions, rows): (&[usize], Range<usize>),
        pass: &mut Pass<'_, B>,
    ) -> Result<(), ComputeError> {
        self.keys.forward(norms, rows.clone(), pass)?;
        let Pass { backend, step, residual, normed: shared, inner, caches, .. } = pass;
        let [compressed, queries, weights, selection] =
            disjoint(inner, [down.buffer, self.queries_buffer, self.weights_buffer, self.selection_buffer]);
        backend.linear(normed::<B>(compressed, &down.norm), rows.clone(), &self.query, queries)?;
        let (dim, rotated) = (self.spec.dim, layer.spec.rotated);
        let firsts: Vec<usize> = (0..self.spec.heads).map(|head| (head + 1) * dim - rotated).collect();
        backend.rotate_parts((&layer.rope, false), positions, &firsts, rows.clone(), queries)?;
        backend.linear(norms.input(residual, shared), rows.clone(), &self.weights, weights)?;
        let from = (&mut **caches, self.keys.caches[1]);
        backend.select(&self.spec, step, rows, (queries, weights), from, selection)
    }
}
