//! The reference's memory.

use std::ops::Range;

use thunder_collectives::{Group, Stats};

use super::{Cache, Caches, DraftInputs, Experts, Reference, Rows, Weights, dequantize};
use crate::backend::{Activation, CacheKind, CacheShape, ComputeError, Device, Expert};
use crate::source::MatrixSource;
use crate::step::KV_BLOCK_TOKENS;

impl Device for Reference {
    type Matrix = Weights;
    type Vector = Vec<f32>;
    type Buffer = Rows;
    type Caches = Caches;
    type Experts = Experts;

    fn matrix(&mut self, parts: &[MatrixSource<'_>]) -> Result<Weights, ComputeError> {
        let rows = parts.iter().flat_map(dequantize).collect();
        let bias = |part: &MatrixSource<'_>| part.bias.clone().unwrap_or_else(|| vec![0.0; part.rows]);
        Ok(Weights { rows, bias: parts.iter().flat_map(bias).collect() })
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vec<f32>, ComputeError> {
        Ok(values.to_vec())
    }

    fn buffer(&mut self, _rows: usize, width: usize) -> Result<Rows, ComputeError> {
        Ok(Rows { width, rows: Vec::new() })
    }

    fn caches(&mut self, shape: &CacheShape) -> Result<Caches, ComputeError> {
        let cache = |&kind: &CacheKind| {
            let (of_token, of_slot) = match kind {
                CacheKind::Heads { heads, key_dim, value_dim } => (heads * (key_dim + value_dim), 0),
                CacheKind::Latent { rank, rotated, .. } => (rank + rotated, 0),
                CacheKind::State { numbers } => (0, numbers),
            };
            Cache {
                kind,
                tokens: vec![vec![0.0; of_token]; shape.blocks * KV_BLOCK_TOKENS],
                states: vec![vec![0.0; of_slot]; shape.slots],
                drafts: vec![DraftInputs::default(); shape.slots],
            }
        };
        Ok(Caches(shape.caches.iter().map(cache).collect()))
    }

    fn experts(
        &mut self,
        experts: Vec<Expert<Weights>>,
        activation: Activation,
    ) -> Result<Experts, ComputeError> {
        Ok(Experts { experts, activation: Some(activation) })
    }

    fn matrix_bytes(matrix: &Weights) -> usize {
        matrix.rows.iter().map(|row| size_of_val(row.as_slice())).sum()
    }

    fn extent(&self, x: &Rows) -> (usize, usize) {
        (x.rows.len(), x.width)
    }

    fn read(&mut self, x: &Rows, rows: Range<usize>, out: &mut [f32]) -> Result<(), ComputeError> {
        out.copy_from_slice(&x.rows[rows].concat());
        Ok(())
    }

    fn write(&mut self, values: &[f32], x: &mut Rows) -> Result<(), ComputeError> {
        x.rows = values.chunks(x.width).map(<[f32]>::to_vec).collect();
        Ok(())
    }

    fn group(&mut self) -> &mut Group {
        &mut self.group
    }

    fn tune(&mut self, _width: usize, _weight_bytes: usize) -> Result<(), ComputeError> {
        Ok(self.group.tune()?)
    }

    fn take_reduction_stats(&mut self) -> Stats {
        self.group.reset_stats()
    }
}
