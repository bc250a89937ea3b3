//! Operations that few families need. Those that are missing here run on the host.

use std::ops::Range;

use thunder_compute::{
    CompressedSpec, CompressionSpec, ComputeError, Curve, DeltaSpec, Expert, Extra, GatedConvSpec, KvFormat,
    LatentSpec, LayerNorm, RareOperations, RecentSpec, Rope, Rounding, RouterSpec, SelectionBlocks,
    SelectionSpec, StateSpaceSpec, Step, StreamSpec,
};

use super::Outcome;
use super::experts::Experts;
use super::recurrence::Convolution;
use super::select::Among;
use crate::backend::GpuBackend;
use crate::buffer::{Buffer, Vector};
use crate::caches::Caches;
use crate::matrix::Matrix;
use crate::proof::Family;

/// Whether GPUs have an operation that some backends lack.
pub fn offers(operation: Extra) -> bool {
    match operation {
        Extra::Scoring
        | Extra::UngatedExperts
        | Extra::ChannelDeltaRule
        | Extra::StateSpace
        | Extra::GatedConv
        | Extra::Selection
        | Extra::Compression
        | Extra::Pooling
        | Extra::RecentTokens
        | Extra::LaterTokens => true,
    }
}

impl RareOperations for GpuBackend {
    fn offers(&self, operation: Extra) -> bool {
        offers(operation)
    }

    fn center(&mut self, parts: &[Range<usize>], rows: Range<usize>, x: &mut Buffer) -> Outcome {
        self.center_parts(parts, rows, x)
    }

    fn shift(&mut self, first: usize, by: &[f32], rows: Range<usize>, x: &mut Buffer) -> Outcome {
        self.shift_columns(first, by, rows, x)
    }

    fn layer_norm(&mut self, norm: &LayerNorm, rows: Range<usize>, x: &mut Buffer) -> Outcome {
        self.layer_norm_rows(norm, rows, x)
    }

    fn clear(&mut self, rows: Range<usize>, x: &mut Buffer) -> Outcome {
        self.clear_rows(rows, x)
    }

    fn round(&mut self, rounding: Rounding, rows: Range<usize>, x: &mut Buffer) -> Outcome {
        self.round_rows(rounding, rows, x)
    }

    fn gate_heads(
        &mut self,
        gates: &Buffer,
        heads: (usize, usize),
        rows: Range<usize>,
        x: &mut Buffer,
    ) -> Outcome {
        self.gate_heads_of(gates, heads, rows, x)
    }

    fn add_values(
        &mut self,
        norm: (&[f32], f32),
        made: &Buffer,
        rows: Range<usize>,
        streams: &mut Buffer,
    ) -> Outcome {
        self.add_values_to(norm, made, rows, streams)
    }

    fn route_assigned(
        &mut self,
        spec: &RouterSpec<Vector>,
        assigned: &[u16],
        logits: &Buffer,
        rows: Range<usize>,
        choices: &mut Buffer,
    ) -> Outcome {
        self.route_given(spec, assigned, logits, rows, choices)
    }

    fn select_members(
        &mut self,
        every: usize,
        positions: &[usize],
        compressed: (&Buffer, Range<usize>),
        selection: &mut Buffer,
    ) -> Outcome {
        self.members_of(every, positions, compressed, selection)
    }

    fn weigh_choices(&mut self, factors: &[f32], rows: Range<usize>, choices: &mut Buffer) -> Outcome {
        self.weigh_chosen(factors, rows, choices)
    }

    fn rotate_parts(
        &mut self,
        rope: (&Rope, bool),
        positions: &[usize],
        firsts: &[usize],
        rows: Range<usize>,
        x: &mut Buffer,
    ) -> Outcome {
        self.rotate_columns(rope, positions, firsts, rows, x)
    }

    fn weigh_streams(&mut self, spec: &StreamSpec, rows: Range<usize>, weights: &mut Buffer) -> Outcome {
        self.weigh_stream_rows(spec, rows, weights)
    }

    fn collapse_streams(
        &mut self,
        spec: &StreamSpec,
        inputs: (&Buffer, &Buffer),
        rows: Range<usize>,
        out: &mut Buffer,
    ) -> Outcome {
        self.collapse_rows(spec, inputs, rows, out)
    }

    fn expand_streams(
        &mut self,
        spec: &StreamSpec,
        inputs: (&Buffer, &Buffer),
        rows: Range<usize>,
        streams: &mut Buffer,
    ) -> Outcome {
        self.expand_rows(spec, inputs, rows, streams)
    }

    fn mix(
        &mut self,
        before: &[Buffer],
        x: &Buffer,
        rows: Range<usize>,
        by: (&[f32], f32),
        out: &mut Buffer,
    ) -> Outcome {
        let sums: Vec<&Buffer> = before.iter().chain([x]).collect();
        self.mix_sums(&sums, rows, by, out)
    }

    fn bend(&mut self, curve: Curve, rows: Range<usize>, x: &mut Buffer) -> Outcome {
        self.bend_rows(curve, rows, x)
    }

    fn copy_columns(
        &mut self,
        from: (&Buffer, usize),
        rows: Range<usize>,
        to: (&mut Buffer, Range<usize>),
    ) -> Outcome {
        self.copy_row_columns(from, rows, to)
    }

    fn scale(
        &mut self,
        columns: Range<usize>,
        factors: &[f32],
        rows: Range<usize>,
        x: &mut Buffer,
    ) -> Outcome {
        self.scale_rows(columns, factors, rows, x)
    }

    fn weigh_input(&mut self, choices: &mut Buffer, rows: Range<usize>, x: &mut Buffer) -> Outcome {
        self.weigh_input_rows(choices, rows, x)
    }

    fn ungated_experts(&mut self, experts: Vec<Expert<Matrix>>) -> Result<Experts, ComputeError> {
        self.upload_experts(experts, None)
    }

    fn channel_delta_rule(
        &mut self,
        spec: &DeltaSpec<Vector>,
        step: &Step,
        rows: Range<usize>,
        inputs: [&Buffer; 3],
        state: (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows())?;
        self.apply_channel_delta_rule(spec, rows, inputs, state, out)
    }

    fn state_space(
        &mut self,
        spec: &StateSpaceSpec<Vector>,
        step: &Step,
        rows: Range<usize>,
        (x, times): (&mut Buffer, &Buffer),
        (caches, cache): (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows())?;
        let (channels, kernel) = (spec.channels(), spec.kernel);
        let of = Convolution { taps: &spec.taps, bias: spec.conv_bias.as_ref(), channels, kernel };
        self.convolve(&of, rows.clone(), x, (&mut *caches, cache))?;
        self.apply_state_space(spec, rows, (x, times), (caches, cache), out)
    }

    fn gated_conv(
        &mut self,
        spec: &GatedConvSpec<Vector>,
        step: &Step,
        rows: Range<usize>,
        x: &mut Buffer,
        state: (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows())?;
        self.convolve_gated(spec, rows, x, state, out)
    }

    fn select(
        &mut self,
        spec: &SelectionSpec,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Buffer, &Buffer),
        (caches, cache): (&mut Caches, usize),
        selection: &mut Buffer,
    ) -> Outcome {
        selection.shape(step.rows())?;
        self.select_rows(spec, rows, inputs, (caches, cache), (Among::All, selection))
    }

    fn attend_selected(
        &mut self,
        spec: &LatentSpec<Vector>,
        step: &Step,
        rows: Range<usize>,
        inputs: [&Buffer; 3],
        (caches, cache): (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows())?;
        self.attend_selected_rows(spec, rows, inputs, (caches, cache), out)
    }

    fn select_blocks(
        &mut self,
        spec: &SelectionSpec,
        blocks: SelectionBlocks,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Buffer, &Buffer),
        (caches, cache): (&mut Caches, usize),
        chosen: &mut Buffer,
    ) -> Outcome {
        chosen.shape(step.rows())?;
        self.select_rows(spec, rows, inputs, (caches, cache), (Among::Blocks(blocks), chosen))
    }

    fn select_within(
        &mut self,
        spec: &SelectionSpec,
        blocks: SelectionBlocks,
        step: &Step,
        rows: Range<usize>,
        [queries, weights, chosen]: [&Buffer; 3],
        (caches, cache): (&mut Caches, usize),
        selection: &mut Buffer,
    ) -> Outcome {
        selection.shape(step.rows())?;
        let among = Among::Within(chosen, blocks);
        self.select_rows(spec, rows, (queries, weights), (caches, cache), (among, selection))
    }

    fn compress(
        &mut self,
        spec: &CompressionSpec<Vector>,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Buffer, &Buffer),
        (caches, to): (&mut Caches, [usize; 2]),
    ) -> Outcome {
        self.compress_to(spec, (step, rows), inputs, (caches, to))
    }

    fn pool(
        &mut self,
        spec: &CompressionSpec<Vector>,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Buffer, &Buffer),
        (caches, state): (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        self.require(Family::Pooling { int8: caches.format == KvFormat::Int8 })?;
        out.shape(step.rows())?;
        self.compress_rows(spec, (step, rows), inputs, caches.states(state), out)
    }

    fn recent_tokens(
        &mut self,
        spec: RecentSpec,
        step: &Step,
        rows: Range<usize>,
        (caches, cache): (&mut Caches, usize),
    ) -> Result<Vec<u32>, ComputeError> {
        self.keep_recent(spec, (step, rows), caches.states(cache))
    }

    fn attend_compressed(
        &mut self,
        spec: &CompressedSpec<Vector>,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Buffer, Option<&Buffer>),
        (caches, from): (&mut Caches, [usize; 2]),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows())?;
        self.attend_compressed_rows(spec, rows, inputs, (caches, from), out)
    }
}
