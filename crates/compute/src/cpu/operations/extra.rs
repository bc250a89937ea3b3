//! Operations that few families need.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::backend::{DeltaSpec, LatentSpec, SelectionSpec, StateSpaceSpec};
use crate::cpu::attention::latent::{LatentPart, LatentScratch, SelectionHeads, select_on};
use crate::cpu::caches::States;
use crate::cpu::pointers::SendPtr;
use crate::cpu::recurrence::{StateToken, decay, softplus, state_token_on};
use crate::cpu::threads::pool::for_rows;
use crate::cpu::{Buffer, CpuBackend};
use crate::step::Step;

/// Largest width of a key or of a group's vectors: those of a head are on the stack.
const MAX_STATE_DIM: usize = 1024;

impl CpuBackend {
    /// Changes rows in place, each on one thread.
    pub(super) fn change_each_row(
        &mut self,
        x: &mut Buffer,
        rows: Range<usize>,
        change: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        assert!(rows.end <= x.rows, "rows {rows:?} of {}", x.rows);
        let width = x.width;
        let to = SendPtr(x.data[rows.start * width..rows.end * width].as_mut_ptr());
        for_rows(&mut self.pool, rows.len(), &|part| {
            for index in part {
                // SAFETY: each row is one thread's.
                change(index, unsafe { std::slice::from_raw_parts_mut(to.at(index * width), width) });
            }
        });
    }

    pub(super) fn copy_row_columns(
        &mut self,
        (x, from): (&Buffer, usize),
        rows: Range<usize>,
        (out, to): (&mut Buffer, Range<usize>),
    ) {
        out.shape(x.rows);
        let first = rows.start;
        self.change_each_row(out, rows, &|index, out| {
            out[to.clone()].copy_from_slice(&x.data[(first + index) * x.width + from..][..to.len()]);
        });
    }

    pub(super) fn channel_delta_rule_rows(
        &mut self,
        spec: &DeltaSpec<Arc<[f32]>>,
        (step, rows): (&Step, Range<usize>),
        [qkv, beta, alpha]: [&Buffer; 3],
        states: &mut States,
        out: &mut Buffer,
    ) {
        let (isa, key_dim, value_dim) = (self.isa, spec.key_dim, spec.value_dim);
        assert!(key_dim <= MAX_STATE_DIM, "a key has {key_dim} numbers");
        let first_key = spec.key_heads * key_dim;
        let first_value = 2 * first_key;
        let (to, stride) = (SendPtr(out.data.as_mut_ptr()), out.width);
        for sequence in &step.sequences {
            let rows = sequence.rows_within(&rows);
            if rows.is_empty() {
                continue;
            }
            let part = spec.conv_numbers()..spec.conv_numbers() + spec.value_heads * key_dim * value_dim;
            let matrices = SendPtr(states.of(sequence, rows.start, part).as_mut_ptr());
            self.pool.split(spec.value_heads, &|heads| {
                let (mut query, mut key) = ([0.0; MAX_STATE_DIM], [0.0; MAX_STATE_DIM]);
                let mut decays = [0.0; MAX_STATE_DIM];
                for row in rows.clone() {
                    let qkv = &qkv.data[row * qkv.width..][..spec.channels()];
                    for head in heads.clone() {
                        let key_head = head * spec.key_heads / spec.value_heads;
                        unit(&qkv[key_head * key_dim..][..key_dim], (key_dim as f32).sqrt(), &mut query);
                        unit(&qkv[first_key + key_head * key_dim..][..key_dim], 1.0, &mut key);
                        let alpha = &alpha.data[row * alpha.width + head * key_dim..][..key_dim];
                        let biases = &spec.decay_bias[head * key_dim..][..key_dim];
                        for ((to, alpha), bias) in decays.iter_mut().zip(alpha).zip(biases) {
                            *to = decay(spec.decay[head], *alpha, *bias);
                        }
                        let strength = 1.0 / (1.0 + (-beta.data[row * beta.width + head]).exp());
                        let token = StateToken {
                            query: &query[..key_dim],
                            key: &key[..key_dim],
                            value: &qkv[first_value + head * value_dim..][..value_dim],
                            decays: &decays[..key_dim],
                            strength: Some(strength),
                        };
                        // SAFETY: the instruction set was detected; each thread has its own heads
                        // of the state and of the rows.
                        unsafe {
                            let state = matrices.at(head * key_dim * value_dim);
                            let state = std::slice::from_raw_parts_mut(state, key_dim * value_dim);
                            let out = to.at(row * stride + head * value_dim);
                            let out = std::slice::from_raw_parts_mut(out, value_dim);
                            state_token_on(isa, &token, state, out);
                        }
                    }
                }
            });
        }
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
        let (isa, head_dim, state_dim) = (self.isa, spec.head_dim, spec.state_dim);
        assert!(state_dim <= MAX_STATE_DIM, "a state has {state_dim} numbers for each column");
        let (numbers, first_group) = (state_dim * head_dim, spec.width());
        let (to, stride) = (SendPtr(out.data.as_mut_ptr()), out.width);
        for sequence in &step.sequences {
            let rows = sequence.rows_within(&rows);
            if rows.is_empty() {
                continue;
            }
            let part = spec.conv_numbers()..spec.conv_numbers() + spec.matrix_numbers();
            let matrices = SendPtr(states.of(sequence, rows.start, part).as_mut_ptr());
            let x = &*x;
            self.pool.split(spec.heads, &|heads| {
                let (mut scaled, mut decays) = ([0.0; MAX_STATE_DIM], [0.0; MAX_STATE_DIM]);
                for row in rows.clone() {
                    let x = &x.data[row * x.width..][..spec.channels()];
                    for head in heads.clone() {
                        let group = head * spec.groups / spec.heads;
                        let vector = |of: usize| &x[first_group + of * state_dim..][..state_dim];
                        let time = softplus(times.data[row * times.width + head] + spec.time_bias[head]);
                        let time = time.clamp(spec.time_limit.0, spec.time_limit.1);
                        decays[..state_dim].fill((-spec.rate[head].exp() * time).exp());
                        scaled.iter_mut().zip(vector(group)).for_each(|(to, x)| *to = time * x);
                        let value = &x[head * head_dim..][..head_dim];
                        let token = StateToken {
                            query: vector(spec.groups + group),
                            key: &scaled[..state_dim],
                            value,
                            decays: &decays[..state_dim],
                            strength: None,
                        };
                        // SAFETY: the instruction set was detected; each thread has its own heads
                        // of the state and of the rows.
                        let out = unsafe {
                            let state = std::slice::from_raw_parts_mut(matrices.at(head * numbers), numbers);
                            let out = to.at(row * stride + head * head_dim);
                            let out = std::slice::from_raw_parts_mut(out, head_dim);
                            state_token_on(isa, &token, state, out);
                            out
                        };
                        out.iter_mut().zip(value).for_each(|(out, x)| *out += spec.skip[head] * x);
                    }
                }
            });
        }
    }

    pub(super) fn select_rows(
        &mut self,
        spec: &SelectionSpec,
        (step, rows): (&Step, Range<usize>),
        (queries, weights): (&Buffer, &Buffer),
        cache: LatentPart,
        selection: &mut Buffer,
    ) {
        assert_eq!(selection.width, spec.columns(), "a selection has its number, then positions");
        selection.shape(step.rows());
        self.latent.resize_with(self.pool.threads(), LatentScratch::default);
        let (isa, scratch) = (self.isa, SendPtr(self.latent.as_mut_ptr()));
        let (to, width) = (SendPtr(selection.data.as_mut_ptr()), selection.width);
        let next = AtomicUsize::new(rows.start);
        // A row's cost grows with its position, so a thread takes the next one when it is done.
        self.pool.run(&|thread| {
            // SAFETY: each thread has its own.
            let scratch = unsafe { &mut *scratch.at(thread) };
            loop {
                let row = next.fetch_add(1, Ordering::Relaxed);
                if row >= rows.end {
                    return;
                }
                let Some(sequence) = step.sequences.iter().find(|of| of.rows.contains(&row)) else {
                    continue;
                };
                let of = SelectionHeads {
                    cache,
                    blocks: &step.blocks[sequence.blocks.clone()],
                    visible: sequence.position(row) + 1,
                    chosen: spec.chosen,
                    queries: &queries.data[row * queries.width..][..spec.heads * spec.dim],
                    weights: &weights.data[row * weights.width..][..spec.heads],
                };
                // SAFETY: the instruction set was detected; each row is one thread's; tokens are
                // not written while they are read.
                unsafe {
                    let out = std::slice::from_raw_parts_mut(to.at(row * width), width);
                    select_on(isa, &of, scratch, out);
                }
            }
        });
    }

    pub(super) fn attend_selected_rows(
        &mut self,
        spec: &LatentSpec<Arc<[f32]>>,
        rows: (&Step, Range<usize>),
        [absorbed, queries, selection]: [&Buffer; 3],
        cache: LatentPart,
        out: &mut Buffer,
    ) {
        self.attend_latent_rows(spec, rows, ([absorbed, queries], Some(selection)), cache, out);
    }
}

/// `x / (√(Σ x² + 1e-6) * divisor)`.
fn unit(x: &[f32], divisor: f32, out: &mut [f32]) {
    let factor = 1.0 / ((x.iter().map(|x| x * x).sum::<f32>() + 1e-6).sqrt() * divisor);
    out.iter_mut().zip(x).for_each(|(out, x)| *out = x * factor);
}
