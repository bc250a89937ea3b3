//! Recurrences (delta rules, state spaces) with their short convolution, on one thread per group of
//! heads.

use std::ops::Range;

use super::dispatch::entry;
use super::simd::{LANES, Simd};

/// One head's inputs of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct StateToken<'a> {
    pub query: &'a [f32],
    pub key: &'a [f32],
    pub value: &'a [f32],
    /// Factors of the state's rows, as many as `key` has numbers.
    pub decays: &'a [f32],
    /// How much of the difference between `value` and what the state has for `key` is written;
    /// `None`: `value` is added whatever the state has.
    pub strength: Option<f32>,
}

/// One token: `S[k] *= decays[k]`, `S += key ⊗ written`, `out = Sᵀ query`. `state` is
/// `[key_dim][value_dim]`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn state_token<S: Simd>(token: &StateToken<'_>, state: &mut [f32], out: &mut [f32]) {
    let StateToken { query, key, value, decays, strength } = *token;
    let (key_dim, value_dim) = (key.len(), value.len());
    assert!(query.len() == key_dim && decays.len() == key_dim);
    assert!(state.len() == key_dim * value_dim && out.len() == value_dim);
    let whole = value_dim / LANES * LANES;
    for first in (0..whole).step_by(LANES) {
        // SAFETY: 16 columns of the state from `first` on, in each of its rows.
        unsafe {
            let column = |k: usize| state.as_ptr().add(k * value_dim + first);
            let mut written = S::load(value.as_ptr().add(first));
            if let Some(strength) = strength {
                let mut known = S::splat(0.0);
                for k in 0..key_dim {
                    known = S::fma(S::load(column(k)), S::splat(key[k] * decays[k]), known);
                }
                written = S::mul(S::sub(written, known), S::splat(strength));
            }
            let mut sum = S::splat(0.0);
            for k in 0..key_dim {
                let decayed = S::mul(S::load(column(k)), S::splat(decays[k]));
                let updated = S::fma(written, S::splat(key[k]), decayed);
                S::store(column(k).cast_mut(), updated);
                sum = S::fma(updated, S::splat(query[k]), sum);
            }
            S::store(out.as_mut_ptr().add(first), sum);
        }
    }
    for v in whole..value_dim {
        let mut written = value[v];
        if let Some(strength) = strength {
            let known: f32 = (0..key_dim).map(|k| state[k * value_dim + v] * key[k] * decays[k]).sum();
            written = (written - known) * strength;
        }
        out[v] = 0.0;
        for k in 0..key_dim {
            let s = &mut state[k * value_dim + v];
            *s = *s * decays[k] + written * key[k];
            out[v] += *s * query[k];
        }
    }
}

entry! {
    /// One token of one head.
    pub(super) fn state_token_on(token: &StateToken<'_>, state: &mut [f32], out: &mut [f32]) = state_token
}

/// `x / (√(Σ x² + eps) * divisor)`.
pub(super) fn unit(x: &[f32], (eps, divisor): (f32, f32), out: &mut [f32]) {
    let factor = 1.0 / ((x.iter().map(|x| x * x).sum::<f32>() + eps).sqrt() * divisor);
    out.iter_mut().zip(x).for_each(|(out, x)| *out = x * factor);
}

/// `ln(1 + e^x)`. For large x, e^x overflows and softplus(x) is x.
pub(super) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// A causal convolution of each channel by itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct Convolution<'a> {
    /// `[channels, kernel]`, the current token's last.
    pub taps: &'a [f32],
    pub bias: Option<&'a [f32]>,
    pub kernel: usize,
    /// True if SiLU is applied to the sums.
    pub silu: bool,
}

/// Rows of inputs, `stride` numbers apart.
#[derive(Debug, Clone)]
pub(super) struct ConvRows {
    pub x: *mut f32,
    pub stride: usize,
    pub rows: Range<usize>,
}

/// Vectors of channels that the rows are walked through with: a few cache lines of each row.
const BLOCK: usize = 4;

/// The convolution of some channels of rows, in place. `before` holds the last `kernel - 1` inputs
/// of all `width` channels before the rows, oldest first, and afterwards those up to the last row.
///
/// # Safety
/// The CPU has `S`. Each row of `x` has `width` channels, `before` `(kernel - 1) * width` numbers,
/// and no other thread uses these channels.
#[inline(always)]
unsafe fn conv_rows<S: Simd>(
    of: Convolution<'_>,
    width: usize,
    channels: Range<usize>,
    before: *mut f32,
    rows: ConvRows,
) {
    assert!(channels.end <= width && of.taps.len() >= width * of.kernel && of.kernel > 0);
    assert!(of.bias.is_none_or(|bias| bias.len() >= width));
    // SAFETY: the caller's.
    let done = unsafe {
        match of.kernel {
            2 => conv_blocks::<S, 2>(of, width, channels.clone(), before, &rows),
            3 => conv_blocks::<S, 3>(of, width, channels.clone(), before, &rows),
            4 => conv_blocks::<S, 4>(of, width, channels.clone(), before, &rows),
            _ => channels.start,
        }
    };
    for row in rows.rows {
        // SAFETY: the caller's.
        unsafe { conv_token(of, width, done..channels.end, before, rows.x.add(row * rows.stride)) };
    }
}

entry! {
    /// The convolution of some channels of rows.
    pub(super) fn conv_rows_on(of: Convolution<'_>, width: usize, channels: Range<usize>, before: *mut f32, rows: ConvRows) = conv_rows
}

/// Convolves as many of the channels as fill vectors. Returns the first that is left.
///
/// # Safety
/// As of [`conv_rows`].
#[inline(always)]
unsafe fn conv_blocks<S: Simd, const TAPS: usize>(
    of: Convolution<'_>,
    width: usize,
    channels: Range<usize>,
    before: *mut f32,
    rows: &ConvRows,
) -> usize {
    let mut first = channels.start;
    // SAFETY: the caller's.
    unsafe {
        while first + BLOCK * LANES <= channels.end {
            conv_block::<S, BLOCK, TAPS>(of, width, first, before, rows);
            first += BLOCK * LANES;
        }
        while first + LANES <= channels.end {
            conv_block::<S, 1, TAPS>(of, width, first, before, rows);
            first += LANES;
        }
    }
    first
}

/// # Safety
/// As of [`conv_rows`], for `VECTORS * LANES` channels from `first` on.
#[inline(always)]
unsafe fn conv_block<S: Simd, const VECTORS: usize, const TAPS: usize>(
    Convolution { taps, bias, silu, .. }: Convolution<'_>,
    width: usize,
    first: usize,
    before: *mut f32,
    ConvRows { x, stride, rows }: &ConvRows,
) {
    let mut by_tap = [[[0.0; LANES]; TAPS]; VECTORS];
    let of_channels = taps[first * TAPS..][..VECTORS * LANES * TAPS].chunks_exact(TAPS);
    for (channel, of_channel) in of_channels.enumerate() {
        for (tap, value) in of_channel.iter().enumerate() {
            by_tap[channel / LANES][tap][channel % LANES] = *value;
        }
    }
    // SAFETY: the caller's; the taps of each vector are an array of `LANES`.
    unsafe {
        let (zero, one) = (S::splat(0.0), S::splat(1.0));
        let mut held = [[zero; TAPS]; VECTORS];
        for (vector, held) in held.iter_mut().enumerate() {
            for (k, held) in held[..TAPS - 1].iter_mut().enumerate() {
                *held = S::load(before.add(k * width + first + vector * LANES));
            }
        }
        for row in rows.clone() {
            for (vector, held) in held.iter_mut().enumerate() {
                let x = x.add(row * stride + first + vector * LANES);
                held[TAPS - 1] = S::load(x);
                let mut sum = zero;
                for k in 0..TAPS {
                    sum = S::fma(held[k], S::load(by_tap[vector][k].as_ptr()), sum);
                }
                if let Some(bias) = bias {
                    sum = S::add(sum, S::load(bias.as_ptr().add(first + vector * LANES)));
                }
                if silu {
                    // Within the range of `exp`.
                    let power = S::exp(S::sub(zero, S::max(sum, S::splat(-87.0))));
                    sum = S::div(sum, S::add(one, power));
                }
                S::store(x, sum);
                held.copy_within(1.., 0);
            }
        }
        for (vector, held) in held.iter().enumerate() {
            for (k, held) in held[..TAPS - 1].iter().enumerate() {
                S::store(before.add(k * width + first + vector * LANES), *held);
            }
        }
    }
}

/// The convolution of some of a token's channels, in place.
///
/// # Safety
/// As of [`conv_rows`], for one row.
unsafe fn conv_token(
    Convolution { taps, bias, kernel, silu }: Convolution<'_>,
    width: usize,
    channels: Range<usize>,
    before: *mut f32,
    x: *mut f32,
) {
    for channel in channels {
        let taps = &taps[channel * kernel..][..kernel];
        // SAFETY: the caller's.
        unsafe {
            let x = &mut *x.add(channel);
            let mut sum = taps[kernel - 1] * *x;
            for (k, tap) in taps[..kernel - 1].iter().enumerate() {
                let input = before.add(k * width + channel);
                sum += tap * *input;
                *input = if k + 2 < kernel { *before.add((k + 1) * width + channel) } else { *x };
            }
            let sum = bias.map_or(sum, |bias| sum + bias[channel]);
            *x = if silu { sum / (1.0 + (-sum).exp()) } else { sum };
        }
    }
}

/// `x = norm(x) * silu(z)`.
pub(super) fn norm_gated(x: &mut [f32], z: &[f32], weight: &[f32], eps: f32) {
    let inverse = 1.0 / (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32 + eps).sqrt();
    for ((x, z), weight) in x.iter_mut().zip(z).zip(weight) {
        *x *= inverse * weight * z / (1.0 + (-z).exp());
    }
}
