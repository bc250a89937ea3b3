//! Experts of prompts' rows, by cooperative matrices or in tiles. Pairs of a row and an expert are
//! sorted by expert, and the pairs of a tile share the expert's weights.

use std::ops::Range;

use thunder_compute::{Activation, ComputeError, LinearInput};

use super::Outcome;
use super::experts::{Equals, Experts, Set};
use super::matrices::{Halves, MATRIX_FLOPS, RowProduct, TILE_FLOPS};
use super::products::{Operand, floats};
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer, Memory};
use crate::kernel::{Kernel, Matrices, Role, Shape, Tiles};
use crate::proof::Weights;
use crate::without::{Way, without};

/// Maximum bytes of the pairs' results. If there are more rows, they are computed in turns.
const MAX_PAIR_BYTES: usize = 192 << 20;
/// Maximum bytes of what experts compute of a prompt's rows: their channels and results.
pub const EXPERT_BYTES: u64 = 2 * MAX_PAIR_BYTES as u64;
/// From this many pairs for each expert on, tiles of 64 pairs are faster than tiles of 32.
const MIDDLE_PAIRS: usize = 28;

/// Up to this many pairs for each expert, tiles of 8 pairs waste less than tiles of 32.
const FEW_PAIRS: usize = 16;
/// Maximum sizes of experts, of which each takes a few kernels.
const MOST_SIZES: usize = 8;

/// Pairs in tiles, as the kernel `sort_pairs` stores them.
pub(crate) struct Sorted {
    pub memory: Memory,
    /// Number of tiles that there is space for.
    pub tiles: usize,
    pub pairs: usize,
}

/// A form of products of pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PairForm {
    Matrices(Matrices),
    Tiles(Tiles),
}

impl PairForm {
    /// Pairs of a workgroup.
    pub const fn rows(self) -> usize {
        match self {
            Self::Matrices(form) => form.tile().rows,
            Self::Tiles(form) => form.rows(),
        }
    }

    /// Outputs of a workgroup.
    pub fn outputs(self) -> usize {
        match self {
            Self::Matrices(form) => form.outputs(),
            Self::Tiles(form) => form.outputs(),
        }
    }

    pub const fn is_gated(self) -> bool {
        match self {
            Self::Matrices(form) => form.gated,
            Self::Tiles(form) => form.gated,
        }
    }

    pub const fn kernel(self) -> Kernel {
        match self {
            Self::Matrices(form) => Kernel::Matrices(form),
            Self::Tiles(form) => Kernel::Tiles(form),
        }
    }

    /// Maximum multiplications and additions of a submission.
    const fn most_work(self) -> usize {
        match self {
            Self::Matrices(_) => MATRIX_FLOPS,
            Self::Tiles(_) => TILE_FLOPS,
        }
    }
}

/// The forms for the sets of gates and ups, and for those of down projections.
pub(crate) struct PairForms {
    up: Vec<PairForm>,
    down: Vec<PairForm>,
}

/// A product of pairs.
pub(crate) struct PairProduct<'a> {
    pub weights: Weights<'a>,
    pub bias: Option<&'a Memory>,
    /// For each expert: the first block of its weights, a number that is 0 if it has none, and its
    /// first bias.
    pub table: &'a Memory,
    pub outputs: usize,
    pub activation: Activation,
    pub role: Role,
    /// The first row of input, and the number of pairs that share a row.
    pub first: usize,
    pub of_row: usize,
}

/// Input rows, as floats or as the kernel `halve` stores them.
pub(crate) enum PairInput {
    Floats(Operand),
    Halves(Halves),
}

impl GpuBackend {
    /// The forms for this many pairs. `None`: rows are computed one by one.
    pub(crate) fn pair_forms(
        &mut self,
        experts: &Experts,
        pairs: usize,
    ) -> Result<Option<PairForms>, ComputeError> {
        let are_few =
            [&experts.up, &experts.down].iter().all(|sets| (1..=MOST_SIZES).contains(&sizes_of(sets)));
        if !are_few || !experts.fills_blocks || experts.lacks_biases() || without(Way::Pairs) {
            return Ok(None);
        }
        let sides = [(&experts.up, experts.first_role()), (&experts.down, Role::ExpertDown)];
        let [mut up, mut down] = [Vec::new(), Vec::new()];
        for ((sets, role), forms) in sides.into_iter().zip([&mut up, &mut down]) {
            for set in sets {
                let Some(form) = self.pair_form(set, role, pairs)? else { return Ok(None) };
                forms.push(form);
            }
        }
        Ok(Some(PairForms { up, down }))
    }

    fn pair_form(&mut self, set: &Set, role: Role, pairs: usize) -> Result<Option<PairForm>, ComputeError> {
        let (format, gated) = (set.chunk.format, role.is_gated());
        let shapes = match self.device.matrix_side.filter(|_| self.config.activations.allows_bf16()) {
            Some(16) if pairs >= MIDDLE_PAIRS * set.experts => &[Shape::Middle, Shape::Small][..],
            Some(16) => &[Shape::Small],
            Some(_) => &[Shape::Eights],
            None => &[],
        };
        let matrices =
            shapes.iter().map(|&shape| PairForm::Matrices(Matrices { format, shape, gated, pairs: true }));
        for form in matrices {
            if self.proves_pairs(set, form, role, None)? {
                return Ok(Some(form));
            }
        }
        // A prompt's row must have the same bits whether it is computed with few rows or with many.
        let [many, few] = [false, true].map(|few| PairForm::Tiles(Tiles::of_pairs(format, gated, few)));
        if !self.proves_pairs(set, many, role, None)? {
            return Ok(None);
        }
        let are_few = pairs < FEW_PAIRS * set.experts;
        Ok(Some(if are_few && self.proves_pairs(set, few, role, Some(many))? { few } else { many }))
    }

    /// Computes the weighted sums over the experts of prompts' rows, and writes them to `out` or
    /// adds them.
    pub(super) fn sum_pairs(
        &mut self,
        forms: &PairForms,
        (x, rows): (&Buffer, Range<usize>),
        choices: &Buffer,
        experts: &Experts,
        (out, adds): (&Buffer, bool),
    ) -> Outcome {
        let of_row = choices.width / 2;
        let lines = if experts.activation.is_some() { 2 } else { 1 };
        let most = self.rows_of_turn(experts, of_row, out.width);
        let capacity = most.min(x.capacity()) * of_row;
        for first in rows.clone().step_by(most) {
            let rows = first..rows.end.min(first + most);
            let mut channels = self.spare(capacity, experts.channels)?;
            let mut results = self.spare(capacity, out.width)?;
            channels.shape(rows.len() * of_row)?;
            results.shape(rows.len() * of_row)?;
            let mut last = None;
            for (set, &form) in experts.up.iter().zip(&forms.up) {
                let input = self.pair_input(form, x, rows.clone(), set.blocks)?;
                for equals in &set.equals {
                    let sorted =
                        self.sort_pairs(choices, &rows, (&equals.table, set.experts), form.rows())?;
                    let product = PairProduct {
                        weights: Weights { chunk: &set.chunk, blocks: equals.blocks },
                        bias: set.bias.as_ref(),
                        table: &equals.table,
                        outputs: equals.rows / lines,
                        activation: experts.activation.unwrap_or_default(),
                        role: experts.first_role(),
                        first: rows.start,
                        of_row,
                    };
                    self.record_pairs(form, &product, &input, &sorted, &channels)?;
                    last = Some((sorted, form.rows()));
                }
            }
            // One group of equals on both sides has the same experts.
            let mut last =
                last.filter(|_| [&experts.up, &experts.down].iter().all(|sets| sizes_of(sets) == 1));
            let (all, mut adds) = (0..rows.len() * of_row, adds);
            for (set, &form) in experts.down.iter().zip(&forms.down) {
                for equals in &set.equals {
                    // Not more columns than the experts have channels: the others are undefined.
                    let input = self.pair_input(form, &channels, all.clone(), equals.blocks)?;
                    let sorted = match last.take().filter(|(_, tile)| *tile == form.rows()) {
                        Some((sorted, _)) => sorted,
                        None => self.sort_pairs(choices, &rows, (&equals.table, set.experts), form.rows())?,
                    };
                    let product = PairProduct {
                        weights: Weights { chunk: &set.chunk, blocks: equals.blocks },
                        bias: experts.down_bias.as_ref(),
                        table: &equals.table,
                        outputs: out.width,
                        activation: Activation::default(),
                        role: Role::ExpertDown,
                        first: 0,
                        of_row: 1,
                    };
                    self.record_pairs(form, &product, &input, &sorted, &results)?;
                    self.add_pairs(choices, &rows, (&results, &equals.table), (out, adds))?;
                    adds = true;
                }
            }
            self.spares.extend([channels, results]);
        }
        Ok(())
    }

    /// Prompts' rows that are computed at a time: their channels and results fit into a buffer, and
    /// no dispatch lasts long.
    pub(super) fn rows_of_turn(&self, experts: &Experts, of_row: usize, width: usize) -> usize {
        let bytes = MAX_PAIR_BYTES.min(self.device.max_binding_bytes as usize);
        let of_bytes = bytes / Buffer::bytes_of(of_row, width.max(experts.channels)).max(1);
        let equals = experts.up.iter().flat_map(|set| &set.equals);
        let of_equals = |it: &Equals| 2 * it.count.min(of_row) * it.rows * it.blocks * BLOCK_COLUMNS;
        let work_of_row = equals.map(of_equals).sum::<usize>().max(1);
        let most_work = if self.device.matrix_side.is_some() { MATRIX_FLOPS } else { TILE_FLOPS };
        of_bytes.min(most_work / work_of_row).max(1)
    }

    /// Rows in the format that a form reads.
    pub(crate) fn pair_input(
        &mut self,
        form: PairForm,
        x: &Buffer,
        rows: Range<usize>,
        blocks: usize,
    ) -> Result<PairInput, ComputeError> {
        Ok(match form {
            PairForm::Matrices(_) => PairInput::Halves(self.halves(&LinearInput::Plain(x), rows, blocks)?),
            PairForm::Tiles(_) => PairInput::Floats(floats(x)),
        })
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
        form: PairForm,
        product: &PairProduct<'_>,
        input: &PairInput,
        sorted: &Sorted,
        out: &Buffer,
    ) -> Outcome {
        let Weights { chunk, blocks } = product.weights;
        let all = RowProduct {
            outputs: product.outputs,
            activation: product.activation,
            first: 0,
            ..RowProduct::of_chunk(chunk, blocks, product.bias, 0..0)
        };
        let lines = product.outputs * if form.is_gated() { 2 } else { 1 };
        // Tiles are not all full.
        let rows = match form {
            PairForm::Matrices(_) => sorted.pairs,
            PairForm::Tiles(form) => sorted.tiles * form.rows(),
        };
        self.record_work(2 * rows * lines * blocks * BLOCK_COLUMNS, form.most_work())?;
        let mut buffers: Vec<&Memory> = chunk.buffers.iter().collect();
        buffers.push(product.bias.unwrap_or(&self.nothing));
        let stride = match input {
            PairInput::Halves(halves) => {
                buffers.extend([&halves.rows, &halves.scales]);
                halves.stride
            }
            PairInput::Floats(floats) => {
                buffers.extend(&floats.buffers);
                floats.stride as usize
            }
        };
        buffers.extend([&sorted.memory, product.table, &out.memory]);
        let rows = product.first..product.first;
        let mut arguments = all.arguments(&rows, 0, stride, out);
        arguments[3] |= u32::from(product.role == Role::ExpertUp) << 2;
        arguments[16..18].copy_from_slice(&[3 * sorted.tiles as u32, product.of_row as u32]);
        let groups = [sorted.tiles as u32, product.outputs.div_ceil(form.outputs()) as u32, 1];
        self.device.dispatch(&form.kernel(), &buffers, &arguments, groups)
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

/// Number of groups of experts of one size.
fn sizes_of(sets: &[Set]) -> usize {
    sets.iter().map(|set| set.equals.len()).sum()
}
