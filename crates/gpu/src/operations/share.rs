//! Products with experts whose weights are read once for several rows, mostly generated tokens'.
//! Pairs of a row and an expert are sorted by expert, and the pairs of a tile are multiplied
//! together.

use thunder_compute::ComputeError;

use super::Outcome;
use super::experts::{Experts, Set};
use super::pairs::Sorted;
use super::products::{Operand, ProductArguments};
use crate::backend::GpuBackend;
use crate::buffer::Memory;
use crate::kernel::{BATCHES, FEW_CHOICES, Kernel, Product, Role};
use crate::matrix::Chunk;
use crate::without::{Way, without};

/// With at most this many rows, each reads its experts' weights: few rows choose an expert
/// together, and nothing needs to be proved for them.
const FEW_ROWS: usize = 4;
/// From this many pairs for each expert on, rows share weights: with two, products with experts,
/// sorting and adding take three quarters of the time on an H200, with four half of it
/// (docs/lab/2026-11-29-experts.md).
const ENOUGH_PAIRS: usize = 2;
/// From this many on, tiles have eight pairs instead of four. Not measured; with four pairs for
/// each expert, tiles of four are faster.
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
        let (is_first, pairs) = (role.is_of_each_expert(), rows * of_row);
        let wanted = if is_first { self.plain_input() } else { self.gated_input() };
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

    /// The same for each set of down projections; empty if each row reads them. There is space for
    /// the pairs of `most` rows.
    pub(super) fn share_down(
        &mut self,
        experts: &Experts,
        (rows, most): (usize, usize),
        of_row: usize,
    ) -> Result<Vec<Option<Product>>, ComputeError> {
        let has_form = of_row >= FEW_CHOICES && !experts.lacks_biases();
        if !has_form || rows <= FEW_ROWS || rows > most {
            return Ok(Vec::new());
        }
        experts.down.iter().map(|set| self.share_form(set, Role::ExpertDown, rows, of_row)).collect()
    }

    /// Records the product of sorted pairs with the experts' matrices. `table` is as in
    /// [`Set::table`]. Row `i` of `out` belongs to pair `i`, and so does row `i` of the input of
    /// down projections.
    pub(crate) fn record_sharing(
        &mut self,
        form: Product,
        weights: (&Chunk, Option<&Memory>),
        operand: &Operand,
        (sorted, table): (&Sorted, &Memory),
        arguments: ProductArguments,
        out: &Memory,
    ) -> Outcome {
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
