//! Products of prompts' rows by cooperative matrices.

use std::ops::Range;

use thunder_compute::{Activation, ComputeError, InputOf, LinearInput};

use super::attend::most_work;
use super::rows::fits;
use super::{Outcome, activation_arguments};
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer, Memory};
use crate::format::Format;
use crate::kernel::{Kernel, Matrices, PADDED_COLUMNS, Shape};
use crate::matrix::{Chunk, Matrix};
use crate::proof::Weights;

/// Maximum multiplications and additions of a submission, by matrices and in scalar tiles: a tenth
/// of a second at 5 and 1 TFLOP/s. macOS ends submissions that take half a second.
pub(super) const MATRIX_FLOPS: usize = 500_000_000_000;
pub(super) const TILE_FLOPS: usize = 100_000_000_000;
/// Maximum bytes of weights that rows of a submission read one by one, if no cache holds any: a
/// fifth of a second at 120 GB/s, the slowest memory of Macs.
pub(super) const READ_BYTES: usize = 24_000_000_000;

/// Up to this many workgroups of large tiles leave most of a GPU idle; small tiles are faster then.
const FEW_GROUPS: usize = 32;

/// Weights are scaled below 2 to this power; f16 ends at 2^16.
const WEIGHT_POWER: i32 = 14;

/// Input rows as f16, as the kernel `halve` stores them.
pub(crate) struct Halves {
    pub rows: Memory,
    pub scales: Memory,
    /// Distance of two rows, in quads.
    pub stride: usize,
}

/// A product of prompts' rows: `rows` of input with the first `outputs` rows of a chunk.
pub(crate) struct RowProduct<'a> {
    pub weights: Weights<'a>,
    pub bias: Option<&'a Memory>,
    pub outputs: usize,
    pub rows: Range<usize>,
    /// Adds to the existing values.
    pub adds: bool,
    pub activation: Activation,
    /// The output's first column, and the first bias.
    pub first: usize,
    /// Number of heads. Each has `outputs` rows of the chunk and columns of the result.
    pub heads: usize,
    /// From the input of a head to the next one's, in quads.
    pub x_of_head: usize,
}

impl<'a> RowProduct<'a> {
    /// `rows` times all rows of a chunk, into the chunk's columns.
    pub fn of_chunk(chunk: &'a Chunk, blocks: usize, bias: Option<&'a Memory>, rows: Range<usize>) -> Self {
        Self {
            weights: Weights { chunk, blocks },
            bias,
            outputs: chunk.rows.len(),
            rows,
            adds: false,
            activation: Activation::default(),
            first: chunk.rows.start,
            heads: 1,
            x_of_head: 0,
        }
    }
}

impl RowProduct<'_> {
    /// The kernel's arguments for some rows of input, `stride` quads apart, whose products go to
    /// the rows from `to` on.
    pub(super) fn arguments(&self, rows: &Range<usize>, to: usize, stride: usize, out: &Buffer) -> [u32; 19] {
        let Weights { chunk, blocks } = self.weights;
        let [kind, alpha, limit] = activation_arguments(self.activation);
        let power = weight_power(chunk.largest);
        [
            blocks as u32,
            chunk.shift,
            self.outputs as u32,
            u32::from(self.bias.is_some()) | u32::from(self.adds) << 1,
            rows.len() as u32,
            rows.start as u32,
            stride as u32,
            to as u32,
            out.stride() as u32,
            self.first as u32,
            self.first as u32,
            kind,
            alpha,
            limit,
            power_of_two(power),
            power_of_two(-power),
            // For pairs only.
            0,
            0,
            self.x_of_head as u32,
        ]
    }
}

/// The forms for many rows and for few.
pub(super) fn forms_of_prompts(side: usize, format: Format, gated: bool) -> [Matrices; 2] {
    Shape::of_side(side).map(|shape| Matrices { format, shape, gated, pairs: false })
}

impl GpuBackend {
    /// The form by matrices for this many rows. Proved now, if it was not before. `None` if the
    /// device has no matrices, activations must not be rounded to f16, or no form is correct.
    pub(super) fn matrices_for(
        &mut self,
        weights: Weights<'_>,
        gated: bool,
        rows: usize,
    ) -> Result<Option<Matrices>, ComputeError> {
        let (Some(side), true) = (self.device.matrix_side, self.config.activations.allows_bf16()) else {
            return Ok(None);
        };
        let outputs = weights.chunk.rows.len() / if gated { 2 } else { 1 };
        if weights.blocks == 0 || rows == 0 || outputs == 0 || !weights.chunk.begins_a_quad() {
            return Ok(None);
        }
        let [large, small] = forms_of_prompts(side, weights.chunk.format, gated);
        if !self.proves_matrices(weights, large, None)? {
            return Ok(None);
        }
        // A prompt's row must have the same bits whether it is computed with few rows or with many.
        let of_large = rows.div_ceil(large.tile().rows) * (outputs.div_ceil(large.outputs()));
        let few = rows <= small.tile().rows || of_large <= FEW_GROUPS;
        if few && small != large && self.proves_matrices(weights, small, Some(large))? {
            return Ok(Some(small));
        }
        Ok(Some(large))
    }

    /// Computes the product of prompts' rows with those parts of a matrix that have a form by
    /// matrices. Returns the other parts.
    pub(super) fn multiply_matrices<'w>(
        &mut self,
        x: &InputOf<'_, Self>,
        rows: Range<usize>,
        w: &'w Matrix,
        out: &Buffer,
        adds: bool,
    ) -> Result<Vec<&'w Chunk>, ComputeError> {
        // Done before any input is made, because a proof uses the same buffers.
        let (mut forms, mut others) = (Vec::new(), Vec::new());
        for chunk in &w.chunks {
            let weights = Weights { chunk, blocks: w.blocks };
            match self.matrices_for(weights, false, rows.len())? {
                Some(form) => forms.push((chunk, form)),
                None => others.push(chunk),
            }
        }
        if !forms.is_empty() {
            let halves = self.halves(x, rows.clone(), w.blocks)?;
            for (chunk, form) in forms {
                let product = RowProduct {
                    adds,
                    ..RowProduct::of_chunk(chunk, w.blocks, w.bias.as_ref(), rows.clone())
                };
                self.record_matrices(form, &product, &halves, out)?;
            }
        }
        Ok(others)
    }

    /// Computes `out = activation(x · Gᵀ + g, x · Uᵀ + u)` for prompts' rows, if there is a form by
    /// matrices. Returns the remaining rows.
    pub(super) fn multiply_gated_matrices(
        &mut self,
        x: &InputOf<'_, Self>,
        rows: Range<usize>,
        w: &Matrix,
        activation: Activation,
        out: &mut Buffer,
    ) -> Result<Range<usize>, ComputeError> {
        let generated = self.generated(x.buffer().rows).clamp(rows.start, rows.end);
        let ([chunk], prompts) = (w.chunks.as_slice(), generated..rows.end) else { return Ok(rows) };
        let weights = Weights { chunk, blocks: w.blocks };
        let Some(form) = self.matrices_for(weights, true, prompts.len())? else { return Ok(rows) };
        out.shape(x.buffer().rows)?;
        fits("the channels of a gate", w.rows / 2, out.width, "no more than its buffer has columns")?;
        let halves = self.halves(x, prompts.clone(), w.blocks)?;
        let product = RowProduct {
            outputs: w.rows / 2,
            activation,
            ..RowProduct::of_chunk(chunk, w.blocks, w.bias.as_ref(), prompts)
        };
        self.record_matrices(form, &product, &halves, out)?;
        Ok(rows.start..generated)
    }

    /// `rows` of a product's input as f16, with the norm applied.
    pub(crate) fn halves(
        &mut self,
        x: &InputOf<'_, Self>,
        rows: Range<usize>,
        blocks: usize,
    ) -> Result<Halves, ComputeError> {
        let buffer = x.buffer();
        let columns = (blocks * BLOCK_COLUMNS).next_multiple_of(PADDED_COLUMNS);
        let bytes = buffer.capacity() * columns * 2;
        let kept = self.halves.take();
        let fits = |(halves, scales): &(Memory, Memory)| {
            halves.bytes() >= bytes as u64 && scales.bytes() >= buffer.capacity() as u64 * 4
        };
        let (halves, scales) = match kept {
            Some(both) if fits(&both) => both,
            _ => (
                self.device.memory(bytes, "activations as f16")?,
                self.device.memory(buffer.capacity() * 4, "scales of activations")?,
            ),
        };
        let norm = match x {
            LinearInput::Normed { weight, eps, .. } => Some((*weight, *eps)),
            _ => None,
        };
        let (weight, eps) = norm.map_or((&self.nothing, 0.0), |(weight, eps)| (&weight.memory, eps));
        let arguments = [
            buffer.width as u32,
            rows.start as u32,
            (buffer.stride() / 4) as u32,
            (blocks * BLOCK_COLUMNS / 4) as u32,
            eps.to_bits(),
            u32::from(norm.is_some()),
            (columns / 4) as u32,
        ];
        let buffers = [weight, &buffer.memory, &halves, &scales];
        self.device.dispatch(&Kernel::Halve, &buffers, &arguments, [rows.len() as u32, 1, 1])?;
        self.halves = Some((halves.clone(), scales.clone()));
        Ok(Halves { rows: halves, scales, stride: columns / 4 })
    }

    /// Records a product, in several dispatches if one would take long.
    pub(crate) fn record_matrices(
        &mut self,
        form: Matrices,
        product: &RowProduct<'_>,
        halves: &Halves,
        out: &Buffer,
    ) -> Outcome {
        let Weights { chunk, blocks } = product.weights;
        let lines = product.heads * product.outputs * if form.gated { 2 } else { 1 };
        let flops_of_row = 2 * lines * blocks * BLOCK_COLUMNS;
        let tile = form.tile();
        let mut buffers = chunk.buffers.to_vec();
        buffers.push(product.bias.unwrap_or(&self.nothing).clone());
        buffers.extend([halves.rows.clone(), halves.scales.clone(), out.memory.clone()]);
        let buffers: Vec<&Memory> = buffers.iter().collect();
        for rows in pieces(&product.rows, flops_of_row, MATRIX_FLOPS, tile.rows) {
            self.record_work(rows.len() * flops_of_row, MATRIX_FLOPS)?;
            let arguments = product.arguments(&rows, rows.start, halves.stride, out);
            // Tiles of rows first, so that workgroups that run at the same time share weights.
            let groups =
                [rows.len().div_ceil(tile.rows), product.outputs.div_ceil(form.outputs()), product.heads]
                    .map(|count| count as u32);
            self.device.dispatch(&Kernel::Matrices(form), &buffers, &arguments, groups)?;
        }
        Ok(())
    }

    /// Counts multiplications and additions of a prompt that are not products with weights.
    pub(super) fn record_scalars(&mut self, work: usize) -> Outcome {
        self.record_work(work, most_work(self.device.is_discrete))
    }

    /// Counts work before it is recorded. A submission has at most `limit` of it.
    pub(super) fn record_work(&mut self, work: usize, limit: usize) -> Outcome {
        self.device.record_share(work as f32 / limit as f32)
    }
}

/// Divides rows into pieces of at most `limit` multiplications and additions, or bytes, in
/// multiples of a tile's rows.
pub(super) fn pieces(
    rows: &Range<usize>,
    work_of_row: usize,
    limit: usize,
    of_tile: usize,
) -> impl Iterator<Item = Range<usize>> + use<> {
    let (most, end) = ((limit / work_of_row.max(1) / of_tile).max(1) * of_tile, rows.end);
    rows.clone().step_by(most).map(move |start| start..end.min(start + most))
}

/// The power of two that weights up to `largest` are multiplied with.
fn weight_power(largest: f32) -> i32 {
    if largest == 0.0 || !largest.is_finite() {
        return 0;
    }
    let exponent = (largest.to_bits() >> 23) as i32 - 127;
    (WEIGHT_POWER - 1 - exponent).clamp(-120, 120)
}

/// The bits of 2^`power`, for a power of [`weight_power`].
fn power_of_two(power: i32) -> u32 {
    ((127 + power) as u32) << 23
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_divided_at_tiles_so_that_none_lasts_long() {
        let all = |rows, flops| pieces(&rows, flops, 1000, 16).collect::<Vec<_>>();
        assert_eq!(all(3..100, 10), [3..99, 99..100]);
        assert_eq!(all(0..40, 1).len(), 1);
        assert_eq!(all(0..40, 5000), [0..16, 16..32, 32..40]);
        assert!(all(4..4, 0).is_empty());
    }

    #[test]
    fn weights_fill_the_range_of_f16_and_never_leave_it() {
        for largest in [1e-30, 1e-7, 0.013, 1.0, 448.0, 65504.0, 3e38] {
            let scaled = largest * f32::from_bits(power_of_two(weight_power(largest)));
            assert!((1.0..16384.0).contains(&scaled), "{largest} becomes {scaled}");
            assert_eq!(scaled * f32::from_bits(power_of_two(-weight_power(largest))), largest);
        }
        // Smaller weights than any model has stay below that range.
        assert!(1e-38 * f32::from_bits(power_of_two(weight_power(1e-38))) < 1.0);
        assert_eq!([0.0, f32::NAN, f32::INFINITY].map(weight_power), [0; 3]);
    }
}
