//! Proofs of products of pairs of rows and experts: each form is compared with plain products of
//! the same weights.

use thunder_compute::{Activation, ComputeError, Device as _};

use super::products::{FLOATS_LIMIT, WEIGHTS, expected_of_experts};
use super::{Numbers, compare};
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer};
use crate::kernel::{Kernel, Role};
use crate::operations::experts::Set;
use crate::operations::pairs::{PairForm, PairProduct};

/// The cost of f16 factors in gates and ups.
const LIMIT: f32 = 4e-3;
/// Rows and outputs in addition to a tile's.
const BEYOND: usize = 5;
/// Experts of a row.
const OF_ROW: usize = 2;

impl GpuBackend {
    /// Whether a form is correct and gives the same bits as the form `like`. Proved now, if it was
    /// not before.
    pub(crate) fn proves_pairs(
        &mut self,
        set: &Set,
        form: PairForm,
        role: Role,
        like: Option<PairForm>,
    ) -> Result<bool, ComputeError> {
        let mut kernels = vec![form.kernel(), Kernel::SortPairs, Kernel::AddPairs];
        kernels.extend(matches!(form, PairForm::Matrices(_)).then_some(Kernel::Halve));
        self.takes_product(form.kernel(), &kernels, |backend| {
            backend.outside_step(|backend| backend.check_pairs(set, form, role, like))
        })
    }

    /// More rows than a tile has choose experts 0 and 2; expert 1 is absent. Sums are also of rows
    /// that choose it.
    fn check_pairs(
        &mut self,
        set: &Set,
        form: PairForm,
        role: Role,
        like: Option<PairForm>,
    ) -> Result<Result<(), String>, ComputeError> {
        let lines = if form.is_gated() { 4 } else { 2 };
        let is_first = role.is_of_each_expert();
        let outputs = (set.rows / lines).min(form.outputs() + BEYOND).max(1);
        let distance = if set.rows >= lines * outputs { lines * outputs / 2 } else { 0 };
        let rows = like.unwrap_or(form).rows() + BEYOND;
        let width = set.blocks * BLOCK_COLUMNS;
        // Small enough not to saturate gates.
        let x: Vec<f32> = Numbers(13).take(rows * OF_ROW * width).iter().map(|x| x * 0.1).collect();
        let biases = Numbers(14).take(distance + lines * outputs / 2);
        let all = self.run_biased(set.weights(), &biases, &x)?;
        let mut expected = expected_of_experts(&all, role, [outputs, distance], [rows, OF_ROW]);
        let (mut input, mut choices) = (self.buffer(rows * OF_ROW, width)?, self.buffer(rows, 2 * OF_ROW)?);
        self.write(&x, &mut input)?;
        let is_absent = |row: usize| !is_first && row % 3 == 1;
        let of_row = |row| [0.0, if is_absent(row) { 1.0 } else { 2.0 }, WEIGHTS[0], WEIGHTS[1]];
        self.write(&(0..rows).flat_map(of_row).collect::<Vec<f32>>(), &mut choices)?;
        for row in (0..rows).filter(|row| is_absent(*row)) {
            let first = &all[OF_ROW * row * (distance + outputs)..];
            let sums = expected[row * outputs..].iter_mut().zip(first).take(outputs);
            sums.for_each(|(sum, product)| *sum = WEIGHTS[0] * product);
        }
        let second = (distance * set.blocks) as u32;
        let table = [0, 1, 0, 1, 0, 0, 0, 0, second, 1, distance as u32, 1];
        let table = self.device.filled(&table, "a table of experts")?;
        let biases = self.vector(&biases)?.memory;
        let product = PairProduct {
            weights: set.weights(),
            bias: Some(&biases),
            table: &table,
            outputs,
            activation: if form.is_gated() { Activation::Silu } else { Activation::default() },
            role,
            first: 0,
            of_row: if is_first { OF_ROW } else { 1 },
        };
        let found = self.run_pairs(form, &product, &input, &choices)?;
        if let Some(like) = like {
            let others = self.run_pairs(like, &product, &input, &choices)?;
            let same = found.iter().zip(&others).all(|(a, b)| a.to_bits() == b.to_bits());
            return Ok(if same { Ok(()) } else { Err(format!("other bits than those of {like:?}")) });
        }
        let limit = if matches!(form, PairForm::Matrices(_)) { LIMIT } else { 2.0 * FLOATS_LIMIT };
        Ok(compare(&found, &expected, limit))
    }

    /// Runs a form on all rows: the results of pairs of gates and ups, the sums of down
    /// projections.
    fn run_pairs(
        &mut self,
        form: PairForm,
        product: &PairProduct<'_>,
        x: &Buffer,
        choices: &Buffer,
    ) -> Result<Vec<f32>, ComputeError> {
        let (rows, outputs) = (choices.rows, product.outputs);
        let sorted = self.sort_pairs(choices, &(0..rows), (product.table, 3), form.rows())?;
        let input = self.pair_input(form, x, 0..rows * OF_ROW, product.weights.blocks)?;
        let mut results = self.buffer(rows * OF_ROW, outputs)?;
        // What an absent expert leaves there must not count.
        self.write(&vec![f32::NAN; rows * OF_ROW * outputs], &mut results)?;
        self.record_pairs(form, product, &input, &sorted, &results)?;
        let mut sums = self.buffer(rows, outputs)?;
        sums.shape(rows)?;
        let from = match product.role.is_of_each_expert() {
            true => &results,
            false => {
                self.add_pairs(choices, &(0..rows), (&results, product.table), (&sums, false))?;
                &sums
            }
        };
        let mut found = vec![0.0; from.rows * outputs];
        self.read(from, 0..from.rows, &mut found)?;
        Ok(found)
    }
}
