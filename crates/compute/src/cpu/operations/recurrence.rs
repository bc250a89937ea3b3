//! Operations of the gated delta rule. Threads share the work by channels and heads, as tokens
//! depend on each other.

use std::ops::Range;
use std::sync::Arc;

use crate::backend::DeltaSpec;
use crate::cpu::caches::States;
use crate::cpu::pointers::SendPtr;
use crate::cpu::recurrence::{DeltaHead, conv_token, decay, delta_token_on, norm_gated};
use crate::cpu::simd::LANES;
use crate::cpu::threads::pool::for_rows;
use crate::cpu::{Buffer, CpuBackend};
use crate::step::Step;

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
        (step, rows): (&Step, Range<usize>),
        (qkv, gates): (&Buffer, &Buffer),
        states: &mut States,
        out: &mut Buffer,
    ) {
        let (isa, key_dim, value_dim) = (self.isa, spec.key_dim, spec.value_dim);
        let (first_key, first_value) = (spec.key_heads * key_dim, 2 * spec.key_heads * key_dim);
        let (to, stride) = (SendPtr(out.data.as_mut_ptr()), out.width);
        assert!(stride >= spec.value_heads * value_dim && out.rows >= rows.end);
        for sequence in &step.sequences {
            let rows = sequence.rows_within(&rows);
            if rows.is_empty() {
                continue;
            }
            let part = spec.conv_numbers()..spec.conv_numbers() + spec.value_heads * key_dim * value_dim;
            let matrices = SendPtr(states.of(sequence, rows.start, part).as_mut_ptr());
            self.pool.split(spec.value_heads, &|heads| {
                for row in rows.clone() {
                    let qkv = &qkv.data[row * qkv.width..][..spec.channels()];
                    let gates = &gates.data[row * gates.width..][..2 * spec.value_heads];
                    for head in heads.clone() {
                        let key_head = head * spec.key_heads / spec.value_heads;
                        let alpha = gates[spec.value_heads + head];
                        let inputs = DeltaHead {
                            query: &qkv[key_head * key_dim..][..key_dim],
                            key: &qkv[first_key + key_head * key_dim..][..key_dim],
                            value: &qkv[first_value + head * value_dim..][..value_dim],
                            beta: gates[head],
                            decay: decay(spec.decay[head], alpha, spec.decay_bias[head]),
                        };
                        // SAFETY: the instruction set was detected; each thread has its own heads
                        // of the state and of the rows.
                        unsafe {
                            let state = matrices.at(head * key_dim * value_dim);
                            let state = std::slice::from_raw_parts_mut(state, key_dim * value_dim);
                            let out = to.at(row * stride + head * value_dim);
                            let out = std::slice::from_raw_parts_mut(out, value_dim);
                            delta_token_on(isa, &inputs, state, out);
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
