//! Operations that few families need. Those that are missing here run on the host.

use std::ops::Range;

use thunder_compute::{
    ComputeError, Curve, DeltaSpec, Expert, Extra, GatedConvSpec, RareOperations, StateSpaceSpec, Step,
};

use super::Outcome;
use super::experts::Experts;
use super::recurrence::Convolution;
use crate::backend::GpuBackend;
use crate::buffer::{Buffer, Vector};
use crate::caches::Caches;
use crate::matrix::Matrix;

/// Whether GPUs have an operation that some backends lack.
pub fn offers(operation: Extra) -> bool {
    match operation {
        Extra::Scoring
        | Extra::UngatedExperts
        | Extra::ChannelDeltaRule
        | Extra::StateSpace
        | Extra::GatedConv
        | Extra::StateDrafts => true,
        Extra::LaterTokens
        | Extra::Selection
        | Extra::Compression
        | Extra::Pooling
        | Extra::RecentTokens => false,
    }
}

impl RareOperations for GpuBackend {
    fn offers(&self, operation: Extra) -> bool {
        offers(operation)
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
}
