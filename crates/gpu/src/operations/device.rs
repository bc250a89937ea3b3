//! The GPU's memory, and its group.

use std::ops::Range;

use thunder_collectives::{Group, Op, Stats};
use thunder_compute::{
    Activation, Backend as _, CacheKind, CacheShape, ComputeError, Device, Expert, Heads, KvFormat,
    MatrixSource,
};

use super::Outcome;
use super::experts::Experts;
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer, Vector};
use crate::caches::Caches;
use crate::matrix::{Matrix, common_format};
use crate::proof::Family;
use crate::slots::Slots;

impl Device for GpuBackend {
    type Matrix = Matrix;
    type Vector = Vector;
    type Buffer = Buffer;
    type Caches = Caches;
    type Experts = Experts;

    fn matrix(&mut self, parts: &[MatrixSource<'_>]) -> Result<Matrix, ComputeError> {
        let matrix = Matrix::pack(parts, None, &mut self.device)?;
        self.prove_matrix(parts, &matrix)?;
        self.expect_products(&matrix, parts.len() == 2 && parts[0].rows == parts[1].rows);
        Ok(matrix)
    }

    fn expert_matrices(&mut self, all: &[&[MatrixSource<'_>]]) -> Result<Vec<Matrix>, ComputeError> {
        let one = |parts: &&[MatrixSource<'_>]| {
            let matrix = Matrix::pack(parts, common_format(parts), &mut self.device)?;
            self.prove_matrix(parts, &matrix)?;
            Ok(matrix)
        };
        all.iter().map(one).collect()
    }

    fn heads(&mut self, all: &[MatrixSource<'_>]) -> Result<Heads<Matrix>, ComputeError> {
        let [first, ..] = all else { return Ok(Heads { count: 0, matrices: Vec::new() }) };
        let is_alike = |head: &MatrixSource<'_>| {
            head.encoding.packed() == first.encoding.packed() && head.bias.is_none()
        };
        // Heads that can be bound together are multiplied together.
        if all.iter().all(is_alike) {
            let together = Matrix::pack(all, None, &mut self.device)?;
            if together.chunks.len() == 1 {
                self.prove_matrix(all, &together)?;
                self.expect_products(&together, false);
                let mut heads = Heads { count: all.len(), matrices: vec![together] };
                if self.proves_heads(&mut heads)? {
                    return Ok(heads);
                }
            }
        }
        let matrices = all.iter().map(|head| self.matrix(std::slice::from_ref(head)));
        Ok(Heads { count: all.len(), matrices: matrices.collect::<Result<_, _>>()? })
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vector, ComputeError> {
        let mut words: Vec<u32> = values.iter().map(|x| x.to_bits()).collect();
        words.resize(words.len().next_multiple_of(BLOCK_COLUMNS), 0);
        let memory = self.device.filled(&words, "a vector of weights")?;
        Ok(Vector { memory, len: values.len() })
    }

    fn buffer(&mut self, rows: usize, width: usize) -> Result<Buffer, ComputeError> {
        let memory = self.device.memory(Buffer::bytes_of(rows, width), "activations")?;
        Ok(Buffer::new(memory, rows, width))
    }

    fn expect_attention(&mut self, cache: CacheKind, queries: usize, format: KvFormat) {
        let kernels = self.kernels_of_attention(cache, queries, format == KvFormat::Int8);
        self.device.prepare_soon(kernels);
    }

    fn caches(&mut self, shape: &CacheShape) -> Result<Caches, ComputeError> {
        self.prove_caches(shape)?;
        if self.proving.is_some() {
            return Caches::new(shape, false, &mut self.device);
        }
        // Compressed tokens are gathered in states where these are.
        let has_states = shape.caches.iter().any(|kind| matches!(kind, CacheKind::State { .. }));
        let compresses =
            shape.caches.iter().any(|kind| matches!(kind, CacheKind::Latent { every, .. } if *every > 1));
        let alternates = self.cache_sets == 0 && has_states && !compresses;
        let caches = Caches::new(shape, alternates, &mut self.device)?;
        self.cache_sets += 1;
        if alternates {
            self.slots = Some(Slots::new(shape.slots));
        }
        Ok(caches)
    }

    fn experts(
        &mut self,
        experts: Vec<Expert<Matrix>>,
        activation: Activation,
    ) -> Result<Experts, ComputeError> {
        self.upload_experts(experts, Some(activation))
    }

    fn matrix_bytes(matrix: &Matrix) -> usize {
        matrix.bytes
    }

    fn scratch(&mut self, rows: usize, width: usize) -> Result<Buffer, ComputeError> {
        self.spare(rows, width)
    }

    fn give_back(&mut self, scratch: Buffer) {
        self.spares.push(scratch);
    }

    fn extent(&self, x: &Buffer) -> (usize, usize) {
        (x.rows, x.width)
    }

    fn read(&mut self, x: &Buffer, rows: Range<usize>, out: &mut [f32]) -> Outcome {
        assert!(rows.end <= x.rows, "rows {rows:?} of {}", x.rows);
        self.read_rows(x, rows, out)
    }

    fn write(&mut self, values: &[f32], x: &mut Buffer) -> Outcome {
        let rows = values.len() / x.width;
        x.shape(rows)?;
        self.write_rows(x, 0, values)
    }

    fn group(&mut self) -> &mut Group {
        self.sums.group(&mut self.device)
    }

    fn loaded(&mut self) -> Outcome {
        self.prove_expected()?;
        if self.sums.size() > 1 {
            // Ranks measure their links next, and must be idle.
            self.device.finish_soon();
        }
        Ok(())
    }

    fn tune(&mut self, _width: usize, _weight_bytes: usize) -> Outcome {
        let group = self.sums.group(&mut self.device);
        group.tune()?;
        // CPU ranks add up here what a step in two parts costs each rank. A GPU waits for its sums,
        // so two parts gain nothing.
        let mut cost = [f64::INFINITY];
        group.all_reduce(&mut cost, Op::Max)?;
        let can_go_ahead = self.goes_ahead && self.takes(Family::Draws(self.device.draw))?;
        self.sums.agree_on_ahead(&mut self.device, can_go_ahead)?;
        if self.gathers() > 0 {
            // Ranks clear rows before they gather all columns.
            self.require(Family::Changes)?;
        }
        Ok(())
    }

    fn never_ahead(&mut self) {
        self.goes_ahead = false;
    }

    fn take_back_ahead(&mut self) -> Outcome {
        self.device.interrupt()?;
        // Other ranks wait for the sums that were recorded again.
        if self.sums.size() > 1 { self.device.submit() } else { Ok(()) }
    }

    fn take_reduction_stats(&mut self) -> Stats {
        self.sums.take_stats(&mut self.device)
    }
}
