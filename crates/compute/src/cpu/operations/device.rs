//! The CPU's memory, and its group.

use std::ops::Range;
use std::sync::Arc;

use thunder_collectives::{Group, Stats};

use super::Outcome;
use crate::backend::{Activation, CacheShape, ComputeError, Device, Expert};
use crate::cpu::layout::matrix::Matrix;
use crate::cpu::product::experts::Experts;
use crate::cpu::{Buffer, Caches, CpuBackend, Linear};
use crate::source::MatrixSource;

impl Device for CpuBackend {
    type Matrix = Linear;
    type Vector = Arc<[f32]>;
    type Buffer = Buffer;
    type Caches = Caches;
    type Experts = Experts;

    fn matrix(&mut self, parts: &[MatrixSource<'_>]) -> Result<Linear, ComputeError> {
        let Some(matrix) = self.expert_matrices(&[parts])?.pop() else { unreachable!("one for each") };
        Ok(matrix)
    }

    fn expert_matrices(&mut self, all: &[&[MatrixSource<'_>]]) -> Result<Vec<Linear>, ComputeError> {
        let pool = self.packing.as_mut().unwrap_or(&mut self.pool);
        let sources: Vec<&MatrixSource<'_>> = all.iter().flat_map(|parts| with_rows(parts)).collect();
        let packed =
            Matrix::pack(&sources, true, &mut self.arena, pool).map_err(|error| ComputeError::Memory {
                bytes: sources.iter().map(|source| source.bytes()).sum(),
                what: "weights",
                reason: error.to_string(),
            })?;
        let mut packed = packed.into_iter();
        let linear = |parts: &&[MatrixSource<'_>]| {
            let parts: Vec<Matrix> = packed.by_ref().take(with_rows(parts).count()).collect();
            Linear { rows: parts.iter().map(|part| part.rows).sum(), parts }
        };
        Ok(all.iter().map(linear).collect())
    }

    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector, ComputeError> {
        Ok(values.into())
    }

    fn buffer(&mut self, rows: usize, width: usize) -> Result<Buffer, ComputeError> {
        Ok(Buffer::new(rows, width))
    }

    fn scratch(&mut self, rows: usize, width: usize) -> Result<Buffer, ComputeError> {
        Ok(self.spare(rows, width))
    }

    fn give_back(&mut self, scratch: Buffer) {
        self.spares.push(scratch);
    }

    fn caches(&mut self, shape: &CacheShape) -> Result<Caches, ComputeError> {
        Caches::new(shape)
    }

    fn experts(
        &mut self,
        experts: Vec<Expert<Linear>>,
        activation: Activation,
    ) -> Result<Experts, ComputeError> {
        Ok(Experts::new(experts, Some(activation)))
    }

    fn matrix_bytes(matrix: &Linear) -> usize {
        matrix.parts.iter().map(Matrix::bytes).sum()
    }

    fn extent(&self, x: &Buffer) -> (usize, usize) {
        (x.rows, x.width)
    }

    fn read(&mut self, x: &Buffer, rows: Range<usize>, out: &mut [f32]) -> Outcome {
        assert!(rows.end <= x.rows, "rows {rows:?} of {}", x.rows);
        out.copy_from_slice(&x.data[rows.start * x.width..rows.end * x.width]);
        Ok(())
    }

    fn write(&mut self, values: &[f32], x: &mut Buffer) -> Outcome {
        x.shape(values.len() / x.width);
        x.data[..values.len()].copy_from_slice(values);
        Ok(())
    }

    fn group(&mut self) -> &mut Group {
        self.reducer.group()
    }

    fn tune(&mut self, width: usize, weight_bytes: usize) -> Outcome {
        Ok(self.reducer.tune(width * size_of::<f32>(), weight_bytes / self.pool.threads())?)
    }

    fn take_reduction_stats(&mut self) -> Stats {
        self.reducer.take_stats()
    }

    fn pin_caller(&self) {
        self.pool.pin_caller();
    }
}

/// A rank may have no rows of a part.
fn with_rows<'a, 's>(parts: &'a [MatrixSource<'s>]) -> impl Iterator<Item = &'a MatrixSource<'s>> {
    parts.iter().filter(|source| source.rows > 0)
}
