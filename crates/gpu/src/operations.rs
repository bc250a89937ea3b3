//! The operations of [`Backend`], grouped into files by kind.

mod attend;
mod attend_many;
mod attend_shared;
pub(crate) mod attention;
mod batch;
mod change;
pub(crate) mod choose;
pub(crate) mod compress;
mod device;
pub(crate) mod expect;
pub(crate) mod experts;
mod heads;
pub(crate) mod leaving;
pub(crate) mod matrices;
pub(crate) mod pairs;
pub(crate) mod products;
mod rare;
mod recurrence;
mod rows;
mod select;
mod share;
mod sum_experts;

use std::ops::Range;

use thunder_compute::{
    Activation, AttentionSpec, Backend, CachePart, Choices, ComputeError, DeltaSpec, Extra, Heads, InputOf,
    Largest, LatentSpec, LinearInput, Norm, Overlap, PartNorm, Rope, RouterSpec, Scoring, Step,
};

use crate::backend::GpuBackend;
use crate::buffer::{Buffer, Vector};
use crate::caches::Caches;
use crate::matrix::Matrix;
use crate::proof::Family;
use choose::Routed;
use experts::Experts;
pub use rare::offers;
use recurrence::Convolution;
pub(crate) use rows::MAX_GROUPS;

type Outcome = Result<(), ComputeError>;

/// The first part of a step has a multiple of this many rows, as in the CPU backend: all ranks of a
/// group must cut the step at the same row.
const PART_ROWS: usize = 32;

/// An activation as the kernels' arguments: its number, alpha and limit.
fn activation_arguments(activation: Activation) -> [u32; 3] {
    match activation {
        Activation::Silu => [0, 0, 0],
        Activation::Gelu => [1, 0, 0],
        Activation::Clamped { alpha, limit } => [2, alpha.to_bits(), limit.to_bits()],
        Activation::Sigmoid => [3, 0, 0],
        Activation::Limited { limit } => [4, 0, limit.to_bits()],
        // 0 stands for no cap.
        Activation::Situ { beta, cap } => [5, beta.to_bits(), cap.unwrap_or(0.0).to_bits()],
        Activation::ExactGelu => [6, 0, 0],
    }
}

impl Backend for GpuBackend {
    fn begin(&mut self, step: &Step, ropes: &[Rope]) -> Result<[Range<usize>; 2], ComputeError> {
        self.begin_step(step, ropes)?;
        let all = step.rows();
        let has_parts =
            self.config.overlap == Overlap::Always && self.sums.size() > 1 && step.generated() < all;
        let cut = if has_parts { (all / 2).next_multiple_of(PART_ROWS).min(all) } else { all };
        Ok([0..cut, cut..all])
    }

    fn embed(&mut self, table: &Matrix, ids: &[u32], first: u32, scale: f32, out: &mut Buffer) -> Outcome {
        self.embed_rows(table, ids, first, scale, out)
    }

    fn rms_norm(&mut self, x: &Buffer, rows: Range<usize>, norm: &Norm<Vector>, out: &mut Buffer) -> Outcome {
        self.norm_rows(x, rows, (&norm.weight, norm.eps), out)
    }

    fn square_sums(
        &mut self,
        norms: &[PartNorm<Vector>],
        x: &Buffer,
        rows: Range<usize>,
        out: &mut Buffer,
    ) -> Outcome {
        self.sum_squares(norms, x, rows, out)
    }

    fn norm_by_sums(
        &mut self,
        norms: &[PartNorm<Vector>],
        sums: &Buffer,
        rows: Range<usize>,
        x: &mut Buffer,
    ) -> Outcome {
        self.norm_parts_by(norms, sums, rows, x)
    }

    fn product(&mut self, x: &Buffer, rows: Range<usize>, w: &Matrix, out: &mut Buffer) -> Outcome {
        self.multiply(LinearInput::Plain(x), rows, w, out, false)
    }

    fn gate(
        &mut self,
        gate_up: &Buffer,
        rows: Range<usize>,
        activation: Activation,
        out: &mut Buffer,
    ) -> Outcome {
        self.gate_rows(gate_up, rows, activation, out)
    }

    fn route(
        &mut self,
        spec: &RouterSpec<Vector>,
        logits: &Buffer,
        rows: Range<usize>,
        choices: &mut Buffer,
    ) -> Outcome {
        self.route_rows(spec, logits, rows, choices)
    }

    fn norm_route(
        &mut self,
        x: &Buffer,
        rows: Range<usize>,
        norm: &Norm<Vector>,
        (router, spec): (&Matrix, &RouterSpec<Vector>),
        out: [&mut Buffer; 3],
    ) -> Outcome {
        self.norm_and_route(&Routed { x, norm, router, spec }, rows, out)
    }

    fn expert_sum(
        &mut self,
        x: &Buffer,
        rows: Range<usize>,
        choices: &Buffer,
        experts: &Experts,
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(x.rows)?;
        self.sum_experts((x, rows), choices, experts, out, false)
    }

    fn add(&mut self, x: &Buffer, rows: Range<usize>, to: &mut Buffer) -> Outcome {
        self.add_rows(x, rows, to)
    }

    fn all_reduce(&mut self, x: &mut Buffer, rows: Range<usize>) -> Outcome {
        self.sum_rows(x, rows)
    }

    fn all_reduce_both(&mut self, [x, y]: [&mut Buffer; 2], rows: Range<usize>) -> Outcome {
        if self.sums.size() == 1 {
            return Ok(());
        }
        if self.sums.peers {
            self.sum_rows(x, rows.clone())?;
            return self.sum_rows(y, rows);
        }
        // Alternates a row of the first and a row of the second, like the CPU backend.
        let width = x.width + y.width;
        let [mut of_x, mut of_y] = [&*x, &*y].map(|x| vec![0.0; rows.len() * x.width]);
        self.read_rows(x, rows.clone(), &mut of_x)?;
        self.read_rows(y, rows.clone(), &mut of_y)?;
        let parts = of_x.chunks_exact(x.width).zip(of_y.chunks_exact(y.width));
        let mut joined: Vec<f32> = parts.flat_map(|(x, y)| x.iter().chain(y)).copied().collect();
        self.sums.group(&mut self.device).all_reduce(&mut joined, thunder_collectives::Op::Sum)?;
        let halves = || joined.chunks_exact(width).map(|row| row.split_at(x.width));
        let of_x: Vec<f32> = halves().flat_map(|(x, _)| x).copied().collect();
        let of_y: Vec<f32> = halves().flat_map(|(_, y)| y).copied().collect();
        self.write_rows(x, rows.start, &of_x)?;
        self.write_rows(y, rows.start, &of_y)
    }

    fn take_rows(&mut self, x: &Buffer, rows: &[u32], out: &mut Buffer) -> Outcome {
        self.pick_rows(x, rows, out)
    }

    fn gathers(&self) -> usize {
        self.sums.gathers()
    }

    fn read_largest(&mut self, x: &Buffer, largest: &mut [Largest]) -> Outcome {
        self.find_largest(x, largest)
    }

    fn read_chosen(
        &mut self,
        x: &Buffer,
        choices: &Choices<'_>,
        chosen: &mut [Largest],
        likely: &mut [f32],
    ) -> Outcome {
        let draws = self.proving == Some(Family::Likely) || self.takes(Family::Draws(self.device.draw))?;
        match draws && (choices.likely.is_none() || self.takes(Family::Likely)?) {
            true => self.draw_tokens(x, choices, chosen, likely),
            false => self.choose_by_host(x, choices, chosen, likely),
        }
    }

    fn prepare_heads(
        &mut self,
        spec: &AttentionSpec<Vector>,
        _step: &Step,
        rows: Range<usize>,
        qkv: &mut Buffer,
    ) -> Outcome {
        self.prepare_heads_of(spec, rows, qkv)
    }

    fn append(
        &mut self,
        spec: &AttentionSpec<Vector>,
        _step: &Step,
        rows: Range<usize>,
        qkv: &Buffer,
        (caches, cache): (&mut Caches, usize),
    ) -> Outcome {
        self.append_heads(spec, rows, qkv, (caches, cache))
    }

    fn attend(
        &mut self,
        spec: &AttentionSpec<Vector>,
        step: &Step,
        rows: Range<usize>,
        qkv: &Buffer,
        (caches, cache): (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows())?;
        self.attend_heads((spec, Scoring::default()), rows, qkv, (caches, cache), out)
    }

    fn attend_by(
        &mut self,
        spec: &AttentionSpec<Vector>,
        scoring: Scoring,
        step: &Step,
        rows: Range<usize>,
        qkv: &Buffer,
        (caches, cache): (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        // Rows of drafts would need their sequence's last position.
        if scoring.after > 0 && step.sequences.iter().any(|s| !s.prompt && s.rows.len() > 1) {
            return Err(ComputeError::Lacks(Extra::LaterTokens));
        }
        out.shape(step.rows())?;
        self.attend_heads((spec, scoring), rows, qkv, (caches, cache), out)
    }

    fn attention(
        &mut self,
        spec: &AttentionSpec<Vector>,
        step: &Step,
        rows: Range<usize>,
        qkv: &mut Buffer,
        (caches, cache): (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows())?;
        self.prepare_and_attend(spec, rows, qkv, (caches, cache), out)
    }

    fn prepare_latent(
        &mut self,
        spec: &LatentSpec<Vector>,
        _step: &Step,
        rows: Range<usize>,
        queries: &mut Buffer,
        latent: &mut Buffer,
    ) -> Outcome {
        self.prepare_latent_of(spec, rows, queries, latent)
    }

    fn append_latent(
        &mut self,
        _spec: &LatentSpec<Vector>,
        _step: &Step,
        rows: Range<usize>,
        latent: &Buffer,
        (caches, cache): (&mut Caches, usize),
    ) -> Outcome {
        let (_, first, second) = caches.tokens(cache);
        self.append_vectors(rows.clone(), (latent, 0), 1, first)?;
        self.append_vectors(rows, (latent, first.width), 1, second)
    }

    fn attend_latent(
        &mut self,
        spec: &LatentSpec<Vector>,
        step: &Step,
        rows: Range<usize>,
        absorbed: &Buffer,
        queries: &Buffer,
        (caches, cache): (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows())?;
        self.attend_compressed(spec, rows, [absorbed, queries], (caches, cache), out)
    }

    fn prepare_and_append_latent(
        &mut self,
        spec: &LatentSpec<Vector>,
        _step: &Step,
        rows: Range<usize>,
        (queries, latent): (&mut Buffer, &mut Buffer),
        (caches, cache): (&mut Caches, usize),
    ) -> Outcome {
        self.prepare_and_append_latent_of(spec, rows, (queries, latent), (caches, cache))
    }

    fn head_products(
        &mut self,
        x: &Buffer,
        stride: usize,
        rows: Range<usize>,
        w: &Heads<Matrix>,
        out: &mut Buffer,
    ) -> Outcome {
        self.multiply_heads(x, stride, rows, w, out)
    }

    fn short_conv(
        &mut self,
        spec: &DeltaSpec<Vector>,
        _step: &Step,
        rows: Range<usize>,
        x: &mut Buffer,
        state: (&mut Caches, usize),
    ) -> Outcome {
        let (channels, kernel) = (spec.channels(), spec.kernel);
        self.convolve(&Convolution { taps: &spec.taps, bias: None, channels, kernel }, rows, x, state)
    }

    fn delta_rule(
        &mut self,
        spec: &DeltaSpec<Vector>,
        step: &Step,
        rows: Range<usize>,
        inputs: (&Buffer, &Buffer),
        state: (&mut Caches, usize),
        out: &mut Buffer,
    ) -> Outcome {
        out.shape(step.rows())?;
        self.apply_delta_rule(spec, rows, inputs, state, out)
    }

    fn norm_gated(
        &mut self,
        spec: &DeltaSpec<Vector>,
        z: &Buffer,
        rows: Range<usize>,
        x: &mut Buffer,
    ) -> Outcome {
        self.norm_gated_rows(spec, z, rows, x)
    }

    fn copy_slot(&mut self, caches: &mut Caches, from: usize, to: usize) -> Outcome {
        self.copy_states(caches, from, to)
    }

    fn read_cache(&mut self, caches: &mut Caches, part: CachePart, out: &mut Vec<u8>) -> Outcome {
        self.read_cache_part(caches, part, out)
    }

    fn write_cache(
        &mut self,
        caches: &mut Caches,
        part: CachePart,
        bytes: &[u8],
    ) -> Result<bool, ComputeError> {
        self.write_cache_part(caches, part, bytes)
    }

    fn linear(&mut self, x: InputOf<'_, Self>, rows: Range<usize>, w: &Matrix, out: &mut Buffer) -> Outcome {
        self.multiply(x, rows, w, out, false)
    }

    fn linear_gated(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        gate_up: &Matrix,
        (activation, _next): (Activation, &Matrix),
        out: &mut Buffer,
    ) -> Outcome {
        self.multiply_gated(x, rows, gate_up, activation, out)
    }

    fn linear_reduce_add(
        &mut self,
        x: InputOf<'_, Self>,
        rows: Range<usize>,
        w: &Matrix,
        residual: &mut Buffer,
    ) -> Outcome {
        if self.sums.size() == 1 {
            return self.multiply(x, rows, w, residual, true);
        }
        let mut partial = self.spare(residual.capacity(), residual.width)?;
        self.multiply(x, rows.clone(), w, &mut partial, false)?;
        let weights = w.chunks.first().map(|chunk| chunk.buffers[0].id);
        self.add_sums(&mut partial, rows, residual, weights)?;
        self.spares.push(partial);
        Ok(())
    }

    /// The last operation of the layers. Other ranks wait for the recorded sums, so they are
    /// submitted even if nobody reads this step's results.
    fn settle(&mut self, _residual: &mut Buffer) -> Outcome {
        self.sums.submit(&mut self.device)
    }

    fn experts_reduce_add(
        &mut self,
        x: &Buffer,
        rows: Range<usize>,
        choices: &Buffer,
        experts: &Experts,
        residual: &mut Buffer,
    ) -> Outcome {
        if self.sums.size() == 1 {
            return self.sum_experts((x, rows), choices, experts, residual, true);
        }
        let mut partial = self.spare(residual.capacity(), residual.width)?;
        partial.shape(x.rows)?;
        self.sum_experts((x, rows.clone()), choices, experts, &partial, false)?;
        let weights = experts.down.first().map(|set| set.chunk.buffers[0].id);
        self.add_sums(&mut partial, rows, residual, weights)?;
        self.spares.push(partial);
        Ok(())
    }
}
