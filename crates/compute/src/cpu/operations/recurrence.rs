//! Operations of delta rules and state spaces. Threads share the work by channels and heads,
//! because tokens depend on each other.
//!
//! A draft's rows are computed on a copy of the state, one head's at a time, which is lost. Their
//! inputs are kept, and the sequence's next step repeats those that turned out right. So a state is
//! read and written once in a step, with a draft too.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use crate::backend::{Decays, DeltaSpec, GatedConvSpec, StateSpaceSpec};
use crate::cpu::caches::{DraftInputs, States};
use crate::cpu::pointers::SendPtr;
use crate::cpu::recurrence::{
    ConvRows, Convolution, StateToken, conv_rows_on, norm_gated, softplus, state_token_on, unit,
};
use crate::cpu::simd::LANES;
use crate::cpu::threads::pool::for_rows;
use crate::cpu::{Buffer, CpuBackend};
use crate::step::Step;

/// Maximum width of a key or of a group's vectors, because those of a head are on the stack.
const MAX_STATE_DIM: usize = 1024;

thread_local! {
    /// The copy of one head's state that a draft's rows are computed on.
    static DRAFT_STATE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Where the states of a layer's heads are, each `[key_dim][value_dim]`.
struct StateHeads {
    heads: usize,
    /// Numbers of the convolution before them.
    first: usize,
    key_dim: usize,
    value_dim: usize,
}

/// A recurrence's inputs from a row: convolved inputs, and others.
#[derive(Clone, Copy)]
struct RowInputs<'a> {
    conv: &'a [f32],
    gates: [&'a [f32]; 2],
}

/// A buffer's first columns.
#[derive(Clone, Copy)]
struct Columns<'a>(&'a Buffer, usize);

impl<'a> Columns<'a> {
    fn row(self, row: usize) -> &'a [f32] {
        &self.0.data[row * self.0.width..][..self.1]
    }
}

/// One head's inputs from a row; as many numbers are used as a key has.
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
        let (eps, root) = (spec.unit_eps, (key_dim as f32).sqrt());
        unit(&queries[key_head * key_dim..][..key_dim], (eps, root), &mut self.query);
        unit(&keys[key_head * key_dim..][..key_dim], (eps, 1.0), &mut self.key);
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
        let of = Convolution { taps: &spec.taps, bias: None, kernel: spec.kernel, silu: true };
        self.convolve((of, spec.channels()), (step, rows), x, states);
    }

    /// The short convolution of the first `channels` columns of these rows, in place.
    pub(super) fn convolve(
        &mut self,
        (of, channels): (Convolution<'_>, usize),
        (step, rows): (&Step, Range<usize>),
        x: &mut Buffer,
        states: &mut States,
    ) {
        let (isa, width, kernel) = (self.isa, x.width, of.kernel);
        assert!(channels <= width && rows.end <= x.rows, "the projection lacks rows or columns");
        let data = SendPtr(x.data.as_mut_ptr());
        let kept = (kernel - 1) * channels;
        self.draft_inputs.resize(self.draft_inputs.len().max(kept), 0.0);
        let copy = SendPtr(self.draft_inputs.as_mut_ptr());
        for sequence in &step.sequences {
            let [certain, drafted] = sequence.certain_and_drafted(&rows);
            let accepted = sequence.accepted_before(&rows);
            if certain.is_empty() && drafted.is_empty() {
                continue;
            }
            let before = SendPtr(states.of(sequence, certain.start, 0..kept).as_mut_ptr());
            let mut again = SendPtr(std::ptr::null_mut());
            if accepted > 0 || !drafted.is_empty() {
                let inputs = states.drafts().of(sequence.slot);
                std::mem::swap(&mut inputs.conv, &mut inputs.accepted);
                inputs.accepted.truncate(accepted * channels);
                assert_eq!(inputs.accepted.len(), accepted * channels, "the draft has fewer rows");
                again = SendPtr(inputs.accepted.as_mut_ptr());
                inputs.conv.clear();
                for row in drafted.clone() {
                    inputs.conv.extend_from_slice(&x.data[row * width..][..channels]);
                }
            }
            self.pool.split(channels.div_ceil(LANES), &|part| {
                let part = part.start * LANES..channels.min(part.end * LANES);
                let convolve =
                    |before: SendPtr<f32>, (x, stride): (SendPtr<f32>, usize), rows: &Range<usize>| {
                        let rows = ConvRows { x: x.0, stride, rows: rows.clone() };
                        // SAFETY: the instruction set was detected. Rows, states and copies have
                        // these channels, and each thread its own of them.
                        unsafe { conv_rows_on(isa, of, channels, part.clone(), before.0, rows) };
                    };
                convolve(before, (again, channels), &(0..accepted));
                convolve(before, (data, width), &certain);
                if drafted.is_empty() {
                    return;
                }
                for first in (0..kernel - 1).map(|k| k * channels + part.start) {
                    // SAFETY: as above.
                    unsafe { copy.at(first).copy_from_nonoverlapping(before.at(first), part.len()) };
                }
                convolve(copy, (data, width), &drafted);
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
        let (qkv, gates) = (Columns(qkv, spec.channels()), Columns(gates, 2 * spec.value_heads));
        let inputs = (qkv, [gates, Columns(gates.0, 0)]);
        self.recur(spec.state_heads(), rows, inputs, states, out, &|row, head, inputs| {
            let [gates, _] = row.gates;
            let alpha = gates[spec.value_heads + head];
            let decay = Decays::Softplus.of(spec.decay[head], alpha + spec.decay_bias[head]);
            inputs.decays[..spec.key_dim].fill(decay);
            inputs.take_delta(spec, row.conv, head, gates[head]);
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
        let gates = [Columns(beta, spec.value_heads), Columns(alpha, spec.value_heads * key_dim)];
        let inputs = (Columns(qkv, spec.channels()), gates);
        self.recur(spec.state_heads(), rows, inputs, states, out, &|row, head, inputs| {
            let [beta, alpha] = row.gates;
            let alpha = &alpha[head * key_dim..][..key_dim];
            let biases = &spec.decay_bias[head * key_dim..][..key_dim];
            for ((to, alpha), bias) in inputs.decays.iter_mut().zip(alpha).zip(biases) {
                *to = spec.decays.of(spec.decay[head], alpha + bias);
            }
            inputs.take_delta(spec, row.conv, head, beta[head]);
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
        let conv = Convolution { taps: &spec.taps, bias, kernel: spec.kernel, silu: true };
        self.convolve((conv, spec.channels()), (step, rows.clone()), x, states);
        let state_dim = spec.state_dim;
        let of = StateHeads {
            heads: spec.heads,
            first: spec.conv_numbers(),
            key_dim: state_dim,
            value_dim: spec.head_dim,
        };
        let inputs = (Columns(x, spec.channels()), [Columns(times, spec.heads), Columns(times, 0)]);
        self.recur(of, (step, rows), inputs, states, out, &|row, head, inputs| {
            let (x, [times, _]) = (row.conv, row.gates);
            let group = head * spec.groups / spec.heads;
            let vector = |of: usize| &x[spec.width() + of * state_dim..][..state_dim];
            let time = softplus(times[head] + spec.time_bias[head]);
            let time = time.clamp(spec.time_limit.0, spec.time_limit.1);
            inputs.decays[..state_dim].fill((-spec.rate[head].exp() * time).exp());
            inputs.query[..state_dim].copy_from_slice(vector(spec.groups + group));
            inputs.key.iter_mut().zip(vector(group)).for_each(|(to, x)| *to = time * x);
            inputs.value = &x[head * spec.head_dim..][..spec.head_dim];
            inputs.skip = spec.skip[head];
        });
    }

    pub(super) fn gated_conv_rows(
        &mut self,
        spec: &GatedConvSpec<Arc<[f32]>>,
        (step, rows): (&Step, Range<usize>),
        x: &mut Buffer,
        states: &mut States,
        out: &mut Buffer,
    ) {
        let (channels, width, to_width) = (spec.channels, x.width, out.width);
        assert!(width >= 3 * channels && to_width >= channels && rows.end <= x.rows.min(out.rows));
        let from = SendPtr(x.data.as_mut_ptr());
        // SAFETY: each row is one thread's, and both buffers have it.
        let numbers = |of: SendPtr<f32>, row: usize, (width, used): (usize, usize)| unsafe {
            std::slice::from_raw_parts_mut(of.at(row * width), used)
        };
        for_rows(&mut self.pool, rows.len(), &|part| {
            for row in rows.start + part.start..rows.start + part.end {
                let (gates, others) = numbers(from, row, (width, 3 * channels)).split_at_mut(channels);
                gates.iter_mut().zip(&others[channels..]).for_each(|(gate, input)| *gate *= input);
            }
        });
        let of = Convolution { taps: &spec.taps, bias: None, kernel: spec.kernel, silu: false };
        self.convolve((of, channels), (step, rows.clone()), x, states);
        let (from, to) = (SendPtr(x.data.as_mut_ptr()), SendPtr(out.data.as_mut_ptr()));
        for_rows(&mut self.pool, rows.len(), &|part| {
            for row in rows.start + part.start..rows.start + part.end {
                let (sums, gates) = numbers(from, row, (width, 2 * channels)).split_at(channels);
                let products = sums.iter().zip(gates).map(|(sum, gate)| sum * gate);
                numbers(to, row, (to_width, channels)).iter_mut().zip(products).for_each(|(out, p)| *out = p);
            }
        });
    }

    /// Advances each head's state token by token. `read` gets a row's inputs, a head, and the
    /// head's inputs to fill. Threads share the heads.
    fn recur(
        &mut self,
        of: StateHeads,
        (step, rows): (&Step, Range<usize>),
        (conv, gates): (Columns<'_>, [Columns<'_>; 2]),
        states: &mut States,
        out: &mut Buffer,
        read: &(dyn for<'a> Fn(RowInputs<'a>, usize, &mut HeadInputs<'a>) + Sync),
    ) {
        let StateHeads { heads, first, key_dim, value_dim } = of;
        let (isa, numbers) = (self.isa, key_dim * value_dim);
        let (to, stride) = (SendPtr(out.data.as_mut_ptr()), out.width);
        assert!(key_dim <= MAX_STATE_DIM, "a key has {key_dim} numbers");
        assert!(stride >= heads * value_dim && out.rows >= rows.end);
        let row_inputs = |row: usize| RowInputs { conv: conv.row(row), gates: gates.map(|of| of.row(row)) };
        let kept = gates.map(|of| of.1);
        for sequence in &step.sequences {
            let [certain, drafted] = sequence.certain_and_drafted(&rows);
            let accepted = sequence.accepted_before(&rows);
            if certain.is_empty() && drafted.is_empty() {
                continue;
            }
            let part = first..first + heads * numbers;
            let matrices = SendPtr(states.of(sequence, certain.start, part).as_mut_ptr());
            let drafts = states.drafts();
            if accepted == 0 && drafted.is_empty() {
                drafts.forget(sequence.slot);
            }
            let mut none = DraftInputs::default();
            let inputs = match accepted == 0 && drafted.is_empty() {
                true => &mut none,
                false => drafts.of(sequence.slot),
            };
            let again = |row: usize| {
                let gates = &inputs.gates[row * (kept[0] + kept[1])..];
                let (one, rest) = gates.split_at(kept[0]);
                RowInputs { conv: &inputs.accepted[row * conv.1..][..conv.1], gates: [one, &rest[..kept[1]]] }
            };
            self.pool.split(heads, &|heads| {
                let mut inputs = HeadInputs::default();
                for head in heads {
                    // SAFETY: each thread has its own heads of the state.
                    let state =
                        unsafe { std::slice::from_raw_parts_mut(matrices.at(head * numbers), numbers) };
                    let mut token = |row, state: &mut [f32], out: &mut [f32]| {
                        read(row, head, &mut inputs);
                        let token = StateToken {
                            query: &inputs.query[..key_dim],
                            key: &inputs.key[..key_dim],
                            value: inputs.value,
                            decays: &inputs.decays[..key_dim],
                            strength: inputs.strength,
                        };
                        // SAFETY: the instruction set was detected.
                        unsafe { state_token_on(isa, &token, state, out) };
                        if inputs.skip != 0.0 {
                            out.iter_mut().zip(inputs.value).for_each(|(out, x)| *out += inputs.skip * x);
                        }
                    };
                    // SAFETY: each thread has its own heads of the rows.
                    let out = |row: usize| unsafe {
                        let out = to.at(row * stride + head * value_dim);
                        std::slice::from_raw_parts_mut(out, value_dim)
                    };
                    for row in 0..accepted {
                        // The first row's output is written after these.
                        token(again(row), state, out(certain.start));
                    }
                    certain.clone().for_each(|row| token(row_inputs(row), state, out(row)));
                    if drafted.is_empty() {
                        continue;
                    }
                    DRAFT_STATE.with_borrow_mut(|copy| {
                        copy.clear();
                        copy.extend_from_slice(state);
                        drafted.clone().for_each(|row| token(row_inputs(row), copy, out(row)));
                    });
                }
            });
            inputs.gates.clear();
            for row in drafted {
                row_inputs(row).gates.iter().for_each(|gates| inputs.gates.extend_from_slice(gates));
            }
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
