//! Operations of delta rules and state spaces. Threads share the work by channels and heads, as
//! tokens depend on each other.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::{DeltaSpec, StateSpaceSpec};
use crate::cpu::caches::States;
use crate::cpu::pointers::SendPtr;
use crate::cpu::recurrence::{StateToken, conv_token, decay, norm_gated, softplus, state_token_on, unit};
use crate::cpu::simd::LANES;
use crate::cpu::threads::pool::for_rows;
use crate::cpu::{Buffer, CpuBackend};
use crate::step::Step;

/// Largest width of a key or of a group's vectors: those of a head are on the stack.
const MAX_STATE_DIM: usize = 1024;

/// Where the states of a layer's heads are, each `[key_dim][value_dim]`.
struct StateHeads {
    heads: usize,
    /// Numbers of the convolution before them.
    first: usize,
    key_dim: usize,
    value_dim: usize,
}

/// One head's inputs of a row; as many numbers count as a key has.
struct HeadInputs<'a> {
    query: [f32; MAX_STATE_DIM],
    key: [f32; MAX_STATE_DIM],
    decays: [f32; MAX_STATE_DIM],
    value: &'a [f32],
    /// As in [`StateToken`].
    strength: Option<f32>,
    /// How much of the value is added to the output.
    skip: f32,
}

impl Default for HeadInputs<'_> {
    fn default() -> Self {
        let zeros = [0.0; MAX_STATE_DIM];
        Self { query: zeros, key: zeros, decays: zeros, value: &[], strength: None, skip: 0.0 }
    }
}

impl<'a> HeadInputs<'a> {
    /// The query, key and value of a delta rule's head, from a row of them; `beta` is before the
    /// sigmoid.
    fn take_delta(&mut self, spec: &DeltaSpec<Arc<[f32]>>, qkv: &'a [f32], head: usize, beta: f32) {
        let (key_dim, value_dim) = (spec.key_dim, spec.value_dim);
        let key_head = spec.key_head(head);
        let (queries, rest) = qkv.split_at(spec.key_heads * key_dim);
        let (keys, values) = rest.split_at(spec.key_heads * key_dim);
        unit(&queries[key_head * key_dim..][..key_dim], (key_dim as f32).sqrt(), &mut self.query);
        unit(&keys[key_head * key_dim..][..key_dim], 1.0, &mut self.key);
        self.value = &values[head * value_dim..][..value_dim];
        self.strength = Some(1.0 / (1.0 + (-beta).exp()));
    }
}

impl DeltaSpec<Arc<[f32]>> {
    fn state_heads(&self) -> StateHeads {
        StateHeads {
            heads: self.value_heads,
            first: self.conv_numbers(),
            key_dim: self.key_dim,
            value_dim: self.value_dim,
        }
    }
}

impl CpuBackend {
    pub(super) fn short_conv_rows(
        &mut self,
        spec: &DeltaSpec<Arc<[f32]>>,
        (step, rows): (&Step, Range<usize>),
        x: &mut Buffer,
        states: &mut States,
    ) {
        self.convolve((&spec.taps, None), (spec.kernel, spec.channels()), (step, rows), x, states);
    }

    /// The short convolution of the first `channels` columns of these rows, in place.
    pub(super) fn convolve(
        &mut self,
        taps_and_bias: (&[f32], Option<&[f32]>),
        (kernel, channels): (usize, usize),
        (step, rows): (&Step, Range<usize>),
        x: &mut Buffer,
        states: &mut States,
    ) {
        let width = x.width;
        assert!(channels <= width && rows.end <= x.rows, "the projection lacks rows or columns");
        let data = SendPtr(x.data.as_mut_ptr());
        for sequence in &step.sequences {
            let rows = sequence.rows_within(&rows);
            if rows.is_empty() {
                continue;
            }
            let before = SendPtr(states.of(sequence, rows.start, 0..(kernel - 1) * channels).as_mut_ptr());
            self.pool.split(channels.div_ceil(LANES), &|part| {
                let part = part.start * LANES..channels.min(part.end * LANES);
                for row in rows.clone() {
                    // SAFETY: the row and the state have these channels, and each thread its own of
                    // them.
                    unsafe {
                        let (before, x) = (before.at(0), data.at(row * width));
                        conv_token(taps_and_bias, (kernel, channels), part.clone(), before, x);
                    }
                }
            });
        }
    }

    pub(super) fn delta_rule_rows(
        &mut self,
        spec: &DeltaSpec<Arc<[f32]>>,
        rows: (&Step, Range<usize>),
        (qkv, gates): (&Buffer, &Buffer),
        states: &mut States,
        out: &mut Buffer,
    ) {
        self.recur(spec.state_heads(), rows, states, out, &|row, head, inputs| {
            let gates = &gates.data[row * gates.width..][..2 * spec.value_heads];
            let alpha = gates[spec.value_heads + head];
            inputs.decays[..spec.key_dim].fill(decay(spec.decay[head], alpha, spec.decay_bias[head]));
            inputs.take_delta(spec, &qkv.data[row * qkv.width..], head, gates[head]);
        });
    }

    pub(super) fn channel_delta_rule_rows(
        &mut self,
        spec: &DeltaSpec<Arc<[f32]>>,
        rows: (&Step, Range<usize>),
        [qkv, beta, alpha]: [&Buffer; 3],
        states: &mut States,
        out: &mut Buffer,
    ) {
        let key_dim = spec.key_dim;
        self.recur(spec.state_heads(), rows, states, out, &|row, head, inputs| {
            let alpha = &alpha.data[row * alpha.width + head * key_dim..][..key_dim];
            let biases = &spec.decay_bias[head * key_dim..][..key_dim];
            for ((to, alpha), bias) in inputs.decays.iter_mut().zip(alpha).zip(biases) {
                *to = spec.decays.of(spec.decay[head], alpha + bias);
            }
            let beta = beta.data[row * beta.width + head];
            inputs.take_delta(spec, &qkv.data[row * qkv.width..], head, beta);
        });
    }

    pub(super) fn state_space_rows(
        &mut self,
        spec: &StateSpaceSpec<Arc<[f32]>>,
        (step, rows): (&Step, Range<usize>),
        (x, times): (&mut Buffer, &Buffer),
        states: &mut States,
        out: &mut Buffer,
    ) {
        let bias = spec.conv_bias.as_deref();
        self.convolve((&spec.taps, bias), (spec.kernel, spec.channels()), (step, rows.clone()), x, states);
        let (x, state_dim) = (&*x, spec.state_dim);
        let of = StateHeads {
            heads: spec.heads,
            first: spec.conv_numbers(),
            key_dim: state_dim,
            value_dim: spec.head_dim,
        };
        self.recur(of, (step, rows), states, out, &|row, head, inputs| {
            let x = &x.data[row * x.width..][..spec.channels()];
            let group = head * spec.groups / spec.heads;
            let vector = |of: usize| &x[spec.width() + of * state_dim..][..state_dim];
            let time = softplus(times.data[row * times.width + head] + spec.time_bias[head]);
            let time = time.clamp(spec.time_limit.0, spec.time_limit.1);
            inputs.decays[..state_dim].fill((-spec.rate[head].exp() * time).exp());
            inputs.query[..state_dim].copy_from_slice(vector(spec.groups + group));
            inputs.key.iter_mut().zip(vector(group)).for_each(|(to, x)| *to = time * x);
            inputs.value = &x[head * spec.head_dim..][..spec.head_dim];
            inputs.skip = spec.skip[head];
        });
    }

    /// A token of each head's state after the other. `read` is given a row, a head, and its inputs
    /// to fill. Threads share the heads.
    fn recur<'a>(
        &mut self,
        of: StateHeads,
        (step, rows): (&Step, Range<usize>),
        states: &mut States,
        out: &mut Buffer,
        read: &(dyn Fn(usize, usize, &mut HeadInputs<'a>) + Sync),
    ) {
        let StateHeads { heads, first, key_dim, value_dim } = of;
        let (isa, numbers) = (self.isa, key_dim * value_dim);
        let (to, stride) = (SendPtr(out.data.as_mut_ptr()), out.width);
        assert!(key_dim <= MAX_STATE_DIM, "a key has {key_dim} numbers");
        assert!(stride >= heads * value_dim && out.rows >= rows.end);
        for sequence in &step.sequences {
            let rows = sequence.rows_within(&rows);
            if rows.is_empty() {
                continue;
            }
            let part = first..first + heads * numbers;
            let matrices = SendPtr(states.of(sequence, rows.start, part).as_mut_ptr());
            self.pool.split(heads, &|heads| {
                let mut inputs = HeadInputs::default();
                for row in rows.clone() {
                    for head in heads.clone() {
                        read(row, head, &mut inputs);
                        let token = StateToken {
                            query: &inputs.query[..key_dim],
                            key: &inputs.key[..key_dim],
                            value: inputs.value,
                            decays: &inputs.decays[..key_dim],
                            strength: inputs.strength,
                        };
                        // SAFETY: the instruction set was detected; each thread has its own heads
                        // of the state and of the rows.
                        let out = unsafe {
                            let state = std::slice::from_raw_parts_mut(matrices.at(head * numbers), numbers);
                            let out = to.at(row * stride + head * value_dim);
                            let out = std::slice::from_raw_parts_mut(out, value_dim);
                            state_token_on(isa, &token, state, out);
                            out
                        };
                        if inputs.skip != 0.0 {
                            out.iter_mut().zip(inputs.value).for_each(|(out, x)| *out += inputs.skip * x);
                        }
                    }
                }
            });
        }
    }

    pub(super) fn norm_gated_rows(
        &mut self,
        spec: &DeltaSpec<Arc<[f32]>>,
        z: &Buffer,
        rows: Range<usize>,
        x: &mut Buffer,
    ) {
        let (width, used) = (x.width, spec.value_heads * spec.value_dim);
        let to = SendPtr(x.data.as_mut_ptr());
        for_rows(&mut self.pool, rows.len(), &|part| {
            for row in rows.start + part.start..rows.start + part.end {
                // SAFETY: each row is one thread's.
                let x = unsafe { std::slice::from_raw_parts_mut(to.at(row * width), used) };
                let heads = x.chunks_exact_mut(spec.value_dim);
                for (x, z) in heads.zip(z.data[row * z.width..].chunks_exact(spec.value_dim)) {
                    norm_gated(x, z, &spec.norm.weight, spec.norm.eps);
                }
            }
        });
    }
}
