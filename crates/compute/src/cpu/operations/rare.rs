//! Operations that few families need, by the functions that compute them.

use std::ops::Range;

use super::Outcome;
use super::compressed::pool_rows;
use crate::backend::{
    CompressedSpec, CompressionSpec, ComputeError, Curve, DeltaSpec, Expert, Extra, GatedConvSpec,
    LatentSpec, LayerNorm, RareOperations, RecentSpec, SelectionBlocks, SelectionSpec, StateSpaceSpec,
    StreamSpec, mix_row,
};
use crate::cpu::product::experts::Experts;
use crate::cpu::rows::{bend_on, layer_norm_on};
use crate::cpu::{Buffer, Caches, CpuBackend, Linear};
use crate::step::Step;

impl RareOperations for CpuBackend {
    fn offers(&self, _operation: Extra) -> bool {
        true
    }

    fn change_rows(
        &mut self,
        x: &mut Buffer,
        rows: Range<usize>,
        change: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Outcome {
        self.change_each_row(x, rows, change);
        Ok(())
    }

    fn bend(&mut self, curve: Curve, rows: Range<usize>, x: &mut Buffer) -> Outcome {
        let isa = self.isa;
        // SAFETY: the instruction set was detected.
        self.change_each_row(x, rows, &|_, row| unsafe { bend_on(isa, curve, row) });
        Ok(())
    }

    fn layer_norm(&mut self, norm: &LayerNorm, rows: Range<usize>, x: &mut Buffer) -> Outcome {
        let isa = self.isa;
        // SAFETY: the instruction set was detected.
        self.change_each_row(x, rows, &|_, row| unsafe { layer_norm_on(isa, norm, row) });
        Ok(())
    }

    fn copy_columns(
        &mut self,
        from: (&Buffer, usize),
        rows: Range<usize>,
        to: (&mut Buffer, Range<usize>),
    ) -> Outcome {
        self.copy_row_columns(from, rows, to);
        Ok(())
    }

    fn collapse_streams(
        &mut self,
        spec: &StreamSpec,
        inputs: (&Buffer, &Buffer),
        rows: Range<usize>,
        out: &mut Buffer,
    ) -> Outcome {
        self.collapse_rows(spec, inputs, rows, out);
        Ok(())
    }

    fn expand_streams(
        &mut self,
        spec: &StreamSpec,
        inputs: (&Buffer, &Buffer),
        rows: Range<usize>,
        streams: &mut Buffer,
    ) -> Outcome {
        self.expand_rows(spec, inputs, rows, streams);
        Ok(())
    }

    fn compress(
        &mut self,
        spec: &CompressionSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Buffer, &Buffer),
        to: (&mut Caches, [usize; 2]),
    ) -> Outcome {
        self.compress_rows(spec, (step, rows), inputs, to);
        Ok(())
    }

    fn pool(
        &mut self,
        spec: &CompressionSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Buffer, &Buffer),
        (caches, state): (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows());
        pool_rows(spec, (step, rows), inputs, caches.states(state), out);
        Ok(())
    }

    fn attend_compressed(
        &mut self,
        spec: &CompressedSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Buffer, Option<&Buffer>),
        (caches, [single, compressed]): (&mut Caches, [usize; 2]),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows());
        let compressed = spec.every.map(|_| caches.latent(compressed).part());
        let caches = (caches.latent(single).part(), compressed);
        self.attend_compressed_rows(spec, (step, rows), inputs, caches, out);
        Ok(())
    }

    fn mix(
        &mut self,
        before: &[Buffer],
        x: &Buffer,
        rows: Range<usize>,
        by: (&[f32], f32),
        out: &mut Buffer,
    ) -> Outcome {
        let first = rows.start;
        out.shape(x.rows);
        self.change_each_row(out, rows, &|index, out| {
            let sums = before.iter().chain([x]).map(|x| &x.data[(first + index) * x.width..][..x.width]);
            mix_row(sums, by, out);
        });
        Ok(())
    }

    fn ungated_experts(&mut self, experts: Vec<Expert<Linear>>) -> Result<Experts, ComputeError> {
        Ok(Experts::new(experts, None))
    }

    fn channel_delta_rule(
        &mut self,
        spec: &DeltaSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        inputs: [&Buffer; 3],
        (caches, cache): (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows());
        self.channel_delta_rule_rows(spec, (step, rows), inputs, caches.states(cache), out);
        Ok(())
    }

    fn state_space(
        &mut self,
        spec: &StateSpaceSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        inputs: (&mut Buffer, &Buffer),
        (caches, cache): (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows());
        self.state_space_rows(spec, (step, rows), inputs, caches.states(cache), out);
        Ok(())
    }

    fn gated_conv(
        &mut self,
        spec: &GatedConvSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        x: &mut Buffer,
        (caches, cache): (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows());
        self.gated_conv_rows(spec, (step, rows), x, caches.states(cache), out);
        Ok(())
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
        let cache = caches.latent(cache).part();
        self.select_rows(spec, (step, rows), inputs, (cache, None), selection);
        Ok(())
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
        let cache = caches.latent(cache).part();
        self.select_block_rows((spec, blocks), (step, rows), inputs, cache, chosen);
        Ok(())
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
        let from = (caches.latent(cache).part(), Some((chosen, blocks)));
        self.select_rows(spec, (step, rows), (queries, weights), from, selection);
        Ok(())
    }

    fn recent_tokens(
        &mut self,
        spec: RecentSpec,
        step: &Step,
        rows: Range<usize>,
        (caches, cache): (&mut Caches, usize),
    ) -> Result<Vec<u32>, ComputeError> {
        let (states, mut recent) = (caches.states(cache), Vec::with_capacity(rows.len() * spec.count));
        for sequence in &step.sequences {
            for row in sequence.rows_within(&rows) {
                let state = states.of(sequence, row, 0..spec.slots());
                spec.keep(state, sequence.position(row), step.tokens[row], &mut recent);
            }
        }
        Ok(recent)
    }

    fn attend_selected(
        &mut self,
        spec: &LatentSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        inputs: [&Buffer; 3],
        (caches, cache): (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows());
        self.attend_selected_rows(spec, (step, rows), inputs, caches.latent(cache).part(), out);
        Ok(())
    }
}
