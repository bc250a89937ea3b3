//! Vectors that a layer looks up by the last tokens, and adds to the residual streams before its
//! mixer (engram, DeepSeek V4.1).

use std::sync::Arc;

use thunder_compute::{Backend, ComputeError, LinearInput, RecentSpec};

use super::{Pass, Vocabulary};
use crate::engram::TokenNumbers;
use crate::spec::{EngramLayer, EngramShape};

/// A layer's tables.
pub(super) struct Engram<B: Backend> {
    pub shape: Arc<EngramShape>,
    pub of: EngramLayer,
    pub numbers: Arc<TokenNumbers>,
    /// This rank's rows of the tables.
    pub table: Vocabulary<B>,
    /// Projects a token's vectors to a key for each stream and a value. Every rank has the whole
    /// matrix.
    pub product: B::Matrix,
    /// Weights of the dot products of streams and keys, `[streams, hidden]`.
    pub weights: Vec<f32>,
    pub eps: f32,
    pub recent: RecentSpec,
    /// The cache of the last tokens.
    pub cache: usize,
    pub vectors_buffer: usize,
    pub keys_buffer: usize,
}

impl<B: Backend> Engram<B> {
    /// Adds to the streams of all rows.
    pub fn add(&self, pass: &mut Pass<'_, B>) -> Result<(), ComputeError> {
        let Pass { backend, step, streams, inner, caches, .. } = pass;
        let rows = 0..step.rows();
        let recent = backend.recent_tokens(self.recent, step, rows.clone(), (&mut **caches, self.cache))?;
        let mut ids = Vec::with_capacity(rows.len() * self.of.primes.len());
        for (id, before) in step.tokens.iter().zip(recent.chunks_exact(self.recent.count)) {
            let number =
                |id: u32| if id == RecentSpec::NONE { self.numbers.pad } else { self.numbers.of(id) };
            let last = [*id].into_iter().chain(before.iter().copied()).map(number);
            self.of.look_up(self.shape.heads, last, &mut ids);
        }
        // A token's vectors, one after the other, are one row of the product's input.
        let (tables, width) = (self.of.primes.len(), self.shape.width);
        let [input, keys] = super::disjoint(inner, [self.vectors_buffer, self.keys_buffer]);
        let mut vectors = backend.scratch(rows.len(), width)?;
        let mut of_table = Vec::with_capacity(rows.len());
        for (table, first) in (0..tables).zip((0..).step_by(width)) {
            of_table.clear();
            of_table.extend(ids.iter().skip(table).step_by(tables));
            backend.embed(&self.table.matrix, &of_table, self.table.rows.start as u32, 1.0, &mut vectors)?;
            backend.copy_columns((&vectors, 0), rows.clone(), (input, first..first + width))?;
        }
        backend.give_back(vectors);
        // Each rank has some rows of the tables, and zeros for the others.
        backend.all_reduce(input, rows.clone())?;
        backend.linear(LinearInput::Plain(input), rows.clone(), &self.product, keys)?;
        backend.add_values((&self.weights, self.eps), keys, rows, streams)
    }
}
