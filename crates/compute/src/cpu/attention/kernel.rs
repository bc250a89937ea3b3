//! The online softmax over blocks of keys and values. The outer loop is over blocks and the inner
//! one over groups of queries, so that a block is read from memory once for all queries of a piece.
//! A query's additions have one order, independent of other queries.

#![allow(clippy::needless_range_loop, reason = "indices name registers")]
#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::mem::MaybeUninit;

use super::heads::{Heads, NO_SCORE};
use crate::backend::KvFormat;
use crate::cpu::attention::kv::{KvBlock, MAX_HEAD_DIM};
use crate::cpu::simd::{LANES, Simd};
use crate::step::KV_BLOCK_TOKENS;

/// Queries whose state is kept at the same time: as many as leave a block of keys in the
/// first-level cache.
const QUERIES: usize = 64;
/// Widest keys and values of which a state holds [`QUERIES`]; of twice as wide ones it holds half.
const USUAL_HEAD_DIM: usize = 256;
const _: () = assert!(MAX_HEAD_DIM <= QUERIES * USUAL_HEAD_DIM);
const TILES: usize = KV_BLOCK_TOKENS / LANES;

/// Number format of a cache.
pub(in crate::cpu) trait Element {
    const BYTES: usize;
    /// Whether each vector has a scale.
    const SCALED: bool;
    /// Loads 16 numbers.
    ///
    /// # Safety
    /// The CPU has `S`, and `p` is valid for them.
    unsafe fn load<S: Simd>(p: *const u8) -> S::F;
}

pub(in crate::cpu) struct Half;
impl Element for Half {
    const BYTES: usize = 2;
    const SCALED: bool = false;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        S::load_f16(p.cast())
    }
}

pub(in crate::cpu) struct Byte;
impl Element for Byte {
    const BYTES: usize = 1;
    const SCALED: bool = true;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        S::load_i8(p.cast())
    }
}

/// Running results of some queries over the blocks seen so far.
struct State {
    /// The queries, `[query][key_dim]`.
    query: [f32; QUERIES * USUAL_HEAD_DIM],
    /// Weighted sums of values, `[query][value_dim]`.
    acc: [f32; QUERIES * USUAL_HEAD_DIM],
    /// Highest score so far.
    best: [f32; QUERIES],
    /// Sum of the weights so far.
    sum: [f32; QUERIES],
    /// Positions that each query attends to: from, to.
    visible: [(usize, usize); QUERIES],
}

/// The block that is being computed with.
struct Block {
    at: KvBlock,
    /// Position of its first token.
    base: usize,
    /// Prefetched meanwhile.
    next: Option<KvBlock>,
    /// Of scores.
    cap: Option<f32>,
}

/// All queries of a piece.
///
/// # Safety
/// The CPU has `S`; pointers and ranges of `heads` describe the step's buffers.
#[inline(always)]
pub(in crate::cpu) unsafe fn attend<S: Simd>(heads: &Heads<'_>) {
    match heads.kv.format {
        KvFormat::F16 => attend_in::<S, Half>(heads),
        KvFormat::Int8 => attend_in::<S, Byte>(heads),
    }
}

#[inline(always)]
unsafe fn attend_in<S: Simd, E: Element>(heads: &Heads<'_>) {
    let total = heads.count();
    let mut state = MaybeUninit::<State>::uninit();
    let width = heads.spec.key_dim.max(heads.spec.value_dim);
    let most = QUERIES / width.div_ceil(USUAL_HEAD_DIM).max(1);
    for first in (0..total).step_by(most) {
        chunk::<S, E>(heads, first, most.min(total - first), state.as_mut_ptr());
    }
}

/// `count` queries from number `first` on.
#[inline(always)]
unsafe fn chunk<S: Simd, E: Element>(heads: &Heads<'_>, first: usize, count: usize, state: *mut State) {
    let Heads { spec, scoring, kv, kv_head, blocks, .. } = *heads;
    let (key_dim, value_dim) = (spec.key_dim, spec.value_dim);
    let query = (&raw mut (*state).query).cast::<f32>();
    let acc = (&raw mut (*state).acc).cast::<f32>();
    let (mut begin, mut end) = (usize::MAX, 0);
    for m in 0..count {
        let (from, to) = heads.visible(first + m);
        (begin, end) = (begin.min(from), end.max(to));
        (*state).visible[m] = (from, to);
        ((*state).best[m], (*state).sum[m]) = heads.first_score(first + m);
        std::ptr::copy_nonoverlapping(heads.query(first + m), query.add(m * key_dim), key_dim);
        acc.add(m * value_dim).write_bytes(0, value_dim);
    }
    let dims = (key_dim, value_dim);
    let blocks_end = end.div_ceil(KV_BLOCK_TOKENS);
    for index in begin / KV_BLOCK_TOKENS..blocks_end {
        let next = (index + 1 < blocks_end).then(|| kv.block(blocks[index + 1], kv_head));
        let (at, base) = (kv.block(blocks[index], kv_head), index * KV_BLOCK_TOKENS);
        let mut block = Block { at, base, next, cap: scoring.cap };
        let mut m = 0;
        while m < count {
            let taken = match count - m {
                8.. => group_of::<S, E, 8>(&block, dims, state, m),
                4.. => group_of::<S, E, 4>(&block, dims, state, m),
                2.. => group_of::<S, E, 2>(&block, dims, state, m),
                _ => group_of::<S, E, 1>(&block, dims, state, m),
            };
            m += taken;
            block.next = None;
        }
    }
    for m in 0..count {
        let out = heads.output(first + m);
        let inverse = S::splat(1.0 / (*state).sum[m]);
        for d in (0..value_dim).step_by(LANES) {
            S::store(out.add(d), S::mul(S::load(acc.add(m * value_dim + d)), inverse));
        }
    }
}

/// Queries `first..first + M` of the state with one block. Returns `M`.
#[inline(always)]
unsafe fn group_of<S: Simd, E: Element, const M: usize>(
    block: &Block,
    (key_dim, value_dim): (usize, usize),
    state: *mut State,
    first: usize,
) -> usize {
    let (base, end) = (block.base, block.base + KV_BLOCK_TOKENS);
    let visible = (&raw const (*state).visible).cast::<(usize, usize)>().add(first);
    let (mut from, mut to) = (usize::MAX, 0);
    for m in 0..M {
        (from, to) = (from.min((*visible.add(m)).0), to.max((*visible.add(m)).1));
    }
    if from >= end || to <= base {
        return M;
    }
    let query = (&raw const (*state).query).cast::<f32>().add(first * key_dim);
    let acc = (&raw mut (*state).acc).cast::<f32>().add(first * value_dim);
    let mut scores = [[S::splat(0.0); TILES]; M];
    for d in 0..key_dim {
        if let Some(next) = block.next {
            S::prefetch(next.keys.wrapping_add(d * KV_BLOCK_TOKENS * E::BYTES));
        }
        for tile in 0..TILES {
            let k = E::load::<S>(block.at.keys.add((tile * key_dim + d) * LANES * E::BYTES));
            for m in 0..M {
                scores[m][tile] = S::fma(k, S::splat(*query.add(m * key_dim + d)), scores[m][tile]);
            }
        }
    }
    let mut weights = [[0.0f32; KV_BLOCK_TOKENS]; M];
    for m in 0..M {
        if E::SCALED {
            for tile in 0..TILES {
                scores[m][tile] = S::mul(scores[m][tile], S::load(block.at.scales.add(tile * LANES)));
            }
        }
        if let Some(cap) = block.cap {
            for tile in 0..TILES {
                scores[m][tile] = capped::<S>(scores[m][tile], cap);
            }
        }
        let (from, to) = *visible.add(m);
        let hidden = from > base || to < end;
        if hidden {
            mask::<S>(&mut scores[m], f32::NEG_INFINITY, base, (from, to));
        }
        let mut max = scores[m][0];
        for tile in 1..TILES {
            max = S::max(max, scores[m][tile]);
        }
        let best = (*state).best[first + m];
        let new_best = best.max(S::reduce_max(max));
        for tile in 0..TILES {
            scores[m][tile] = S::exp(S::sub(scores[m][tile], S::splat(new_best)));
        }
        if hidden {
            // `exp` clamps −∞ to its lower limit, and the result is not quite zero.
            mask::<S>(&mut scores[m], 0.0, base, (from, to));
        }
        let mut block_sum = scores[m][0];
        for tile in 1..TILES {
            block_sum = S::add(block_sum, scores[m][tile]);
        }
        let mut sum = (*state).sum[first + m];
        if new_best > best {
            // Without a score before, `exp` would take its slow path to zero.
            let factor = if best > NO_SCORE { (best - new_best).exp() } else { 0.0 };
            sum *= factor;
            for d in (0..value_dim).step_by(LANES) {
                let a = acc.add(m * value_dim + d);
                S::store(a, S::mul(S::load(a), S::splat(factor)));
            }
            (*state).best[first + m] = new_best;
        }
        (*state).sum[first + m] = sum + S::reduce_add(block_sum);
        for tile in 0..TILES {
            let mut weight = scores[m][tile];
            if E::SCALED {
                weight = S::mul(weight, S::load(block.at.scales.add(KV_BLOCK_TOKENS + tile * LANES)));
            }
            S::store(weights[m].as_mut_ptr().add(tile * LANES), weight);
        }
    }
    // Tokens past the end hold another sequence's values, or none.
    let tokens = KV_BLOCK_TOKENS.min(to - base);
    let mut d = 0;
    while d + 2 * LANES <= value_dim {
        values::<S, E, M, 2>(block, tokens, value_dim, d, &weights, acc);
        d += 2 * LANES;
    }
    if d < value_dim {
        values::<S, E, M, 1>(block, tokens, value_dim, d, &weights, acc);
    }
    M
}

/// `cap * tanh(x / cap)`, as `cap * (2 / (1 + e^(-2x / cap)) - 1)`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
pub(in crate::cpu) unsafe fn capped<S: Simd>(x: S::F, cap: f32) -> S::F {
    let power = S::exp(S::mul(x, S::splat(-2.0 / cap)));
    S::sub(S::div(S::splat(2.0 * cap), S::add(S::splat(1.0), power)), S::splat(cap))
}

/// Replaces the lanes of tokens outside of `visible`.
#[inline(always)]
unsafe fn mask<S: Simd>(x: &mut [S::F; TILES], by: f32, base: usize, visible: (usize, usize)) {
    let mut lanes = [0.0f32; KV_BLOCK_TOKENS];
    for tile in 0..TILES {
        S::store(lanes.as_mut_ptr().add(tile * LANES), x[tile]);
    }
    for (token, x) in lanes.iter_mut().enumerate() {
        if !(visible.0..visible.1).contains(&(base + token)) {
            *x = by;
        }
    }
    for tile in 0..TILES {
        x[tile] = S::load(lanes.as_ptr().add(tile * LANES));
    }
}

/// Adds the weighted values of `16 T` dimensions from `d` on.
#[inline(always)]
unsafe fn values<S: Simd, E: Element, const M: usize, const T: usize>(
    block: &Block,
    tokens: usize,
    dim: usize,
    d: usize,
    weights: &[[f32; KV_BLOCK_TOKENS]; M],
    acc: *mut f32,
) {
    let mut a = [[S::splat(0.0); T]; M];
    for m in 0..M {
        for t in 0..T {
            a[m][t] = S::load(acc.add(m * dim + d + t * LANES));
        }
    }
    for token in 0..tokens {
        let at = (token * dim + d) * E::BYTES;
        if let Some(next) = block.next {
            S::prefetch(next.values.wrapping_add(at));
        }
        for t in 0..T {
            let v = E::load::<S>(block.at.values.add(at + t * LANES * E::BYTES));
            for m in 0..M {
                a[m][t] = S::fma(v, S::splat(weights[m][token]), a[m][t]);
            }
        }
    }
    for m in 0..M {
        for t in 0..T {
            S::store(acc.add(m * dim + d + t * LANES), a[m][t]);
        }
    }
}
