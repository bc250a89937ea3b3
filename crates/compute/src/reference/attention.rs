//! Attention by its definition.

use std::ops::Range;

use super::{Cache, Reference, Rows, dot, rms_normed};
use crate::backend::{AttentionSpec, CacheKind, LatentSpec, Scoring, SelectionBlocks, SelectionSpec};
use crate::step::{KV_BLOCK_TOKENS, Step, StepSequence};

/// Place of a sequence's position in a cache.
pub(super) fn place(step: &Step, sequence: &StepSequence, position: usize) -> usize {
    let block = step.blocks[sequence.blocks.start + position / KV_BLOCK_TOKENS] as usize;
    block * KV_BLOCK_TOKENS + position % KV_BLOCK_TOKENS
}

impl Cache {
    pub fn append(&mut self, step: &Step, rows: Range<usize>, token: impl Fn(usize) -> Vec<f32>) {
        for sequence in &step.sequences {
            for row in sequence.rows_within(&rows) {
                let position = sequence.position(row);
                let every = match self.kind {
                    CacheKind::Latent { every, .. } => every,
                    _ => 1,
                };
                if (position + 1).is_multiple_of(every) {
                    self.tokens[place(step, sequence, position)] = token(row);
                }
            }
        }
    }
}

impl Reference {
    pub(super) fn prepare_heads_of(
        &self,
        spec: &AttentionSpec<Vec<f32>>,
        step: &Step,
        rows: Range<usize>,
        qkv: &mut Rows,
    ) {
        for sequence in &step.sequences {
            for row in sequence.rows_within(&rows) {
                let scale = spec.query_scale(sequence.position(row));
                for head in 0..spec.heads() + spec.kv_heads() {
                    let is_query = head < spec.heads();
                    let x = &mut qkv.rows[row][head * spec.key_dim..][..spec.key_dim];
                    if let Some(norm) = &spec.qk_norm {
                        let weight = if is_query { &norm.query } else { &norm.key };
                        x.copy_from_slice(&rms_normed(x, weight, norm.eps));
                    }
                    self.rotate(spec.rope, row, x);
                    if is_query {
                        x.iter_mut().for_each(|x| *x *= scale);
                    }
                }
            }
        }
    }

    pub(super) fn prepare_latent_of(
        &self,
        spec: &LatentSpec<Vec<f32>>,
        rows: Range<usize>,
        queries: &mut Rows,
        latent: &mut Rows,
    ) {
        for row in rows {
            for query in queries.rows[row].chunks_mut(spec.query_dim()) {
                self.rotate(spec.rope, row, &mut query[spec.plain..]);
                query.iter_mut().for_each(|x| *x *= spec.scale);
            }
            let (compressed, rotated) = latent.rows[row].split_at_mut(spec.rank);
            let normed = rms_normed(compressed, &spec.norm.weight, spec.norm.eps);
            compressed.copy_from_slice(&normed);
            self.rotate(spec.rope, row, rotated);
        }
    }
}

/// `Σ softmax(scores)[t] * value(t)`; a sink is one more score, without a value.
pub(super) fn weighted<'a>(
    scores: &[f32],
    sink: Option<f32>,
    value: impl Fn(usize) -> &'a [f32],
    out: &mut [f32],
) {
    let best = scores.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
    let total: f32 = scores.iter().copied().chain(sink).map(|score| (score - best).exp()).sum();
    out.fill(0.0);
    for (t, score) in scores.iter().enumerate() {
        let weight = (score - best).exp() / total;
        out.iter_mut().zip(value(t)).for_each(|(out, value)| *out += weight * value);
    }
}

pub(super) fn attend(
    (spec, scoring): (&AttentionSpec<Vec<f32>>, Scoring),
    step: &Step,
    rows: Range<usize>,
    qkv: &Rows,
    cache: &Cache,
    out: &mut Rows,
) {
    assert_eq!(cache.kind, spec.cache(), "the cache is of another kind");
    let first_value = spec.kv_heads() * spec.key_dim;
    for sequence in &step.sequences {
        for row in sequence.rows_within(&rows) {
            let position = sequence.position(row);
            let visible = scoring.first_visible(position, spec.first_visible(position))
                ..scoring.end_visible(position, sequence.end());
            let tokens: Vec<&[f32]> =
                visible.map(|t| cache.tokens[place(step, sequence, t)].as_slice()).collect();
            for (kv_head, queries) in spec.queries_of.iter().enumerate() {
                for head in queries.clone() {
                    let query = &qkv.rows[row][head * spec.key_dim..][..spec.key_dim];
                    let key = |token: &&[f32]| dot(query, &token[kv_head * spec.key_dim..][..spec.key_dim]);
                    let scores: Vec<f32> = tokens.iter().map(|token| scoring.of(key(token))).collect();
                    let value =
                        |t: usize| &tokens[t][first_value + kv_head * spec.value_dim..][..spec.value_dim];
                    let column = spec.out_column + head * spec.value_dim;
                    let sink = spec.sinks.as_ref().map(|sinks| sinks[head]);
                    weighted(&scores, sink, value, &mut out.rows[row][column..][..spec.value_dim]);
                }
            }
        }
    }
}

pub(super) fn attend_latent(
    spec: &LatentSpec<Vec<f32>>,
    step: &Step,
    rows: Range<usize>,
    ([absorbed, queries], selection): ([&Rows; 2], Option<&Rows>),
    cache: &Cache,
    out: &mut Rows,
) {
    let CacheKind::Latent { rank, rotated, .. } = cache.kind else { panic!("the cache is of another kind") };
    assert_eq!((rank, rotated), (spec.rank, spec.rotated));
    for sequence in &step.sequences {
        for row in sequence.rows_within(&rows) {
            let visible: Vec<usize> = match selection {
                None => (0..sequence.position(row) + 1).collect(),
                Some(selection) => selected(&selection.rows[row]),
            };
            let tokens: Vec<&[f32]> =
                visible.into_iter().map(|t| cache.tokens[place(step, sequence, t)].as_slice()).collect();
            for head in 0..spec.heads {
                let absorbed = &absorbed.rows[row][head * rank..][..rank];
                let query = &queries.rows[row][head * spec.query_dim() + spec.plain..][..rotated];
                let score = |token: &&[f32]| dot(absorbed, &token[..rank]) + dot(query, &token[rank..]);
                let scores: Vec<f32> = tokens.iter().map(score).collect();
                weighted(&scores, None, |t| &tokens[t][..rank], &mut out.rows[row][head * rank..][..rank]);
            }
        }
    }
}

/// The positions of a selection.
pub(super) fn selected(row: &[f32]) -> Vec<usize> {
    row[1..].iter().take(row[0] as usize).map(|position| *position as usize).collect()
}

/// Scores of the visible keys of a row.
fn key_scores(
    spec: &SelectionSpec,
    (step, sequence, row): (&Step, &StepSequence, usize),
    (queries, weights): (&Rows, &Rows),
    cache: &Cache,
) -> Vec<f32> {
    let score = |position: usize| -> f32 {
        // A key is in the place of its last token.
        let key = &cache.tokens[place(step, sequence, (position + 1) * spec.every - 1)];
        let of_heads = queries.rows[row].chunks_exact(spec.dim).zip(&weights.rows[row][..spec.heads]);
        of_heads.map(|(query, weight)| weight * dot(query, key).max(0.0)).sum()
    };
    (0..spec.visible(sequence.position(row))).map(score).collect()
}

/// A row of a selection: the number of the best of `from`, then these in ascending order.
fn best_of(mut from: Vec<usize>, score: impl Fn(usize) -> f32, chosen: usize) -> Vec<f32> {
    // A stable sort: of equal ones, the first.
    from.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
    from.truncate(chosen);
    from.sort_unstable();
    let mut row = vec![from.len() as f32];
    row.extend(from.iter().map(|number| *number as f32));
    row.resize(1 + chosen, 0.0);
    row
}

pub(super) fn select(
    spec: &SelectionSpec,
    step: &Step,
    rows: Range<usize>,
    inputs: (&Rows, &Rows),
    (cache, within): (&Cache, Option<(&Rows, SelectionBlocks)>),
    out: &mut Rows,
) {
    for sequence in &step.sequences {
        for row in sequence.rows_within(&rows) {
            let scores = key_scores(spec, (step, sequence, row), inputs, cache);
            let mut from: Vec<usize> = (0..scores.len()).collect();
            if let Some((chosen, blocks)) = within {
                let chosen = selected(&chosen.rows[row]);
                from.retain(|key| chosen.contains(&(key / blocks.keys)));
            }
            out.rows[row] = best_of(from, |key| scores[key], spec.chosen);
        }
    }
}

pub(super) fn select_blocks(
    (spec, blocks): (&SelectionSpec, SelectionBlocks),
    step: &Step,
    rows: Range<usize>,
    inputs: (&Rows, &Rows),
    cache: &Cache,
    out: &mut Rows,
) {
    for sequence in &step.sequences {
        for row in sequence.rows_within(&rows) {
            let scores = key_scores(spec, (step, sequence, row), inputs, cache);
            let largest = |keys: &[f32]| keys.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut of_blocks: Vec<f32> = scores.chunks(blocks.keys).map(largest).collect();
            of_blocks.iter_mut().next_back().into_iter().for_each(|newest| *newest = f32::INFINITY);
            let all = (0..of_blocks.len()).collect();
            out.rows[row] = best_of(all, |block| of_blocks[block], blocks.chosen);
        }
    }
}
