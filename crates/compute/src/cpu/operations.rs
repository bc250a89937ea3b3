//! The CPU's operations.

mod compressed;
mod device;
pub(super) mod experts;
mod extra;
mod latent;
mod rare;
mod recurrence;
mod rows;

use std::ops::Range;
use std::sync::Arc;

use thunder_collectives::Op;

use super::attention::{Attention, HeadWork};
use super::pointers::SendPtr;
use super::product::GatedOutput;
use super::product::experts::Experts;
use super::rows::Rotation;
use super::{Buffer, Caches, CpuBackend, Linear, PART_ROWS, StepRows};
use crate::backend::{
    Activation, AttentionSpec, Backend, CachePart, ComputeError, DeltaSpec, Heads, InputOf, Largest,
    LatentSpec, LinearInput, Norm, PartNorm, Rope, RouterSpec, Scoring,
};
use crate::choice::Choices;
use crate::step::Step;

type Outcome = Result<(), ComputeError>;

impl CpuBackend {
    /// The inputs of attention: `rows` of `qkv`, and `cache` if there is one.
    fn attention_of<'a>(
        &'a mut self,
        spec: &'a AttentionSpec<Arc<[f32]>>,
        (step, rows): (&'a Step, Range<usize>),
        qkv: (*const f32, &Buffer),
        cache: Option<(&mut Caches, usize)>,
    ) -> Attention<'a> {
        let (pointer, buffer) = qkv;
        assert!(
            spec.qkv_width() <= buffer.width && step.rows() <= buffer.rows,
            "the projection lacks rows or columns"
        );
        Attention {
            pool: &mut self.pool,
            isa: self.isa,
            allows_bf16: self.activations.allows_bf16(),
            scratch: SendPtr(self.space.scratch.as_mut_ptr()),
            spec,
            step,
            rows,
            rotation: spec.rope.map(|rope| &self.rotations[rope]),
            qkv: SendPtr(pointer.cast_mut()),
            qkv_stride: buffer.width,
            kv: cache.map(|(caches, cache)| caches.heads(cache).part()),
        }
    }

    /// Adds partial sums to the residual stream after they were summed over the ranks. Sums of a
    /// part of a step stay pending.
    fn reduce_partial(&mut self, mut partial: Buffer, rows: Range<usize>, residual: &mut Buffer) -> Outcome {
        if self.step.is_some_and(|step| rows.len() < step.all) {
            self.settle(residual)?;
            self.reducer.begin(partial, rows);
            return Ok(());
        }
        self.all_reduce(&mut partial, rows.clone())?;
        self.add_rows(&partial, rows, residual);
        self.spares.push(partial);
        Ok(())
    }
}

impl Backend for CpuBackend {
    fn begin(&mut self, step: &Step, ropes: &[Rope]) -> Result<[Range<usize>; 2], ComputeError> {
        self.packing = None;
        let (all, generated) = (step.rows(), step.generated());
        // Drafts stay whole: states are computed beyond their first row on a copy.
        let has_drafts = step.sequences.iter().any(|sequence| sequence.drafted + sequence.accepted > 0);
        let least = if has_drafts { generated } else { 0 };
        let middle = (all / 2).max(least).next_multiple_of(PART_ROWS).min(all);
        let cut = if generated < all && self.reducer.overlaps(all) { middle } else { all };
        self.step = Some(StepRows { all, generated });
        self.rotations.resize_with(ropes.len(), Rotation::default);
        for (rotation, rope) in self.rotations.iter_mut().zip(ropes) {
            rotation.compute(&mut self.pool, step, rope);
        }
        Ok([0..cut, cut..all])
    }

    fn embed(&mut self, table: &Linear, ids: &[u32], first: u32, scale: f32, out: &mut Buffer) -> Outcome {
        self.embed_rows(table, ids, first, scale, out);
        Ok(())
    }

    fn rms_norm(
        &mut self,
        x: &Buffer,
        rows: Range<usize>,
        norm: &Norm<Self::Vector>,
        out: &mut Buffer,
    ) -> Outcome {
        self.norm_rows(x, rows, norm, out);
        Ok(())
    }

    fn square_sums(
        &mut self,
        norms: &[PartNorm<Self::Vector>],
        x: &Buffer,
        rows: Range<usize>,
        out: &mut Buffer,
    ) -> Outcome {
        self.square_sum_rows(norms, x, rows, out);
        Ok(())
    }

    fn norm_by_sums(
        &mut self,
        norms: &[PartNorm<Self::Vector>],
        sums: &Buffer,
        rows: Range<usize>,
        x: &mut Buffer,
    ) -> Outcome {
        self.norm_rows_by_sums(norms, sums, rows, x);
        Ok(())
    }

    fn product(&mut self, x: &Buffer, rows: Range<usize>, w: &Linear, out: &mut Buffer) -> Outcome {
        self.multiply(LinearInput::Plain(x), rows, w, out, false, None);
        Ok(())
    }

    fn gate(
        &mut self,
        gate_up: &Buffer,
        rows: Range<usize>,
        activation: Activation,
        out: &mut Buffer,
    ) -> Outcome {
        self.gate_rows(gate_up, rows, activation, out);
        Ok(())
    }

    fn route(
        &mut self,
        spec: &RouterSpec<Self::Vector>,
        logits: &Buffer,
        rows: Range<usize>,
        choices: &mut Buffer,
    ) -> Outcome {
        self.route_rows(spec, logits, rows, choices);
        Ok(())
    }

    fn expert_sum(
        &mut self,
        x: &Buffer,
        rows: Range<usize>,
        choices: &Buffer,
        experts: &Experts,
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(x.rows);
        out.data[rows.start * out.width..rows.end * out.width].fill(0.0);
        self.add_experts(x, rows, choices, experts, out);
        Ok(())
    }

    fn add(&mut self, x: &Buffer, rows: Range<usize>, to: &mut Buffer) -> Outcome {
        self.add_rows(x, rows, to);
        Ok(())
    }

    fn all_reduce(&mut self, x: &mut Buffer, rows: Range<usize>) -> Outcome {
        // The group is free again; the sum stays what `settle` adds.
        self.reducer.finish()?;
        let rows = &mut x.data[rows.start * x.width..rows.end * x.width];
        Ok(self.reducer.group().all_reduce(rows, Op::Sum)?)
    }

    fn all_reduce_both(&mut self, both: [&mut Buffer; 2], rows: Range<usize>) -> Outcome {
        self.reduce_joined(both, rows)
    }

    fn take_rows(&mut self, x: &Buffer, rows: &[u32], out: &mut Buffer) -> Outcome {
        out.shape(rows.len());
        for (&row, out) in rows.iter().zip(out.data.chunks_exact_mut(x.width)) {
            out.copy_from_slice(&x.data[row as usize * x.width..][..x.width]);
        }
        Ok(())
    }

    fn read_largest(&mut self, x: &Buffer, largest: &mut [Largest]) -> Outcome {
        self.find_largest(x, largest);
        Ok(())
    }

    fn read_chosen(
        &mut self,
        x: &Buffer,
        choices: &Choices<'_>,
        chosen: &mut [Largest],
        likely: &mut [f32],
    ) -> Outcome {
        choices.of_rows(x.data.chunks_exact(x.width), &mut self.choices, chosen, likely);
        Ok(())
    }

    fn prepare_heads(
        &mut self,
        spec: &AttentionSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        qkv: &mut Buffer,
    ) -> Outcome {
        let pointer = qkv.data.as_mut_ptr();
        self.attention_of(spec, (step, rows), (pointer, qkv), None).prepare(HeadWork::Prepare);
        Ok(())
    }

    fn append(
        &mut self,
        spec: &AttentionSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        qkv: &Buffer,
        to: (&mut Caches, usize),
    ) -> Outcome {
        let pointer = qkv.data.as_ptr();
        self.attention_of(spec, (step, rows), (pointer, qkv), Some(to)).prepare(HeadWork::Append);
        Ok(())
    }

    fn attend(
        &mut self,
        spec: &AttentionSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        qkv: &Buffer,
        from: (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        self.attend_by(spec, Scoring::default(), step, rows, qkv, from, out)
    }

    fn prepare_latent(
        &mut self,
        spec: &LatentSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        queries: &mut Buffer,
        latent: &mut Buffer,
    ) -> Outcome {
        debug_assert!(rows.end <= step.rows());
        self.prepare_latent_rows(spec, rows, queries, latent);
        Ok(())
    }

    fn append_latent(
        &mut self,
        _spec: &LatentSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        latent: &Buffer,
        (caches, cache): (&mut Caches, usize),
    ) -> Outcome {
        self.append_latent_rows((step, rows), latent, caches.latent(cache).part());
        Ok(())
    }

    fn attend_latent(
        &mut self,
        spec: &LatentSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        absorbed: &Buffer,
        queries: &Buffer,
        (caches, cache): (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows());
        let cache = caches.latent(cache).part();
        self.attend_latent_rows(spec, (step, rows), ([absorbed, queries], None), cache, out);
        Ok(())
    }

    fn head_products(
        &mut self,
        x: &Buffer,
        stride: usize,
        rows: Range<usize>,
        w: &Heads<Linear>,
        out: &mut Buffer,
    ) -> Outcome {
        self.multiply_heads(x, stride, rows, &w.matrices, out);
        Ok(())
    }

    fn short_conv(
        &mut self,
        spec: &DeltaSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        x: &mut Buffer,
        (caches, cache): (&mut Caches, usize),
    ) -> Outcome {
        self.short_conv_rows(spec, (step, rows), x, caches.states(cache));
        Ok(())
    }

    fn delta_rule(
        &mut self,
        spec: &DeltaSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        (qkv, gates): (&Buffer, &Buffer),
        (caches, cache): (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows());
        self.delta_rule_rows(spec, (step, rows), (qkv, gates), caches.states(cache), out);
        Ok(())
    }

    fn norm_gated(
        &mut self,
        spec: &DeltaSpec<Self::Vector>,
        z: &Buffer,
        rows: Range<usize>,
        x: &mut Buffer,
    ) -> Outcome {
        self.norm_gated_rows(spec, z, rows, x);
        Ok(())
    }

    fn copy_slot(&mut self, caches: &mut Caches, from: usize, to: usize) -> Outcome {
        caches.copy_slot(from, to);
        Ok(())
    }

    fn read_cache(&mut self, caches: &mut Caches, part: CachePart, out: &mut Vec<u8>) -> Outcome {
        caches.read(part, out);
        Ok(())
    }

    fn write_cache(
        &mut self,
        caches: &mut Caches,
        part: CachePart,
        bytes: &[u8],
    ) -> Result<bool, ComputeError> {
        Ok(caches.write(part, bytes))
    }

    fn linear(&mut self, x: InputOf<'_, Self>, rows: Range<usize>, w: &Linear, out: &mut Buffer) -> Outcome {
        self.multiply(x, rows, w, out, false, None);
        Ok(())
    }

    fn linear_largest(&mut self, x: InputOf<'_, Self>, rows: usize, w: &Linear, out: &mut Buffer) -> Outcome {
        let mut largest = std::mem::take(&mut out.largest);
        largest.clear();
        largest.resize(rows, Largest::NONE);
        self.multiply(x, 0..rows, w, out, false, Some(&mut largest));
        out.largest = largest;
        Ok(())
    }

    fn linear_reduce_add(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        w: &Linear,
        residual: &mut Buffer,
    ) -> Outcome {
        if self.reducer.is_alone() {
            self.multiply(x, rows, w, residual, true, None);
            return Ok(());
        }
        let mut partial = self.spare(residual.capacity(), residual.width);
        self.multiply(x, rows.clone(), w, &mut partial, false, None);
        self.reduce_partial(partial, rows, residual)
    }

    fn experts_reduce_add(
        &mut self,
        x: &Buffer,
        rows: Range<usize>,
        choices: &Buffer,
        experts: &Experts,
        residual: &mut Buffer,
    ) -> Outcome {
        if self.reducer.is_alone() {
            self.add_experts(x, rows, choices, experts, residual);
            return Ok(());
        }
        let mut partial = self.spare(residual.capacity(), residual.width);
        self.expert_sum(x, rows.clone(), choices, experts, &mut partial)?;
        self.reduce_partial(partial, rows, residual)
    }

    fn linear_gated(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        gate_up: &Linear,
        (activation, next): (Activation, &Linear),
        out: &mut Buffer,
    ) -> Outcome {
        let all = x.buffer().rows;
        out.shape(all);
        assert_eq!(gate_up.rows, 2 * out.width, "gate and up have a row for each channel");
        for (rows, prompts) in self.alike(all, &rows) {
            let multiplier = self.multiplier(prompts);
            let out = if multiplier.gates_in_bf16(gate_up, activation, next) {
                GatedOutput::Bf16(out.output_in_bf16(rows.clone()))
            } else {
                GatedOutput::F32(out.output(rows.clone(), false))
            };
            multiplier.run_gated(&x, rows, (gate_up, activation), out);
        }
        Ok(())
    }

    fn settle(&mut self, residual: &mut Buffer) -> Outcome {
        if let Some((partial, rows)) = self.reducer.end()? {
            self.add_rows(&partial, rows, residual);
            self.spares.push(partial);
        }
        Ok(())
    }

    fn attention(
        &mut self,
        spec: &AttentionSpec<Self::Vector>,
        step: &Step,
        rows: Range<usize>,
        qkv: &mut Buffer,
        cache: (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows());
        if spec.kv_heads() > 0 {
            let pointer = qkv.data.as_mut_ptr();
            self.attention_of(spec, (step, rows), (pointer, qkv), Some(cache)).attend(
                HeadWork::PrepareAndAppend,
                Scoring::default(),
                out,
            );
        }
        Ok(())
    }

    fn attend_by(
        &mut self,
        spec: &AttentionSpec<Self::Vector>,
        scoring: Scoring,
        step: &Step,
        rows: Range<usize>,
        qkv: &Buffer,
        from: (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows());
        if spec.kv_heads() > 0 {
            let pointer = qkv.data.as_ptr();
            self.attention_of(spec, (step, rows), (pointer, qkv), Some(from)).attend(
                HeadWork::Nothing,
                scoring,
                out,
            );
        }
        Ok(())
    }
}
