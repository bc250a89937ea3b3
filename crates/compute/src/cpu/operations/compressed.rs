//! Attention to compressed tokens, and several residual streams.

use std::ops::Range;
use std::sync::Arc;

use super::latent::selected;
use crate::backend::{CompressedSpec, CompressionSpec, StreamSpec};
use crate::cpu::attention::compressed::{CompressedHeads, attend_compressed_on};
use crate::cpu::attention::latent::{LatentPart, write_latent_on};
use crate::cpu::caches::{Caches, States};
use crate::cpu::pointers::SendPtr;
use crate::cpu::rows::rms_norm_on;
use crate::cpu::{Buffer, CpuBackend};
use crate::step::{Step, StepSequence};

impl CpuBackend {
    /// Compresses tokens, on this thread: a compressed token costs less than a row of attention.
    pub(super) fn compress_rows(
        &mut self,
        spec: &CompressionSpec<Arc<[f32]>>,
        (step, rows): (&Step, Range<usize>),
        inputs: (&Buffer, &Buffer),
        (caches, [state, entries]): (&mut Caches, [usize; 2]),
    ) {
        let isa = self.isa;
        let to = caches.latent(entries).part();
        let mut entry = vec![0.0; spec.dim];
        keep_and_compress(spec, (step, rows), inputs, caches.states(state), |sequence, row, sums| {
            match &spec.norm {
                // SAFETY: the instruction set was detected.
                Some(norm) => unsafe { rms_norm_on(isa, sums, &norm.weight, norm.eps, &mut entry) },
                None => entry.copy_from_slice(sums),
            }
            let position = sequence.position(row);
            let turns: Vec<_> = spec.rope.turns(position + 1 - spec.every).collect();
            spec.rope.rotate(&turns, false, &mut entry[spec.dim - 2 * turns.len()..]);
            let blocks = &step.blocks[sequence.blocks.clone()];
            let (block, slot) = to.place(blocks, position / spec.every);
            // SAFETY: the instruction set was detected; no other thread runs.
            unsafe { write_latent_on(isa, &to, block, slot, &entry) };
        });
    }

    pub(super) fn attend_compressed_rows(
        &mut self,
        spec: &CompressedSpec<Arc<[f32]>>,
        (step, rows): (&Step, Range<usize>),
        (queries, selection): (&Buffer, Option<&Buffer>),
        (single, compressed): (LatentPart, Option<LatentPart>),
        out: &mut Buffer,
    ) {
        let (isa, dim, stride) = (self.isa, spec.dim, out.width);
        assert!(stride >= spec.heads * dim && out.rows >= rows.end, "the output lacks rows or columns");
        assert_eq!(single.width(), dim, "the cache has vectors of another width");
        let to = SendPtr(out.data.as_mut_ptr());
        self.for_heads((step, rows), spec.heads, &|scratch, sequence, row, heads| {
            let position = sequence.position(row);
            let of = CompressedHeads {
                single,
                compressed,
                blocks: &step.blocks[sequence.blocks.clone()],
                window: spec.first_visible(position)..position + 1,
                entries: spec.compressed(position),
                selected: selection.map(|selection| selected(selection, row)),
                heads: heads.clone(),
                queries: &queries.data[row * queries.width..][..spec.heads * dim],
                sinks: &spec.sinks,
            };
            // SAFETY: the instruction set was detected; each call has its own heads of a row of
            // `out`; tokens are not written while they are read.
            unsafe {
                let column = row * stride + heads.start * dim;
                let out = std::slice::from_raw_parts_mut(to.at(column), heads.len() * dim);
                attend_compressed_on(isa, &of, scratch, out);
            }
        });
    }

    pub(super) fn collapse_rows(
        &mut self,
        spec: &StreamSpec,
        (weights, streams): (&Buffer, &Buffer),
        rows: Range<usize>,
        out: &mut Buffer,
    ) {
        out.shape(streams.rows);
        let first = rows.start;
        self.change_each_row(out, rows, &|index, out| {
            let weights = &weights.data[(first + index) * weights.width..][..weights.width];
            spec.collapse(weights, &streams.data[(first + index) * streams.width..][..streams.width], out);
        });
    }

    pub(super) fn expand_rows(
        &mut self,
        spec: &StreamSpec,
        (weights, result): (&Buffer, &Buffer),
        rows: Range<usize>,
        streams: &mut Buffer,
    ) {
        let first = rows.start;
        self.change_each_row(streams, rows, &|index, streams| {
            let weights = &weights.data[(first + index) * weights.width..][..weights.width];
            spec.expand(weights, &result.data[(first + index) * result.width..][..result.width], streams);
        });
    }
}

/// The means of completed tokens, in the rows of their last tokens.
pub(super) fn pool_rows(
    spec: &CompressionSpec<Arc<[f32]>>,
    (step, rows): (&Step, Range<usize>),
    inputs: (&Buffer, &Buffer),
    states: &mut States,
    out: &mut Buffer,
) {
    let width = out.width;
    out.data[rows.start * width..rows.end * width].fill(0.0);
    keep_and_compress(spec, (step, rows), inputs, states, |_, row, sums| {
        out.data[row * width..][..spec.dim].copy_from_slice(sums);
    });
}

/// Stores these rows' values and gates. `complete` gets the mean of each compressed token and the
/// row of its last token.
fn keep_and_compress(
    spec: &CompressionSpec<Arc<[f32]>>,
    (step, rows): (&Step, Range<usize>),
    (values, gates): (&Buffer, &Buffer),
    states: &mut States,
    mut complete: impl FnMut(&StepSequence, usize, &[f32]),
) {
    let width = spec.width();
    let numbers = spec.slots() * 2 * width;
    let mut made = Compressed::new(spec.dim);
    for sequence in &step.sequences {
        for row in sequence.rows_within(&rows) {
            let position = sequence.position(row);
            let state = states.of(sequence, row, 0..numbers);
            let slot = &mut state[position % spec.slots() * 2 * width..][..2 * width];
            let (kept, kept_gates) = slot.split_at_mut(width);
            kept.copy_from_slice(&values.data[row * values.width..][..width]);
            let gates = &gates.data[row * gates.width..][..width];
            let bias = &spec.place_bias[position % spec.every * width..][..width];
            for ((kept, gate), bias) in kept_gates.iter_mut().zip(gates).zip(bias) {
                *kept = gate + bias;
            }
            if (position + 1).is_multiple_of(spec.every) {
                made.sum(spec, position, state);
                complete(sequence, row, &made.sums);
            }
        }
    }
}

/// A compressed token in the making.
struct Compressed {
    largest: Vec<f32>,
    totals: Vec<f32>,
    sums: Vec<f32>,
}

impl Compressed {
    fn new(dim: usize) -> Self {
        let [largest, totals, sums] = [0; 3].map(|_| vec![0.0; dim]);
        Self { largest, totals, sums }
    }

    /// The weighted means of the columns, to `sums`.
    fn sum(&mut self, spec: &CompressionSpec<Arc<[f32]>>, position: usize, state: &[f32]) {
        let width = spec.width();
        let of = |(slot, first): (usize, usize), part: usize| {
            &state[slot * 2 * width + part * width + first..][..spec.dim]
        };
        self.largest.fill(f32::NEG_INFINITY);
        for member in spec.members(position) {
            self.largest.iter_mut().zip(of(member, 1)).for_each(|(most, gate)| *most = most.max(*gate));
        }
        self.totals.fill(0.0);
        self.sums.fill(0.0);
        for member in spec.members(position) {
            let sums = self.sums.iter_mut().zip(&mut self.totals).zip(&self.largest);
            let of_member = of(member, 0).iter().zip(of(member, 1));
            for (((sum, total), largest), (value, gate)) in sums.zip(of_member) {
                let weight = (gate - largest).exp();
                *total += weight;
                *sum += weight * value;
            }
        }
        self.sums.iter_mut().zip(&self.totals).for_each(|(sum, total)| *sum /= total);
    }
}
