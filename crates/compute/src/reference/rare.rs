//! Operations that few families need.

use std::ops::Range;

use super::{Caches, Experts, Reference, Rows, Weights, attention, compressed, recurrence};
use crate::backend::{
    CompressedSpec, CompressionSpec, ComputeError, DeltaSpec, Expert, Extra, GatedConvSpec, LatentSpec,
    RareOperations, RecentSpec, SelectionBlocks, SelectionSpec, StateSpaceSpec,
};
use crate::step::Step;

impl RareOperations for Reference {
    fn offers(&self, _operation: Extra) -> bool {
        true
    }

    fn ungated_experts(&mut self, experts: Vec<Expert<Weights>>) -> Result<Experts, ComputeError> {
        Ok(Experts { experts, activation: None })
    }

    fn channel_delta_rule(
        &mut self,
        spec: &DeltaSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        inputs: [&Rows; 3],
        (caches, cache): (&mut Caches, usize),
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(step.rows());
        recurrence::channel_delta_rule(spec, step, rows, inputs, &mut caches.0[cache], out);
        Ok(())
    }

    fn state_space(
        &mut self,
        spec: &StateSpaceSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        inputs: (&mut Rows, &Rows),
        (caches, cache): (&mut Caches, usize),
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(step.rows());
        recurrence::state_space(spec, step, rows, inputs, &mut caches.0[cache], out);
        Ok(())
    }

    fn gated_conv(
        &mut self,
        spec: &GatedConvSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        x: &mut Rows,
        (caches, cache): (&mut Caches, usize),
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(step.rows());
        recurrence::gated_conv(spec, step, rows, x, &mut caches.0[cache], out);
        Ok(())
    }

    fn select(
        &mut self,
        spec: &SelectionSpec,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Rows, &Rows),
        (caches, cache): (&mut Caches, usize),
        selection: &mut Rows,
    ) -> Result<(), ComputeError> {
        selection.resize(step.rows());
        attention::select(spec, step, rows, inputs, (&caches.0[cache], None), selection);
        Ok(())
    }

    fn select_blocks(
        &mut self,
        spec: &SelectionSpec,
        blocks: SelectionBlocks,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Rows, &Rows),
        (caches, cache): (&mut Caches, usize),
        chosen: &mut Rows,
    ) -> Result<(), ComputeError> {
        chosen.resize(step.rows());
        attention::select_blocks((spec, blocks), step, rows, inputs, &caches.0[cache], chosen);
        Ok(())
    }

    fn select_within(
        &mut self,
        spec: &SelectionSpec,
        blocks: SelectionBlocks,
        step: &Step,
        rows: Range<usize>,
        [queries, weights, chosen]: [&Rows; 3],
        (caches, cache): (&mut Caches, usize),
        selection: &mut Rows,
    ) -> Result<(), ComputeError> {
        selection.resize(step.rows());
        let from = (&caches.0[cache], Some((chosen, blocks)));
        attention::select(spec, step, rows, (queries, weights), from, selection);
        Ok(())
    }

    fn recent_tokens(
        &mut self,
        spec: RecentSpec,
        step: &Step,
        rows: Range<usize>,
        (caches, cache): (&mut Caches, usize),
    ) -> Result<Vec<u32>, ComputeError> {
        let mut recent = Vec::new();
        for sequence in &step.sequences {
            for row in sequence.rows_within(&rows) {
                let state = &mut caches.0[cache].states[sequence.slot];
                spec.keep(state, sequence.position(row), step.tokens[row], &mut recent);
            }
        }
        Ok(recent)
    }

    fn pool(
        &mut self,
        spec: &CompressionSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Rows, &Rows),
        state: (&mut Caches, usize),
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(step.rows());
        rows.clone().for_each(|row| out.rows[row].fill(0.0));
        for (_, row, mean) in compressed::means(spec, step, rows, inputs, state) {
            out.rows[row][..spec.dim].copy_from_slice(&mean);
        }
        Ok(())
    }

    fn compress(
        &mut self,
        spec: &CompressionSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Rows, &Rows),
        to: (&mut Caches, [usize; 2]),
    ) -> Result<(), ComputeError> {
        compressed::compress(spec, step, rows, inputs, to);
        Ok(())
    }

    fn attend_compressed(
        &mut self,
        spec: &CompressedSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Rows, Option<&Rows>),
        (caches, from): (&mut Caches, [usize; 2]),
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(step.rows());
        compressed::attend(spec, step, rows, inputs, (caches, from), out);
        Ok(())
    }

    fn attend_selected(
        &mut self,
        spec: &LatentSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        [absorbed, queries, selection]: [&Rows; 3],
        (caches, cache): (&mut Caches, usize),
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(step.rows());
        let inputs = ([absorbed, queries], Some(selection));
        attention::attend_latent(spec, step, rows, inputs, &caches.0[cache], out);
        Ok(())
    }
}
