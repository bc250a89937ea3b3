//! The gated delta rule by its definition, a token at a time.

use std::ops::Range;

use super::{Cache, Rows, dot, silu};
use crate::backend::{DeltaSpec, StateSpaceSpec};
use crate::step::{Step, StepSequence};

impl Cache {
    /// The state of a row's sequence, which begins at zero.
    fn state(&mut self, sequence: &StepSequence, row: usize, of: Range<usize>) -> &mut [f32] {
        let state = &mut self.states[sequence.slot][of];
        if sequence.position(row) == 0 {
            state.fill(0.0);
        }
        state
    }
}

pub(super) fn short_conv(
    spec: &DeltaSpec<Vec<f32>>,
    step: &Step,
    rows: Range<usize>,
    x: &mut Rows,
    cache: &mut Cache,
) {
    let bias = vec![0.0; spec.channels()];
    convolve((&spec.taps, &bias), step, rows, x, cache);
}

/// The convolution of as many columns as `bias` has, in place.
fn convolve(
    (taps, bias): (&[f32], &[f32]),
    step: &Step,
    rows: Range<usize>,
    x: &mut Rows,
    cache: &mut Cache,
) {
    let (channels, kernel) = (bias.len(), taps.len() / bias.len().max(1));
    for sequence in &step.sequences {
        for row in sequence.rows_within(&rows) {
            // The inputs before this one, oldest first, then this one.
            let before = cache.state(sequence, row, 0..(kernel - 1) * channels);
            let inputs = [&*before, &x.rows[row][..channels]].concat();
            before.copy_from_slice(&inputs[channels..]);
            for channel in 0..channels {
                let taps = &taps[channel * kernel..][..kernel];
                let sum: f32 =
                    taps.iter().enumerate().map(|(k, tap)| tap * inputs[k * channels + channel]).sum();
                x.rows[row][channel] = silu(sum + bias[channel]);
            }
        }
    }
}

/// `x / √(Σ x² + 1e-6)`, as Gated DeltaNet's implementations make unit vectors.
fn unit(x: &[f32]) -> Vec<f32> {
    let length = (dot(x, x) + 1e-6).sqrt();
    x.iter().map(|x| x / length).collect()
}

pub(super) fn delta_rule(
    spec: &DeltaSpec<Vec<f32>>,
    step: &Step,
    rows: Range<usize>,
    (qkv, gates): (&Rows, &Rows),
    cache: &mut Cache,
    out: &mut Rows,
) {
    let (key_dim, value_dim) = (spec.key_dim, spec.value_dim);
    let first_value = 2 * spec.key_heads * key_dim;
    for sequence in &step.sequences {
        for row in sequence.rows_within(&rows) {
            let (qkv, gates) = (&qkv.rows[row], &gates.rows[row]);
            let all = spec.conv_numbers()..spec.conv_numbers() + spec.value_heads * key_dim * value_dim;
            let states = cache.state(sequence, row, all);
            for head in 0..spec.value_heads {
                let state = &mut states[head * key_dim * value_dim..][..key_dim * value_dim];
                let key_head = head * spec.key_heads / spec.value_heads;
                let query = unit(&qkv[key_head * key_dim..][..key_dim]);
                let key = unit(&qkv[(spec.key_heads + key_head) * key_dim..][..key_dim]);
                let value = &qkv[first_value + head * value_dim..][..value_dim];
                let beta = 1.0 / (1.0 + (-gates[head]).exp());
                let softplus = (gates[spec.value_heads + head] + spec.decay_bias[head]).exp().ln_1p();
                let decay = (-spec.decay[head].exp() * softplus).exp();
                state.iter_mut().for_each(|s| *s *= decay);
                for v in 0..value_dim {
                    let column = |k: usize| state[k * value_dim + v];
                    let known: f32 = (0..key_dim).map(|k| column(k) * key[k]).sum();
                    let delta = (value[v] - known) * beta;
                    for k in 0..key_dim {
                        state[k * value_dim + v] += key[k] * delta;
                    }
                    let sum: f32 = (0..key_dim).map(|k| state[k * value_dim + v] * query[k]).sum();
                    out.rows[row][head * value_dim + v] = sum / (key_dim as f32).sqrt();
                }
            }
        }
    }
}

pub(super) fn channel_delta_rule(
    spec: &DeltaSpec<Vec<f32>>,
    step: &Step,
    rows: Range<usize>,
    [qkv, beta, alpha]: [&Rows; 3],
    cache: &mut Cache,
    out: &mut Rows,
) {
    let (key_dim, value_dim) = (spec.key_dim, spec.value_dim);
    let first_value = 2 * spec.key_heads * key_dim;
    for sequence in &step.sequences {
        for row in sequence.rows_within(&rows) {
            let qkv = &qkv.rows[row];
            let all = spec.conv_numbers()..spec.conv_numbers() + spec.value_heads * key_dim * value_dim;
            let states = cache.state(sequence, row, all);
            for head in 0..spec.value_heads {
                let state = &mut states[head * key_dim * value_dim..][..key_dim * value_dim];
                let key_head = head * spec.key_heads / spec.value_heads;
                let query = unit(&qkv[key_head * key_dim..][..key_dim]);
                let key = unit(&qkv[(spec.key_heads + key_head) * key_dim..][..key_dim]);
                let value = &qkv[first_value + head * value_dim..][..value_dim];
                let beta = 1.0 / (1.0 + (-beta.rows[row][head]).exp());
                for k in 0..key_dim {
                    let at = head * key_dim + k;
                    let softplus = (alpha.rows[row][at] + spec.decay_bias[at]).exp().ln_1p();
                    let decay = (-spec.decay[head].exp() * softplus).exp();
                    state[k * value_dim..][..value_dim].iter_mut().for_each(|s| *s *= decay);
                }
                for v in 0..value_dim {
                    let known: f32 = (0..key_dim).map(|k| state[k * value_dim + v] * key[k]).sum();
                    let delta = (value[v] - known) * beta;
                    (0..key_dim).for_each(|k| state[k * value_dim + v] += key[k] * delta);
                    let sum: f32 = (0..key_dim).map(|k| state[k * value_dim + v] * query[k]).sum();
                    out.rows[row][head * value_dim + v] = sum / (key_dim as f32).sqrt();
                }
            }
        }
    }
}

pub(super) fn state_space(
    spec: &StateSpaceSpec<Vec<f32>>,
    step: &Step,
    rows: Range<usize>,
    (x, times): (&mut Rows, &Rows),
    cache: &mut Cache,
    out: &mut Rows,
) {
    let none = vec![0.0; spec.channels()];
    let bias = spec.conv_bias.as_ref().unwrap_or(&none);
    convolve((&spec.taps, bias), step, rows.clone(), x, cache);
    let (head_dim, state_dim) = (spec.head_dim, spec.state_dim);
    for sequence in &step.sequences {
        for row in sequence.rows_within(&rows) {
            let x = &x.rows[row];
            let all = spec.conv_numbers()..spec.conv_numbers() + spec.matrix_numbers();
            let states = cache.state(sequence, row, all);
            for head in 0..spec.heads {
                let state = &mut states[head * state_dim * head_dim..][..state_dim * head_dim];
                let group = head * spec.groups / spec.heads;
                let vector = |of: usize| &x[spec.width() + of * state_dim..][..state_dim];
                let (input, output) = (vector(group), vector(spec.groups + group));
                let time = (times.rows[row][head] + spec.time_bias[head]).exp().ln_1p();
                let time = time.clamp(spec.time_limit.0, spec.time_limit.1);
                let decay = (-spec.rate[head].exp() * time).exp();
                for d in 0..head_dim {
                    let x = x[head * head_dim + d];
                    let mut sum = spec.skip[head] * x;
                    for k in 0..state_dim {
                        let s = &mut state[k * head_dim + d];
                        *s = *s * decay + input[k] * time * x;
                        sum += *s * output[k];
                    }
                    out.rows[row][head * head_dim + d] = sum;
                }
            }
        }
    }
}
