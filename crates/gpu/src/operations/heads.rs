//! Products with a matrix for each head.

use std::ops::Range;

use thunder_compute::{ComputeError, Device, Heads, LinearInput};

use super::Outcome;
use super::matrices::RowProduct;
use super::products::{MANY_ROWS, ProductArguments, floats};
use super::rows::fits;
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer};
use crate::kernel::{PADDED_COLUMNS, Role};
use crate::matrix::Matrix;
use crate::proof::{Numbers, Weights, compare};

impl GpuBackend {
    /// A product for each head, in one dispatch if one matrix has all heads' rows.
    pub(super) fn multiply_heads(
        &mut self,
        x: &Buffer,
        stride: usize,
        rows: Range<usize>,
        w: &Heads<Matrix>,
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(x.rows)?;
        fits("the distance of heads, modulo 4,", stride % 4, 0, "a multiple of 4")?;
        let generated = self.generated(x.rows).clamp(rows.start, rows.end);
        let are_done = self.multiply_heads_together(x, stride, generated..rows.end, w, out)?;
        let rows = rows.start..if are_done { generated } else { rows.end };
        if rows.is_empty() {
            return Ok(());
        }
        let operand = floats(x);
        let together = w.count / w.matrices.len().max(1);
        for (head, w) in w.matrices.iter().enumerate() {
            for chunk in &w.chunks {
                let arguments = ProductArguments {
                    x_first: head * stride / 4,
                    out_first: head * w.rows + chunk.rows.start,
                    outputs: chunk.rows.len() / together,
                    heads: together,
                    x_of_head: stride / 4,
                    ..ProductArguments::with_chunk(w, chunk, rows.clone(), operand.stride, out)
                };
                let weights = (Weights { chunk, blocks: w.blocks }, w.bias.as_ref());
                self.run_product(weights, &operand, Role::Plain, &[], &arguments, (&out.memory, None))?;
            }
        }
        Ok(())
    }

    /// Multiplies prompts' rows with the matrix that has all heads' rows, if there is one and a
    /// form for it. Returns whether it did.
    fn multiply_heads_together(
        &mut self,
        x: &Buffer,
        stride: usize,
        rows: Range<usize>,
        w: &Heads<Matrix>,
        out: &Buffer,
    ) -> Result<bool, ComputeError> {
        let [Matrix { chunks, blocks, bias: None, .. }] = w.matrices.as_slice() else { return Ok(false) };
        let [chunk] = chunks.as_slice() else { return Ok(false) };
        let outputs = chunk.rows.len() / w.count;
        let columns = blocks * BLOCK_COLUMNS;
        if rows.is_empty() || (w.count - 1) * stride + columns > x.stride() {
            return Ok(false);
        }
        let weights = Weights { chunk, blocks: *blocks };
        let product = RowProduct {
            outputs,
            heads: w.count,
            x_of_head: stride / 4,
            ..RowProduct::of_chunk(chunk, *blocks, None, rows.clone())
        };
        // Matrices read whole steps of columns and store whole quads: others would be another
        // head's.
        let is_whole = columns.is_multiple_of(PADDED_COLUMNS) && outputs.is_multiple_of(4);
        if is_whole && let Some(form) = self.matrices_for(weights, false, rows.len())? {
            let halves = self.halves(&LinearInput::Plain(x), rows, x.stride() / BLOCK_COLUMNS)?;
            self.record_matrices(form, &product, &halves, out)?;
            return Ok(true);
        }
        if self.proves_tiles(weights)? {
            self.record_tiles(&product, &floats(x), out)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Compares products of all heads together, of few rows and of many, with those of one head
    /// alone. Done once for each format.
    pub(super) fn proves_heads(&mut self, w: &mut Heads<Matrix>) -> Result<bool, ComputeError> {
        let format = w.matrices[0].chunks[0].format;
        if w.count == 1 {
            return Ok(true);
        }
        if let Some(right) = self.heads.get(&format) {
            return Ok(*right);
        }
        let (count, columns) = (w.count, w.matrices[0].blocks * BLOCK_COLUMNS);
        let all = w.matrices[0].rows;
        let outputs = all / count;
        let mut outcome = Ok(());
        for rows in [3, 2 * MANY_ROWS] {
            let x = Numbers(31).take(rows * count * columns);
            let together = self.products_of_heads(w, &x, [rows, columns])?;
            // The last head, whose place differs in all three buffers.
            let of_last: Vec<f32> =
                x.chunks(columns).skip(count - 1).step_by(count).flatten().copied().collect();
            w.count = 1;
            let alone = self.products_of_heads(w, &of_last, [rows, columns]);
            w.count = count;
            let alone = alone?;
            let last = |values: &[f32]| -> Vec<f32> {
                values.chunks(all).flat_map(|row| row[all - outputs..].to_vec()).collect()
            };
            outcome = outcome.and_then(|()| compare(&last(&together), &last(&alone), 1e-3));
        }
        if let Err(reason) = &outcome {
            self.refuse(&format!("products of heads, {format:?}"), reason);
        }
        self.heads.insert(format, outcome.is_ok());
        Ok(outcome.is_ok())
    }

    /// Products of random rows, whose heads follow each other.
    fn products_of_heads(
        &mut self,
        w: &Heads<Matrix>,
        x: &[f32],
        [rows, columns]: [usize; 2],
    ) -> Result<Vec<f32>, ComputeError> {
        let width = w.count * columns;
        let (mut input, mut out) = (self.buffer(rows, width)?, self.buffer(rows, w.matrices[0].rows)?);
        self.write(x, &mut input)?;
        self.multiply_heads(&input, columns, 0..rows, w, &mut out)?;
        let mut values = vec![0.0; rows * w.matrices[0].rows];
        self.read(&out, 0..rows, &mut values)?;
        Ok(values)
    }
}
