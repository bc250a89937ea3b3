//! Attention over the paged cache: rotation and append, then an online softmax over blocks of keys.
//!
//! Blocks are visited in the order of their positions and masked scores weigh nothing, so that a query's result does not
//! depend on the other queries it is computed with.

mod kernel;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::isa::{self, Isa};
use super::kv::{Kv, KvPart, MAX_HEAD_DIM};
use super::matrix::SendPtr;
use super::pool::Pool;
use super::rows::{Rotation, rms_norm};
use super::simd::Simd;
use super::{Buffer, for_rows};
use crate::backend::AttentionSpec;
use crate::step::{KV_BLOCK_TOKENS, Step, StepSequence};
pub(super) use kernel::attend;

/// Some rows of one sequence and one KV head.
pub(super) struct Heads<'a> {
    spec: &'a AttentionSpec<Arc<[f32]>>,
    kv: KvPart,
    kv_head: usize,
    sequence: &'a StepSequence,
    blocks: &'a [u32],
    rows: Range<usize>,
    queries: SendPtr<f32>,
    query_stride: usize,
    out: SendPtr<f32>,
    out_stride: usize,
}

/// Rows whose keys and values enter the cache.
pub(super) struct Arrivals<'a> {
    spec: &'a AttentionSpec<Arc<[f32]>>,
    step: &'a Step,
    rotation: Option<&'a Rotation>,
    kv: KvPart,
    qkv: SendPtr<f32>,
    stride: usize,
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
    assert!(spec.qkv_width() <= qkv.width && step.rows() <= qkv.rows, "the projection lacks rows or columns");
    let kv = kv.layer(layer);
    let (queries, query_stride) = (SendPtr(qkv.data.as_mut_ptr()), qkv.width);
    let arrivals = Arrivals { spec, step, rotation, kv, qkv: queries, stride: query_stride };
    for_rows(pool, step.rows(), &|rows| {
        // SAFETY: the instruction set was detected; each row, and its token in the cache, is one thread's.
        unsafe { isa::arrive(isa, &arrivals, rows) };
    });
    let (to, out_stride) = (SendPtr(out.data.as_mut_ptr()), out.width);
    let group = spec.queries_of.iter().map(Range::len).max().unwrap_or(0);
    let piece_rows = (kernel::QUERIES / group.max(1)).max(1);
    let next = AtomicUsize::new(0);
    // Pieces differ in cost by their position, so threads take the next one when they are done.
    pool.run(&|_| {
        let mut first = 0;
        let mut item = next.fetch_add(1, Ordering::Relaxed);
        for sequence in &step.sequences {
            let count = sequence.rows.len().div_ceil(piece_rows) * spec.kv_heads();
            while item < first + count {
                let (piece, kv_head) = ((item - first) / spec.kv_heads(), (item - first) % spec.kv_heads());
                let start = sequence.rows.start + piece * piece_rows;
                let heads = Heads {
                    spec,
                    kv,
                    kv_head,
                    sequence,
                    blocks: &step.blocks[sequence.blocks.clone()],
                    rows: start..sequence.rows.end.min(start + piece_rows),
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

/// Norms, rotation and temperature of some rows' queries and keys; keys and values go into the cache.
///
/// # Safety
/// The CPU has `S`; the rows are the step's, and nobody else uses them or their tokens' part of the cache.
#[inline(always)]
pub(super) unsafe fn arrive<S: Simd>(from: &Arrivals<'_>, rows: Range<usize>) {
    let Arrivals { spec, step, rotation, kv, qkv, stride } = from;
    let (heads, dim) = (spec.heads(), spec.head_dim);
    let mut normed = [0.0; MAX_HEAD_DIM];
    for sequence in &step.sequences {
        let blocks = &step.blocks[sequence.blocks.clone()];
        for row in sequence.rows.start.max(rows.start)..sequence.rows.end.min(rows.end) {
            let position = sequence.start + row - sequence.rows.start;
            // SAFETY: the row is within the buffer, which has these columns, and is this thread's.
            let data = unsafe { std::slice::from_raw_parts_mut(qkv.at(row * stride), spec.qkv_width()) };
            let factor = spec
                .temperature
                .map_or(1.0, |(beta, original)| 1.0 + beta * ((position / original) as f32).ln_1p());
            for (index, head) in data.chunks_exact_mut(dim).take(heads + spec.kv_heads()).enumerate() {
                if let Some(norm) = &spec.qk_norm {
                    let weight = if index < heads { &norm.query } else { &norm.key };
                    // SAFETY: the CPU has `S`.
                    unsafe { rms_norm::<S>(head, weight, norm.eps, &mut normed[..dim]) };
                    head.copy_from_slice(&normed[..dim]);
                }
                if let Some(rotation) = rotation {
                    rotation.apply(row, head);
                }
                if index < heads {
                    for x in head {
                        *x *= spec.scale * factor;
                    }
                }
            }
            let (keys, values) = data[heads * dim..].split_at(spec.kv_heads() * dim);
            let (block, slot) = (blocks[position / KV_BLOCK_TOKENS], position % KV_BLOCK_TOKENS);
            for (head, (key, value)) in keys.chunks_exact(dim).zip(values.chunks_exact(dim)).enumerate() {
                // SAFETY: the CPU has `S`, and the token is this thread's.
                unsafe { kv.write::<S>(block, slot, head, key, value) };
            }
        }
    }
}
