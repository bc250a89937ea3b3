//! Products with a matrix for each head.

use std::ops::Range;

use thunder_compute::{ComputeError, Heads, LinearInput};

use super::Outcome;
use super::matrices::RowProduct;
use super::products::{ProductArguments, floats};
use super::rows::fits;
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer};
use crate::kernel::{PADDED_COLUMNS, Role};
use crate::matrix::Matrix;
use crate::proof::Weights;

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
        // Tiles read whole steps of columns and store whole quads: others would be another head's.
        let fits = (blocks * BLOCK_COLUMNS).is_multiple_of(PADDED_COLUMNS) && outputs.is_multiple_of(4);
        if rows.is_empty() || !fits {
            return Ok(false);
        }
        let weights = Weights { chunk, blocks: *blocks };
        let product = RowProduct {
            outputs,
            heads: w.count,
            x_of_head: stride / 4,
            ..RowProduct::of_chunk(chunk, *blocks, None, rows.clone())
        };
        if let Some(form) = self.matrices_for(weights, false, rows.len())? {
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
}
