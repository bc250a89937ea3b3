//! Attention to compressed tokens by its definition.

use std::ops::Range;

use super::attention::{place, selected, weighted};
use super::{Caches, Rows, dot, rms_normed};
use crate::backend::{CompressedSpec, CompressionSpec};
use crate::step::{Step, StepSequence};

pub(super) fn compress(
    spec: &CompressionSpec<Vec<f32>>,
    step: &Step,
    rows: Range<usize>,
    inputs: (&Rows, &Rows),
    (caches, [state, entries]): (&mut Caches, [usize; 2]),
) {
    for (sequence, row, mean) in means(spec, step, rows, inputs, (caches, state)) {
        let position = sequence.position(row);
        let mut entry = match &spec.norm {
            Some(norm) => rms_normed(&mean, &norm.weight, norm.eps),
            None => mean,
        };
        let turns: Vec<_> = spec.rope.turns(position + 1 - spec.every).collect();
        spec.rope.rotate(&turns, false, &mut entry[spec.dim - 2 * turns.len()..]);
        caches.0[entries].tokens[place(step, sequence, position)] = entry;
    }
}

/// Stores these rows' values and gates. Returns the mean of each completed compressed token, with
/// its sequence and the row of its last token.
pub(super) fn means<'a>(
    spec: &CompressionSpec<Vec<f32>>,
    step: &'a Step,
    rows: Range<usize>,
    (values, gates): (&Rows, &Rows),
    (caches, state): (&mut Caches, usize),
) -> Vec<(&'a StepSequence, usize, Vec<f32>)> {
    let (width, mut means) = (spec.width(), Vec::new());
    for sequence in &step.sequences {
        for row in sequence.rows_within(&rows) {
            let position = sequence.position(row);
            let state = &mut caches.0[state].states[sequence.slot];
            if position == 0 {
                state.fill(0.0);
            }
            let slot = &mut state[position % spec.slots() * 2 * width..][..2 * width];
            slot[..width].copy_from_slice(&values.rows[row][..width]);
            let bias = &spec.place_bias[position % spec.every * width..][..width];
            let gates = gates.rows[row].iter().zip(bias).map(|(gate, bias)| gate + bias);
            slot[width..].iter_mut().zip(gates).for_each(|(slot, gate)| *slot = gate);
            if !(position + 1).is_multiple_of(spec.every) {
                continue;
            }
            let mean = |column: usize| -> f32 {
                let at = |(slot, first): (usize, usize)| slot * 2 * width + first + column;
                let gates: Vec<f32> = spec.members(position).map(|of| state[at(of) + width]).collect();
                let largest = gates.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let total: f32 = gates.iter().map(|gate| (gate - largest).exp()).sum();
                let values = spec.members(position).map(|of| state[at(of)]);
                values.zip(&gates).map(|(value, gate)| value * ((gate - largest).exp() / total)).sum()
            };
            means.push((sequence, row, (0..spec.dim).map(mean).collect()));
        }
    }
    means
}

pub(super) fn attend(
    spec: &CompressedSpec<Vec<f32>>,
    step: &Step,
    rows: Range<usize>,
    (queries, selection): (&Rows, Option<&Rows>),
    (caches, [single, compressed]): (&Caches, [usize; 2]),
    out: &mut Rows,
) {
    for sequence in &step.sequences {
        for row in sequence.rows_within(&rows) {
            let position = sequence.position(row);
            let entries: Vec<usize> = match selection {
                None => (0..spec.compressed(position)).collect(),
                Some(selection) => selected(&selection.rows[row]),
            };
            let of_window = spec.first_visible(position)..position + 1;
            let window = of_window.map(|at| &caches.0[single].tokens[place(step, sequence, at)]);
            // A compressed token is in the place of its last token.
            let last = |entry: usize| (entry + 1) * spec.every.unwrap_or(1) - 1;
            let compressed =
                entries.iter().map(|&entry| &caches.0[compressed].tokens[place(step, sequence, last(entry))]);
            let tokens: Vec<&[f32]> = window.chain(compressed).map(Vec::as_slice).collect();
            for head in 0..spec.heads {
                let columns = head * spec.dim..(head + 1) * spec.dim;
                let query = &queries.rows[row][columns.clone()];
                let scores: Vec<f32> = tokens.iter().map(|token| dot(query, token)).collect();
                let sink = Some(spec.sinks[head]);
                weighted(&scores, sink, |t| tokens[t], &mut out.rows[row][columns]);
            }
        }
    }
}
