//! The plain reference: every operation by its definition, in f32, on one thread. Slow and simple.
//!
//! [`crate::conformance`] holds other backends to it. It implements the plain operations only, so
//! that the fused operations' defaults are tested with it.

mod attention;
mod compressed;
mod device;
mod experts;
mod rare;
mod recurrence;

use std::ops::Range;

use thunder_collectives::{Group, Op};

use crate::backend::{
    Activation, AttentionSpec, Backend, CacheKind, CachePart, ComputeError, DeltaSpec, Expert, Heads,
    Largest, LatentSpec, Norm, PartNorm, Rope, RouterSpec, Scoring,
};
use crate::choice::{ChoiceScratch, Choices};
use crate::source::MatrixSource;
use crate::step::{KV_BLOCK_TOKENS, Step};

/// A backend without kernels.
#[derive(Debug)]
pub struct Reference {
    group: Group,
    /// Cosine and sine of each pair of each row of the step, for each rope.
    rotations: Vec<Vec<Vec<(f32, f32)>>>,
    /// For each rope: true if neighbours are pairs.
    interleaved: Vec<bool>,
}

/// Dequantized weights.
#[derive(Debug, Clone)]
pub struct Weights {
    /// `[rows][cols]`.
    rows: Vec<Vec<f32>>,
    /// One per row.
    bias: Vec<f32>,
}

/// Rows of f32.
#[derive(Debug, Clone)]
pub struct Rows {
    width: usize,
    /// `[rows][width]`.
    rows: Vec<Vec<f32>>,
}

/// The experts of a layer.
#[derive(Debug)]
pub struct Experts {
    experts: Vec<Expert<Weights>>,
    /// `None`: channels are `max(up, 0)²`, and `gate_up` is `up`.
    activation: Option<Activation>,
}

impl Weights {
    /// `W · x + bias`.
    fn times(&self, x: &[f32]) -> Vec<f32> {
        self.rows.iter().zip(&self.bias).map(|(weights, bias)| dot(x, weights) + bias).collect()
    }
}

impl Rows {
    /// Resizes `self` to `count` rows, and keeps the existing ones.
    fn resize(&mut self, count: usize) {
        self.rows.resize(count, vec![0.0; self.width]);
    }
}

/// One cache.
#[derive(Debug, Clone)]
struct Cache {
    kind: CacheKind,
    /// `[blocks * KV_BLOCK_TOKENS][numbers]`: keys of all heads, then values; or the latent vector.
    tokens: Vec<Vec<f32>>,
    /// `[slots][numbers]`.
    states: Vec<Vec<f32>>,
    /// By slot.
    drafts: Vec<DraftInputs>,
}

/// Inputs of a sequence's last draft in a layer with states, a row each.
#[derive(Debug, Clone, Default)]
struct DraftInputs {
    /// Of the convolution.
    conv: Vec<Vec<f32>>,
    /// The recurrence's other inputs.
    gates: Vec<Vec<f32>>,
    /// Convolved inputs of the right rows of the draft before.
    accepted: Vec<Vec<f32>>,
}

/// All caches.
#[derive(Debug, Clone)]
pub struct Caches(Vec<Cache>);

impl Cache {
    /// The vectors of a block, or a state.
    fn part(&mut self, part: CachePart) -> &mut [Vec<f32>] {
        match part {
            CachePart::Block(block) => &mut self.tokens[block * KV_BLOCK_TOKENS..][..KV_BLOCK_TOKENS],
            CachePart::Slot(slot) => &mut self.states[slot..=slot],
        }
    }
}

impl Reference {
    /// A backend whose reductions go over `group`.
    pub fn new(group: Group) -> Self {
        Self { group, rotations: Vec::new(), interleaved: Vec::new() }
    }

    /// Rotates the first dimensions of a head of a row.
    fn rotate(&self, rope: Option<usize>, row: usize, head: &mut [f32]) {
        let Some(rope) = rope else { return };
        let pairs = &self.rotations[rope][row];
        for (i, (cos, sin)) in pairs.iter().enumerate() {
            let (first, second) =
                if self.interleaved[rope] { (2 * i, 2 * i + 1) } else { (i, i + pairs.len()) };
            let (a, b) = (head[first], head[second]);
            head[first] = a * cos - b * sin;
            head[second] = b * cos + a * sin;
        }
    }
}

/// All elements of a stored matrix, `[rows][cols]`.
pub fn dequantize(source: &MatrixSource<'_>) -> Vec<Vec<f32>> {
    (0..source.rows).map(|row| dequantize_row(source, row)).collect()
}

fn dequantize_row(source: &MatrixSource<'_>, row: usize) -> Vec<f32> {
    let mut values = vec![0.0; source.cols];
    source.dequantize_row(row, &mut values);
    values
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

fn rms_normed(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let rms = (dot(x, x) / x.len() as f32 + eps).sqrt();
    x.iter().zip(weight).map(|(x, weight)| x / rms * weight).collect()
}

impl Backend for Reference {
    fn begin(&mut self, step: &Step, ropes: &[Rope]) -> Result<[Range<usize>; 2], ComputeError> {
        let of_position = |rope: &Rope, position: usize| {
            let pair = |frequency: &f32| {
                let (sin, cos) = (position as f64 * f64::from(*frequency)).sin_cos();
                (cos as f32 * rope.amplitude, sin as f32 * rope.amplitude)
            };
            rope.inverse_frequencies.iter().map(pair).collect()
        };
        let of_rope = |rope: &Rope| {
            let sequences = step.sequences.iter();
            sequences.flat_map(|s| s.rows.clone().map(|row| of_position(rope, s.position(row)))).collect()
        };
        self.rotations = ropes.iter().map(of_rope).collect();
        self.interleaved = ropes.iter().map(|rope| rope.interleaved).collect();
        Ok([0..step.rows(), step.rows()..step.rows()])
    }

    fn embed(
        &mut self,
        table: &Weights,
        ids: &[u32],
        first: u32,
        scale: f32,
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        let row = |&id: &u32| match id.checked_sub(first).and_then(|row| table.rows.get(row as usize)) {
            Some(row) => row.iter().map(|x| x * scale).collect(),
            None => vec![0.0; out.width],
        };
        out.rows = ids.iter().map(row).collect();
        Ok(())
    }

    fn rms_norm(
        &mut self,
        x: &Rows,
        rows: Range<usize>,
        norm: &Norm<Vec<f32>>,
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(x.rows.len());
        for row in rows {
            out.rows[row] = rms_normed(&x.rows[row], &norm.weight, norm.eps);
        }
        Ok(())
    }

    fn square_sums(
        &mut self,
        norms: &[PartNorm<Vec<f32>>],
        x: &Rows,
        rows: Range<usize>,
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(x.rows.len());
        for row in rows {
            let counted = |norm: &PartNorm<Vec<f32>>| &x.rows[row][norm.counted.clone()];
            out.rows[row] = norms.iter().map(|norm| dot(counted(norm), counted(norm))).collect();
        }
        Ok(())
    }

    fn norm_by_sums(
        &mut self,
        norms: &[PartNorm<Vec<f32>>],
        sums: &Rows,
        rows: Range<usize>,
        x: &mut Rows,
    ) -> Result<(), ComputeError> {
        for row in rows {
            for (norm, sum) in norms.iter().zip(&sums.rows[row]) {
                let columns = x.rows[row][norm.columns.clone()].iter_mut();
                columns.zip(&norm.weight).for_each(|(x, weight)| *x *= weight * norm.factor(*sum));
            }
        }
        Ok(())
    }

    fn product(
        &mut self,
        x: &Rows,
        rows: Range<usize>,
        w: &Weights,
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(x.rows.len());
        for row in rows {
            out.rows[row][..w.rows.len()].copy_from_slice(&w.times(&x.rows[row]));
        }
        Ok(())
    }

    fn gate(
        &mut self,
        gate_up: &Rows,
        rows: Range<usize>,
        activation: Activation,
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(gate_up.rows.len());
        for row in rows {
            let (gate, up) = gate_up.rows[row].split_at(out.width);
            out.rows[row] = gate.iter().zip(up).map(|(&gate, &up)| activation.of(gate, up)).collect();
        }
        Ok(())
    }

    fn route(
        &mut self,
        spec: &RouterSpec<Vec<f32>>,
        logits: &Rows,
        rows: Range<usize>,
        choices: &mut Rows,
    ) -> Result<(), ComputeError> {
        choices.resize(logits.rows.len());
        for row in rows {
            choices.rows[row] = experts::route(spec, &logits.rows[row]);
        }
        Ok(())
    }

    fn expert_sum(
        &mut self,
        x: &Rows,
        rows: Range<usize>,
        choices: &Rows,
        experts: &Experts,
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(x.rows.len());
        for row in rows {
            out.rows[row] = experts.sum(&x.rows[row], &choices.rows[row], out.width);
        }
        Ok(())
    }

    fn add(&mut self, x: &Rows, rows: Range<usize>, to: &mut Rows) -> Result<(), ComputeError> {
        for row in rows {
            to.rows[row].iter_mut().zip(&x.rows[row]).for_each(|(to, x)| *to += x);
        }
        Ok(())
    }

    fn all_reduce(&mut self, x: &mut Rows, rows: Range<usize>) -> Result<(), ComputeError> {
        for row in rows {
            self.group.all_reduce(&mut x.rows[row], Op::Sum)?;
        }
        Ok(())
    }

    fn take_rows(&mut self, x: &Rows, rows: &[u32], out: &mut Rows) -> Result<(), ComputeError> {
        out.rows = rows.iter().map(|row| x.rows[*row as usize].clone()).collect();
        Ok(())
    }

    fn read_largest(&mut self, x: &Rows, largest: &mut [Largest]) -> Result<(), ComputeError> {
        for (largest, row) in largest.iter_mut().zip(&x.rows) {
            *largest = Largest::of(row);
        }
        Ok(())
    }

    fn read_chosen(
        &mut self,
        x: &Rows,
        choices: &Choices<'_>,
        chosen: &mut [Largest],
        likely: &mut [f32],
    ) -> Result<(), ComputeError> {
        choices.of_rows(x.rows.iter().map(Vec::as_slice), &mut ChoiceScratch::default(), chosen, likely);
        Ok(())
    }

    fn prepare_heads(
        &mut self,
        spec: &AttentionSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        qkv: &mut Rows,
    ) -> Result<(), ComputeError> {
        self.prepare_heads_of(spec, step, rows, qkv);
        Ok(())
    }

    fn append(
        &mut self,
        spec: &AttentionSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        qkv: &Rows,
        (caches, cache): (&mut Caches, usize),
    ) -> Result<(), ComputeError> {
        let keys = spec.key_column(0);
        caches.0[cache].append(step, rows, |row| qkv.rows[row][keys..spec.qkv_width()].to_vec());
        Ok(())
    }

    fn attend(
        &mut self,
        spec: &AttentionSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        qkv: &Rows,
        from: (&mut Caches, usize),
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        self.attend_by(spec, Scoring::default(), step, rows, qkv, from, out)
    }

    fn prepare_latent(
        &mut self,
        spec: &LatentSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        queries: &mut Rows,
        latent: &mut Rows,
    ) -> Result<(), ComputeError> {
        debug_assert!(rows.end <= step.rows());
        self.prepare_latent_of(spec, rows, queries, latent);
        Ok(())
    }

    fn append_latent(
        &mut self,
        _spec: &LatentSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        latent: &Rows,
        (caches, cache): (&mut Caches, usize),
    ) -> Result<(), ComputeError> {
        caches.0[cache].append(step, rows, |row| latent.rows[row].clone());
        Ok(())
    }

    fn attend_latent(
        &mut self,
        spec: &LatentSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        absorbed: &Rows,
        queries: &Rows,
        (caches, cache): (&mut Caches, usize),
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(step.rows());
        let inputs = ([absorbed, queries], None);
        attention::attend_latent(spec, step, rows, inputs, &caches.0[cache], out);
        Ok(())
    }

    fn head_products(
        &mut self,
        x: &Rows,
        stride: usize,
        rows: Range<usize>,
        w: &Heads<Weights>,
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(x.rows.len());
        for row in rows {
            for (head, w) in w.matrices.iter().enumerate() {
                let outputs = w.times(&x.rows[row][head * stride..]);
                out.rows[row][head * outputs.len()..][..outputs.len()].copy_from_slice(&outputs);
            }
        }
        Ok(())
    }

    fn short_conv(
        &mut self,
        spec: &DeltaSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        x: &mut Rows,
        (caches, cache): (&mut Caches, usize),
    ) -> Result<(), ComputeError> {
        recurrence::short_conv(spec, step, rows, x, &mut caches.0[cache]);
        Ok(())
    }

    fn delta_rule(
        &mut self,
        spec: &DeltaSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        (qkv, gates): (&Rows, &Rows),
        (caches, cache): (&mut Caches, usize),
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(step.rows());
        recurrence::delta_rule(spec, step, rows, (qkv, gates), &mut caches.0[cache], out);
        Ok(())
    }

    fn norm_gated(
        &mut self,
        spec: &DeltaSpec<Vec<f32>>,
        z: &Rows,
        rows: Range<usize>,
        x: &mut Rows,
    ) -> Result<(), ComputeError> {
        for row in rows {
            let heads = x.rows[row].chunks_mut(spec.value_dim).zip(z.rows[row].chunks(spec.value_dim));
            for (x, z) in heads {
                let normed = rms_normed(x, &spec.norm.weight, spec.norm.eps);
                x.iter_mut().zip(normed).zip(z).for_each(|((x, normed), z)| *x = normed * silu(*z));
            }
        }
        Ok(())
    }

    fn attend_by(
        &mut self,
        spec: &AttentionSpec<Vec<f32>>,
        scoring: Scoring,
        step: &Step,
        rows: Range<usize>,
        qkv: &Rows,
        (caches, cache): (&mut Caches, usize),
        out: &mut Rows,
    ) -> Result<(), ComputeError> {
        out.resize(step.rows());
        attention::attend((spec, scoring), step, rows, qkv, &caches.0[cache], out);
        Ok(())
    }

    fn copy_slot(&mut self, caches: &mut Caches, from: usize, to: usize) -> Result<(), ComputeError> {
        for cache in &mut caches.0 {
            cache.states[to] = cache.states[from].clone();
        }
        Ok(())
    }

    fn read_cache(
        &mut self,
        caches: &mut Caches,
        part: CachePart,
        out: &mut Vec<u8>,
    ) -> Result<(), ComputeError> {
        for cache in &mut caches.0 {
            cache.part(part).iter().flatten().for_each(|number| out.extend(number.to_le_bytes()));
        }
        Ok(())
    }

    fn write_cache(
        &mut self,
        caches: &mut Caches,
        part: CachePart,
        bytes: &[u8],
    ) -> Result<bool, ComputeError> {
        let (numbers, rest) = bytes.as_chunks::<4>();
        let of_part: Vec<&mut f32> =
            caches.0.iter_mut().flat_map(|cache| cache.part(part).iter_mut().flatten()).collect();
        if of_part.len() != numbers.len() || !rest.is_empty() {
            return Ok(false);
        }
        for (to, number) in of_part.into_iter().zip(numbers) {
            *to = f32::from_le_bytes(*number);
        }
        Ok(true)
    }
}
