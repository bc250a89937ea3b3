//! Operations on single rows: norms, the gated activation, rotation.

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, SQRT_2};

use super::dispatch::entry;
use super::pointers::SendPtr;
use super::pool::{Pool, for_rows};
use super::simd::{LANES, Simd};
use crate::backend::{Activation, Curve, ERF, ERF_STEP, Largest, LayerNorm, Rope};
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

/// `Σ x²`, in sums of each lane, which compilers vectorise.
pub(super) fn square_sum(x: &[f32]) -> f32 {
    let (whole, rest) = x.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for x in whole {
        lanes.iter_mut().zip(x).for_each(|(sum, x)| *sum += x * x);
    }
    lanes.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>()
}

/// A vector's gated activation. Types instead of closures: closures do not inherit the enclosing
/// function's instruction set, so that each operation in one would be a call.
pub(super) trait Gate: Copy {
    /// # Safety
    /// The CPU has `S`.
    unsafe fn of<S: Simd>(self, gate: S::F, up: S::F) -> S::F;
}

/// `x / (1 + e^-y)`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn times_sigmoid<S: Simd>(x: S::F, y: S::F) -> S::F {
    // SAFETY: the caller's.
    unsafe { S::div(x, S::add(S::splat(1.0), S::exp(S::sub(S::splat(0.0), y)))) }
}

/// `min(x, limit)`, as `-max(-x, -limit)`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn at_most<S: Simd>(x: S::F, limit: f32) -> S::F {
    // SAFETY: the caller's.
    unsafe { S::sub(S::splat(0.0), S::max(S::sub(S::splat(0.0), x), S::splat(-limit))) }
}

/// [`Activation::Silu`].
#[derive(Clone, Copy)]
pub(super) struct Silu;

impl Gate for Silu {
    #[inline(always)]
    unsafe fn of<S: Simd>(self, gate: S::F, up: S::F) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::mul(times_sigmoid::<S>(gate, gate), up) }
    }
}

/// [`Activation::Sigmoid`].
#[derive(Clone, Copy)]
struct Sigmoid;

impl Gate for Sigmoid {
    #[inline(always)]
    unsafe fn of<S: Simd>(self, gate: S::F, up: S::F) -> S::F {
        // SAFETY: the caller's.
        unsafe { times_sigmoid::<S>(up, gate) }
    }
}

/// [`Activation::Gelu`]: `(1 + tanh(x)) / 2` is the sigmoid of `2x`.
#[derive(Clone, Copy)]
struct Gelu;

impl Gate for Gelu {
    #[inline(always)]
    unsafe fn of<S: Simd>(self, gate: S::F, up: S::F) -> S::F {
        /// `√(8 / π)`.
        const FACTOR: f32 = FRAC_2_SQRT_PI * SQRT_2;
        // SAFETY: the caller's.
        unsafe {
            let cube = S::mul(S::mul(gate, gate), gate);
            let inner = S::mul(S::splat(FACTOR), S::fma(cube, S::splat(0.044_715), gate));
            S::mul(times_sigmoid::<S>(gate, inner), up)
        }
    }
}

/// [`Activation::ExactGelu`].
#[derive(Clone, Copy)]
struct ExactGelu;

impl Gate for ExactGelu {
    #[inline(always)]
    unsafe fn of<S: Simd>(self, gate: S::F, up: S::F) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::mul(bent::<S>(Curve::Gelu, gate), up) }
    }
}

/// [`Activation::Clamped`].
#[derive(Clone, Copy)]
struct Clamped {
    alpha: f32,
    limit: f32,
}

impl Gate for Clamped {
    #[inline(always)]
    unsafe fn of<S: Simd>(self, gate: S::F, up: S::F) -> S::F {
        // SAFETY: the caller's.
        unsafe {
            let gate = at_most::<S>(gate, self.limit);
            let up = S::max(at_most::<S>(up, self.limit), S::splat(-self.limit));
            let gated = times_sigmoid::<S>(gate, S::mul(S::splat(self.alpha), gate));
            S::mul(gated, S::add(up, S::splat(1.0)))
        }
    }
}

/// [`Activation::Limited`].
#[derive(Clone, Copy)]
struct Limited {
    limit: f32,
}

impl Gate for Limited {
    #[inline(always)]
    unsafe fn of<S: Simd>(self, gate: S::F, up: S::F) -> S::F {
        // SAFETY: the caller's.
        unsafe {
            let up = S::max(at_most::<S>(up, self.limit), S::splat(-self.limit));
            Silu.of::<S>(at_most::<S>(gate, self.limit), up)
        }
    }
}

/// `limit * tanh(x / limit)`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn softly_limited<S: Simd>(x: S::F, limit: f32) -> S::F {
    // SAFETY: the caller's.
    unsafe {
        // tanh(-40) is -1 in f32, and e^80 is finite.
        let x = S::max(S::div(x, S::splat(limit)), S::splat(-40.0));
        let (power, one) = (S::exp(S::mul(S::splat(-2.0), x)), S::splat(1.0));
        S::mul(S::splat(limit), S::div(S::sub(one, power), S::add(one, power)))
    }
}

/// [`Activation::Situ`] without a cap.
#[derive(Clone, Copy)]
struct Situ {
    beta: f32,
}

impl Gate for Situ {
    #[inline(always)]
    unsafe fn of<S: Simd>(self, gate: S::F, up: S::F) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::mul(times_sigmoid::<S>(softly_limited::<S>(gate, self.beta), gate), up) }
    }
}

/// [`Activation::Situ`].
#[derive(Clone, Copy)]
struct CappedSitu {
    beta: f32,
    cap: f32,
}

impl Gate for CappedSitu {
    #[inline(always)]
    unsafe fn of<S: Simd>(self, gate: S::F, up: S::F) -> S::F {
        // SAFETY: the caller's.
        unsafe { Situ { beta: self.beta }.of::<S>(gate, softly_limited::<S>(up, self.cap)) }
    }
}

/// `out = activation(gate, up)`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn gate<S: Simd>(activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    // SAFETY: the caller's.
    unsafe {
        match activation {
            Activation::Silu => gate_by::<S, Silu>(Silu, gate, up, out),
            Activation::Sigmoid => gate_by::<S, Sigmoid>(Sigmoid, gate, up, out),
            Activation::Gelu => gate_by::<S, Gelu>(Gelu, gate, up, out),
            Activation::ExactGelu => gate_by::<S, ExactGelu>(ExactGelu, gate, up, out),
            Activation::Clamped { alpha, limit } => {
                gate_by::<S, Clamped>(Clamped { alpha, limit }, gate, up, out);
            }
            Activation::Limited { limit } => gate_by::<S, Limited>(Limited { limit }, gate, up, out),
            Activation::Situ { beta, cap: None } => gate_by::<S, Situ>(Situ { beta }, gate, up, out),
            Activation::Situ { beta, cap: Some(cap) } => {
                gate_by::<S, CappedSitu>(CappedSitu { beta, cap }, gate, up, out);
            }
        }
    }
}

#[inline(always)]
unsafe fn gate_by<S: Simd, G: Gate>(by: G, gate: &[f32], up: &[f32], out: &mut [f32]) {
    let whole = out.len() / LANES * LANES;
    let (gate, up) = (&gate[..out.len()], &up[..out.len()]);
    // SAFETY: all offsets are below `whole`, which is within each slice.
    unsafe {
        for i in (0..whole).step_by(LANES) {
            let v = by.of::<S>(S::load(gate.as_ptr().add(i)), S::load(up.as_ptr().add(i)));
            S::store(out.as_mut_ptr().add(i), v);
        }
        // The tail goes through the same arithmetic, so that a channel's value does not depend on
        // where a shard begins.
        for i in whole..out.len() {
            let mut lane = [0.0; LANES];
            S::store(lane.as_mut_ptr(), by.of::<S>(S::splat(gate[i]), S::splat(up[i])));
            out[i] = lane[0];
        }
    }
}

/// `x = curve(x)` in place. The tail goes through the same arithmetic, as in [`gate_by`].
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn bend<S: Simd>(curve: Curve, row: &mut [f32]) {
    let (whole, rest) = row.as_chunks_mut::<LANES>();
    let mut tail = [0.0; LANES];
    tail[..rest.len()].copy_from_slice(rest);
    for x in whole.iter_mut().chain([&mut tail]) {
        // SAFETY: the CPU has `S`, and the chunk has all lanes.
        unsafe { S::store(x.as_mut_ptr(), bent::<S>(curve, S::load(x.as_ptr()))) };
    }
    rest.copy_from_slice(&tail[..rest.len()]);
}

/// [`Curve::of`].
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn bent<S: Simd>(curve: Curve, x: S::F) -> S::F {
    // SAFETY: the caller's.
    unsafe {
        let (zero, one) = (S::splat(0.0), S::splat(1.0));
        match curve {
            Curve::Relu => S::max(x, zero),
            Curve::SquaredRelu => {
                let positive = S::max(x, zero);
                S::mul(positive, positive)
            }
            Curve::Gelu => {
                let size = S::mul(S::abs(x), S::splat(FRAC_1_SQRT_2));
                let t = S::div(one, S::fma(size, S::splat(ERF_STEP), one));
                let mut sum = zero;
                for factor in ERF.iter().rev() {
                    sum = S::mul(S::add(sum, S::splat(*factor)), t);
                }
                let power = S::exp(S::sub(zero, S::mul(size, size)));
                let half = S::mul(S::abs(x), S::splat(0.5));
                S::sub(S::max(x, zero), S::mul(S::mul(half, sum), power))
            }
            Curve::GeluTanh => Gelu.of::<S>(x, one),
            Curve::Silu => Silu.of::<S>(x, one),
            Curve::Tanh => softly_limited::<S>(x, 1.0),
        }
    }
}

/// [`LayerNorm::apply`].
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn layer_norm<S: Simd>(norm: &LayerNorm, row: &mut [f32]) {
    let len = row.len();
    let whole = len / LANES * LANES;
    let (weight, bias) = (&norm.weight[..len], &norm.bias[..len]);
    // SAFETY: all offsets are below `whole`, which is within each slice.
    unsafe {
        let mut sums = S::splat(0.0);
        for i in (0..whole).step_by(LANES) {
            sums = S::add(sums, S::load(row.as_ptr().add(i)));
        }
        let mean = (S::reduce_add(sums) + row[whole..].iter().sum::<f32>()) / len as f32;
        let mut squares = S::splat(0.0);
        for i in (0..whole).step_by(LANES) {
            let v = S::sub(S::load(row.as_ptr().add(i)), S::splat(mean));
            squares = S::fma(v, v, squares);
        }
        let rest: f32 = row[whole..].iter().map(|x| (x - mean) * (x - mean)).sum();
        let inverse = 1.0 / ((S::reduce_add(squares) + rest) / len as f32 + norm.eps).sqrt();
        for i in (0..whole).step_by(LANES) {
            let v = S::mul(S::sub(S::load(row.as_ptr().add(i)), S::splat(mean)), S::splat(inverse));
            let v = S::fma(v, S::load(weight.as_ptr().add(i)), S::load(bias.as_ptr().add(i)));
            S::store(row.as_mut_ptr().add(i), v);
        }
        for i in whole..len {
            row[i] = (row[i] - mean) * inverse * weight[i] + bias[i];
        }
    }
}

/// Updates `best` with the largest of the outputs from column `first` on; NaN if one is not finite.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn largest<S: Simd>(outputs: &[f32], first: u32, best: &mut Largest) {
    let (whole, rest) = outputs.split_at(outputs.len() / LANES * LANES);
    // SAFETY: all offsets are within `whole`.
    let (mut top, mut poison) = unsafe {
        let (zero, mut lanes, mut poison) = (S::splat(0.0), S::splat(f32::NEG_INFINITY), S::splat(0.0));
        for i in (0..whole.len()).step_by(LANES) {
            let v = S::load(whole.as_ptr().add(i));
            lanes = S::max(v, lanes);
            // A maximum may lose a NaN. Zero times a number is zero unless it is not finite.
            poison = S::fma(v, zero, poison);
        }
        (S::reduce_max(lanes), S::reduce_add(poison))
    };
    for output in rest {
        (top, poison) = (top.max(*output), poison + output * 0.0);
    }
    if poison != 0.0 {
        *best = best.or(Largest { column: first, value: f32::NAN });
        return;
    }
    // Its column is searched only if it is at least as large as the best so far, which is rare.
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
    pub(super) fn gate_on(activation: Activation, gates: &[f32], up: &[f32], out: &mut [f32]) = gate
}
entry! {
    /// One row's activations.
    pub(super) fn bend_on(curve: Curve, row: &mut [f32]) = bend
}
entry! {
    /// One row's LayerNorm.
    pub(super) fn layer_norm_on(norm: &LayerNorm, row: &mut [f32]) = layer_norm
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
    interleaved: bool,
}

impl Rotation {
    /// Computes the step's positions in f64: at position 32768, an angle in f32 is off by 0.002.
    pub fn compute(&mut self, pool: &mut Pool, step: &Step, rope: &Rope) {
        let pairs = rope.inverse_frequencies.len();
        (self.pairs, self.interleaved) = (pairs, rope.interleaved);
        let [cos, sin] = [&mut self.cos, &mut self.sin].map(|of| {
            of.resize(step.rows() * pairs, 0.0);
            SendPtr(of.as_mut_ptr())
        });
        for_rows(pool, step.rows(), &|rows| {
            for sequence in &step.sequences {
                for row in sequence.rows_within(&rows) {
                    let position = sequence.position(row) as f64;
                    for (pair, frequency) in rope.inverse_frequencies.iter().enumerate() {
                        let (s, c) = (position * f64::from(*frequency)).sin_cos();
                        // SAFETY: within the vectors; each row is one thread's.
                        unsafe {
                            *cos.at(row * pairs + pair) = c as f32 * rope.amplitude;
                            *sin.at(row * pairs + pair) = s as f32 * rope.amplitude;
                        }
                    }
                }
            }
        });
    }

    /// Rotates one head of a row.
    #[inline(always)]
    pub fn apply(&self, row: usize, head: &mut [f32]) {
        let cos = &self.cos[row * self.pairs..][..self.pairs];
        let sin = &self.sin[row * self.pairs..][..self.pairs];
        if self.interleaved {
            let pairs = head[..2 * self.pairs].as_chunks_mut::<2>().0;
            for (([a, b], cos), sin) in pairs.iter_mut().zip(cos).zip(sin) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
            return;
        }
        let (first, second) = head[..2 * self.pairs].split_at_mut(self.pairs);
        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}
