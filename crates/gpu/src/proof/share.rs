//! Proofs of products in which several rows share an expert's weights: each pair of a row and an
//! expert must have the bits that it has alone.

use thunder_compute::{ComputeError, Device as _};

use super::products::{OF_ROW, same_bits};
use super::{Numbers, Weights};
use crate::backend::GpuBackend;
use crate::buffer::BLOCK_COLUMNS;
use crate::kernel::{Kernel, Product};
use crate::operations::experts::Set;

/// Rows and outputs in addition to a tile's.
const BEYOND: usize = 3;

impl GpuBackend {
    /// Whether a form gives the bits of one row at a time. Proved now, if it was not before.
    pub(crate) fn proves_sharing(&mut self, set: &Set, form: Product) -> Result<bool, ComputeError> {
        let kernel = Kernel::Product(form);
        let mut kernels = vec![kernel, Kernel::Product(form.of_one_row()), Kernel::SortPairs];
        kernels.extend((!form.role.is_of_each_expert()).then_some(Kernel::AddPairs));
        self.takes_product(kernel, &kernels, |backend| {
            backend.outside_step(|backend| backend.check_sharing(set, form))
        })
    }

    /// More rows than a tile has choose experts, which are rows of the set's first expert.
    fn check_sharing(&mut self, set: &Set, form: Product) -> Result<Result<(), String>, ComputeError> {
        let one = form.of_one_row();
        let lines = if form.role.is_gated() { 2 } else { 1 };
        // If there are enough, several of the matrix's rows are one, so that lanes take more than
        // one turn.
        let of_turn = form.shape.blocks_of_turn().max(one.shape.blocks_of_turn());
        let together = of_turn / set.blocks + 1;
        let has_enough = set.rows / together >= 2 * lines * (form.shape.outputs() + BEYOND);
        let together = if has_enough { together } else { 1 };
        let weights = Weights { chunk: &set.chunk, blocks: together * set.blocks };
        let all = set.rows / together;
        let outputs = (all / (2 * lines)).min(form.shape.outputs() + BEYOND).max(1);
        let distance = if all >= 2 * lines * outputs { lines * outputs } else { 0 };
        let of_row = if form.role.is_of_each_expert() { 2 } else { OF_ROW };
        let pairs = of_row * (form.batch + BEYOND);
        // Small enough not to saturate gates.
        let x: Vec<f32> =
            Numbers(13).take(pairs * weights.blocks * BLOCK_COLUMNS).iter().map(|x| x * 0.1).collect();
        let biases = self.vector(&Numbers(14).take(distance + lines * outputs))?.memory;
        let (weights, sizes) = ((weights, Some(&biases)), [outputs, distance, of_row]);
        let found = self.run_experts(form, weights, sizes, &x)?;
        let alone = self.run_experts(one, weights, sizes, &x)?;
        if alone.iter().any(|value| value.is_nan()) {
            return Ok(Err("rows that are alone have no results".to_owned()));
        }
        Ok(same_bits(&found, &alone))
    }
}
