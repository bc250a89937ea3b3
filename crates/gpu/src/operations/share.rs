//! Gates and ups of experts, whose weights are read once for several rows, mostly generated
//! tokens'. Pairs of a row and an expert are sorted by expert, and the pairs of a tile are
//! multiplied together.

use thunder_compute::ComputeError;

use super::Outcome;
use super::experts::Set;
use super::products::{Operand, ProductArguments};
use crate::backend::GpuBackend;
use crate::buffer::{Buffer, Memory};
use crate::kernel::{BATCHES, Kernel, Product, Role};
use crate::matrix::Chunk;
use crate::without::{Way, without};

/// With at most this many rows, each reads its experts' weights.
const FEW_ROWS: usize = 4;
/// From this many pairs for each expert on, rows share weights. Four for each of 128 experts were
/// 1.08 times as fast on an H200 (docs/lab/2026-11-29-batches.md). Fewer save less and are sorted
/// in the same time.
const ENOUGH_PAIRS: usize = 4;
/// From this many on, tiles have eight pairs instead of four. Not measured: on average, they are
/// full.
const MANY_PAIRS: usize = 8;

impl GpuBackend {
    /// The form in which pairs of `rows` rows share the set's weights. `None`: each row reads its
    /// experts' weights, because there are few pairs or the form is wrong.
    pub(super) fn share_form(
        &mut self,
        set: &Set,
        role: Role,
        rows: usize,
        of_row: usize,
    ) -> Result<Option<Product>, ComputeError> {
        let (wanted, pairs) = (self.plain_input(), rows * of_row);
        let has_form = wanted.has_levels() && set.chunk.format.has_scales() && !without(Way::Experts);
        if !has_form || rows <= FEW_ROWS || set.blocks == 0 {
            return Ok(None);
        }
        let Some(sum) = self.form_of(set.weights(), wanted, role, BATCHES[0])? else { return Ok(None) };
        let of = |batch| Product::new(set.chunk.format, wanted, role, sum, batch);
        let [small, large] = [BATCHES[1], BATCHES[2]].map(of);
        // With more requests, steps soon have more pairs.
        self.prepare_larger([small, large].map(Kernel::Product));
        if pairs < ENOUGH_PAIRS * set.experts {
            return Ok(None);
        }
        let form = if pairs < MANY_PAIRS * set.experts { small } else { large };
        Ok(self.proves_sharing(set, form)?.then_some(form))
    }

    /// Sorts the pairs of rows and experts, and records their product with the experts' first
    /// matrices. `table` is as in [`Set::table`]. Row `i` of `out` belongs to pair `i`.
    pub(crate) fn record_sharing(
        &mut self,
        form: Product,
        weights: (&Chunk, Option<&Memory>),
        operand: &Operand,
        (choices, table, experts): (&Buffer, &Memory, usize),
        arguments: ProductArguments,
        out: &Memory,
    ) -> Outcome {
        let sorted = self.sort_pairs(choices, &arguments.rows, (table, experts), form.batch)?;
        let first = arguments.rows.start;
        let arguments = ProductArguments {
            rows: first..first + sorted.tiles * form.batch,
            choice_row: 3 * sorted.tiles,
            ..arguments
        };
        let extra = [table, &sorted.memory];
        self.record_product(form, weights, operand, &extra, &arguments, (out, None))
    }
}
