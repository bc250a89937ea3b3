//! Kernels that also store levels of their results: the same bits as from the kernel that rounds
//! rows.

use thunder_compute::{ComputeError, Device as _, LinearInput};

use super::products::{COUNTS, choices_of};
use super::{Numbers, Weights};
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer, Memory};
use crate::kernel::{Input, Kernel, Leaves, Product, Role};
use crate::operations::products::ProductArguments;
use crate::without::{Way, without};

/// Outputs of a proof: two blocks.
const OUTPUTS: usize = 2 * BLOCK_COLUMNS;

impl GpuBackend {
    /// The form of a product of `rows` that stores levels, if it is correct. Proved now, if it was
    /// not before.
    pub(crate) fn leaving_form(
        &mut self,
        weights: Weights<'_>,
        input: Input,
        role: Role,
        leaves: Leaves,
        rows: usize,
    ) -> Result<Option<Product>, ComputeError> {
        if weights.blocks == 0 || without(Way::Levels) {
            return Ok(None);
        }
        let Some(usual) = self.product_for(weights, input, role, rows)? else { return Ok(None) };
        if !usual.can_leave() {
            return Ok(None);
        }
        let product = usual.leaving(leaves);
        if !product.can_bind() {
            return Ok(None);
        }
        if let Some(right) = self.leaving.get(&product) {
            return Ok(right.then_some(product));
        }
        let kernel = Kernel::Product(product);
        let lines = if role.is_gated() { 2 * OUTPUTS } else { OUTPUTS };
        let fits =
            weights.chunk.rows.len() >= lines && product.shape.threads() as u32 <= self.device.max_threads();
        let right = fits && (self.proofs.is_proved(&[kernel]) || self.prove_leaving(product, weights)?);
        if right {
            self.proofs.note(&[kernel]);
        }
        self.leaving.insert(product, right);
        Ok(right.then_some(product))
    }

    fn prove_leaving(&mut self, product: Product, weights: Weights<'_>) -> Result<bool, ComputeError> {
        let outcome = match product.role {
            Role::ExpertGated | Role::ExpertUp => self.compare_leaving_experts(product, weights)?,
            Role::ExpertDown => self.compare_leaving_sums(product, weights)?,
            _ => self.compare_leaving(product, weights)?,
        };
        if let Err(reason) = &outcome {
            self.refuse(&format!("{product:?}"), reason);
        }
        Ok(outcome.is_ok())
    }

    /// Computes a row by the form, and by the usual form followed by the kernel that rounds rows.
    fn compare_leaving(
        &mut self,
        product: Product,
        weights: Weights<'_>,
    ) -> Result<Result<(), String>, ComputeError> {
        const ROWS: usize = 2;
        const BLOCKS: usize = OUTPUTS / BLOCK_COLUMNS;
        let (mut numbers, width) = (Numbers(13), weights.blocks * BLOCK_COLUMNS);
        let mut x = self.buffer(ROWS, width)?;
        self.write(&numbers.take(ROWS * width).iter().map(|x| 0.1 * x).collect::<Vec<_>>(), &mut x)?;
        let (before, after) = (self.vector(&numbers.take(width))?, self.vector(&numbers.take(OUTPUTS))?);
        let (mut usual, mut leaving) = (self.buffer(ROWS, OUTPUTS)?, self.buffer(ROWS, OUTPUTS)?);
        let old = numbers.take(ROWS * OUTPUTS);
        self.write(&old, &mut usual)?;
        self.write(&old, &mut leaving)?;
        let normed = product.leaves == Leaves::Normed;
        let wanted = if product.leaves == Leaves::Pairs { Input::Pairs } else { Input::Bytes };
        // Gates and ups read norms; other products of these kinds do not.
        let input = match product.role {
            Role::Gated => LinearInput::Normed { x: &x, weight: &before, eps: 1e-5 },
            _ => LinearInput::Plain(&x),
        };
        let rows = 1..ROWS;
        let operand = self.operand(&input, rows.clone(), weights.blocks, product.input, &mut None)?;
        let arguments = ProductArguments {
            adds: normed,
            ..ProductArguments::new(weights, OUTPUTS, rows.clone(), operand.stride(), &usual)
        };
        let to = (&usual.memory, None);
        let of_usual = product.of_one_row();
        self.record_product(of_usual, (weights.chunk, None), &operand, &[], &arguments, to)?;
        let bytes = ROWS * BLOCKS * wanted.planes() * 16;
        let levels = self.device.memory(bytes, "a proof")?;
        let scales = self.device.memory(ROWS * BLOCKS * 16, "a proof")?;
        let squares = self.device.memory(ROWS * BLOCKS * 4, "a proof")?;
        let left: &[&Memory] =
            if normed { &[&after.memory, &levels, &scales, &squares] } else { &[&levels, &scales] };
        let to = (&leaving.memory, None);
        self.record_leaving(product, (weights.chunk, None), &operand, &[], &arguments, to, left)?;
        let norm = normed.then_some((&after, 1e-5));
        let expected = self.quantized(&usual, rows, BLOCKS, wanted, norm)?;
        let of_rows = |words: usize| words..ROWS * words;
        let mut pairs = vec![
            (&usual.memory, &leaving.memory, 0..ROWS * OUTPUTS),
            (&expected.buffers[0], &levels, of_rows(BLOCKS * wanted.planes() * 4)),
            (&expected.buffers[1], &scales, of_rows(BLOCKS * 4)),
        ];
        let of_norm = expected.squares().cloned();
        pairs.extend(of_norm.as_ref().map(|of_norm| (of_norm, &squares, of_rows(BLOCKS))));
        same(self, &pairs)
    }
}

impl GpuBackend {
    /// Choices of two experts, the first and the third, in turn, for each row, and a table of
    /// experts in which they have these entries.
    fn two_experts(
        &mut self,
        rows: usize,
        of_row: usize,
        [first, third]: [[u32; 4]; 2],
    ) -> Result<(Buffer, Memory), ComputeError> {
        let mut choices = self.buffer(rows, 2 * of_row)?;
        self.write(&choices_of(of_row).repeat(rows), &mut choices)?;
        let table = self.device.filled(&[first, [0; 4], third].concat(), "a proof")?;
        Ok((choices, table))
    }

    /// A copy of the first words, because the kernel that rounds rows writes its levels to the same
    /// place.
    pub(super) fn kept(&mut self, memory: &Memory, words: usize) -> Result<Memory, ComputeError> {
        let mut values = Vec::new();
        self.device.read(memory, 0..words, &mut values)?;
        self.device.filled(&values, "a proof")
    }

    /// Gates and ups of two experts of each row. Both have the same rows of weights.
    fn compare_leaving_experts(
        &mut self,
        product: Product,
        weights: Weights<'_>,
    ) -> Result<Result<(), String>, ComputeError> {
        const ROWS: usize = 2;
        const OF_ROW: usize = 2;
        const BLOCKS: usize = OUTPUTS / BLOCK_COLUMNS;
        let (mut numbers, width) = (Numbers(14), weights.blocks * BLOCK_COLUMNS);
        let mut x = self.buffer(ROWS, width)?;
        self.write(&numbers.take(ROWS * width).iter().map(|x| 0.1 * x).collect::<Vec<_>>(), &mut x)?;
        let (choices, table) = self.two_experts(ROWS, OF_ROW, [[0, OUTPUTS as u32, 0, 1]; 2])?;
        let wanted = if product.leaves == Leaves::Pairs { Input::Pairs } else { Input::Bytes };
        let operand = self.quantized(&x, 0..ROWS, weights.blocks, product.input, None)?;
        let mut usual = self.buffer(ROWS * OF_ROW, OUTPUTS)?;
        let mut leaving = self.buffer(ROWS * OF_ROW, OUTPUTS)?;
        usual.shape(ROWS * OF_ROW)?;
        leaving.shape(ROWS * OF_ROW)?;
        let arguments = ProductArguments {
            choices: OF_ROW,
            choice_stride: choices.stride(),
            ..ProductArguments::new(weights, OUTPUTS, 0..ROWS, operand.stride(), &usual)
        };
        let of_usual = product.of_one_row();
        let (extra, groups) = ([&table, &choices.memory], Some([OF_ROW as u32, ROWS as u32]));
        let to = (&usual.memory, groups);
        self.record_product(of_usual, (weights.chunk, None), &operand, &extra, &arguments, to)?;
        let levels = self.device.memory(ROWS * OF_ROW * BLOCKS * wanted.planes() * 16, "a proof")?;
        let scales = self.device.memory(ROWS * OF_ROW * BLOCKS * 16, "a proof")?;
        let (to, left) = ((&leaving.memory, groups), [&levels, &scales]);
        self.record_leaving(product, (weights.chunk, None), &operand, &extra, &arguments, to, &left)?;
        let expected = self.quantized(&usual, 0..ROWS * OF_ROW, BLOCKS, wanted, None)?;
        let pairs = [
            (&usual.memory, &leaving.memory, 0..ROWS * OF_ROW * OUTPUTS),
            (&expected.buffers[0], &levels, 0..ROWS * OF_ROW * BLOCKS * wanted.planes() * 4),
            (&expected.buffers[1], &scales, 0..ROWS * OF_ROW * BLOCKS * 4),
        ];
        same(self, &pairs)
    }
}

impl GpuBackend {
    /// Sums over the experts of each row, for each number of lanes that share an output.
    fn compare_leaving_sums(
        &mut self,
        product: Product,
        weights: Weights<'_>,
    ) -> Result<Result<(), String>, ComputeError> {
        for of_row in COUNTS {
            if let Err(reason) = self.compare_sums_of(product, weights, of_row)? {
                return Ok(Err(format!("{reason}, with {of_row} experts")));
            }
        }
        Ok(Ok(()))
    }

    fn compare_sums_of(
        &mut self,
        product: Product,
        weights: Weights<'_>,
        of_row: usize,
    ) -> Result<Result<(), String>, ComputeError> {
        const ROWS: usize = 2;
        const BLOCKS: usize = OUTPUTS / BLOCK_COLUMNS;
        let (mut numbers, width) = (Numbers(17), weights.blocks * BLOCK_COLUMNS);
        let mut x = self.buffer(ROWS * of_row, width)?;
        self.write(&numbers.take(ROWS * of_row * width), &mut x)?;
        // The third expert has other rows than the first, if there are any.
        let distance = if weights.chunk.rows.len() >= 2 * OUTPUTS { OUTPUTS } else { 0 };
        let entry = |first: usize| [first * weights.blocks, weights.blocks, first, 1].map(|it| it as u32);
        let (choices, table) = self.two_experts(ROWS, of_row, [0, distance].map(entry))?;
        let biases = self.vector(&numbers.take(2 * OUTPUTS))?.memory;
        let after = self.vector(&numbers.take(OUTPUTS))?;
        let operand = self.quantized(&x, 0..ROWS * of_row, weights.blocks, product.input, None)?;
        let (mut usual, mut leaving) = (self.buffer(ROWS, OUTPUTS)?, self.buffer(ROWS, OUTPUTS)?);
        let old = numbers.take(ROWS * OUTPUTS);
        self.write(&old, &mut usual)?;
        self.write(&old, &mut leaving)?;
        let arguments = ProductArguments {
            adds: true,
            biased: true,
            choices: of_row,
            choice_stride: choices.stride(),
            ..ProductArguments::new(weights, OUTPUTS, 0..ROWS, operand.stride(), &usual)
        };
        let of_usual = product.of_one_row();
        let (extra, groups) = ([&table, &choices.memory], Some([1, ROWS as u32]));
        let (to, weights) = ((&usual.memory, groups), (weights.chunk, Some(&biases)));
        self.record_product(of_usual, weights, &operand, &extra, &arguments, to)?;
        let [levels, scales, squares] = [ROWS * BLOCKS * 32, ROWS * BLOCKS * 16, ROWS * BLOCKS * 4];
        let levels = self.device.memory(levels, "a proof")?;
        let scales = self.device.memory(scales, "a proof")?;
        let squares = self.device.memory(squares, "a proof")?;
        let (to, left) = ((&leaving.memory, groups), [&after.memory, &levels, &scales, &squares]);
        self.record_leaving(product, weights, &operand, &extra, &arguments, to, &left)?;
        let expected = self.quantized(&usual, 0..ROWS, BLOCKS, Input::Bytes, Some((&after, 1e-5)))?;
        let mut pairs = vec![
            (&usual.memory, &leaving.memory, 0..ROWS * OUTPUTS),
            (&expected.buffers[0], &levels, 0..ROWS * BLOCKS * 8),
            (&expected.buffers[1], &scales, 0..ROWS * BLOCKS * 4),
        ];
        let of_norm = expected.squares().cloned();
        pairs.extend(of_norm.as_ref().map(|of_norm| (of_norm, &squares, 0..ROWS * BLOCKS)));
        same(self, &pairs)
    }
}

/// Levels of attention's results, with two query heads of 64 columns.
pub(super) fn combined(backend: &mut GpuBackend) -> Result<Result<(), String>, ComputeError> {
    const ROWS: usize = 2;
    const HEADS: usize = 2;
    const SPLITS: usize = 3;
    const WIDTH: usize = 64;
    const BLOCKS: usize = HEADS * WIDTH / 32;
    let mut numbers = Numbers(12).take(ROWS * HEADS * SPLITS * (WIDTH + 2));
    // Sums of weights are positive.
    numbers.chunks_mut(WIDTH + 2).for_each(|part| part[1] = part[1].abs() + 0.5);
    let parts: Vec<u32> = numbers.iter().map(|x| x.to_bits()).collect();
    let parts = backend.device.filled(&parts, "a proof")?;
    // Positions of rows with three and with two splits.
    let tables = backend.device.filled(&[150, 0, 0, 0, 70, 0, 0, 0], "a proof")?;
    let mut plain = backend.buffer(ROWS, HEADS * WIDTH)?;
    let mut leaving = backend.buffer(ROWS, HEADS * WIDTH)?;
    plain.shape(ROWS)?;
    leaving.shape(ROWS)?;
    let levels = backend.device.memory(ROWS * BLOCKS * 32, "a proof")?;
    let scales = backend.device.memory(ROWS * BLOCKS * 16, "a proof")?;
    let arguments = [0, HEADS, SPLITS, WIDTH + 2, plain.stride(), 0, WIDTH, 0, 0, 0, BLOCKS, 0]
        .map(|number| number as u32);
    let groups = [HEADS as u32, ROWS as u32, (WIDTH / 32) as u32];
    let nothing = backend.nothing.clone();
    let buffers = [&tables, &nothing, &parts, &plain.memory];
    backend.device.dispatch(&Kernel::Combine { levels: false }, &buffers, &arguments, groups)?;
    let buffers = [&tables, &nothing, &parts, &leaving.memory, &levels, &scales];
    backend.device.dispatch(&Kernel::Combine { levels: true }, &buffers, &arguments, groups)?;
    let operand = backend.quantized(&plain, 0..ROWS, BLOCKS, Input::Bytes, None)?;
    let pairs = [
        (&plain.memory, &leaving.memory, 0..ROWS * plain.stride()),
        (&operand.buffers[0], &levels, 0..ROWS * BLOCKS * 8),
        (&operand.buffers[1], &scales, 0..ROWS * BLOCKS * 4),
    ];
    same(backend, &pairs)
}

/// Levels of norms: of rows that the kernel processes in one turn, and in several.
pub(super) fn normed(backend: &mut GpuBackend) -> Result<Result<(), String>, ComputeError> {
    const ROWS: usize = 2;
    for width in [96, 2048 + 64] {
        let blocks = width / BLOCK_COLUMNS;
        let mut numbers = Numbers(15);
        let [mut x, mut plain, mut leaving] =
            [backend.buffer(ROWS, width)?, backend.buffer(ROWS, width)?, backend.buffer(ROWS, width)?];
        backend.write(&numbers.take(ROWS * width), &mut x)?;
        plain.shape(ROWS)?;
        leaving.shape(ROWS)?;
        let weight = backend.vector(&numbers.take(width))?;
        backend.record_norm(&x, 0..ROWS, (&weight, 1e-5), &leaving, true)?;
        let left = backend.levels_at(0, &leaving, blocks, Input::Bytes)?;
        let levels = backend.kept(&left.levels, ROWS * blocks * 8)?;
        let scales = backend.kept(&left.scales, ROWS * blocks * 4)?;
        backend.record_norm(&x, 0..ROWS, (&weight, 1e-5), &plain, false)?;
        let operand = backend.quantized(&plain, 0..ROWS, blocks, Input::Bytes, None)?;
        let pairs = [
            (&plain.memory, &leaving.memory, 0..ROWS * width),
            (&operand.buffers[0], &levels, 0..ROWS * blocks * 8),
            (&operand.buffers[1], &scales, 0..ROWS * blocks * 4),
        ];
        if let Err(reason) = same(backend, &pairs)? {
            return Ok(Err(reason));
        }
    }
    Ok(Ok(()))
}

/// Whether two buffers have the same words.
pub(super) fn same(
    backend: &mut GpuBackend,
    pairs: &[(&Memory, &Memory, std::ops::Range<usize>)],
) -> Result<Result<(), String>, ComputeError> {
    let (mut expected, mut found) = (Vec::new(), Vec::new());
    for (index, (of_expected, of_found, words)) in pairs.iter().enumerate() {
        backend.device.read(of_expected, words.clone(), &mut expected)?;
        backend.device.read(of_found, words.clone(), &mut found)?;
        if let Some(at) = (0..words.len()).find(|&at| found[at] != expected[at]) {
            let (found, expected) = (found[at], expected[at]);
            return Ok(Err(format!("word {at} of result {index} is {found:#010x}, not {expected:#010x}")));
        }
    }
    Ok(Ok(()))
}
