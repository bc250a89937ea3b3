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

/// Rows with keys and values on the host at the same time: 3 MB for DeepSeek V4.1-Flash.
const HOST_ROWS: usize = 32;

/// Minimum magnitude whose root is used in a gate.
const LEAST_DOT: f32 = 1e-6;

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
        let (_, columns) = backend.extent(&inner[self.keys_buffer]);
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
        let (weights, eps) = (&self.weights[..], self.eps);
        let mut made = vec![0.0; rows.len().min(HOST_ROWS) * columns];
        for first in rows.clone().step_by(HOST_ROWS) {
            let rows = first..rows.end.min(first + HOST_ROWS);
            let made = &mut made[..rows.len() * columns];
            backend.read(keys, rows.clone(), made)?;
            backend.change_rows(streams, rows, &|index, row| {
                let (keys, value) = made[index * columns..][..columns].split_at(weights.len());
                let parts = row.chunks_exact_mut(value.len()).zip(keys.chunks_exact(value.len()));
                for ((stream, key), weights) in parts.zip(weights.chunks_exact(value.len())) {
                    let gate = gate(stream, (key, weights), eps);
                    stream.iter_mut().zip(value).for_each(|(x, value)| *x += gate * value);
                }
            })?;
        }
        Ok(())
    }
}

/// The sigmoid of the signed root of the dot product of a stream's norm with its key's.
fn gate(stream: &[f32], (key, weights): (&[f32], &[f32]), eps: f32) -> f32 {
    let (mut dot, mut of_stream, mut of_key) = (0.0, 0.0, 0.0);
    for ((x, key), weight) in stream.iter().zip(key).zip(weights) {
        dot += f64::from(x * weight * key);
        of_stream += f64::from(x * x);
        of_key += f64::from(key * key);
    }
    let (width, eps) = (stream.len() as f64, f64::from(eps));
    let norms = ((of_stream / width + eps) * (of_key / width + eps)).sqrt();
    let dot = (dot / norms / width.sqrt()) as f32;
    let root = dot.abs().max(LEAST_DOT).sqrt().copysign(dot);
    1.0 / (1.0 + (-root).exp())
}
