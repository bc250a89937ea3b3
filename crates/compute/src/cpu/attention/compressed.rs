//! Attention to single tokens in a window and to compressed ones: all heads share one vector for
//! each, which is both key and value. Tokens are stored as in latent attention.
//!
//! A head's softmax goes over the window's blocks, then over the compressed tokens, both in the
//! order of their positions.

use std::ops::Range;

use super::latent::{HEADS_TOGETHER, LatentPart, LatentScratch, dot};
use crate::cpu::dispatch::entry;
use crate::cpu::simd::{LANES, Simd};
use crate::step::KV_BLOCK_TOKENS;

/// Some heads of one row.
#[derive(Debug)]
pub(in crate::cpu) struct CompressedHeads<'a> {
    pub single: LatentPart,
    pub compressed: Option<LatentPart>,
    /// The sequence's blocks.
    pub blocks: &'a [u32],
    /// Single tokens that the row attends to.
    pub window: Range<usize>,
    /// Number of compressed tokens that exist: `0..entries`.
    pub entries: usize,
    /// Those that count, ascending; `None`: all.
    pub selected: Option<&'a [f32]>,
    pub heads: Range<usize>,
    /// The row's queries, `[heads][width]`.
    pub queries: &'a [f32],
    /// A score of each head.
    pub sinks: &'a [f32],
}

/// The softmax of some heads so far.
struct Softmax {
    best: [f32; HEADS_TOGETHER],
    sums: [f32; HEADS_TOGETHER],
}

impl Softmax {
    /// Adds some tokens, `[tokens][width]`, to all heads.
    ///
    /// # Safety
    /// The CPU has `S`; the width is whole vectors.
    #[inline(always)]
    unsafe fn add<S: Simd>(&mut self, of: &CompressedHeads<'_>, tokens: &[f32], out: &mut [f32]) {
        let width = of.single.width();
        let count = tokens.len() / width;
        for (place, head) in of.heads.clone().enumerate() {
            let query = &of.queries[head * width..][..width];
            let mut weights = [f32::NEG_INFINITY; KV_BLOCK_TOKENS];
            // SAFETY: the caller's; all slices are whole vectors.
            unsafe {
                for (token, weight) in tokens.chunks_exact(width).zip(&mut weights) {
                    *weight = S::reduce_add(dot::<S>(query, token, S::splat(0.0)));
                }
                let highest = weights.iter().copied().fold(self.best[place], f32::max);
                for tile in weights.as_chunks_mut::<LANES>().0 {
                    let score = S::load(tile.as_ptr());
                    S::store(tile.as_mut_ptr(), S::exp(S::sub(score, S::splat(highest))));
                }
                weights[count..].fill(0.0);
                let factor = (self.best[place] - highest).exp();
                self.best[place] = highest;
                self.sums[place] = self.sums[place] * factor + weights.iter().sum::<f32>();
                let out = &mut out[place * width..][..width];
                for d in (0..width).step_by(LANES) {
                    let mut sum = S::mul(S::load(out.as_ptr().add(d)), S::splat(factor));
                    for (token, weight) in weights[..count].iter().enumerate() {
                        let value = S::load(tokens.as_ptr().add(token * width + d));
                        sum = S::fma(value, S::splat(*weight), sum);
                    }
                    S::store(out.as_mut_ptr().add(d), sum);
                }
            }
        }
    }
}

/// Attends with some heads of a row. `out` holds those heads, `[width]` each.
///
/// # Safety
/// The CPU has `S`; no thread writes the tokens that the row attends to.
#[inline(always)]
unsafe fn attend_compressed<S: Simd>(of: &CompressedHeads<'_>, scratch: &mut LatentScratch, out: &mut [f32]) {
    let width = of.single.width();
    assert!(of.heads.len() <= HEADS_TOGETHER && out.len() >= of.heads.len() * width);
    let block = &mut scratch.block;
    block.resize(KV_BLOCK_TOKENS * width, 0.0);
    let mut softmax = Softmax { best: [0.0; HEADS_TOGETHER], sums: [1.0; HEADS_TOGETHER] };
    softmax.best[..of.heads.len()].copy_from_slice(&of.sinks[of.heads.clone()]);
    out.fill(0.0);
    let mut position = of.window.start;
    while position < of.window.end {
        let first = position % KV_BLOCK_TOKENS;
        let count = (KV_BLOCK_TOKENS - first).min(of.window.end - position);
        let tokens = &mut block[..count * width];
        // SAFETY: the caller's.
        unsafe {
            of.single.decode::<S>(of.blocks[position / KV_BLOCK_TOKENS], first..first + count, tokens);
            softmax.add::<S>(of, tokens, out);
        }
        position += count;
    }
    if let Some(compressed) = &of.compressed {
        assert_eq!(compressed.width(), width, "compressed tokens are as wide as single ones");
        let all = of.selected.map_or(of.entries, <[f32]>::len);
        for first in (0..all).step_by(KV_BLOCK_TOKENS) {
            let numbers = first..all.min(first + KV_BLOCK_TOKENS);
            let tokens = &mut block[..numbers.len() * width];
            for (number, token) in numbers.zip(tokens.chunks_exact_mut(width)) {
                let number = of.selected.map_or(number, |selected| selected[number] as usize);
                assert!(number < of.entries, "a compressed token is not there");
                let (block, slot) = compressed.place(of.blocks, number);
                // SAFETY: the caller's.
                unsafe { compressed.decode::<S>(block, slot..slot + 1, token) };
            }
            // SAFETY: the caller's.
            unsafe { softmax.add::<S>(of, tokens, out) };
        }
    }
    for (out, sum) in out.chunks_exact_mut(width).zip(softmax.sums) {
        out.iter_mut().for_each(|x| *x /= sum);
    }
}

entry! {
    /// Attention of some heads of a row to single and compressed tokens.
    pub(in crate::cpu) fn attend_compressed_on(of: &CompressedHeads<'_>, scratch: &mut LatentScratch, out: &mut [f32]) = attend_compressed
}
