//! Rows as levels (activations rounded to integers). A kernel of its own rounds them, or the kernel
//! that computes the rows also stores levels for the next product.

use std::ops::Range;

use thunder_compute::{ComputeError, InputOf};

use super::products::{Operand, ProductArguments, RowNorm};
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer, Memory, Vector};
use crate::kernel::{Input, Kernel, Leaves, Role};
use crate::matrix::Matrix;
use crate::proof::Weights;

/// Blocks of a row that a workgroup of the kernel `quantize` processes.
const QUANTIZED_BLOCKS: usize = 64;

/// Buffers for rows as levels.
#[derive(Debug, Clone)]
pub(crate) struct Levels {
    pub levels: Memory,
    pub scales: Memory,
    /// Sums of squares of the blocks, if a norm follows.
    pub squares: Memory,
}

/// Rows that a dispatch has stored as levels, in [`GpuBackend::levels`].
#[derive(Debug)]
pub(crate) struct Left {
    /// The id of the rows' buffer.
    of: u64,
    rows: Range<usize>,
    blocks: usize,
    input: Input,
    /// The id of the norm's weights.
    norm: Option<u64>,
    place: usize,
    /// The value of `Device::recorded` at that time.
    after: u64,
}

/// A product that was added to rows, or a norm that was written to rows.
#[derive(Debug)]
pub(crate) struct Added {
    /// The id of the weights.
    weights: u64,
    /// The id of the rows' buffer.
    to: u64,
    after: u64,
}

impl GpuBackend {
    /// Rows as levels.
    pub(crate) fn quantized(
        &mut self,
        x: &Buffer,
        rows: Range<usize>,
        blocks: usize,
        input: Input,
        norm: Option<(&Vector, f32)>,
    ) -> Result<Operand, ComputeError> {
        let of_norm = norm.map(|(weight, _)| weight.memory.id);
        let left = self.left(x, &rows, (blocks, input, of_norm));
        let place = left.unwrap_or(0);
        let all = self.levels_at(place, x, blocks, input)?;
        let Levels { levels, scales, squares } = &all;
        let norm_of = |(_, eps)| RowNorm { squares: squares.clone(), width: x.width as u32, eps };
        let operand = Operand {
            input,
            buffers: vec![levels.clone(), scales.clone()],
            stride: blocks as u32,
            norm: norm.map(norm_of),
            place,
        };
        if left.is_some() {
            return Ok(operand);
        }
        if let (Some((weight, _)), Some(added)) = (norm, &self.added)
            && (added.after, added.to) == (self.device.recorded, x.memory.id)
        {
            self.norms_after.insert(added.weights, weight.memory.clone());
        }
        if let (None, Input::Bytes, Some(normed)) = (norm, input, &self.normed)
            && (normed.after, normed.to) == (x.memory.written(), x.memory.id)
        {
            self.rounded_norms.insert(normed.weights);
        }
        let weight = norm.map_or(&self.nothing, |(weight, _)| &weight.memory);
        let arguments =
            [rows.start as u32, (x.stride() / 4) as u32, blocks as u32, u32::from(norm.is_some())];
        let buffers = [weight, &x.memory, levels, scales, squares];
        let parts = blocks.div_ceil(QUANTIZED_BLOCKS) as u32;
        let kernel = Kernel::Quantize { pairs: input == Input::Pairs };
        self.device.dispatch(&kernel, &buffers, &arguments, [rows.len() as u32, parts, 1])?;
        Ok(operand)
    }

    /// Buffers for levels of all rows of `x`. There are two places, because a product that stores
    /// levels reads the other one.
    pub(crate) fn levels_at(
        &mut self,
        place: usize,
        x: &Buffer,
        blocks: usize,
        input: Input,
    ) -> Result<Levels, ComputeError> {
        let mut all = x.capacity() * blocks;
        let mut bytes = all * input.planes() * 16;
        if let Some(levels) = &self.levels[place] {
            let (had_bytes, had) = (levels.levels.bytes() as usize, levels.squares.bytes() as usize / 4);
            if had_bytes >= bytes && had >= all {
                return Ok(levels.clone());
            }
            // Those that wanted these buffers find them large enough again.
            (bytes, all) = (bytes.max(had_bytes), all.max(had));
        }
        let levels = Levels {
            levels: self.device.memory(bytes, "activations as levels")?,
            scales: self.device.memory(all * 16, "scales of activations")?,
            squares: self.device.memory(all * 4, "squares of activations")?,
        };
        Ok(self.levels[place].insert(levels).clone())
    }

    /// Notes that the last dispatch has also stored these rows of `x` as levels.
    pub(crate) fn note_levels(
        &mut self,
        x: &Buffer,
        rows: Range<usize>,
        (blocks, input, norm): (usize, Input, Option<u64>),
        place: usize,
    ) {
        let after = self.device.recorded;
        self.left = Some(Left { of: x.memory.id, rows, blocks, input, norm, place, after });
    }

    /// Where a dispatch has stored these rows as levels, if neither rows nor levels were written
    /// since.
    fn left(
        &self,
        x: &Buffer,
        rows: &Range<usize>,
        (blocks, input, norm): (usize, Input, Option<u64>),
    ) -> Option<usize> {
        let is_new = |left: &&Left| {
            let levels = self.levels[left.place].as_ref().map(|levels| levels.levels.written());
            x.memory.written() <= left.after && levels == Some(left.after)
        };
        let left = self.left.as_ref().filter(is_new)?;
        let is_same = (left.of, left.blocks, left.input, left.norm) == (x.memory.id, blocks, input, norm)
            && left.rows == *rows;
        is_same.then_some(left.place)
    }

    /// Runs a product that also stores its outputs as levels, for a product that reads them as
    /// `wanted`, after a norm with these weights if there is one. Returns false if no such form is
    /// correct.
    pub(super) fn run_leaving(
        &mut self,
        (weights, bias): (Weights<'_>, Option<&Memory>),
        (x, rows): (&InputOf<'_, Self>, &Range<usize>),
        (role, leaves, wanted): (Role, Leaves, Input),
        norm: Option<&Memory>,
        (arguments, out): (ProductArguments, &Buffer),
    ) -> Result<bool, ComputeError> {
        let fills = arguments.outputs == out.stride() && arguments.out_first == 0;
        if !fills {
            return Ok(false);
        }
        let input = self.input_for(x, rows.len(), weights, role)?;
        let Some(product) = self.leaving_form(weights, input, role, leaves, rows.len())? else {
            return Ok(false);
        };
        let operand = self.operand(x, rows.clone(), weights.blocks, input, &mut None)?;
        let (place, blocks) = (1 - operand.place, out.stride() / BLOCK_COLUMNS);
        let Levels { levels, scales, squares } = self.levels_at(place, out, blocks, wanted)?;
        let mut left: Vec<_> = norm.into_iter().collect();
        left.extend([&levels, &scales]);
        left.extend(norm.map(|_| &squares));
        let arguments = ProductArguments { x_stride: operand.stride, ..arguments };
        let to = (&out.memory, None);
        self.record_leaving(product, (weights.chunk, bias), &operand, &[], &arguments, to, &left)?;
        self.note_levels(out, rows.clone(), (blocks, wanted, norm.map(|norm| norm.id)), place);
        Ok(true)
    }

    /// Notes that a norm with these weights was written to `out`.
    pub(super) fn note_normed(&mut self, weight: &Vector, out: &Buffer) {
        let weights = weight.memory.id;
        self.normed = Some(Added { weights, to: out.memory.id, after: self.device.recorded });
    }

    /// Notes that a product with these weights was added to `out`. The next norm is probably the
    /// one that followed last time.
    pub(crate) fn note_added(&mut self, weights: u64, out: &Buffer) {
        self.added = Some(Added { weights, to: out.memory.id, after: self.device.recorded });
    }

    /// Adds a product to rows and stores levels of the norm that followed last time. Returns false
    /// if that norm is unknown or no form is correct.
    pub(super) fn add_leaving(
        &mut self,
        x: &InputOf<'_, Self>,
        rows: &Range<usize>,
        w: &Matrix,
        out: &Buffer,
    ) -> Result<bool, ComputeError> {
        let ([chunk], Input::Bytes) = (w.chunks.as_slice(), self.plain_input()) else { return Ok(false) };
        let Some(norm) = self.norms_after.get(&chunk.buffers[0].id).cloned() else { return Ok(false) };
        let arguments =
            ProductArguments { adds: true, ..ProductArguments::with_chunk(w, chunk, rows.clone(), 0, out) };
        let weights = (Weights { chunk, blocks: w.blocks }, w.bias.as_ref());
        let form = (Role::Plain, Leaves::Normed, Input::Bytes);
        let leaves = self.run_leaving(weights, (x, rows), form, Some(&norm), (arguments, out))?;
        if leaves {
            self.note_added(chunk.buffers[0].id, out);
        }
        Ok(leaves)
    }
}
