//! Attention over the paged cache: rotation and append, then an online softmax over blocks of keys.
//!
//! Blocks are visited in the order of their positions and masked scores weigh nothing, so that a query's result does not
//! depend on the other queries it is computed with.

#![allow(clippy::needless_range_loop, reason = "indices name registers")]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Buffer;
use super::isa::{self, Isa};
use super::kv::{Kv, MAX_HEAD_DIM};
use super::matrix::SendPtr;
use super::pool::Pool;
use super::rows::Rotation;
use super::simd::{LANES, Simd};
use crate::backend::AttentionSpec;
use crate::step::{KV_BLOCK_TOKENS, Step, StepSequence};

/// Rows of a sequence that one thread takes at a time.
const ROWS_A_PIECE: usize = 16;
/// Lower than any score, and finite, so that differences of it are no NaN.
const NO_SCORE: f32 = -1e30;
const TILES: usize = KV_BLOCK_TOKENS / LANES;

/// Some rows of one sequence and one KV head.
pub(super) struct Heads<'a> {
    spec: &'a AttentionSpec<Arc<[f32]>>,
    kv: &'a Kv,
    layer: usize,
    kv_head: usize,
    sequence: &'a StepSequence,
    blocks: &'a [u32],
    rows: Range<usize>,
    queries: SendPtr<f32>,
    query_stride: usize,
    out: SendPtr<f32>,
    out_stride: usize,
}

#[allow(clippy::too_many_arguments, reason = "the operation's operands and the backend's parts")]
pub(super) fn run(
    pool: &mut Pool,
    isa: Isa,
    spec: &AttentionSpec<Arc<[f32]>>,
    step: &Step,
    rotation: Option<&Rotation>,
    qkv: &mut Buffer,
    kv: &mut Kv,
    layer: usize,
    out: &mut Buffer,
) {
    if spec.kv_heads() == 0 {
        return;
    }
    for sequence in &step.sequences {
        let blocks = &step.blocks[sequence.blocks.clone()];
        for row in sequence.rows.clone() {
            let position = sequence.start + row - sequence.rows.start;
            let data = &mut qkv.data[row * qkv.width..][..spec.qkv_width()];
            prepare(isa, spec, rotation, row, position, data);
            let (_, data) = data.split_at(spec.heads() * spec.head_dim);
            let (keys, values) = data.split_at(spec.kv_heads() * spec.head_dim);
            let block = blocks[position / KV_BLOCK_TOKENS];
            for head in 0..spec.kv_heads() {
                let range = head * spec.head_dim..(head + 1) * spec.head_dim;
                let slot = position % KV_BLOCK_TOKENS;
                kv.append(layer, block, slot, head, &keys[range.clone()], &values[range]);
            }
        }
    }
    let kv = &*kv;
    let (queries, query_stride) = (SendPtr(qkv.data.as_mut_ptr()), qkv.width);
    let (to, out_stride) = (SendPtr(out.data.as_mut_ptr()), out.width);
    let pieces = |sequence: &StepSequence| sequence.rows.len().div_ceil(ROWS_A_PIECE);
    let next = AtomicUsize::new(0);
    // Pieces differ in cost by their position, so threads take the next one when they are done.
    pool.run(&|_| {
        let mut first = 0;
        let mut item = next.fetch_add(1, Ordering::Relaxed);
        for sequence in &step.sequences {
            let count = pieces(sequence) * spec.kv_heads();
            while item < first + count {
                let (piece, kv_head) = ((item - first) / spec.kv_heads(), (item - first) % spec.kv_heads());
                let start = sequence.rows.start + piece * ROWS_A_PIECE;
                let heads = Heads {
                    spec,
                    kv,
                    layer,
                    kv_head,
                    sequence,
                    blocks: &step.blocks[sequence.blocks.clone()],
                    rows: start..sequence.rows.end.min(start + ROWS_A_PIECE),
                    queries,
                    query_stride,
                    out: to,
                    out_stride,
                };
                // SAFETY: the instruction set was detected; each item writes its own rows and heads of `out`.
                unsafe { isa::attention(isa, &heads) };
                item = next.fetch_add(1, Ordering::Relaxed);
            }
            first += count;
        }
    });
}

/// Norms, rotation and temperature of one row's queries and keys.
fn prepare(
    isa: Isa,
    spec: &AttentionSpec<Arc<[f32]>>,
    rotation: Option<&Rotation>,
    row: usize,
    position: usize,
    data: &mut [f32],
) {
    let (heads, dim) = (spec.heads(), spec.head_dim);
    let mut normed = [0.0; MAX_HEAD_DIM];
    for (index, head) in data.chunks_exact_mut(dim).take(heads + spec.kv_heads()).enumerate() {
        if let Some(norm) = &spec.qk_norm {
            let weight = if index < heads { &norm.query } else { &norm.key };
            // SAFETY: the instruction set was detected.
            unsafe { isa::rms_norm(isa, head, weight, norm.eps, &mut normed[..dim]) };
            head.copy_from_slice(&normed[..dim]);
        }
        if let Some(rotation) = rotation {
            rotation.apply(row, head);
        }
        if index < heads {
            let factor = spec
                .temperature
                .map_or(1.0, |(beta, original)| 1.0 + beta * ((position / original) as f32).ln_1p());
            head.iter_mut().for_each(|x| *x *= spec.scale * factor);
        }
    }
}

/// The queries of `heads`, four at a time: those of one row that share the KV head, then the next row's.
///
/// # Safety
/// The CPU has `S`; pointers and ranges of `heads` describe the step's buffers.
#[inline(always)]
pub(super) unsafe fn attend<S: Simd>(heads: &Heads<'_>) {
    let per_row = heads.spec.queries_of[heads.kv_head].len();
    let total = heads.rows.len() * per_row;
    let mut query = 0;
    // SAFETY: queries below `total` are the heads' own.
    unsafe {
        while query + 4 <= total {
            queries::<S, 4>(heads, query);
            query += 4;
        }
        while query < total {
            queries::<S, 1>(heads, query);
            query += 1;
        }
    }
}

/// `M` queries, from number `first` of the piece on.
///
/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn queries<S: Simd, const M: usize>(heads: &Heads<'_>, first: usize) {
    let Heads { spec, kv, layer, kv_head, sequence, blocks, .. } = *heads;
    let (dim, group) = (spec.head_dim, &spec.queries_of[kv_head]);
    let place = |m: usize| {
        let (row, head) =
            (heads.rows.start + (first + m) / group.len(), group.start + (first + m) % group.len());
        let position = sequence.start + row - sequence.rows.start;
        (row, head, position)
    };
    let mut visible = [(0, 0); M];
    let mut query = [std::ptr::null::<f32>(); M];
    for m in 0..M {
        let (row, head, position) = place(m);
        visible[m] = (spec.window.map_or(0, |window| (position + 1).saturating_sub(window)), position + 1);
        // SAFETY: the row's queries come first in the fused projection.
        query[m] = unsafe { heads.queries.at(row * heads.query_stride + head * dim) };
    }
    let begin = visible.iter().map(|v| v.0).min().unwrap_or(0) / KV_BLOCK_TOKENS;
    let end = visible.iter().map(|v| v.1).max().unwrap_or(0);

    let mut best = [NO_SCORE; M];
    let mut sum = [0.0f32; M];
    let mut acc = [[0.0f32; MAX_HEAD_DIM]; M];
    let mut weights = [[0.0f32; KV_BLOCK_TOKENS]; M];
    for block in begin..end.div_ceil(KV_BLOCK_TOKENS) {
        let (keys, values) = kv.block(layer, blocks[block], kv_head);
        let base = block * KV_BLOCK_TOKENS;
        // SAFETY: a block holds TILES tiles of `dim × LANES` keys and KV_BLOCK_TOKENS rows of `dim` values.
        unsafe {
            let mut scores = [[S::splat(0.0); TILES]; M];
            for d in 0..dim {
                for tile in 0..TILES {
                    let k = S::load_f16(keys.add((tile * dim + d) * LANES));
                    for m in 0..M {
                        scores[m][tile] = S::fma(k, S::splat(*query[m].add(d)), scores[m][tile]);
                    }
                }
            }
            for m in 0..M {
                let (from, to) = visible[m];
                if from > base || to < base + KV_BLOCK_TOKENS {
                    for tile in 0..TILES {
                        S::store(weights[m].as_mut_ptr().add(tile * LANES), scores[m][tile]);
                    }
                    for (token, score) in weights[m].iter_mut().enumerate() {
                        if !(from..to).contains(&(base + token)) {
                            *score = f32::NEG_INFINITY;
                        }
                    }
                    for tile in 0..TILES {
                        scores[m][tile] = S::load(weights[m].as_ptr().add(tile * LANES));
                    }
                }
                let mut max = scores[m][0];
                for tile in 1..TILES {
                    max = S::max(max, scores[m][tile]);
                }
                let new_best = best[m].max(S::reduce_max(max));
                let mut block_sum = S::splat(0.0);
                for tile in 0..TILES {
                    // −∞ is held at the exponent's lower end, which is not quite zero: mask again.
                    let p = S::exp(S::sub(scores[m][tile], S::splat(new_best)));
                    S::store(weights[m].as_mut_ptr().add(tile * LANES), p);
                }
                for token in 0..KV_BLOCK_TOKENS {
                    if !(from..to).contains(&(base + token)) {
                        weights[m][token] = 0.0;
                    }
                }
                for tile in 0..TILES {
                    block_sum = S::add(block_sum, S::load(weights[m].as_ptr().add(tile * LANES)));
                }
                if new_best > best[m] {
                    let factor = (best[m] - new_best).exp();
                    sum[m] *= factor;
                    for d in (0..dim).step_by(LANES) {
                        let a = acc[m].as_mut_ptr().add(d);
                        S::store(a, S::mul(S::load(a), S::splat(factor)));
                    }
                    best[m] = new_best;
                }
                sum[m] += S::reduce_add(block_sum);
            }
            // Tokens past the end hold another sequence's numbers, or none.
            let tokens = KV_BLOCK_TOKENS.min(end - base);
            for d in (0..dim).step_by(LANES) {
                let mut a: [S::F; M] = std::array::from_fn(|m| S::load(acc[m].as_ptr().add(d)));
                for token in 0..tokens {
                    let v = S::load_f16(values.add(token * dim + d));
                    for m in 0..M {
                        a[m] = S::fma(v, S::splat(weights[m][token]), a[m]);
                    }
                }
                for m in 0..M {
                    S::store(acc[m].as_mut_ptr().add(d), a[m]);
                }
            }
        }
    }
    for m in 0..M {
        let (row, head, _) = place(m);
        // SAFETY: the head's columns of this row are written by this call alone.
        let out = unsafe {
            let at = heads.out.at(row * heads.out_stride + spec.out_column + head * dim);
            std::slice::from_raw_parts_mut(at, dim)
        };
        for (out, a) in out.iter_mut().zip(&acc[m]) {
            *out = a / sum[m];
        }
    }
}
