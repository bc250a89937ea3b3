//! Attention over the paged cache: rotation and append, then an online softmax over blocks of keys.
//!
//! Blocks are visited in the order of their positions and masked scores weigh nothing, so that a
//! query's result does not depend on the other queries it is computed with.

pub(super) mod compressed;
pub(super) mod heads;
pub(super) mod kernel;
pub(super) mod kv;
pub(super) mod latent;
pub(super) mod selection;

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
use crate::backend::{AttentionSpec, Scoring};
use crate::step::{KV_BLOCK_TOKENS, Step, StepSequence};
use heads::{Heads, PIECE_QUERIES};
use kernel::attend;
use kv::{KvPart, MAX_HEAD_DIM};

/// Rows of the fused projection: queries and keys to prepare, keys and values to append.
struct HeadInputs<'a> {
    spec: &'a AttentionSpec<Arc<[f32]>>,
    step: &'a Step,
    rotation: Option<&'a Rotation>,
    /// Where keys and values go; `None` if none are appended.
    kv: Option<KvPart>,
    qkv: SendPtr<f32>,
    stride: usize,
    /// What to do with the rows.
    work: HeadWork,
}

/// Which operations of an attention layer come before attending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeadWork {
    Prepare,
    Append,
    PrepareAndAppend,
    Nothing,
}

/// The inputs of attention.
pub(super) struct Attention<'a> {
    pub pool: &'a mut Pool,
    pub isa: Isa,
    /// Whether prompts may be computed in bf16.
    pub allows_bf16: bool,
    /// One per thread.
    pub scratch: SendPtr<Scratch>,
    pub spec: &'a AttentionSpec<Arc<[f32]>>,
    pub step: &'a Step,
    /// Rows of the step.
    pub rows: Range<usize>,
    pub rotation: Option<&'a Rotation>,
    pub qkv: SendPtr<f32>,
    pub qkv_stride: usize,
    /// `None` if rows are only prepared.
    pub kv: Option<KvPart>,
}

impl<'a> Attention<'a> {
    fn inputs(&self, work: HeadWork) -> HeadInputs<'a> {
        let Self { spec, step, rotation, kv, qkv, qkv_stride, .. } = *self;
        HeadInputs { spec, step, rotation, kv, qkv, stride: qkv_stride, work }
    }

    /// Prepares or appends all rows.
    pub fn prepare(&mut self, work: HeadWork) {
        let inputs = self.inputs(work);
        let (isa, step, all) = (self.isa, self.step, self.rows.clone());
        for_rows(self.pool, all.len(), &|rows| {
            let rows = all.start + rows.start..all.start + rows.end;
            for sequence in &step.sequences {
                let rows = sequence.rows_within(&rows);
                // SAFETY: the instruction set was detected; each row, and its token in the cache,
                // is one thread's.
                unsafe { prepare_heads_on(isa, &inputs, sequence, rows, 0..inputs.spec.kv_heads()) };
            }
        });
    }

    /// Does `work`, then attends.
    pub fn attend(mut self, work: HeadWork, scoring: Scoring, out: &mut Buffer) {
        let Self { spec, step, .. } = self;
        assert!(
            spec.queries_of.is_sorted_by(|head, next| head.start <= head.end && head.end <= next.start),
            "KV heads share queries"
        );
        // A query needs only the keys and values of its own KV head. If it needs no other row's, no
        // thread waits for another.
        let single_rows = step.sequences.iter().all(|sequence| sequence.rows_within(&self.rows).len() <= 1);
        if !single_rows && work != HeadWork::Nothing {
            self.prepare(work);
        }
        let inputs = self.inputs(work);
        let prepares = single_rows && work != HeadWork::Nothing;
        let Self { pool, isa, allows_bf16, scratch, rows: part, kv, qkv, qkv_stride, .. } = self;
        let Some(kv) = kv else { unreachable!("attention has a cache") };
        let (to, out_stride) = (SendPtr(out.data.as_mut_ptr()), out.width);
        let group = spec.queries_of.iter().map(Range::len).max().unwrap_or(0);
        let piece_rows = (PIECE_QUERIES / group.max(1)).max(1);
        let next = AtomicUsize::new(0);
        // Pieces differ in cost by their position, so a thread claims the next one when it has
        // finished. The last ones cost most and come first, so that threads finish together.
        pool.run(&|thread| {
            // SAFETY: each thread has its own.
            let scratch = unsafe { &mut *scratch.at(thread) };
            let mut first = 0;
            let mut item = next.fetch_add(1, Ordering::Relaxed);
            for sequence in &step.sequences {
                let rows = sequence.rows_within(&part);
                let count = rows.len().div_ceil(piece_rows) * spec.kv_heads();
                while item < first + count {
                    let item_of_all = first + count - 1 - item;
                    let (piece, kv_head) = (item_of_all / spec.kv_heads(), item_of_all % spec.kv_heads());
                    let start = rows.start + piece * piece_rows;
                    let heads = Heads {
                        spec,
                        scoring,
                        kv,
                        kv_head,
                        sequence,
                        blocks: &step.blocks[sequence.blocks.clone()],
                        rows: start..rows.end.min(start + piece_rows),
                        queries: qkv,
                        query_stride: qkv_stride,
                        out: to,
                        out_stride,
                    };
                    // SAFETY: the instruction set was detected; each item has its own rows and
                    // heads of `qkv`, of the cache and of `out`, as those of different KV heads are
                    // different; no other sequence reads the blocks it writes.
                    unsafe {
                        if prepares {
                            prepare_heads_on(isa, &inputs, sequence, rows.clone(), kv_head..kv_head + 1);
                        }
                        attend_on(isa, allows_bf16, &heads, scratch);
                    }
                    item = next.fetch_add(1, Ordering::Relaxed);
                }
                first += count;
            }
        });
    }
}

/// Attends with the queries of one KV head; in bf16 for prompts, if that is allowed and there is a
/// matrix unit.
///
/// # Safety
/// `isa` was detected on this CPU, and the kernel's own conditions hold.
unsafe fn attend_on(isa: Isa, allows_bf16: bool, heads: &Heads<'_>, scratch: &mut Scratch) {
    // SAFETY: the caller's conditions.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if allows_bf16 && isa == Isa::Amx && heads.of_prompt() {
            return amx::attend(heads, scratch);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let (_, Scratch) = (allows_bf16, scratch);
        attend_by_vectors_on(isa, heads);
    }
}

entry! {
    /// Attends by vector instructions.
    fn attend_by_vectors_on(heads: &Heads<'_>) = attend
}

entry! {
    /// Prepares queries and keys, appends keys and values to the cache.
    fn prepare_heads_on(from: &HeadInputs<'_>, sequence: &StepSequence, rows: Range<usize>, kv_heads: Range<usize>) = prepare_heads
}

/// Prepares and appends some KV heads, and the queries that read them, of a sequence's rows.
///
/// # Safety
/// The CPU has `S`; the rows are the sequence's; no other thread uses these heads of them or of
/// their tokens in the cache.
#[inline(always)]
unsafe fn prepare_heads<S: Simd>(
    from: &HeadInputs<'_>,
    sequence: &StepSequence,
    rows: Range<usize>,
    kv_heads: Range<usize>,
) {
    let HeadInputs { spec, step, rotation, kv, qkv, stride, work } = from;
    let (prepares, appends) = (*work != HeadWork::Append, *work != HeadWork::Prepare);
    let blocks = &step.blocks[sequence.blocks.clone()];
    let mut scratch = [0.0; MAX_HEAD_DIM];
    let scratch = &mut scratch[..spec.key_dim];
    let norm = spec.qk_norm.as_ref();
    let query_norm = norm.map(|norm| (&norm.query[..], norm.eps));
    let key_norm = norm.map(|norm| (&norm.key[..], norm.eps));
    for row in rows {
        let position = sequence.position(row);
        // SAFETY: the row is within the buffer, which has these columns, and its heads are this
        // thread's.
        let head = |column: usize, dim: usize| unsafe {
            std::slice::from_raw_parts_mut(qkv.at(row * stride + column), dim)
        };
        let query_scale = spec.query_scale(position);
        for kv_head in kv_heads.clone() {
            let key = head(spec.key_column(kv_head), spec.key_dim);
            // SAFETY: the CPU has `S`, and the token's head is this thread's.
            unsafe {
                if prepares {
                    for query in spec.queries_of[kv_head].clone() {
                        let query = head(spec.query_column(query), spec.key_dim);
                        norm_and_rotate::<S>(query, query_norm, *rotation, row, scratch);
                        for x in query {
                            *x *= query_scale;
                        }
                    }
                    norm_and_rotate::<S>(key, key_norm, *rotation, row, scratch);
                }
                if let Some(kv) = kv.as_ref().filter(|_| appends) {
                    let (block, slot) = (blocks[position / KV_BLOCK_TOKENS], position % KV_BLOCK_TOKENS);
                    let value = head(spec.value_column(kv_head), spec.value_dim);
                    kv.write::<S>(block, slot, kv_head, key, value);
                }
            }
        }
    }
}

/// Norms and rotates one head of a row. Not a closure: closures do not inherit the enclosing
/// function's instruction set.
///
/// # Safety
/// The CPU has `S`; `scratch` has the head's width.
#[inline(always)]
unsafe fn norm_and_rotate<S: Simd>(
    head: &mut [f32],
    norm: Option<(&[f32], f32)>,
    rotation: Option<&Rotation>,
    row: usize,
    scratch: &mut [f32],
) {
    if let Some((weight, eps)) = norm {
        // SAFETY: the caller's.
        unsafe { rms_norm::<S>(head, weight, eps, scratch) };
        head.copy_from_slice(scratch);
    }
    if let Some(rotation) = rotation {
        rotation.apply(row, head);
    }
}
