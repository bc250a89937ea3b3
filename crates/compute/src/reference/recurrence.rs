//! The gated delta rule by its definition, a token at a time.

use std::ops::Range;

use super::{Cache, Rows, dot, silu};
use crate::backend::DeltaSpec;
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
    let channels = spec.channels();
    for sequence in &step.sequences {
        for row in sequence.rows_within(&rows) {
            // The inputs before this one, oldest first, then this one.
            let before = cache.state(sequence, row, 0..spec.conv_numbers());
            let inputs = [&*before, &x.rows[row][..channels]].concat();
            before.copy_from_slice(&inputs[channels..]);
            for channel in 0..channels {
                let taps = &spec.taps[channel * spec.kernel..][..spec.kernel];
                let sum: f32 =
                    taps.iter().enumerate().map(|(k, tap)| tap * inputs[k * channels + channel]).sum();
                x.rows[row][channel] = silu(sum);
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
