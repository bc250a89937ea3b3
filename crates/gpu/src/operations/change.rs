//! Changes of rows that few families need.

use std::ops::Range;

use thunder_compute::{LayerNorm, Rope, Rounding, StreamSpec};

use super::Outcome;
use super::rows::{MAX_GROUPS, fits};
use crate::backend::GpuBackend;
use crate::buffer::{Buffer, Memory};
use crate::kernel::{CHANGED, Change, Kernel, MAX_STREAMS, WEIGHED};
use crate::proof::Family;

impl GpuBackend {
    pub(super) fn center_parts(&mut self, parts: &[Range<usize>], rows: Range<usize>, x: &Buffer) -> Outcome {
        self.require(Family::Changes)?;
        for part in parts.iter().filter(|part| !part.is_empty()) {
            let arguments = [rows.start, x.stride(), part.start, part.len()].map(|number| number as u32);
            let groups = [rows.len() as u32, 1, 1];
            self.device.dispatch(&Kernel::Change(Change::Center), &[&x.memory], &arguments, groups)?;
        }
        Ok(())
    }

    pub(super) fn layer_norm_rows(
        &mut self,
        LayerNorm { weight, bias, eps }: &LayerNorm,
        rows: Range<usize>,
        x: &Buffer,
    ) -> Outcome {
        self.require(Family::Changes)?;
        debug_assert_eq!([weight.len(), bias.len()], [x.width; 2]);
        let words: Vec<u32> = weight.iter().chain(bias).map(|number| number.to_bits()).collect();
        let (memory, at) = self.device.table(&words)?;
        let arguments = [rows.start as u32, x.stride() as u32, x.width as u32, at, eps.to_bits()];
        let buffers = [&memory, &x.memory];
        let groups = [rows.len() as u32, 1, 1];
        self.device.dispatch(&Kernel::Change(Change::LayerNorm), &buffers, &arguments, groups)
    }

    pub(super) fn clear_rows(&mut self, rows: Range<usize>, x: &Buffer) -> Outcome {
        self.require(Family::Changes)?;
        let (first, count) = (rows.start * x.stride(), rows.len() * x.stride());
        let groups = count.div_ceil(CHANGED).min(MAX_GROUPS) as u32;
        let arguments = [first as u32, count as u32, groups];
        let kernel = Kernel::Change(Change::Clear);
        self.device.dispatch(&kernel, &[&x.memory], &arguments, [groups, 1, 1])
    }

    pub(super) fn round_rows(&mut self, rounding: Rounding, rows: Range<usize>, x: &Buffer) -> Outcome {
        self.require(Family::Changes)?;
        let kind = match rounding {
            Rounding::E4m3 => 0,
            Rounding::E2m1 => 1,
            Rounding::ScaledE2m1 => 2,
        };
        // Columns of whole groups.
        let count = x.width / rounding.group() * rounding.group();
        let arguments = [rows.start, x.stride(), count, kind].map(|number| number as u32);
        let groups = [count.div_ceil(CHANGED) as u32, rows.len() as u32, 1];
        self.device.dispatch(&Kernel::Change(Change::Round), &[&x.memory], &arguments, groups)
    }

    pub(super) fn gate_heads_of(
        &mut self,
        gates: &Buffer,
        (first, dim): (usize, usize),
        rows: Range<usize>,
        x: &Buffer,
    ) -> Outcome {
        self.require(Family::Changes)?;
        let count = gates.width * dim;
        let arguments = [rows.start, gates.stride(), x.stride(), first, dim, count];
        let arguments = arguments.map(|number| number as u32);
        let buffers = [&gates.memory, &x.memory];
        let groups = [count.div_ceil(CHANGED) as u32, rows.len() as u32, 1];
        self.device.dispatch(&Kernel::Change(Change::GateHeads), &buffers, &arguments, groups)
    }

    pub(super) fn add_values_to(
        &mut self,
        (weights, eps): (&[f32], f32),
        made: &Buffer,
        rows: Range<usize>,
        streams: &Buffer,
    ) -> Outcome {
        self.require(Family::Changes)?;
        // A row has a key for each stream, and one value.
        let width = made.width - weights.len();
        let count = weights.len() / width;
        let words: Vec<u32> = weights.iter().map(|weight| weight.to_bits()).collect();
        let (memory, at) = self.device.table(&words)?;
        let numbers = [rows.start, made.stride(), streams.stride(), width, count, at as usize];
        let arguments = [&numbers.map(|number| number as u32)[..], &[eps.to_bits()]].concat();
        let buffers = [&memory, &made.memory, &streams.memory];
        let groups = [count as u32, rows.len() as u32, 1];
        self.device.dispatch(&Kernel::Change(Change::AddValues), &buffers, &arguments, groups)
    }

    pub(super) fn shift_columns(
        &mut self,
        first: usize,
        by: &[f32],
        rows: Range<usize>,
        x: &Buffer,
    ) -> Outcome {
        self.require(Family::Changes)?;
        let words: Vec<u32> = by.iter().map(|number| number.to_bits()).collect();
        let (memory, at) = self.device.table(&words)?;
        let arguments = [rows.start, x.stride(), first, by.len(), at as usize].map(|number| number as u32);
        let groups = [by.len().div_ceil(CHANGED) as u32, rows.len() as u32, 1];
        let buffers = [&memory, &x.memory];
        self.device.dispatch(&Kernel::Change(Change::Shift), &buffers, &arguments, groups)
    }

    pub(super) fn members_of(
        &mut self,
        every: usize,
        positions: &[usize],
        (compressed, rows): (&Buffer, Range<usize>),
        selection: &mut Buffer,
    ) -> Outcome {
        self.require(Family::Changes)?;
        selection.shape(compressed.rows)?;
        let words: Vec<u32> = positions.iter().map(|position| *position as u32).collect();
        let (memory, at) = self.device.table(&words)?;
        let arguments =
            [rows.start, compressed.stride(), selection.stride(), selection.width, every, at as usize]
                .map(|number| number as u32);
        let buffers = [&memory, &compressed.memory, &selection.memory];
        let kernel = Kernel::Change(Change::Members);
        self.device.dispatch(&kernel, &buffers, &arguments, [rows.len() as u32, 1, 1])
    }

    pub(super) fn rotate_columns(
        &mut self,
        (rope, back): (&Rope, bool),
        positions: &[usize],
        firsts: &[usize],
        rows: Range<usize>,
        x: &Buffer,
    ) -> Outcome {
        self.require(Family::Changes)?;
        let pairs = rope.inverse_frequencies.len();
        let mut words: Vec<u32> = firsts.iter().map(|first| *first as u32).collect();
        for position in positions {
            words.extend(rope.turns(*position).flat_map(|(cos, sin)| [cos.to_bits(), sin.to_bits()]));
        }
        let (memory, at) = self.device.table(&words)?;
        let [interleaved, back] = [rope.interleaved, back].map(usize::from);
        let turns = at as usize + firsts.len();
        let arguments = [rows.start, x.stride(), at as usize, firsts.len(), turns, pairs, interleaved, back]
            .map(|number| number as u32);
        let groups = [(firsts.len() * pairs).div_ceil(CHANGED) as u32, rows.len() as u32, 1];
        let buffers = [&memory, &x.memory];
        self.device.dispatch(&Kernel::Change(Change::Rotate), &buffers, &arguments, groups)
    }

    pub(super) fn weigh_stream_rows(
        &mut self,
        spec: &StreamSpec,
        rows: Range<usize>,
        weights: &Buffer,
    ) -> Outcome {
        fits("the number of residual streams", spec.streams, MAX_STREAMS, "at most 8")?;
        self.require(Family::Changes)?;
        let base: Vec<u32> = spec.base.iter().map(|base| base.to_bits()).collect();
        let (memory, at) = self.device.table(&base)?;
        let [row, end, stride, streams, columns, iterations] =
            [rows.start, rows.end, weights.stride(), spec.streams, spec.columns(), spec.iterations]
                .map(|number| number as u32);
        let [pre, post, mix] = spec.scale.map(f32::to_bits);
        let eps = spec.eps.to_bits();
        let arguments = [row, end, stride, streams, columns, at, iterations, eps, pre, post, mix];
        let groups = [rows.len().div_ceil(WEIGHED) as u32, 1, 1];
        let buffers = [&memory, &weights.memory];
        self.device.dispatch(&Kernel::Change(Change::WeighStreams), &buffers, &arguments, groups)
    }

    pub(super) fn collapse_rows(
        &mut self,
        spec: &StreamSpec,
        (weights, streams): (&Buffer, &Buffer),
        rows: Range<usize>,
        out: &mut Buffer,
    ) -> Outcome {
        self.require(Family::Changes)?;
        out.shape(streams.rows)?;
        let strides = [weights.stride(), streams.stride(), out.stride()];
        let buffers = [&weights.memory, &streams.memory, &out.memory];
        self.change_streams(Change::Collapse, (spec.streams, out.width), rows, strides, &buffers)
    }

    pub(super) fn expand_rows(
        &mut self,
        spec: &StreamSpec,
        (weights, result): (&Buffer, &Buffer),
        rows: Range<usize>,
        streams: &Buffer,
    ) -> Outcome {
        fits("the number of residual streams", spec.streams, MAX_STREAMS, "at most 8")?;
        self.require(Family::Changes)?;
        let strides = [weights.stride(), result.stride(), streams.stride()];
        let buffers = [&weights.memory, &result.memory, &streams.memory];
        self.change_streams(Change::Expand, (spec.streams, result.width), rows, strides, &buffers)
    }

    fn change_streams(
        &mut self,
        change: Change,
        (streams, width): (usize, usize),
        rows: Range<usize>,
        strides: [usize; 3],
        buffers: &[&Memory],
    ) -> Outcome {
        let arguments = [rows.start, strides[0], strides[1], strides[2], streams, width];
        let arguments = arguments.map(|number| number as u32);
        let groups = [width.div_ceil(CHANGED) as u32, rows.len() as u32, 1];
        self.device.dispatch(&Kernel::Change(change), buffers, &arguments, groups)
    }

    pub(super) fn weigh_chosen(&mut self, factors: &[f32], rows: Range<usize>, choices: &Buffer) -> Outcome {
        self.require(Family::Changes)?;
        let words: Vec<u32> = factors.iter().map(|factor| factor.to_bits()).collect();
        let (memory, at) = self.device.table(&words)?;
        let arguments = [rows.start, choices.stride(), choices.width / 2, at as usize, factors.len()]
            .map(|number| number as u32);
        let buffers = [&memory, &choices.memory];
        let groups = [rows.len() as u32, 1, 1];
        self.device.dispatch(&Kernel::Change(Change::WeighChoices), &buffers, &arguments, groups)
    }

    pub(super) fn mix_sums(
        &mut self,
        sums: &[&Buffer],
        rows: Range<usize>,
        (weight, eps): (&[f32], f32),
        out: &mut Buffer,
    ) -> Outcome {
        self.require(Family::Changes)?;
        let Some(x) = sums.last().filter(|_| !rows.is_empty()) else { return Ok(()) };
        out.shape(x.rows)?;
        let words: Vec<u32> = weight.iter().map(|weight| weight.to_bits()).collect();
        let (memory, at) = self.device.table(&words)?;
        let bytes = rows.len() * sums.len() * 4;
        let scores = Self::grown(&mut self.device, &mut self.parts, bytes, "scores of sums")?;
        let (row, width, count) = (rows.start as u32, x.width as u32, sums.len() as u32);
        for (number, x) in (0..).zip(sums) {
            let arguments = [row, x.stride() as u32, width, at, eps.to_bits(), count, number];
            let buffers = [&memory, &x.memory, &scores];
            let groups = [rows.len() as u32, 1, 1];
            self.device.dispatch(&Kernel::Change(Change::MixScores), &buffers, &arguments, groups)?;
        }
        for (number, x) in (0..).zip(sums) {
            let arguments = [row, x.stride() as u32, out.stride() as u32, width, count, number];
            let buffers = [&scores, &x.memory, &out.memory];
            let groups = [x.width.div_ceil(CHANGED) as u32, rows.len() as u32, 1];
            self.device.dispatch(&Kernel::Change(Change::MixAdd), &buffers, &arguments, groups)?;
        }
        Ok(())
    }
}
