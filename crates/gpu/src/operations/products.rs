//! Products with weights.

use std::ops::Range;

use thunder_compute::{Activation, Activations, ComputeError, InputOf, LinearInput};

use super::matrices::{RowProduct, TILE_FLOPS, pieces};
use super::rows::fits;
use super::{Outcome, activation_arguments};
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer, Memory};
use crate::kernel::{Input, Kernel, Leaves, Product, Role, Tiles};
use crate::matrix::{Chunk, Matrix};
use crate::proof::Weights;

/// Outside of a step, this many rows are treated as a prompt's.
pub(super) const MANY_ROWS: usize = 16;

/// Input rows in the format that a product reads.
pub(crate) struct Operand {
    pub input: Input,
    /// The rows; for levels, also their scales.
    pub buffers: Vec<Memory>,
    /// Distance of two rows: quads of floats, or blocks of levels.
    pub stride: u32,
    /// Set if the levels are a norm's and not yet divided by it.
    pub norm: Option<RowNorm>,
    /// Where the levels are in [`GpuBackend::levels`].
    pub place: usize,
}

/// What a product divides its sums by.
#[derive(Clone)]
pub(crate) struct RowNorm {
    /// Squares of the rows' blocks.
    pub squares: Memory,
    pub width: u32,
    pub eps: f32,
}

/// Arguments that all products have.
#[derive(Default)]
pub(crate) struct ProductArguments {
    pub blocks: usize,
    pub shift: u32,
    pub outputs: usize,
    /// Adds a bias.
    pub biased: bool,
    /// Adds to the existing values.
    pub adds: bool,
    /// Rows of input.
    pub rows: Range<usize>,
    pub x_stride: u32,
    pub x_first: usize,
    pub out_row: usize,
    pub out_stride: usize,
    pub out_first: usize,
    pub activation: Activation,
    pub choices: usize,
    pub choice_stride: usize,
    pub choice_row: usize,
    /// The first bias. Tables of experts have it for each.
    pub bias: usize,
    /// Number of heads, 0 for one. Each has `outputs` rows of the weights and columns of the
    /// result.
    pub heads: usize,
    /// From the input of a head to the next one's, in quads.
    pub x_of_head: usize,
}

impl ProductArguments {
    /// A product of `rows` with the first `outputs` rows of the weights.
    pub fn new(
        weights: Weights<'_>,
        outputs: usize,
        rows: Range<usize>,
        x_stride: u32,
        out: &Buffer,
    ) -> Self {
        Self {
            blocks: weights.blocks,
            shift: weights.chunk.shift,
            outputs,
            out_row: rows.start,
            rows,
            x_stride,
            out_stride: out.stride(),
            ..Default::default()
        }
    }

    /// A product with a part of a matrix. It has the same rows and writes the part's columns of
    /// `out`.
    pub fn with_chunk(w: &Matrix, chunk: &Chunk, rows: Range<usize>, x_stride: u32, out: &Buffer) -> Self {
        let weights = Weights { chunk, blocks: w.blocks };
        Self {
            biased: w.bias.is_some(),
            out_first: chunk.rows.start,
            bias: chunk.rows.start,
            ..Self::new(weights, chunk.rows.len(), rows, x_stride, out)
        }
    }

    pub fn words(&self) -> [u32; 21] {
        let [kind, alpha, limit] = activation_arguments(self.activation);
        [
            self.blocks as u32,
            self.shift,
            self.outputs as u32,
            u32::from(self.biased) | u32::from(self.adds) << 1,
            self.rows.len() as u32,
            self.rows.start as u32,
            self.x_stride,
            self.x_first as u32,
            self.out_row as u32,
            self.out_stride as u32,
            self.out_first as u32,
            kind,
            alpha,
            limit,
            self.choices as u32,
            self.choice_stride as u32,
            self.choice_row as u32,
            self.bias as u32,
            0,
            0,
            self.x_of_head as u32,
        ]
    }
}

impl GpuBackend {
    /// The format in which products with these weights read rows.
    pub(super) fn input_for(
        &mut self,
        x: &InputOf<'_, Self>,
        rows: usize,
        weights: Weights<'_>,
        role: Role,
    ) -> Result<Input, ComputeError> {
        let wanted = match x {
            LinearInput::Precise(_) => Input::Floats,
            LinearInput::Gated(_) => self.gated_input(),
            _ => self.plain_input(),
        };
        self.proved_input(wanted, weights, role, rows)
    }

    /// The format of gated activations for quantized weights. A few of them are large, so 8 bits
    /// with one scale would cost more precision than for other activations.
    pub(crate) fn gated_input(&self) -> Input {
        match self.config.activations {
            Activations::Auto => Input::Pairs,
            Activations::Int8 => Input::Bytes,
            _ => Input::Floats,
        }
    }

    /// The format of other activations.
    pub(crate) fn plain_input(&self) -> Input {
        match self.config.activations {
            Activations::Auto | Activations::Int8 => Input::Bytes,
            _ => Input::Floats,
        }
    }

    /// `wanted`, or floats if none of its forms is correct or the weights have no scales.
    pub(super) fn proved_input(
        &mut self,
        wanted: Input,
        weights: Weights<'_>,
        role: Role,
        rows: usize,
    ) -> Result<Input, ComputeError> {
        let has_form = wanted.has_levels()
            && weights.chunk.format.has_scales()
            && self.product_for(weights, wanted, role, rows)?.is_some();
        if has_form {
            self.batch_for(weights, wanted, role, rows)?;
        }
        Ok(if has_form { wanted } else { Input::Floats })
    }

    /// `rows` of a product's input, with the norm applied. `spare` gets the buffer that this took.
    pub(crate) fn operand(
        &mut self,
        x: &InputOf<'_, Self>,
        rows: Range<usize>,
        blocks: usize,
        input: Input,
        spare: &mut Option<Buffer>,
    ) -> Result<Operand, ComputeError> {
        let buffer = x.buffer();
        if input.has_levels() {
            let norm = match x {
                LinearInput::Normed { weight, eps, .. } => Some((*weight, *eps)),
                _ => None,
            };
            return self.quantized(buffer, rows, blocks, input, norm);
        }
        let normed = match x {
            LinearInput::Normed { x, weight, eps } => {
                let mut normed = self.spare(x.capacity(), x.width)?;
                self.norm_rows(x, rows, (weight, *eps), &mut normed)?;
                Some(normed)
            }
            _ => None,
        };
        let from = normed.as_ref().unwrap_or(buffer);
        let operand = floats(from);
        *spare = normed;
        Ok(operand)
    }

    /// Records a product with weights in the proved form. With experts, `of_experts` is the number
    /// of workgroups in the other two dimensions.
    pub(super) fn run_product(
        &mut self,
        (weights, bias): (Weights<'_>, Option<&Memory>),
        operand: &Operand,
        role: Role,
        extra: &[&Memory],
        arguments: &ProductArguments,
        (out, of_experts): (&Memory, Option<[u32; 2]>),
    ) -> Outcome {
        let rows = if of_experts.is_some() { 1 } else { arguments.rows.len() };
        if of_experts.is_none()
            && let Some(form) = self.batch_for(weights, operand.input, role, rows)?
        {
            return self.record_batch(form, (weights, bias), operand, arguments, out);
        }
        let Some(product) = self.product_for(weights, operand.input, role, rows)? else {
            unreachable!("levels are an input only where a form of them was proved")
        };
        self.record_product(product, (weights.chunk, bias), operand, extra, arguments, (out, of_experts))
    }

    /// Records one form of a product.
    pub(crate) fn record_product(
        &mut self,
        product: Product,
        (chunk, bias): (&Chunk, Option<&Memory>),
        operand: &Operand,
        extra: &[&Memory],
        arguments: &ProductArguments,
        (out, of_experts): (&Memory, Option<[u32; 2]>),
    ) -> Outcome {
        self.record_leaving(product, (chunk, bias), operand, extra, arguments, (out, of_experts), &[])
    }

    /// [`Self::record_product`] for a form that stores levels, in these buffers.
    #[expect(clippy::too_many_arguments, reason = "a product has many parts")]
    pub(crate) fn record_leaving(
        &mut self,
        product: Product,
        (chunk, bias): (&Chunk, Option<&Memory>),
        operand: &Operand,
        extra: &[&Memory],
        arguments: &ProductArguments,
        (out, of_experts): (&Memory, Option<[u32; 2]>),
        left: &[&Memory],
    ) -> Outcome {
        let mut buffers: Vec<_> = chunk.buffers.iter().collect();
        buffers.push(bias.unwrap_or(&self.nothing));
        buffers.extend(&operand.buffers);
        let mut words = arguments.words();
        if product.takes_norm() {
            buffers.push(operand.norm_of(&mut words).unwrap_or(&self.nothing));
        }
        buffers.extend(extra);
        buffers.push(out);
        buffers.extend(left);
        let mut groups = product.groups(arguments.outputs, arguments.rows.len());
        groups[2] = arguments.heads.max(1) as u32;
        if let Some(of_experts) = of_experts {
            groups[1..].copy_from_slice(&of_experts);
        }
        self.device.dispatch(&Kernel::Product(product), &buffers, &words, groups)
    }

    /// `out[r] = W · x[r] + bias`, or added to the existing values.
    pub(crate) fn multiply(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        w: &Matrix,
        out: &mut Buffer,
        adds: bool,
    ) -> Outcome {
        if !adds {
            out.shape(x.buffer().rows)?;
        }
        fits("the rows of a matrix", w.rows, out.width, "no more outputs than its buffer has columns")?;
        if w.blocks * 32 > x.buffer().stride() {
            return fits("the width of a product's input", x.buffer().width, 0, "the columns of its weights");
        }
        let precise = matches!(x, LinearInput::Precise(_));
        let generated = if precise { rows.end } else { self.generated(x.buffer().rows) };
        let prompts = rows.start.max(generated)..rows.end;
        self.multiply_tiles(&x, prompts, w, out, adds)?;
        let rows = rows.start..rows.end.min(generated);
        if rows.is_empty() {
            return Ok(());
        }
        if adds && self.add_leaving(&x, &rows, w, out)? {
            return Ok(());
        }
        // Done before any operand is made, because a proof uses the same buffers for levels.
        let mut inputs = Vec::with_capacity(w.chunks.len());
        for chunk in &w.chunks {
            let weights = Weights { chunk, blocks: w.blocks };
            inputs.push(self.input_for(&x, rows.len(), weights, Role::Plain)?);
        }
        let (mut floats, mut levels, mut spare) = (None, None, None);
        for (chunk, input) in w.chunks.iter().zip(inputs) {
            let weights = Weights { chunk, blocks: w.blocks };
            let place = if input.has_levels() { &mut levels } else { &mut floats };
            if place.is_none() {
                *place = Some(self.operand(&x, rows.clone(), w.blocks, input, &mut spare)?);
            }
            let Some(operand) = place else { unreachable!("it was just made") };
            let arguments = ProductArguments {
                adds,
                ..ProductArguments::with_chunk(w, chunk, rows.clone(), operand.stride, out)
            };
            let weights = (weights, w.bias.as_ref());
            self.run_product(weights, operand, Role::Plain, &[], &arguments, (&out.memory, None))?;
        }
        self.spares.extend(spare);
        if let ([chunk], true) = (w.chunks.as_slice(), adds) {
            self.note_added(chunk.buffers[0].id, out);
        }
        Ok(())
    }

    /// Number of generated tokens among a buffer's `rows`; they come first. Prompts' rows are
    /// multiplied in tiles whatever their number, so that they do not depend on how a prompt is
    /// cut.
    pub(crate) fn generated(&self, rows: usize) -> usize {
        match &self.step {
            Some(step) if step.all == rows => step.generated,
            Some(_) => rows,
            None if rows < MANY_ROWS => rows,
            None => 0,
        }
    }

    /// The product of prompts' rows.
    fn multiply_tiles(
        &mut self,
        x: &InputOf<'_, Self>,
        rows: Range<usize>,
        w: &Matrix,
        out: &Buffer,
        adds: bool,
    ) -> Outcome {
        if rows.is_empty() {
            return Ok(());
        }
        let chunks = self.multiply_matrices(x, rows.clone(), w, out, adds)?;
        if chunks.is_empty() {
            return Ok(());
        }
        let mut spare = None;
        let operand = self.operand(x, rows.clone(), w.blocks, Input::Floats, &mut spare)?;
        for chunk in chunks {
            let weights = Weights { chunk, blocks: w.blocks };
            let bias = w.bias.as_ref();
            if self.proves_tiles(weights)? {
                let product =
                    RowProduct { adds, ..RowProduct::of_chunk(chunk, w.blocks, bias, rows.clone()) };
                self.record_tiles(&product, &operand, out)?;
            } else {
                let arguments = ProductArguments {
                    adds,
                    ..ProductArguments::with_chunk(w, chunk, rows.clone(), operand.stride, out)
                };
                self.run_product(
                    (weights, bias),
                    &operand,
                    Role::Plain,
                    &[],
                    &arguments,
                    (&out.memory, None),
                )?;
            }
        }
        self.spares.extend(spare);
        Ok(())
    }

    /// Records a product in tiles, in several dispatches if one would take long.
    pub(crate) fn record_tiles(
        &mut self,
        product: &RowProduct<'_>,
        operand: &Operand,
        out: &Buffer,
    ) -> Outcome {
        let Weights { chunk, blocks } = product.weights;
        let form = Tiles::of_rows(chunk.format);
        let flops_of_row = 2 * product.heads * product.outputs * blocks * BLOCK_COLUMNS;
        let mut buffers: Vec<_> = chunk.buffers.iter().collect();
        buffers.push(product.bias.unwrap_or(&self.nothing));
        buffers.extend(&operand.buffers);
        buffers.push(&out.memory);
        let buffers: Vec<_> = buffers.into_iter().cloned().collect();
        let buffers: Vec<&Memory> = buffers.iter().collect();
        for rows in pieces(&product.rows, flops_of_row, TILE_FLOPS, form.rows()) {
            self.record_work(rows.len() * flops_of_row, TILE_FLOPS)?;
            let arguments = product.arguments(&rows, rows.start, operand.stride as usize, out);
            let groups =
                [rows.len().div_ceil(form.rows()), product.outputs.div_ceil(form.outputs()), product.heads]
                    .map(|count| count as u32);
            self.device.dispatch(&Kernel::Tiles(form), &buffers, &arguments, groups)?;
        }
        Ok(())
    }

    /// `out = activation(x · Gᵀ + g, x · Uᵀ + u)`.
    pub(super) fn multiply_gated(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        w: &Matrix,
        activation: Activation,
        out: &mut Buffer,
    ) -> Outcome {
        let rows = self.multiply_gated_matrices(&x, rows, w, activation, out)?;
        if rows.is_empty() {
            return Ok(());
        }
        let has_prompts = self.generated(x.buffer().rows) < rows.end;
        let ([chunk], false) = (w.chunks.as_slice(), has_prompts) else {
            // Gates and ups of different formats, or too large to be bound together, or of prompts.
            let mut both = self.spare(x.buffer().capacity(), w.rows)?;
            self.multiply(x, rows.clone(), w, &mut both, false)?;
            self.gate_rows(&both, rows, activation, out)?;
            self.spares.push(both);
            return Ok(());
        };
        out.shape(x.buffer().rows)?;
        let channels = w.rows / 2;
        fits("the channels of a gate", channels, out.width, "no more than its buffer has columns")?;
        let weights = Weights { chunk, blocks: w.blocks };
        let leaves = Leaves::of(self.gated_input());
        if leaves != Leaves::Nothing {
            let arguments = ProductArguments {
                outputs: channels,
                activation,
                ..ProductArguments::with_chunk(w, chunk, rows.clone(), 0, out)
            };
            let form = (Role::Gated, leaves, self.gated_input());
            let weights = (weights, w.bias.as_ref());
            if self.run_leaving(weights, (&x, &rows), form, None, (arguments, &*out))? {
                return Ok(());
            }
        }
        let input = self.input_for(&x, rows.len(), weights, Role::Gated)?;
        let mut spare = None;
        let operand = self.operand(&x, rows.clone(), w.blocks, input, &mut spare)?;
        let arguments = ProductArguments {
            outputs: channels,
            activation,
            ..ProductArguments::with_chunk(w, chunk, rows.clone(), operand.stride, out)
        };
        let weights = (weights, w.bias.as_ref());
        self.run_product(weights, &operand, Role::Gated, &[], &arguments, (&out.memory, None))?;
        self.spares.extend(spare);
        Ok(())
    }
}

/// All rows of a buffer, as floats.
pub(crate) fn floats(x: &Buffer) -> Operand {
    let (buffers, stride) = (vec![x.memory.clone()], (x.stride() / 4) as u32);
    Operand { input: Input::Floats, buffers, stride, norm: None, place: 0 }
}

impl Operand {
    pub fn stride(&self) -> u32 {
        self.stride
    }

    /// The squares by which a product divides its sums, as its arguments then say.
    pub fn norm_of(&self, words: &mut [u32; 21]) -> Option<&Memory> {
        let RowNorm { squares, width, eps } = self.norm.as_ref()?;
        words[3] |= 4;
        words[18..20].copy_from_slice(&[*width, eps.to_bits()]);
        Some(squares)
    }

    /// Sums of squares of the rows' blocks, if a norm is not applied yet.
    pub fn squares(&self) -> Option<&Memory> {
        self.norm.as_ref().map(|norm| &norm.squares)
    }
}
