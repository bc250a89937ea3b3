//! Operations on single rows: norms, the gated activation, rotation.

use super::dispatch::entry;
use super::simd::{LANES, Simd};
use crate::backend::{Largest, Rope};
use crate::step::Step;

/// `out = x / sqrt(mean(x²) + eps) * weight`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
pub(super) unsafe fn rms_norm<S: Simd>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let whole = x.len() / LANES * LANES;
    // SAFETY: all offsets are below `whole`, which is within each slice.
    unsafe {
        let mut squares = S::splat(0.0);
        for i in (0..whole).step_by(LANES) {
            let v = S::load(x.as_ptr().add(i));
            squares = S::fma(v, v, squares);
        }
        let sum = S::reduce_add(squares) + x[whole..].iter().map(|x| x * x).sum::<f32>();
        let inverse = 1.0 / (sum / x.len() as f32 + eps).sqrt();
        let (weight, out) = (&weight[..x.len()], &mut out[..x.len()]);
        for i in (0..whole).step_by(LANES) {
            let v = S::mul(S::load(x.as_ptr().add(i)), S::splat(inverse));
            S::store(out.as_mut_ptr().add(i), S::mul(v, S::load(weight.as_ptr().add(i))));
        }
        for i in whole..x.len() {
            out[i] = x[i] * inverse * weight[i];
        }
    }
}

/// `out = gate / (1 + e^-gate) * up`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn swiglu<S: Simd>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let whole = out.len() / LANES * LANES;
    let (gate, up) = (&gate[..out.len()], &up[..out.len()]);
    // SAFETY: all offsets are below `whole`, which is within each slice.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            let v = silu_times::<S>(S::load(gate.as_ptr().add(i)), S::load(up.as_ptr().add(i)));
            S::store(out.as_mut_ptr().add(i), v);
        }
        // The tail goes through the same arithmetic, so that a channel's value does not depend on
        // where a shard begins.
        for i in whole..out.len() {
            let mut lane = [0.0; LANES];
            S::store(lane.as_mut_ptr(), silu_times::<S>(S::splat(gate[i]), S::splat(up[i])));
            out[i] = lane[0];
        }
    }
}

/// Not a closure: closures do not inherit the enclosing function's instruction set, so that each
/// operation in one would be a call.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn silu_times<S: Simd>(gate: S::F, up: S::F) -> S::F {
    // SAFETY: the caller's.
    unsafe {
        let denominator = S::add(S::splat(1.0), S::exp(S::sub(S::splat(0.0), gate)));
        S::mul(S::div(gate, denominator), up)
    }
}

/// Takes the largest of the outputs from column `first` on into `best`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn largest<S: Simd>(outputs: &[f32], first: u32, best: &mut Largest) {
    let (whole, rest) = outputs.split_at(outputs.len() / LANES * LANES);
    // SAFETY: all offsets are within `whole`.
    let mut top = unsafe {
        let mut lanes = S::splat(f32::NEG_INFINITY);
        for i in (0..whole.len()).step_by(LANES) {
            lanes = S::max(S::load(whole.as_ptr().add(i)), lanes);
        }
        S::reduce_max(lanes)
    };
    top = rest.iter().fold(top, |top, output| top.max(*output));
    // Its column is looked for only if it is as large as the best so far, which is rare.
    if top >= best.value
        && let Some(at) = outputs.iter().position(|output| *output == top)
    {
        *best = best.or(Largest { column: first + at as u32, value: top });
    }
}

entry! {
    /// One row's norm.
    pub(super) fn rms_norm_on(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = rms_norm
}
entry! {
    /// One row's gated activation.
    pub(super) fn swiglu_on(gate: &[f32], up: &[f32], out: &mut [f32]) = swiglu
}
entry! {
    /// The larger of `best` and of a row's outputs.
    pub(super) fn largest_on(outputs: &[f32], first: u32, best: &mut Largest) = largest
}

/// Cosines and sines of a step's positions.
#[derive(Debug, Default)]
pub(super) struct Rotation {
    /// `[rows][pairs]` of each.
    cos: Vec<f32>,
    sin: Vec<f32>,
    pairs: usize,
}

impl Rotation {
    /// Computes the step's positions in f64: at position 32768, an angle in f32 is off by 0.002.
    pub fn compute(&mut self, step: &Step, rope: &Rope) {
        self.pairs = rope.inverse_frequencies.len();
        self.cos.clear();
        self.sin.clear();
        for sequence in &step.sequences {
            for position in sequence.start..sequence.start + sequence.rows.len() {
                for &frequency in &rope.inverse_frequencies {
                    let (sin, cos) = (position as f64 * f64::from(frequency)).sin_cos();
                    self.cos.push(cos as f32 * rope.amplitude);
                    self.sin.push(sin as f32 * rope.amplitude);
                }
            }
        }
    }

    /// Rotates one head of a row: dimension `i` with `i + pairs`.
    #[inline(always)]
    pub fn apply(&self, row: usize, head: &mut [f32]) {
        let cos = &self.cos[row * self.pairs..][..self.pairs];
        let sin = &self.sin[row * self.pairs..][..self.pairs];
        let (first, second) = head[..2 * self.pairs].split_at_mut(self.pairs);
        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}
