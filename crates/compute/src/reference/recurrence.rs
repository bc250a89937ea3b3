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

/// One head's part in a token.
struct HeadToken {
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    /// Factor of each row of the state.
    decays: Vec<f32>,
    /// How much of the difference between `value` and what the state has for `key` is written;
    /// `None`: `value` is added whatever the state has.
    strength: Option<f32>,
    /// How much of the value is added to the output.
    skip: f32,
}

/// `S[k] *= decays[k]`, `S += key ⊗ written`, `out = Sᵀ query`, for each token and head, whose
/// states are behind the convolution's `first` numbers.
fn recur(
    (heads, first): (usize, usize),
    (step, rows): (&Step, Range<usize>),
    cache: &mut Cache,
    out: &mut Rows,
    token: &dyn Fn(usize, usize) -> HeadToken,
) {
    for sequence in &step.sequences {
        for row in sequence.rows_within(&rows) {
            for head in 0..heads {
                let HeadToken { query, key, value, decays, strength, skip } = token(row, head);
                let (key_dim, value_dim) = (key.len(), value.len());
                let start = first + head * key_dim * value_dim;
                let state = cache.state(sequence, row, start..start + key_dim * value_dim);
                for (row, decay) in state.chunks_exact_mut(value_dim).zip(&decays) {
                    row.iter_mut().for_each(|s| *s *= decay);
                }
                for v in 0..value_dim {
                    let mut written = value[v];
                    if let Some(strength) = strength {
                        let known: f32 = (0..key_dim).map(|k| state[k * value_dim + v] * key[k]).sum();
                        written = (written - known) * strength;
                    }
                    (0..key_dim).for_each(|k| state[k * value_dim + v] += key[k] * written);
                    let sum: f32 = (0..key_dim).map(|k| state[k * value_dim + v] * query[k]).sum();
                    out.rows[row][head * value_dim + v] = sum + skip * value[v];
                }
            }
        }
    }
}

fn softplus(x: f32) -> f32 {
    x.exp().ln_1p()
}

/// A delta rule, given what each head's state is multiplied with.
fn delta_rule_by(
    spec: &DeltaSpec<Vec<f32>>,
    rows: (&Step, Range<usize>),
    (qkv, strengths): (&Rows, &Rows),
    cache: &mut Cache,
    out: &mut Rows,
    decays: &dyn Fn(usize, usize) -> Vec<f32>,
) {
    let (key_dim, value_dim) = (spec.key_dim, spec.value_dim);
    let first_value = 2 * spec.key_heads * key_dim;
    recur((spec.value_heads, spec.conv_numbers()), rows, cache, out, &|row, head| {
        let qkv = &qkv.rows[row];
        let key_head = spec.key_head(head);
        let query = unit(&qkv[key_head * key_dim..][..key_dim]);
        HeadToken {
            query: query.iter().map(|x| x / (key_dim as f32).sqrt()).collect(),
            key: unit(&qkv[(spec.key_heads + key_head) * key_dim..][..key_dim]),
            value: qkv[first_value + head * value_dim..][..value_dim].to_vec(),
            decays: decays(row, head),
            strength: Some(1.0 / (1.0 + (-strengths.rows[row][head]).exp())),
            skip: 0.0,
        }
    });
}

pub(super) fn delta_rule(
    spec: &DeltaSpec<Vec<f32>>,
    step: &Step,
    rows: Range<usize>,
    (qkv, gates): (&Rows, &Rows),
    cache: &mut Cache,
    out: &mut Rows,
) {
    delta_rule_by(spec, (step, rows), (qkv, gates), cache, out, &|row, head| {
        let time = softplus(gates.rows[row][spec.value_heads + head] + spec.decay_bias[head]);
        vec![(-spec.decay[head].exp() * time).exp(); spec.key_dim]
    });
}

pub(super) fn channel_delta_rule(
    spec: &DeltaSpec<Vec<f32>>,
    step: &Step,
    rows: Range<usize>,
    [qkv, beta, alpha]: [&Rows; 3],
    cache: &mut Cache,
    out: &mut Rows,
) {
    delta_rule_by(spec, (step, rows), (qkv, beta), cache, out, &|row, head| {
        let of_column = |k: usize| {
            let at = head * spec.key_dim + k;
            spec.decays.of(spec.decay[head], alpha.rows[row][at] + spec.decay_bias[at])
        };
        (0..spec.key_dim).map(of_column).collect()
    });
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
    recur((spec.heads, spec.conv_numbers()), (step, rows), cache, out, &|row, head| {
        let x = &x.rows[row];
        let group = head * spec.groups / spec.heads;
        let vector = |of: usize| &x[spec.width() + of * spec.state_dim..][..spec.state_dim];
        let time = softplus(times.rows[row][head] + spec.time_bias[head]);
        let time = time.clamp(spec.time_limit.0, spec.time_limit.1);
        HeadToken {
            query: vector(spec.groups + group).to_vec(),
            key: vector(group).iter().map(|x| x * time).collect(),
            value: x[head * spec.head_dim..][..spec.head_dim].to_vec(),
            decays: vec![(-spec.rate[head].exp() * time).exp(); spec.state_dim],
            strength: None,
            skip: spec.skip[head],
        }
    });
}
