//! Products of several generated tokens' rows by matrices of bytes.

use thunder_compute::ComputeError;

use super::Outcome;
use super::products::{Operand, ProductArguments};
use crate::backend::GpuBackend;
use crate::buffer::Memory;
use crate::kernel::{BATCHES, Batch, Input, Kernel, Role, Sum};
use crate::proof::Weights;
use crate::without::{Way, without};

/// With at most this many rows, products by lanes are faster.
const FEW_ROWS: usize = 8;
/// With at most this many rows, products by matrices are faster only with at least [`MANY_BLOCKS`]
/// of 32 weights (docs/lab/2026-11-30-gpu.md).
const SOME_ROWS: usize = 16;
const MANY_BLOCKS: usize = 1 << 21;

impl GpuBackend {
    /// The form by matrices of bytes for this many generated tokens' rows, if it is faster than
    /// products by lanes. Proved now, if it was not before. `None` also if the device has no such
    /// matrices, the form is wrong, or no larger matrix has proved it.
    pub(super) fn batch_for(
        &mut self,
        weights: Weights<'_>,
        input: Input,
        role: Role,
        rows: usize,
    ) -> Result<Option<Batch>, ComputeError> {
        let (format, gated) = (weights.chunk.format, role == Role::Gated);
        let has_form = self.device.multiplies_bytes
            && !without(Way::Bytes)
            && rows > BATCHES[1]
            && weights.blocks > 0
            && matches!(role, Role::Plain | Role::Gated)
            && Batch::exists(format, input);
        if !has_form || self.form_of(weights, input, role, BATCHES[0])? != Some(Sum::Subgroup) {
            return Ok(None);
        }
        let lines = weights.chunk.rows.len();
        let has_many = lines * weights.blocks >= MANY_BLOCKS;
        let outputs = lines / if gated { 2 } else { 1 };
        let of = |rows| Batch::new(format, input, gated, [outputs, rows]);
        // With more requests, steps soon have more rows; drivers take 0.4 s to compile such a
        // kernel.
        let [narrow, wide] = Batch::all(format, input, gated);
        let takes_narrow = has_many || of(SOME_ROWS + 1) == narrow;
        self.prepare_larger(takes_narrow.then_some(narrow).into_iter().chain([wide]).map(Kernel::Batch));
        let (is_faster, form) = (rows > SOME_ROWS || rows > FEW_ROWS && has_many, of(rows));
        let can_show = form.rows_of_proof(lines, weights.blocks).is_some()
            || self.products.contains_key(&Kernel::Batch(form));
        Ok((is_faster && can_show && self.proves_batch(weights, form)?).then_some(form))
    }

    /// Records a product by matrices of bytes.
    pub(crate) fn record_batch(
        &mut self,
        form: Batch,
        (weights, bias): (Weights<'_>, Option<&Memory>),
        operand: &Operand,
        arguments: &ProductArguments,
        out: &Memory,
    ) -> Outcome {
        let mut buffers: Vec<_> = weights.chunk.buffers.iter().collect();
        buffers.push(bias.unwrap_or(&self.nothing));
        buffers.extend(&operand.buffers);
        let mut words = arguments.words();
        buffers.push(operand.norm_of(&mut words).unwrap_or(&self.nothing));
        buffers.push(out);
        debug_assert!(arguments.heads <= 1, "heads read floats");
        let groups = form.groups(arguments.outputs, arguments.rows.len());
        self.device.dispatch(&Kernel::Batch(form), &buffers, &words, groups)
    }
}
