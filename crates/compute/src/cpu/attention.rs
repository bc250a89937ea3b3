//! Attention over the paged cache: rotation and append, then an online softmax over blocks of keys.
//!
//! Blocks are visited in the order of their positions and masked scores weigh nothing, so that a query's result does not
//! depend on the other queries it is computed with.

mod kernel;
pub(super) mod kv;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::buffer::Buffer;
use super::dispatch::entry;
use super::isa::Isa;
use super::pointers::SendPtr;
#[cfg(target_arch = "x86_64")]
use super::product::amx;
use super::rows::{Rotation, rms_norm};
use super::scratch::Scratch;
use super::simd::Simd;
use super::threads::pool::{Pool, for_rows};
use crate::backend::AttentionSpec;
use crate::step::{KV_BLOCK_TOKENS, Step, StepSequence};
use kernel::attend;
#[cfg(target_arch = "x86_64")]
pub(super) use kernel::{Byte, Element, Half, NO_SCORE};
use kv::{Kv, KvPart, MAX_HEAD_DIM};

/// Queries of a KV head that a thread takes at a time, as many as a matrix unit works on together.
pub(super) const PIECE_QUERIES: usize = 128;

/// Some rows of one sequence and one KV head. Its queries are those of one row that share the KV head, then the next row's.
pub(super) struct Heads<'a> {
    pub spec: &'a AttentionSpec<Arc<[f32]>>,
    pub kv: KvPart,
    pub kv_head: usize,
    sequence: &'a StepSequence,
    pub blocks: &'a [u32],
    pub rows: Range<usize>,
    queries: SendPtr<f32>,
    query_stride: usize,
    out: SendPtr<f32>,
    out_stride: usize,
}

impl Heads<'_> {
    /// Queries.
    pub fn count(&self) -> usize {
        self.rows.len() * self.spec.queries_of[self.kv_head].len()
    }

    /// Whether these are a prompt's.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no matrix unit is used there"))]
    pub fn of_prompt(&self) -> bool {
        self.sequence.prompt
    }

    /// Row and head of a query.
    #[inline(always)]
    fn place(&self, query: usize) -> (usize, usize) {
        let group = &self.spec.queries_of[self.kv_head];
        (self.rows.start + query / group.len(), group.start + query % group.len())
    }

    /// The positions that a query sees: from, to.
    #[inline(always)]
    pub fn visible(&self, query: usize) -> (usize, usize) {
        let position = self.sequence.start + self.place(query).0 - self.sequence.rows.start;
        let from = self.spec.window.map_or(0, |window| (position + 1).saturating_sub(window));
        (from, position + 1)
    }

    /// A query's numbers.
    ///
    /// # Safety
    /// Pointers and ranges describe the step's buffers.
    #[inline(always)]
    pub unsafe fn query(&self, query: usize) -> *const f32 {
        let (row, head) = self.place(query);
        // SAFETY: the row's queries come first in the fused projection.
        unsafe { self.queries.at(row * self.query_stride + head * self.spec.head_dim) }
    }

    /// Where a query's result goes.
    ///
    /// # Safety
    /// As [`Self::query`].
    #[inline(always)]
    pub unsafe fn output(&self, query: usize) -> *mut f32 {
        let (row, head) = self.place(query);
        // SAFETY: the head's columns of this row are written by this piece alone.
        unsafe { self.out.at(row * self.out_stride + self.spec.out_column + head * self.spec.head_dim) }
    }
}

/// Rows whose queries become ready, and whose keys and values enter the cache.
struct Arrivals<'a> {
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
    (isa, halves): (Isa, bool),
    scratch: SendPtr<Scratch>,
    (spec, step, part): (&AttentionSpec<Arc<[f32]>>, &Step, Range<usize>),
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
    assert!(
        spec.queries_of.is_sorted_by(|head, next| head.start <= head.end && head.end <= next.start),
        "KV heads share queries"
    );
    let kv = kv.layer(layer);
    let (queries, query_stride) = (SendPtr(qkv.data.as_mut_ptr()), qkv.width);
    let arrivals = Arrivals { spec, step, rotation, kv, qkv: queries, stride: query_stride };
    let rows_of = |sequence: &StepSequence, rows: &Range<usize>| {
        sequence.rows.start.max(rows.start)..sequence.rows.end.min(rows.end)
    };
    // A query needs the keys and values of its own KV head only. If it needs no other row's, no thread waits for another.
    let single_rows = step.sequences.iter().all(|sequence| rows_of(sequence, &part).len() <= 1);
    if !single_rows {
        for_rows(pool, part.len(), &|rows| {
            let rows = part.start + rows.start..part.start + rows.end;
            for sequence in &step.sequences {
                let rows = rows_of(sequence, &rows);
                // SAFETY: the instruction set was detected; each row, and its token in the cache, is one thread's.
                unsafe { arrive_on(isa, &arrivals, sequence, rows, 0..spec.kv_heads()) };
            }
        });
    }
    let (to, out_stride) = (SendPtr(out.data.as_mut_ptr()), out.width);
    let group = spec.queries_of.iter().map(Range::len).max().unwrap_or(0);
    let piece_rows = (PIECE_QUERIES / group.max(1)).max(1);
    let next = AtomicUsize::new(0);
    // WorkQueue differ in cost by their position, so threads take the next one when they are done.
    pool.run(&|thread| {
        // SAFETY: each thread has its own.
        let scratch = unsafe { &mut *scratch.at(thread) };
        let mut first = 0;
        let mut item = next.fetch_add(1, Ordering::Relaxed);
        for sequence in &step.sequences {
            let rows = rows_of(sequence, &part);
            let count = rows.len().div_ceil(piece_rows) * spec.kv_heads();
            while item < first + count {
                let (piece, kv_head) = ((item - first) / spec.kv_heads(), (item - first) % spec.kv_heads());
                let start = rows.start + piece * piece_rows;
                let heads = Heads {
                    spec,
                    kv,
                    kv_head,
                    sequence,
                    blocks: &step.blocks[sequence.blocks.clone()],
                    rows: start..rows.end.min(start + piece_rows),
                    queries,
                    query_stride,
                    out: to,
                    out_stride,
                };
                // SAFETY: the instruction set was detected; each item has its own rows and heads of `qkv`, of the cache and of
                // `out`, as those of different KV heads are different; and no other sequence reads the blocks that it writes.
                unsafe {
                    if single_rows {
                        arrive_on(isa, &arrivals, sequence, rows.clone(), kv_head..kv_head + 1);
                    }
                    attend_on(isa, halves, &heads, scratch);
                }
                item = next.fetch_add(1, Ordering::Relaxed);
            }
            first += count;
        }
    });
}

/// Queries of one KV head over its sequence's keys and values; a prompt's in bf16 where that is allowed and there is a matrix unit.
///
/// # Safety
/// `isa` was detected on this CPU, and the kernel's own conditions hold.
unsafe fn attend_on(isa: Isa, halves: bool, heads: &Heads<'_>, scratch: &mut Scratch) {
    // SAFETY: the caller's conditions.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if halves && isa == Isa::Amx && heads.of_prompt() {
            return amx::attend(heads, scratch);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let (_, Scratch) = (halves, scratch);
        attend_by_vectors_on(isa, heads);
    }
}

entry! {
    /// Queries by vectors.
    fn attend_by_vectors_on(heads: &Heads<'_>) = attend
}

entry! {
    /// Queries made ready, keys and values written to the cache.
    fn arrive_on(from: &Arrivals<'_>, sequence: &StepSequence, rows: Range<usize>, kv_heads: Range<usize>) = arrive
}

/// Norms, rotation and temperature of a sequence's rows' queries and keys, those of some KV heads; keys and values go into the cache.
///
/// # Safety
/// The CPU has `S`; the rows are the sequence's, and nobody else uses these heads of them or of their tokens in the cache.
#[inline(always)]
unsafe fn arrive<S: Simd>(
    from: &Arrivals<'_>,
    sequence: &StepSequence,
    rows: Range<usize>,
    kv_heads: Range<usize>,
) {
    let Arrivals { spec, step, rotation, kv, qkv, stride } = from;
    let (heads, dim) = (spec.heads(), spec.head_dim);
    let blocks = &step.blocks[sequence.blocks.clone()];
    let mut room = [0.0; MAX_HEAD_DIM];
    let room = &mut room[..dim];
    let norm = spec.qk_norm.as_ref();
    let query_norm = norm.map(|norm| (&norm.query[..], norm.eps));
    let key_norm = norm.map(|norm| (&norm.key[..], norm.eps));
    for row in rows {
        let position = sequence.start + row - sequence.rows.start;
        // SAFETY: the row is within the buffer, which has these columns, and a head of it is this thread's.
        let head =
            |index: usize| unsafe { std::slice::from_raw_parts_mut(qkv.at(row * stride + index * dim), dim) };
        let temperature = spec
            .temperature
            .map_or(1.0, |(beta, original)| 1.0 + beta * ((position / original) as f32).ln_1p());
        let (block, slot) = (blocks[position / KV_BLOCK_TOKENS], position % KV_BLOCK_TOKENS);
        for kv_head in kv_heads.clone() {
            // SAFETY: the CPU has `S`, and the token's head is this thread's.
            unsafe {
                for query in spec.queries_of[kv_head].clone() {
                    let query = head(query);
                    ready::<S>(query, query_norm, *rotation, row, room);
                    for x in query {
                        *x *= spec.scale * temperature;
                    }
                }
                let (key, value) = (head(heads + kv_head), head(heads + spec.kv_heads() + kv_head));
                ready::<S>(key, key_norm, *rotation, row, room);
                kv.write::<S>(block, slot, kv_head, key, value);
            }
        }
    }
}

/// Norm and rotation of one head of a row. Not a closure: those do not have the instruction set of the function around them.
///
/// # Safety
/// The CPU has `S`; `room` has the head's width.
#[inline(always)]
unsafe fn ready<S: Simd>(
    head: &mut [f32],
    norm: Option<(&[f32], f32)>,
    rotation: Option<&Rotation>,
    row: usize,
    room: &mut [f32],
) {
    if let Some((weight, eps)) = norm {
        // SAFETY: the caller's.
        unsafe { rms_norm::<S>(head, weight, eps, room) };
        head.copy_from_slice(room);
    }
    if let Some(rotation) = rotation {
        rotation.apply(row, head);
    }
}
