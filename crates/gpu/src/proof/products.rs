//! Proofs of products with the first rows of a matrix, for each form before it is used.
//!
//! The plain form with f32 activations is compared with the weights that the CPU reads from the
//! file; all other forms are compared with the plain form.

use thunder_compute::{Activation, ComputeError, Device as _, LinearInput, MatrixSource};

use super::{Numbers, compare};
use crate::backend::{FormKey, GpuBackend};
use crate::buffer::{BLOCK_COLUMNS, Buffer, Memory};
use crate::kernel::{BATCHES, FEW_CHOICES, Input, Kernel, Product, Role, Sum, TILE_LINES, Tiles};
use crate::matrix::{Chunk, Matrix};
use crate::operations::experts::{Experts, Set};
use crate::operations::matrices::RowProduct;
use crate::operations::products::{Operand, ProductArguments, floats};

/// Outputs that are compared: more than a workgroup's, and an odd number.
const OUTPUTS: usize = 11;
/// Rows of input: one more than the largest form computes together.
const ROWS: usize = 9;
/// The cost of bytes: 8 bits, and a scale for each 32 columns.
const BYTES_LIMIT: f32 = 2e-2;
/// The cost of another order of additions.
pub(super) const FLOATS_LIMIT: f32 = 1e-4;

fn limit(input: Input) -> f32 {
    if input == Input::Bytes { BYTES_LIMIT } else { FLOATS_LIMIT }
}

/// A chunk of a matrix, and the blocks in its rows.
#[derive(Clone, Copy)]
pub(crate) struct Weights<'a> {
    pub chunk: &'a Chunk,
    pub blocks: usize,
}

/// The form of products with matrices that have no columns on this rank. No weight is read, so
/// there is nothing to prove, and it says nothing about other matrices of the format.
const NOTHING_MULTIPLIED: Sum = Sum::Shared;

/// Runs a form of a product. The inner error says what is wrong.
type Check<'a> = &'a mut dyn FnMut(&mut GpuBackend, Product) -> Result<Result<(), String>, ComputeError>;

impl GpuBackend {
    /// Proves the plain form against the file's weights.
    pub(crate) fn prove_matrix(
        &mut self,
        parts: &[MatrixSource<'_>],
        w: &Matrix,
    ) -> Result<(), ComputeError> {
        for chunk in &w.chunks {
            let key = (chunk.format, Input::Floats, Role::Plain, BATCHES[0]);
            if w.blocks == 0 || self.forms.contains_key(&key) {
                continue;
            }
            let weights = Weights { chunk, blocks: w.blocks };
            let outputs = chunk.rows.len().min(OUTPUTS);
            let mut rows = Vec::new();
            for row in chunk.rows.start..chunk.rows.start + outputs {
                rows.push(stored_row(parts, row));
            }
            let expected = |x: &[f32]| -> Vec<f32> {
                let dot = |x: &[f32], w: &[f32]| -> f64 {
                    x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
                };
                let of_row = |x: &[f32]| rows.iter().map(|w| dot(x, w) as f32).collect::<Vec<_>>();
                x.chunks(w.blocks.max(1) * BLOCK_COLUMNS).flat_map(of_row).collect()
            };
            self.take_form(key, weights, &mut |backend, product| {
                let x = Numbers(7).take(ROWS * w.blocks * BLOCK_COLUMNS);
                let found = backend.run_form(product, weights, outputs, &x, None)?;
                Ok(compare(&found, &expected(&x), FLOATS_LIMIT))
            })?;
        }
        Ok(())
    }

    /// The correct product that computes the most of `rows` rows together. `None` if no form of
    /// bytes is correct.
    pub(crate) fn product_for(
        &mut self,
        weights: Weights<'_>,
        input: Input,
        role: Role,
        rows: usize,
    ) -> Result<Option<Product>, ComputeError> {
        for batch in input.batches(rows) {
            if let Some(sum) = self.form_of(weights, input, role, batch)? {
                return Ok(Some(Product::new(weights.chunk.format, input, role, sum, batch)));
            }
        }
        Ok(None)
    }

    /// The form of a product. Proved now, if it was not before. `None` if no form of bytes is
    /// correct.
    pub(crate) fn form_of(
        &mut self,
        weights: Weights<'_>,
        input: Input,
        role: Role,
        batch: usize,
    ) -> Result<Option<Sum>, ComputeError> {
        if weights.blocks == 0 {
            return Ok(Some(NOTHING_MULTIPLIED));
        }
        let key = (weights.chunk.format, input, role, batch);
        if let Some(form) = self.forms.get(&key) {
            return Ok(*form);
        }
        let gated = role == Role::Gated;
        let outputs = (weights.chunk.rows.len() / if gated { 2 } else { 1 }).min(OUTPUTS);
        let lines = if gated { 2 * outputs } else { outputs };
        let plain = self.plain(weights)?;
        // A row of levels must have the same bits whichever rows are computed with it.
        let of_one_row = match input.has_levels() && batch > BATCHES[0] {
            true => self
                .form_of(weights, input, role, BATCHES[0])?
                .map(|sum| Product::new(weights.chunk.format, input, role, sum, BATCHES[0])),
            false => None,
        };
        self.take_form(key, weights, &mut |backend, product| {
            // Small enough not to saturate gates.
            let x: Vec<f32> =
                Numbers(8).take(ROWS * weights.blocks * BLOCK_COLUMNS).iter().map(|x| x * 0.1).collect();
            for normed in [None, Some(1e-5)] {
                let expected = backend.run_form(plain, weights, lines, &x, normed)?;
                let found = backend.run_form(product, weights, outputs, &x, normed)?;
                let expected = if gated { gate(&expected, outputs) } else { expected };
                let limit = if gated { 2.0 * limit(input) } else { limit(input) };
                if let Err(reason) = compare(&found, &expected, limit) {
                    return Ok(Err(reason));
                }
                if let Some(of_one_row) = of_one_row {
                    let expected = backend.run_form(of_one_row, weights, outputs, &x, normed)?;
                    if let Err(reason) = same_bits(&found, &expected) {
                        return Ok(Err(reason));
                    }
                }
            }
            Ok(Ok(()))
        })
    }

    /// Proves that rows of a table equal the table's products with unit vectors.
    pub(crate) fn prove_embed(&mut self, weights: Weights<'_>) -> Result<(), ComputeError> {
        let Weights { chunk, blocks } = weights;
        let kernel = Kernel::Embed(chunk.format);
        if self.proofs.is_proved(&[kernel]) || blocks == 0 {
            return Ok(());
        }
        let (rows, width) = (chunk.rows.len().min(OUTPUTS), blocks * BLOCK_COLUMNS);
        let columns: [usize; ROWS] = std::array::from_fn(|row| (row * 37 + 5) % width);
        let mut x = vec![0.0; ROWS * width];
        for (row, column) in columns.iter().enumerate() {
            x[row * width + column] = 1.0;
        }
        let plain = self.plain(weights)?;
        let by_column = self.run_form(plain, weights, rows, &x, None)?;
        let mut out = self.buffer(rows, width)?;
        out.shape(rows)?;
        let ids: Vec<u32> = (0..rows as u32).map(|row| chunk.rows.start as u32 + row).collect();
        let (memory, at) = self.device.table(&ids)?;
        self.record_embed(weights, (&memory, at), [0, chunk.rows.end as u32], 1.0, &out)?;
        let mut table = vec![0.0; rows * width];
        self.read(&out, 0..rows, &mut table)?;
        let found: Vec<f32> =
            columns.iter().flat_map(|column| table.chunks(width).map(|row| row[*column])).collect();
        match compare(&found, &by_column, FLOATS_LIMIT) {
            Ok(()) => {
                self.proofs.note(&[kernel]);
                Ok(())
            }
            Err(reason) => Err(self.refused(&format!("{kernel:?}"), &reason)),
        }
    }

    /// Whether products in tiles are correct for a format. Proved now, if it was not before.
    pub(crate) fn proves_tiles(&mut self, weights: Weights<'_>) -> Result<bool, ComputeError> {
        if weights.blocks == 0 {
            return Ok(false);
        }
        let form = Tiles::of_rows(weights.chunk.format);
        let kernel = Kernel::Tiles(form);
        self.takes_product(kernel, &[kernel], |backend| {
            // More than one tile in each direction.
            let outputs = weights.chunk.rows.len().min(TILE_LINES + 6);
            let x = Numbers(11).take((form.rows() + ROWS) * weights.blocks * BLOCK_COLUMNS);
            let plain = backend.plain(weights)?;
            let expected = backend.run_form(plain, weights, outputs, &x, None)?;
            let found = backend.run_on(&x, (weights.blocks, outputs), |backend, from, out| {
                let all = RowProduct::of_chunk(weights.chunk, weights.blocks, None, 0..out.rows);
                backend.record_tiles(&RowProduct { outputs, first: 0, ..all }, &floats(from), out)
            })?;
            Ok(compare(&found, &expected, FLOATS_LIMIT))
        })
    }

    /// Runs `record` on rows `x` of `blocks` blocks. Returns `[rows][outputs]`.
    pub(super) fn run_on(
        &mut self,
        x: &[f32],
        (blocks, outputs): (usize, usize),
        record: impl FnOnce(&mut Self, &Buffer, &Buffer) -> Result<(), ComputeError>,
    ) -> Result<Vec<f32>, ComputeError> {
        let width = blocks * BLOCK_COLUMNS;
        let rows = x.len() / width.max(1);
        let (mut from, mut out) = (self.buffer(rows, width)?, self.buffer(rows, outputs)?);
        self.write(x, &mut from)?;
        out.shape(rows)?;
        record(self, &from, &out)?;
        let mut found = vec![0.0; rows * outputs];
        self.read(&out, 0..rows, &mut found)?;
        Ok(found)
    }

    pub(crate) fn plain(&self, weights: Weights<'_>) -> Result<Product, ComputeError> {
        let (format, input, role, batch) = (weights.chunk.format, Input::Floats, Role::Plain, BATCHES[0]);
        match self.forms.get(&(format, input, role, batch)) {
            Some(Some(sum)) => Ok(Product::new(format, input, role, *sum, batch)),
            _ => Err(self.refused(&format!("{format:?}"), "a product was asked for with an unproved matrix")),
        }
    }

    /// Chooses the first form that `check` accepts.
    fn take_form(
        &mut self,
        key: FormKey,
        weights: Weights<'_>,
        check: Check<'_>,
    ) -> Result<Option<Sum>, ComputeError> {
        let (format, input, role, batch) = key;
        debug_assert_eq!(format, weights.chunk.format);
        let sums: &[Sum] = if self.has_subgroups { &[Sum::Subgroup, Sum::Shared] } else { &[Sum::Shared] };
        let mut why = String::new();
        for &sum in sums {
            let product = Product::new(format, input, role, sum, batch);
            let kernel = Kernel::Product(product);
            let outcome = if self.proofs.is_proved(&[kernel]) { Ok(()) } else { check(self, product)? };
            match outcome {
                Ok(()) => {
                    self.proofs.note(&[kernel]);
                    self.forms.insert(key, Some(sum));
                    return Ok(Some(sum));
                }
                Err(reason) => {
                    self.refuse(&format!("{product:?}"), &reason);
                    why = reason;
                }
            }
        }
        if input.has_levels() {
            self.forms.insert(key, None);
            return Ok(None);
        }
        Err(self.refused(&format!("products of {format:?}"), &why))
    }

    /// Runs a form on rows `x`, with `normed` on their norm. Returns `[rows][outputs]`.
    pub(super) fn run_form(
        &mut self,
        product: Product,
        weights: Weights<'_>,
        outputs: usize,
        x: &[f32],
        normed: Option<f32>,
    ) -> Result<Vec<f32>, ComputeError> {
        self.run_levels(weights, outputs, x, (product.input, normed), |backend, operand, arguments, out| {
            let to = (out, None);
            backend.record_product(product, (weights.chunk, None), operand, &[], arguments, to)
        })
    }

    /// Plain products of rows `x` with as many rows of weights as there are biases, which are
    /// added.
    pub(super) fn run_biased(
        &mut self,
        weights: Weights<'_>,
        biases: &[f32],
        x: &[f32],
    ) -> Result<Vec<f32>, ComputeError> {
        let plain = self.plain(weights)?;
        let mut all = self.run_form(plain, weights, biases.len(), x, None)?;
        for sums in all.chunks_mut(biases.len()) {
            sums.iter_mut().zip(biases).for_each(|(sum, bias)| *sum += bias);
        }
        Ok(all)
    }

    /// Runs `record` on rows `x`, in this format and with `normed` on their norm. Returns
    /// `[rows][outputs]`.
    pub(super) fn run_levels(
        &mut self,
        weights: Weights<'_>,
        outputs: usize,
        x: &[f32],
        (format, normed): (Input, Option<f32>),
        record: impl FnOnce(&mut Self, &Operand, &ProductArguments, &Memory) -> Result<(), ComputeError>,
    ) -> Result<Vec<f32>, ComputeError> {
        let blocks = weights.blocks;
        let norm = self.vector(&Numbers(9).take(blocks * BLOCK_COLUMNS))?;
        self.run_on(x, (blocks, outputs), |backend, x, out| {
            let input = match normed {
                None => LinearInput::Plain(x),
                Some(eps) => LinearInput::Normed { x, weight: &norm, eps },
            };
            let mut spare = None;
            let operand = backend.operand(&input, 0..out.rows, blocks, format, &mut spare)?;
            let arguments = ProductArguments::new(weights, outputs, 0..out.rows, operand.stride(), out);
            record(backend, &operand, &arguments, &out.memory)?;
            backend.spares.extend(spare);
            Ok(())
        })
    }

    /// Proves products with experts against plain products with the same weights.
    pub(crate) fn prove_experts(&mut self, experts: &Experts) -> Result<(), ComputeError> {
        for (sets, role) in [(&experts.up, experts.first_role()), (&experts.down, Role::ExpertDown)] {
            for set in sets {
                self.prove_set(set, role)?;
            }
        }
        self.prove(super::Family::Experts)?;
        // Both shapes of tiles.
        self.pair_forms(experts, 0)?;
        self.pair_forms(experts, usize::MAX).map(|_| ())
    }

    fn prove_set(&mut self, set: &Set, role: Role) -> Result<(), ComputeError> {
        let wanted = if role.is_of_each_expert() { self.plain_input() } else { self.gated_input() };
        for input in [Input::Floats, wanted] {
            let key = (set.chunk.format, input, role, 1);
            let has_form = input == Input::Floats || set.chunk.format.has_scales();
            if set.blocks == 0 || !has_form || self.forms.contains_key(&key) {
                continue;
            }
            let weights = set.weights();
            let lines = if role.is_gated() { 4 } else { 2 };
            let outputs = (set.rows / lines).clamp(1, OUTPUTS / 2);
            let counts = if role.is_of_each_expert() { &[2][..] } else { &COUNTS };
            let x = Numbers(10).take(ROWS * OF_ROW * set.blocks * BLOCK_COLUMNS);
            // Both halves of small matrices would be the same rows.
            let distance = if set.rows >= lines * outputs { lines * outputs / 2 } else { 0 };
            let biases = Numbers(14).take(distance + lines * outputs / 2);
            let all = self.run_biased(weights, &biases, &x)?;
            let biases = self.vector(&biases)?.memory;
            self.take_form(key, weights, &mut |backend, product| {
                for &of_row in counts {
                    let expected = expected_of_experts(&all, role, [outputs, distance], [ROWS, of_row]);
                    let x = &x[..ROWS * of_row * set.blocks * BLOCK_COLUMNS];
                    let sizes = [outputs, distance, of_row];
                    let found = backend.run_experts(product, (weights, Some(&biases)), sizes, x)?;
                    if let Err(reason) = compare(&found, &expected, 2.0 * limit(input)) {
                        return Ok(Err(reason));
                    }
                }
                Ok(Ok(()))
            })?;
        }
        Ok(())
    }

    /// Runs a form of experts on rows that choose `of_row` experts, 0 and 2 in turn: the rows of
    /// weights, and of the biases, from 0 on and from `distance` on. Expert 1 is absent. `x` has
    /// rows for each pair.
    pub(super) fn run_experts(
        &mut self,
        product: Product,
        (weights, bias): (Weights<'_>, Option<&Memory>),
        [outputs, distance, of_row]: [usize; 3],
        x: &[f32],
    ) -> Result<Vec<f32>, ComputeError> {
        let width = weights.blocks * BLOCK_COLUMNS;
        let pairs = x.len() / width;
        let rows = pairs / of_row;
        let is_first = product.role.is_of_each_expert();
        let (mut input, mut choices) = (self.buffer(pairs, width)?, self.buffer(rows, 2 * of_row)?);
        self.write(x, &mut input)?;
        self.write(&choices_of(of_row).repeat(rows), &mut choices)?;
        let entry = |first: usize| match is_first {
            true => [first * weights.blocks, outputs, first, 1],
            false => [first * weights.blocks, weights.blocks, first, 1],
        };
        let table = [entry(0), [0; 4], entry(distance)].concat().into_iter().map(|number| number as u32);
        let table = self.device.filled(&table.collect::<Vec<_>>(), "a table of experts")?;
        let results = if is_first { pairs } else { rows };
        // What a form leaves out must not look like a result.
        let mut unwritten = |rows: usize| -> Result<Buffer, ComputeError> {
            let mut out = self.buffer(rows, outputs)?;
            self.write(&vec![f32::NAN; rows * outputs], &mut out)?;
            Ok(out)
        };
        let (of_pairs, out) = (unwritten(pairs)?, unwritten(results)?);
        let operand = match product.input {
            Input::Floats => floats(&input),
            levels => self.quantized(&input, 0..pairs, weights.blocks, levels, None)?,
        };
        let arguments = ProductArguments {
            biased: bias.is_some(),
            choices: of_row,
            choice_stride: choices.stride(),
            ..ProductArguments::new(weights, outputs, 0..rows, operand.stride(), &out)
        };
        let weights = (weights.chunk, bias);
        if product.shares_experts() {
            let sorted = self.sort_pairs(&choices, &(0..rows), (&table, 3), product.batch)?;
            let to = if is_first { &out } else { &of_pairs };
            let pairs = (&sorted, &table);
            self.record_sharing(product, weights, &operand, pairs, arguments, &to.memory)?;
            if !is_first {
                self.add_pairs(&choices, &(0..rows), (&of_pairs, &table), (&out, false))?;
            }
        } else {
            let groups = [if is_first { of_row as u32 } else { 1 }, rows as u32];
            let (extra, to) = ([&table, &choices.memory], (&out.memory, Some(groups)));
            self.record_product(product, weights, &operand, &extra, &arguments, to)?;
        }
        let mut found = vec![0.0; results * outputs];
        self.read(&out, 0..results, &mut found)?;
        Ok(found)
    }
}

/// Most experts of a row in [`GpuBackend::run_experts`], more than are computed together, and their
/// weights.
pub(super) const OF_ROW: usize = 5;
pub(super) const WEIGHTS: [f32; OF_ROW] = [0.5, 0.25, 1.0, -0.75, 0.625];

/// Numbers of experts of a row with which other numbers of lanes share an output.
pub(super) const COUNTS: [usize; 3] = [1, FEW_CHOICES - 1, OF_ROW];

/// A row of choices of the first and the third expert in turn.
pub(super) fn choices_of(of_row: usize) -> Vec<f32> {
    let experts = (0..of_row).map(|i| [0.0, 2.0][i % 2]);
    experts.chain(WEIGHTS[..of_row].iter().copied()).collect()
}

/// The expected results of [`GpuBackend::run_experts`]. `all` are plain products of its rows of
/// input with the rows of weights from 0 on.
pub(super) fn expected_of_experts(
    all: &[f32],
    role: Role,
    [outputs, distance]: [usize; 2],
    [rows, of_row]: [usize; 2],
) -> Vec<f32> {
    let lines = if role.is_gated() { 2 * outputs } else { outputs };
    let products: Vec<&[f32]> = all.chunks(distance + lines).collect();
    let mut expected = Vec::new();
    for row in 0..rows {
        if role.is_of_each_expert() {
            // Input rows are those of the step; all experts read the same rows.
            for i in 0..of_row {
                let lines = &products[row][i % 2 * distance..][..lines];
                match role {
                    Role::ExpertGated => expected.extend(gate(lines, outputs)),
                    _ => expected.extend(lines.iter().map(|up| up.max(0.0).powi(2))),
                }
            }
        } else {
            let of_pair =
                |i: usize, output: usize| WEIGHTS[i] * products[of_row * row + i][i % 2 * distance + output];
            expected.extend((0..outputs).map(|output| (0..of_row).map(|i| of_pair(i, output)).sum::<f32>()));
        }
    }
    expected
}

/// Whether numbers have the same bits.
pub(super) fn same_bits(found: &[f32], expected: &[f32]) -> Result<(), String> {
    match found.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits()) {
        None => Ok(()),
        Some(at) => Err(format!("result {at} is {}, and {} when rows are alone", found[at], expected[at])),
    }
}

/// Row `row` of all parts, as the file has it.
fn stored_row(parts: &[MatrixSource<'_>], mut row: usize) -> Vec<f32> {
    for part in parts {
        if row < part.rows {
            let mut values = vec![0.0; part.cols];
            part.dequantize_row(row, &mut values);
            return values;
        }
        row -= part.rows;
    }
    Vec::new()
}

/// `silu(gate) * up` of rows of `[gates, ups]`.
pub(super) fn gate(both: &[f32], outputs: usize) -> Vec<f32> {
    let of_row = |row: &[f32]| {
        let (gates, ups) = row.split_at(outputs);
        gates.iter().zip(ups).map(|(gate, up)| Activation::Silu.of(*gate, *up)).collect::<Vec<_>>()
    };
    both.chunks(2 * outputs.max(1)).flat_map(of_row).collect()
}
