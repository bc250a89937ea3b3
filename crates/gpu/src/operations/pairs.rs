//! Experts of prompts' rows by cooperative matrices. Pairs of a row and an expert are sorted by
//! expert, and the pairs of a tile share the expert's weights.

use std::ops::Range;

use thunder_compute::{Activation, ComputeError, LinearInput};

use super::Outcome;
use super::experts::{Experts, Set};
use super::matrices::{Halves, MATRIX_FLOPS, MatrixProduct};
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer, Memory};
use crate::kernel::{Kernel, Matrices, Role, Shape};
use crate::proof::Weights;
use crate::without::{Way, without};

/// Maximum bytes of the pairs' results. If there are more rows, they are computed in turns.
pub(crate) const MAX_PAIR_BYTES: usize = 192 << 20;
/// From this many pairs for each expert on, tiles of 64 pairs are faster than tiles of 32.
const MIDDLE_PAIRS: usize = 28;

/// Pairs in tiles, as the kernel `sort_pairs` stores them.
pub(crate) struct Sorted {
    pub memory: Memory,
    /// Number of tiles that there is space for.
    pub tiles: usize,
    pub pairs: usize,
}

/// A product of pairs.
pub(crate) struct PairProduct<'a> {
    pub weights: Weights<'a>,
    /// For each expert: the first block of its weights, and three more numbers.
    pub table: &'a Memory,
    pub outputs: usize,
    pub activation: Activation,
    pub role: Role,
    /// The first row of input, and the number of pairs that share a row.
    pub first: usize,
    pub of_row: usize,
}

impl GpuBackend {
    /// The forms of gates and ups and of down projections for this many pairs, if both are correct.
    pub(crate) fn pair_forms(
        &mut self,
        experts: &Experts,
        pairs: usize,
    ) -> Result<Option<[Matrices; 2]>, ComputeError> {
        let has_matrices =
            self.has_attention_matrices() && self.config.activations.allows_bf16() && !without(Way::Pairs);
        let ([up], [down], true) = (experts.up.as_slice(), experts.down.as_slice(), has_matrices) else {
            return Ok(None);
        };
        let is_plain = up.bias.is_none() && experts.down_bias.is_none();
        if !is_plain || !experts.is_uniform || up.blocks == 0 || down.blocks == 0 {
            return Ok(None);
        }
        let are_many = pairs >= MIDDLE_PAIRS * up.experts;
        let shapes = if are_many { &[Shape::Middle, Shape::Small][..] } else { &[Shape::Small] };
        let roles = [experts.first_role(), Role::ExpertDown];
        for &shape in shapes {
            let form = |set: &Set, gated| Matrices { format: set.chunk.format, shape, gated, pairs: true };
            let forms = [form(up, experts.activation.is_some()), form(down, false)];
            if self.proves_pairs(up, forms[0], roles[0])? && self.proves_pairs(down, forms[1], roles[1])? {
                return Ok(Some(forms));
            }
        }
        Ok(None)
    }

    /// Computes the weighted sums over the experts of prompts' rows, and writes them to `out` or
    /// adds them.
    pub(super) fn sum_pairs(
        &mut self,
        [of_up, of_down]: [Matrices; 2],
        (x, rows): (&Buffer, Range<usize>),
        choices: &Buffer,
        experts: &Experts,
        (out, adds): (&Buffer, bool),
    ) -> Outcome {
        let of_row = choices.width / 2;
        let most = (MAX_PAIR_BYTES / Buffer::bytes_of(of_row, out.width)).max(1);
        let capacity = most.min(x.capacity()) * of_row;
        for first in rows.clone().step_by(most) {
            let rows = first..rows.end.min(first + most);
            let mut channels = self.spare(capacity, experts.channels)?;
            let mut results = self.spare(capacity, out.width)?;
            channels.shape(rows.len() * of_row)?;
            results.shape(rows.len() * of_row)?;
            let (up, down) = (&experts.up[0], &experts.down[0]);
            let sorted = self.sort_pairs(choices, &rows, (&up.table, up.experts), of_up.tile().rows)?;
            let halves = self.halves(&LinearInput::Plain(x), rows.clone(), experts.blocks)?;
            let product = PairProduct {
                weights: up.weights(),
                table: &up.table,
                outputs: experts.channels,
                activation: experts.activation.unwrap_or_default(),
                role: experts.first_role(),
                first: rows.start,
                of_row,
            };
            self.record_pairs(of_up, &product, &halves, &sorted, &channels)?;
            let halves = self.halves(&LinearInput::Plain(&channels), 0..sorted.pairs, down.blocks)?;
            let product = PairProduct {
                weights: down.weights(),
                table: &down.table,
                outputs: out.width,
                activation: Activation::default(),
                role: Role::ExpertDown,
                first: 0,
                of_row: 1,
            };
            self.record_pairs(of_down, &product, &halves, &sorted, &results)?;
            self.add_pairs(choices, &rows, (&results, &down.table), (out, adds))?;
            self.spares.extend([channels, results]);
        }
        Ok(())
    }

    /// Sorts the pairs of rows by their expert.
    pub(crate) fn sort_pairs(
        &mut self,
        choices: &Buffer,
        rows: &Range<usize>,
        (table, experts): (&Memory, usize),
        tile: usize,
    ) -> Result<Sorted, ComputeError> {
        let of_row = choices.width / 2;
        let pairs = rows.len() * of_row;
        let tiles = pairs / tile + experts.min(pairs);
        let words = 3 * tiles + pairs;
        let memory = Self::grown(&mut self.device, &mut self.sorted, 4 * words, "pairs of rows and experts")?;
        let arguments = [rows.len(), rows.start, of_row, choices.stride(), experts, tile, tiles];
        let arguments = arguments.map(|number| number as u32);
        self.device.dispatch(
            &Kernel::SortPairs,
            &[&choices.memory, table, &memory],
            &arguments,
            [1, 1, 1],
        )?;
        Ok(Sorted { memory, tiles, pairs })
    }

    /// Records a product of sorted pairs; row `i` of `out` belongs to pair `i`.
    pub(crate) fn record_pairs(
        &mut self,
        form: Matrices,
        product: &PairProduct<'_>,
        halves: &Halves,
        sorted: &Sorted,
        out: &Buffer,
    ) -> Outcome {
        let Weights { chunk, blocks } = product.weights;
        let all = MatrixProduct {
            outputs: product.outputs,
            activation: product.activation,
            first: 0,
            ..MatrixProduct::of_chunk(chunk, blocks, None, 0..0)
        };
        let rows = product.first..product.first;
        let mut arguments = all.arguments(&rows, 0, halves, out);
        arguments[3] |= u32::from(product.role == Role::ExpertUp) << 2;
        arguments[16..].copy_from_slice(&[3 * sorted.tiles as u32, product.of_row as u32]);
        let lines = product.outputs * if form.gated { 2 } else { 1 };
        self.record_work(2 * sorted.pairs * lines * blocks * BLOCK_COLUMNS, MATRIX_FLOPS)?;
        let mut buffers: Vec<&Memory> = chunk.buffers.iter().collect();
        buffers.extend([
            &self.nothing,
            &halves.rows,
            &halves.scales,
            &sorted.memory,
            product.table,
            &out.memory,
        ]);
        let groups = [sorted.tiles as u32, product.outputs.div_ceil(form.outputs()) as u32, 1];
        self.device.dispatch(&Kernel::Matrices(form), &buffers, &arguments, groups)
    }

    /// Adds the weighted results of the rows' pairs.
    pub(crate) fn add_pairs(
        &mut self,
        choices: &Buffer,
        rows: &Range<usize>,
        (results, table): (&Buffer, &Memory),
        (out, adds): (&Buffer, bool),
    ) -> Outcome {
        let arguments = [
            rows.start,
            choices.width / 2,
            choices.stride(),
            out.width,
            results.stride(),
            out.stride(),
            usize::from(adds),
        ]
        .map(|number| number as u32);
        let buffers = [&choices.memory, table, &results.memory, &out.memory];
        let groups = [out.width.div_ceil(256) as u32, rows.len() as u32, 1];
        self.device.dispatch(&Kernel::AddPairs, &buffers, &arguments, groups)
    }
}
