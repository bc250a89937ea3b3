//! Proofs of products by cooperative matrices: each form is compared with the plain form, which was
//! compared with the CPU.

use thunder_compute::{ComputeError, LinearInput};

use super::products::gate;
use super::{Numbers, Weights, compare};
use crate::backend::GpuBackend;
use crate::buffer::BLOCK_COLUMNS;
use crate::kernel::{Kernel, Matrices};
use crate::operations::matrices::RowProduct;

/// The cost of f16 factors, which have 11 bits each.
const LIMIT: f32 = 2e-3;
/// Rows and outputs in addition to a tile's.
const BEYOND: usize = 5;
/// Factors of the rows, in turn. f16 can represent none of the results.
const SIZES: [f32; 3] = [1.0, 1e9, 1e-12];

impl GpuBackend {
    /// Whether a form is correct and gives the same bits as the form `like`. Proved now, if it was
    /// not before.
    pub(crate) fn proves_matrices(
        &mut self,
        weights: Weights<'_>,
        form: Matrices,
        like: Option<Matrices>,
    ) -> Result<bool, ComputeError> {
        let kernels = [Kernel::Matrices(form), Kernel::Halve];
        self.takes_product(kernels[0], &kernels, |backend| backend.check_matrices(weights, form, like))
    }

    /// Whether a product's kernel is correct by `check`, which runs once for it and the kernels
    /// that it needs.
    pub(super) fn takes_product(
        &mut self,
        kernel: Kernel,
        kernels: &[Kernel],
        check: impl FnOnce(&mut Self) -> Result<Result<(), String>, ComputeError>,
    ) -> Result<bool, ComputeError> {
        if let Some(right) = self.products.get(&kernel) {
            return Ok(*right);
        }
        let right = self.proofs.is_proved(kernels) || {
            let outcome = match kernels.iter().try_for_each(|kernel| self.device.prepare(kernel)) {
                Ok(()) => check(self)?,
                Err(error) => Err(error.to_string()),
            };
            match outcome {
                Ok(()) => true,
                Err(reason) => {
                    self.refuse(&format!("{kernel:?}"), &reason);
                    false
                }
            }
        };
        if right {
            self.proofs.note(kernels);
        }
        self.products.insert(kernel, right);
        Ok(right)
    }

    fn check_matrices(
        &mut self,
        weights: Weights<'_>,
        form: Matrices,
        like: Option<Matrices>,
    ) -> Result<Result<(), String>, ComputeError> {
        let all = weights.chunk.rows.len();
        let outputs = if form.gated { all / 2 } else { all }.min(form.outputs() + BEYOND);
        let lines = if form.gated { 2 * outputs } else { outputs };
        let width = weights.blocks * BLOCK_COLUMNS;
        let rows = form.tile().rows + BEYOND;
        // Small enough not to saturate gates.
        let x: Vec<f32> = Numbers(12).take(rows * width).iter().map(|x| x * 0.1).collect();
        let plain = self.plain(weights)?;
        let expected = self.run_form(plain, weights, lines, &x, None)?;
        let expected = if form.gated { gate(&expected, outputs) } else { expected };
        let found = self.run_matrices(form, weights, outputs, &x)?;
        if let Err(reason) = compare(&found, &expected, LIMIT) {
            return Ok(Err(reason));
        }
        if let Some(like) = like {
            let others = self.run_matrices(like, weights, outputs, &x)?;
            let same = found.iter().zip(&others).all(|(a, b)| a.to_bits() == b.to_bits());
            return Ok(if same { Ok(()) } else { Err(format!("other bits than those of {:?}", like.shape)) });
        }
        if form.gated {
            return Ok(Ok(()));
        }
        // Each row has its own scale.
        let sizes = || SIZES.iter().cycle();
        let sized: Vec<f32> =
            x.chunks(width).zip(sizes()).flat_map(|(row, size)| row.iter().map(move |x| x * size)).collect();
        let found = self.run_matrices(form, weights, outputs, &sized)?;
        let found: Vec<f32> = found
            .chunks(outputs)
            .zip(sizes())
            .flat_map(|(row, size)| row.iter().map(move |x| x / size))
            .collect();
        Ok(compare(&found, &expected, LIMIT))
    }

    /// Runs a form on rows `x`. Returns `[rows][outputs]`.
    fn run_matrices(
        &mut self,
        form: Matrices,
        weights: Weights<'_>,
        outputs: usize,
        x: &[f32],
    ) -> Result<Vec<f32>, ComputeError> {
        self.run_on(x, (weights.blocks, outputs), |backend, from, out| {
            let rows = 0..out.rows;
            let halves = backend.halves(&LinearInput::Plain(from), rows.clone(), weights.blocks)?;
            let product = RowProduct {
                outputs,
                first: 0,
                ..RowProduct::of_chunk(weights.chunk, weights.blocks, None, rows)
            };
            backend.record_matrices(form, &product, &halves, out)
        })
    }
}
