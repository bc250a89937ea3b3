//! Proofs of products by matrices of bytes: each row must have the bits that it has alone.

use thunder_compute::ComputeError;

use super::products::same_bits;
use super::{Numbers, Weights};
use crate::backend::GpuBackend;
use crate::buffer::BLOCK_COLUMNS;
use crate::kernel::{Batch, Kernel};

/// Rows and outputs in addition to a workgroup's.
const BEYOND: usize = 5;

impl GpuBackend {
    /// Whether a form gives the bits of one row at a time. Proved now, if it was not before.
    pub(crate) fn proves_batch(&mut self, weights: Weights<'_>, form: Batch) -> Result<bool, ComputeError> {
        let kernel = Kernel::Batch(form);
        self.takes_product(kernel, &[kernel], |backend| {
            let lines = weights.chunk.rows.len();
            let together = form.rows_of_proof(lines, weights.blocks).unwrap_or(1);
            let weights = Weights { blocks: together * weights.blocks, ..weights };
            let all = lines / together / if form.gated { 2 } else { 1 };
            let outputs = all.min(form.outputs() + BEYOND);
            let rows = form.rows + BEYOND;
            // Small enough not to saturate gates.
            let x: Vec<f32> =
                Numbers(13).take(rows * weights.blocks * BLOCK_COLUMNS).iter().map(|x| x * 0.1).collect();
            for normed in [None, Some(1e-5)] {
                let expected = backend.run_form(form.of_one_row(), weights, outputs, &x, normed)?;
                let found = backend.run_batch(form, weights, outputs, &x, normed)?;
                if let Err(reason) = same_bits(&found, &expected) {
                    return Ok(Err(reason));
                }
            }
            Ok(Ok(()))
        })
    }

    /// Runs a form on rows `x`, with `normed` on their norm. Returns `[rows][outputs]`.
    fn run_batch(
        &mut self,
        form: Batch,
        weights: Weights<'_>,
        outputs: usize,
        x: &[f32],
        normed: Option<f32>,
    ) -> Result<Vec<f32>, ComputeError> {
        self.run_levels(weights, outputs, x, (form.input, normed), |backend, operand, arguments, out| {
            backend.record_batch(form, (weights, None), operand, arguments, out)
        })
    }
}
