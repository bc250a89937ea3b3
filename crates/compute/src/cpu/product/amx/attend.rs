//! Attention of many queries on AMX, in bf16: scores of a span of tokens, their online softmax in
//! f32, weighted values.
//!
//! Spans begin at multiples of their length, and masked scores have weight zero, so a query's
//! result does not depend on the queries that it is computed with.

#![allow(unsafe_op_in_unsafe_fn, reason = "kernels: the contract of each function covers its body")]

use std::arch::x86_64::*;

use super::tiles::{self, Configured, Tile, TileSums};
use crate::backend::KvFormat;
use crate::cpu::attention::heads::{Heads, NO_SCORE, PIECE_QUERIES};
use crate::cpu::attention::kernel::{Byte, Element, Half, capped};
use crate::cpu::attention::kv::{KvBlock, MAX_HEAD_DIM};
use crate::cpu::layout::bf16_rows::{TILE_COLUMNS, TILE_ROWS};
use crate::cpu::simd::{LANES, Simd, avx512::Avx512};
use crate::step::KV_BLOCK_TOKENS;

/// Queries that share one unpacking of keys and values.
const QUERIES: usize = PIECE_QUERIES;
/// KV blocks of a span: the highest score is updated once per span.
const SPAN_BLOCKS: usize = 4;
/// Maximum tiles of a head's dimensions.
const MAX_DEPTH: usize = MAX_HEAD_DIM / TILE_COLUMNS;
/// Row tiles of the queries.
const QUERY_TILES: usize = QUERIES / TILE_ROWS;
/// Pairs of row tiles. A product takes two row tiles.
const TILE_PAIRS: usize = QUERY_TILES / 2;

// A KV block is as many tokens as a tile is deep, and two vectors.
const _: () = assert!(KV_BLOCK_TOKENS == TILE_COLUMNS && KV_BLOCK_TOKENS == 2 * LANES);

/// Memory of one thread.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct AttentionScratch {
    /// `[row tile][32 dimensions]`.
    queries: [[Tile; MAX_DEPTH]; QUERY_TILES],
    /// A block's keys: `[32 dimensions][16 tokens]`.
    keys: [[Tile; 2]; MAX_DEPTH],
    scores: [[TileSums; TILE_PAIRS]; SPAN_BLOCKS],
    /// The softmax weights: `[row tile][KV block]`.
    weights: [[Tile; SPAN_BLOCKS]; QUERY_TILES],
    /// `[32 dimensions][KV block][16 dimensions]`.
    values: [[[Tile; 2]; SPAN_BLOCKS]; MAX_DEPTH],
    /// Sums of weighted values so far: `[32 dimensions][pair of row tiles]`.
    acc: [[TileSums; TILE_PAIRS]; MAX_DEPTH],
    /// The highest score so far.
    best: [f32; QUERIES],
    /// The sum of the weights so far.
    sum: [f32; QUERIES],
    /// The positions that each query sees: first, end.
    visible: [(usize, usize); QUERIES],
}

/// Attention of all queries of `heads`.
///
/// # Safety
/// `Isa::Amx` was detected; pointers and ranges of `heads` describe the step's buffers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn attend(heads: &Heads<'_>, memory: &mut AttentionScratch) {
    let _configured = Configured::new();
    let total = heads.count();
    for first in (0..total).step_by(QUERIES) {
        let count = QUERIES.min(total - first);
        match heads.kv.format {
            KvFormat::F16 => queries::<Half>(heads, first, count, memory),
            KvFormat::Int8 => queries::<Byte>(heads, first, count, memory),
        }
    }
}

/// Attention of `count` queries, from query `first` on.
#[inline(always)]
unsafe fn queries<E: Element>(heads: &Heads<'_>, first: usize, count: usize, memory: &mut AttentionScratch) {
    let Heads { spec, scoring, kv, kv_head, blocks, .. } = *heads;
    let (key_dim, value_dim) = (spec.key_dim, spec.value_dim);
    let (key_depth, value_depth) = (key_dim.div_ceil(TILE_COLUMNS), value_dim.div_ceil(TILE_COLUMNS));
    let pairs = count.div_ceil(2 * TILE_ROWS);
    let (mut begin, mut end) = (usize::MAX, 0);
    for m in 0..count {
        let (from, to) = heads.visible(first + m);
        (begin, end) = (begin.min(from), end.max(to));
        memory.visible[m] = (from, to);
        (memory.best[m], memory.sum[m]) = heads.first_score(first + m);
        let query = heads.query(first + m);
        for (block, tile) in memory.queries[m / TILE_ROWS][..key_depth].iter_mut().enumerate() {
            let line = tile.0[m % TILE_ROWS].as_mut_ptr().cast();
            _mm512_store_si512(line, side_by_side(two_of(query, block * TILE_COLUMNS, key_dim)));
        }
    }
    for acc in &mut memory.acc[..value_depth] {
        // SAFETY: the sums are numbers, so zero bytes are valid.
        acc[..pairs].as_mut_ptr().write_bytes(0, pairs);
    }
    let blocks_end = end.div_ceil(KV_BLOCK_TOKENS);
    let first_block = begin / KV_BLOCK_TOKENS;
    for span in (first_block / SPAN_BLOCKS * SPAN_BLOCKS..blocks_end).step_by(SPAN_BLOCKS) {
        let span = span.max(first_block)..blocks_end.min(span + SPAN_BLOCKS);
        let mut parts = [kv.block(blocks[span.start], kv_head); SPAN_BLOCKS];
        for (part, block) in parts.iter_mut().zip(&blocks[span.clone()]) {
            *part = kv.block(*block, kv_head);
        }
        let parts = &parts[..span.len()];
        for (part, scores) in parts.iter().zip(&mut memory.scores) {
            unpack_keys::<E>(part, key_dim, &mut memory.keys);
            for (queries, scores) in memory.queries.chunks_exact(2).zip(&mut scores[..pairs]) {
                multiply(queries, &memory.keys[..key_depth], scores, true);
            }
        }
        for m in 0..count {
            softmax::<E>(memory, m, (parts, scoring.cap), span.start * KV_BLOCK_TOKENS, value_depth);
        }
        for (place, part) in parts.iter().enumerate() {
            let tokens = end - (span.start + place) * KV_BLOCK_TOKENS;
            unpack_values::<E>(part, tokens, value_dim, place, &mut memory.values);
        }
        for (values, acc) in memory.values[..value_depth].iter().zip(&mut memory.acc) {
            for (weights, acc) in memory.weights.chunks_exact(2).zip(&mut acc[..pairs]) {
                multiply(weights, &values[..parts.len()], acc, false);
            }
        }
    }
    for m in 0..count {
        let out = heads.output(first + m);
        let inverse = _mm512_set1_ps(1.0 / memory.sum[m]);
        for d in (0..value_dim).step_by(LANES) {
            let acc = line(&memory.acc[d / TILE_COLUMNS], m, d % TILE_COLUMNS / LANES);
            _mm512_storeu_ps(out.add(d), _mm512_mul_ps(_mm512_load_ps(acc), inverse));
        }
    }
}

/// Pointer to 16 sums of query `m`.
#[inline(always)]
fn line(sums: &[TileSums; TILE_PAIRS], m: usize, side: usize) -> *const f32 {
    sums[m / (2 * TILE_ROWS)][m / TILE_ROWS % 2][side][m % TILE_ROWS].as_ptr()
}

/// Multiplies two row tiles with `columns`.
#[inline(always)]
unsafe fn multiply<const D: usize>(
    rows: &[[Tile; D]],
    columns: &[[Tile; 2]],
    sums: &mut TileSums,
    fresh: bool,
) {
    let [first, second] = [0, D].map(|tile| rows.as_ptr().cast::<Tile>().wrapping_add(tile).cast());
    let nothing_ahead = columns.as_ptr().cast();
    // The tile after the first rows is the first tile of the second rows.
    tiles::two([first, second], columns.as_ptr().cast(), sums, columns.len(), fresh, nothing_ahead);
}

/// Computes a query's softmax weights for the tokens of a span. Earlier sums are rescaled to the
/// new highest score.
#[inline(always)]
unsafe fn softmax<E: Element>(
    memory: &mut AttentionScratch,
    m: usize,
    (parts, cap): (&[KvBlock], Option<f32>),
    base: usize,
    depth: usize,
) {
    let (from, to) = memory.visible[m];
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let mut scores = [[_mm512_set1_ps(NO_SCORE); 2]; SPAN_BLOCKS];
    let mut seen = [[0; 2]; SPAN_BLOCKS];
    let mut max = _mm512_set1_ps(NO_SCORE);
    for (block, part) in parts.iter().enumerate() {
        for tile in 0..2 {
            let mut score = _mm512_load_ps(line(&memory.scores[block], m, tile));
            if E::SCALED {
                score = _mm512_mul_ps(score, _mm512_loadu_ps(part.scales.add(tile * LANES)));
            }
            if let Some(cap) = cap {
                score = capped::<Avx512>(score, cap);
            }
            let first = base + block * KV_BLOCK_TOKENS + tile * LANES;
            // Positions fit 32 bits, because contexts are shorter.
            let position = _mm512_add_epi32(lanes, _mm512_set1_epi32(first as i32));
            let visible = _mm512_cmpge_epi32_mask(position, _mm512_set1_epi32(from as i32))
                & _mm512_cmplt_epi32_mask(position, _mm512_set1_epi32(to as i32));
            max = _mm512_mask_max_ps(max, visible, max, score);
            (scores[block][tile], seen[block][tile]) = (score, visible);
        }
    }
    let best = memory.best[m];
    let new_best = best.max(_mm512_reduce_max_ps(max));
    let mut sum = _mm512_setzero_ps();
    for (block, part) in parts.iter().enumerate() {
        let mut weights = [_mm512_setzero_ps(); 2];
        for tile in 0..2 {
            let weight = Avx512::exp(_mm512_sub_ps(scores[block][tile], _mm512_set1_ps(new_best)));
            weights[tile] = _mm512_maskz_mov_ps(seen[block][tile], weight);
            sum = _mm512_add_ps(sum, weights[tile]);
            if E::SCALED {
                let scales = _mm512_loadu_ps(part.scales.add(KV_BLOCK_TOKENS + tile * LANES));
                weights[tile] = _mm512_maskz_mul_ps(seen[block][tile], weights[tile], scales);
            }
        }
        let to = memory.weights[m / TILE_ROWS][block].0[m % TILE_ROWS].as_mut_ptr().cast();
        _mm512_store_si512(to, side_by_side(weights));
    }
    if new_best > best {
        // Without a score before, `exp` would take its slow path to zero.
        let factor = if best > NO_SCORE { (best - new_best).exp() } else { 0.0 };
        memory.sum[m] *= factor;
        memory.best[m] = new_best;
        for acc in &mut memory.acc[..depth] {
            for acc in &mut acc[m / (2 * TILE_ROWS)][m / TILE_ROWS % 2] {
                let acc = acc[m % TILE_ROWS].as_mut_ptr();
                _mm512_store_ps(acc, _mm512_mul_ps(_mm512_load_ps(acc), _mm512_set1_ps(factor)));
            }
        }
    }
    memory.sum[m] += _mm512_reduce_add_ps(sum);
}

/// Keys are stored as `[16 tokens][dimension][16]`; two dimensions make a tile row.
#[inline(always)]
unsafe fn unpack_keys<E: Element>(part: &KvBlock, dim: usize, keys: &mut [[Tile; 2]; MAX_DEPTH]) {
    for (block, tiles) in keys[..dim.div_ceil(TILE_COLUMNS)].iter_mut().enumerate() {
        for (tile, to) in tiles.iter_mut().enumerate() {
            let from = part.keys.add(tile * dim * LANES * E::BYTES);
            for (pair, line) in to.0.iter_mut().enumerate() {
                let d = block * TILE_COLUMNS + 2 * pair;
                let numbers = if d < dim {
                    let at = from.add(d * LANES * E::BYTES);
                    [E::load::<Avx512>(at), E::load::<Avx512>(at.add(LANES * E::BYTES))]
                } else {
                    [_mm512_setzero_ps(); 2]
                };
                _mm512_store_si512(line.as_mut_ptr().cast(), in_turns(numbers));
            }
        }
    }
}

/// Values are stored as `[token][dimension]`; two tokens make a tile row. Tokens past the end may
/// have another sequence's numbers or uninitialised ones, so zeros replace them.
#[inline(always)]
unsafe fn unpack_values<E: Element>(
    part: &KvBlock,
    tokens: usize,
    dim: usize,
    place: usize,
    values: &mut [[[Tile; 2]; SPAN_BLOCKS]; MAX_DEPTH],
) {
    for (block, tiles) in values[..dim.div_ceil(TILE_COLUMNS)].iter_mut().enumerate() {
        for (side, to) in tiles[place].iter_mut().enumerate() {
            let d = block * TILE_COLUMNS + side * LANES;
            for (pair, line) in to.0.iter_mut().enumerate() {
                let mut numbers = [_mm512_setzero_ps(); 2];
                for (token, numbers) in (2 * pair..).zip(&mut numbers) {
                    if token < tokens && d < dim {
                        *numbers = E::load::<Avx512>(part.values.add((token * dim + d) * E::BYTES));
                    }
                }
                _mm512_store_si512(line.as_mut_ptr().cast(), in_turns(numbers));
            }
        }
    }
}

/// 32 numbers of a row; zeros after its end.
#[inline(always)]
unsafe fn two_of(row: *const f32, from: usize, len: usize) -> [__m512; 2] {
    let second =
        if from + LANES < len { _mm512_loadu_ps(row.add(from + LANES)) } else { _mm512_setzero_ps() };
    [_mm512_loadu_ps(row.add(from)), second]
}

/// 32 numbers in bf16, in order.
#[inline(always)]
unsafe fn side_by_side([first, second]: [__m512; 2]) -> __m512i {
    // SAFETY: both are 512 bits.
    std::mem::transmute(_mm512_cvtne2ps_pbh(second, first))
}

/// 32 numbers in bf16, alternating between the two vectors.
#[inline(always)]
unsafe fn in_turns(numbers: [__m512; 2]) -> __m512i {
    const ORDER: [u16; 2 * LANES] = {
        let mut order = [0; 2 * LANES];
        let mut i = 0;
        while i < order.len() {
            order[i] = (i / 2 + i % 2 * LANES) as u16;
            i += 1;
        }
        order
    };
    _mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER.as_ptr().cast()), side_by_side(numbers))
}
