//! Proofs of products in which several rows share an expert's weights: each pair of a row and an
//! expert must have the bits that it has alone.

use thunder_compute::{Activation, ComputeError, Device as _};

use super::products::{OF_ROW, same_bits};
use super::{Numbers, Weights};
use crate::backend::GpuBackend;
use crate::buffer::BLOCK_COLUMNS;
use crate::kernel::{Kernel, Product};
use crate::operations::experts::Set;
use crate::operations::products::ProductArguments;
use crate::operations::share::SharedWeights;

/// Rows and outputs in addition to a tile's.
const BEYOND: usize = 3;
/// Lanes that share an output.
const SUBGROUP: usize = 32;

impl GpuBackend {
    /// Whether a form gives the bits of one row at a time. Proved now, if it was not before.
    pub(crate) fn proves_sharing(&mut self, set: &Set, form: Product) -> Result<bool, ComputeError> {
        let kernel = Kernel::Product(form);
        let kernels = [kernel, Kernel::Product(form.of_one_row()), Kernel::SortPairs];
        self.takes_product(kernel, &kernels, |backend| {
            let (step, tables) = (backend.step.take(), backend.device.take_tables()?);
            let outcome = backend.check_sharing(set, form);
            backend.device.return_tables(tables)?;
            backend.step = step;
            outcome
        })
    }

    /// More rows than a tile has choose experts 0 and 2, which are rows of the set's first expert.
    fn check_sharing(&mut self, set: &Set, form: Product) -> Result<Result<(), String>, ComputeError> {
        let lines = if form.role.is_gated() { 2 } else { 1 };
        // If there are enough, several of the matrix's rows are one, so that lanes take more than
        // one turn.
        let of_turn = form.shape.unroll.max(form.of_one_row().shape.unroll) * SUBGROUP;
        let together = of_turn / set.blocks + 1;
        let has_enough = set.rows / together >= 2 * lines * (form.shape.outputs() + BEYOND);
        let together = if has_enough { together } else { 1 };
        let weights = Weights { chunk: &set.chunk, blocks: together * set.blocks };
        let all = set.rows / together;
        let outputs = (all / (2 * lines)).min(form.shape.outputs() + BEYOND).max(1);
        let distance = if all >= 2 * lines * outputs { lines * outputs } else { 0 };
        let (rows, width) = (form.batch + BEYOND, weights.blocks * BLOCK_COLUMNS);
        // Small enough not to saturate gates.
        let x: Vec<f32> = Numbers(13).take(rows * width).iter().map(|x| x * 0.1).collect();
        let mut input = self.buffer(rows, width)?;
        self.write(&x, &mut input)?;
        let mut choices = self.buffer(rows, 2 * OF_ROW)?;
        self.write(&[0.0, 2.0, 1.0, 1.0].repeat(rows), &mut choices)?;
        let second = [(distance * weights.blocks) as u32, outputs as u32, distance as u32, 1];
        let table = [[0, outputs as u32, 0, 1], [0; 4], second].concat();
        let table = self.device.filled(&table, "a table of experts")?;
        let biases = Numbers(14).take(distance + lines * outputs);
        let biases = self.device.filled(&biases.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), "biases")?;
        let shared = SharedWeights { weights, bias: Some(&biases), table: &table };
        let operand = self.quantized(&input, 0..rows, weights.blocks, form.input, None)?;
        let sorted = self.sort_pairs(&choices, &(0..rows), (&table, 3), form.batch)?;
        let mut found = Vec::new();
        for together in [true, false] {
            let mut out = self.buffer(rows * OF_ROW, outputs)?;
            self.write(&vec![f32::NAN; rows * OF_ROW * outputs], &mut out)?;
            let arguments = ProductArguments {
                biased: true,
                choices: OF_ROW,
                choice_stride: choices.stride(),
                activation: if lines == 2 { Activation::Silu } else { Activation::default() },
                ..ProductArguments::new(weights, outputs, 0..rows, operand.stride(), &out)
            };
            if together {
                self.record_sharing(form, &shared, &operand, &sorted, arguments, &out.memory)?;
            } else {
                let (weights, extra) = ((&set.chunk, Some(&biases)), [&table, &choices.memory]);
                let to = (&out.memory, Some([OF_ROW as u32, rows as u32]));
                self.record_product(form.of_one_row(), weights, &operand, &extra, &arguments, to)?;
            }
            let mut results = vec![0.0; rows * OF_ROW * outputs];
            self.read(&out, 0..rows * OF_ROW, &mut results)?;
            found.push(results);
        }
        if found[1].iter().any(|value| value.is_nan()) {
            return Ok(Err("rows that are alone have no results".to_owned()));
        }
        Ok(same_bits(&found[0], &found[1]))
    }
}
