//! The gated delta rule by its definition, a token at a time.

use std::ops::Range;

use super::{Cache, Rows, dot, silu};
use crate::backend::{DeltaSpec, GatedConvSpec, StateSpaceSpec};
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
    convolve((&spec.taps, &bias), silu, (step, rows), x, cache);
}

/// The convolution of the first columns, as many as `bias` has, in place. `curve` is applied to the
/// sums.
fn convolve(
    (taps, bias): (&[f32], &[f32]),
    curve: fn(f32) -> f32,
    (step, rows): (&Step, Range<usize>),
    x: &mut Rows,
    cache: &mut Cache,
) {
    let (channels, kernel) = (bias.len(), taps.len() / bias.len().max(1));
    let token = |before: &mut [f32], x: &mut [f32]| {
        // The inputs before this one, oldest first, then this one.
        let inputs = [&*before, &x[..channels]].concat();
        before.copy_from_slice(&inputs[channels..]);
        for channel in 0..channels {
            let taps = &taps[channel * kernel..][..kernel];
            let sum: f32 = taps.iter().enumerate().map(|(k, tap)| tap * inputs[k * channels + channel]).sum();
            x[channel] = curve(sum + bias[channel]);
        }
    };
    for sequence in &step.sequences {
        let [certain, drafted] = sequence.certain_and_drafted(&rows);
        if certain.is_empty() && drafted.is_empty() {
            continue;
        }
        let mut accepted = std::mem::take(&mut cache.drafts[sequence.slot].conv);
        accepted.truncate(sequence.accepted_before(&rows));
        for row in certain.clone() {
            let before = cache.state(sequence, row, 0..(kernel - 1) * channels);
            if row == certain.start {
                accepted.iter_mut().for_each(|x| token(before, x));
            }
            token(before, &mut x.rows[row]);
        }
        let mut copy = cache.states[sequence.slot][..(kernel - 1) * channels].to_vec();
        let conv = drafted.clone().map(|row| x.rows[row][..channels].to_vec()).collect();
        drafted.for_each(|row| token(&mut copy, &mut x.rows[row]));
        let kept = &mut cache.drafts[sequence.slot];
        (kept.accepted, kept.conv) = (accepted, conv);
    }
}

/// `x / √(Σ x² + eps)`, as Gated DeltaNet's implementations make unit vectors.
fn unit(x: &[f32], eps: f32) -> Vec<f32> {
    let length = (dot(x, x) + eps).sqrt();
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

/// A head's token, from a row's convolved inputs, the row of gates, and the head.
type HeadTokens<'a> = dyn Fn(&[f32], &[f32], usize) -> HeadToken + 'a;

/// `S[k] *= decays[k]`, `S += key ⊗ written`, `out = Sᵀ query`, for each token and head. The heads'
/// states follow the convolution's `first` numbers. `token` gets the convolved inputs of a row, the
/// row of gates, and the head.
fn recur(
    (heads, first): (usize, usize),
    (step, rows): (&Step, Range<usize>),
    (conv, gates): (&Rows, &[Vec<f32>]),
    cache: &mut Cache,
    out: &mut Rows,
    token: &HeadTokens<'_>,
) {
    for sequence in &step.sequences {
        let [certain, drafted] = sequence.certain_and_drafted(&rows);
        if certain.is_empty() && drafted.is_empty() {
            continue;
        }
        let accepted = sequence.accepted_before(&rows);
        let mut kept = std::mem::take(&mut cache.drafts[sequence.slot]);
        for head in 0..heads {
            let again = (0..accepted).map(|row| (&kept.accepted[row], &kept.gates[row], certain.start));
            let certain = certain.clone().map(|row| (&conv.rows[row], &gates[row], row));
            for (conv, gates, row) in again.chain(certain) {
                let token = token(conv, gates, head);
                let start = first + head * token.numbers();
                let state = cache.state(sequence, row, start..start + token.numbers());
                token.advance(state, &mut out.rows[row][head * token.value.len()..]);
            }
            for row in drafted.clone().take(1) {
                let size = token(&conv.rows[row], &gates[row], head).numbers();
                let mut copy = cache.states[sequence.slot][first + head * size..][..size].to_vec();
                for row in drafted.clone() {
                    let token = token(&conv.rows[row], &gates[row], head);
                    token.advance(&mut copy, &mut out.rows[row][head * token.value.len()..]);
                }
            }
        }
        kept.gates = drafted.map(|row| gates[row].clone()).collect();
        cache.drafts[sequence.slot] = kept;
    }
}

impl HeadToken {
    /// Numbers of the head's state.
    fn numbers(&self) -> usize {
        self.key.len() * self.value.len()
    }

    /// Updates the state with this token, and writes the head's output.
    fn advance(&self, state: &mut [f32], out: &mut [f32]) {
        let Self { query, key, value, decays, strength, skip } = self;
        let (key_dim, value_dim) = (key.len(), value.len());
        for (row, decay) in state.chunks_exact_mut(value_dim).zip(decays) {
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
            out[v] = sum + skip * value[v];
        }
    }
}

fn softplus(x: f32) -> f32 {
    x.exp().ln_1p()
}

/// Rows of all of these, side by side.
fn joined(of: &[&Rows]) -> Vec<Vec<f32>> {
    let row = |row: usize| of.iter().flat_map(|of| of.rows[row].iter().copied()).collect();
    (0..of[0].rows.len()).map(row).collect()
}

/// A delta rule, with given factors of each head's state. A row of gates begins with the strengths.
fn delta_rule_by(
    spec: &DeltaSpec<Vec<f32>>,
    rows: (&Step, Range<usize>),
    inputs: (&Rows, &[Vec<f32>]),
    cache: &mut Cache,
    out: &mut Rows,
    decays: &dyn Fn(&[f32], usize) -> Vec<f32>,
) {
    let (key_dim, value_dim) = (spec.key_dim, spec.value_dim);
    let first_value = 2 * spec.key_heads * key_dim;
    recur((spec.value_heads, spec.conv_numbers()), rows, inputs, cache, out, &|qkv, gates, head| {
        let key_head = spec.key_head(head);
        let query = unit(&qkv[key_head * key_dim..][..key_dim], spec.unit_eps);
        HeadToken {
            query: query.iter().map(|x| x / (key_dim as f32).sqrt()).collect(),
            key: unit(&qkv[(spec.key_heads + key_head) * key_dim..][..key_dim], spec.unit_eps),
            value: qkv[first_value + head * value_dim..][..value_dim].to_vec(),
            decays: decays(gates, head),
            strength: Some(1.0 / (1.0 + (-gates[head]).exp())),
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
    delta_rule_by(spec, (step, rows), (qkv, &gates.rows), cache, out, &|gates, head| {
        let time = softplus(gates[spec.value_heads + head] + spec.decay_bias[head]);
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
    let gates = joined(&[beta, alpha]);
    delta_rule_by(spec, (step, rows), (qkv, &gates), cache, out, &|gates, head| {
        let of_column = |k: usize| {
            let at = head * spec.key_dim + k;
            spec.decays.of(spec.decay[head], gates[beta.width + at] + spec.decay_bias[at])
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
    convolve((&spec.taps, bias), silu, (step, rows.clone()), x, cache);
    let of = (spec.heads, spec.conv_numbers());
    recur(of, (step, rows), (x, &times.rows), cache, out, &|x, times, head| {
        let group = head * spec.groups / spec.heads;
        let vector = |of: usize| &x[spec.width() + of * spec.state_dim..][..spec.state_dim];
        let time = softplus(times[head] + spec.time_bias[head]);
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

pub(super) fn gated_conv(
    spec: &GatedConvSpec<Vec<f32>>,
    step: &Step,
    rows: Range<usize>,
    x: &mut Rows,
    cache: &mut Cache,
    out: &mut Rows,
) {
    let channels = spec.channels;
    for row in rows.clone() {
        let (gates, others) = x.rows[row].split_at_mut(channels);
        gates.iter_mut().zip(&others[channels..]).for_each(|(gate, input)| *gate *= input);
    }
    convolve((&spec.taps, &vec![0.0; channels]), |sum| sum, (step, rows.clone()), x, cache);
    for row in rows {
        let (sums, others) = x.rows[row].split_at(channels);
        let products = sums.iter().zip(others).map(|(sum, gate)| sum * gate);
        out.rows[row].iter_mut().zip(products).for_each(|(out, product)| *out = product);
    }
}
