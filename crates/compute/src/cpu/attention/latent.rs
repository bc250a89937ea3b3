//! Latent attention: all heads attend to one compressed vector per token, which is both key and
//! value, and to a rotated key part.
//!
//! A block holds `[token][rank + rotated]` numbers, as f16, or as int8 with two scales per token. A
//! thread decodes a block to f32 once for several heads of a row; each head's softmax goes over
//! blocks in the order of their positions.

use std::ops::Range;

use super::heads::NO_SCORE;
use super::kv::{to_f16, to_i8};
use crate::backend::{ComputeError, KvFormat};
use crate::cpu::dispatch::entry;
use crate::cpu::layout::region::{Region, cache_region};
use crate::cpu::pointers::SendPtr;
use crate::cpu::simd::{LANES, Simd};
use crate::step::KV_BLOCK_TOKENS;

/// Heads of a row that a thread claims at once, because they share the work of decoding a block.
pub(in crate::cpu) const HEADS_TOGETHER: usize = 16;

/// Heads of a block that are computed side by side: they share the loads of its tokens.
const HEADS_ABREAST: usize = 4;

/// Compressed vectors and rotated parts of one layer's tokens.
#[derive(Debug)]
pub(in crate::cpu) struct LatentCache {
    numbers: Region,
    /// `[token][compressed, rotated]`.
    scales: Region,
    /// Widths of the compressed vector and of the rotated part.
    widths: [usize; 2],
    format: KvFormat,
    blocks: usize,
    every: usize,
}

/// Pointers into a [`LatentCache`].
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct LatentPart {
    numbers: SendPtr<u8>,
    scales: SendPtr<f32>,
    widths: [usize; 2],
    format: KvFormat,
    blocks: usize,
    /// Number of tokens that a vector represents.
    pub every: usize,
}

impl LatentCache {
    /// Reserves the address space; the system provides pages when blocks are first written. A
    /// vector represents `every` tokens.
    pub fn new(
        widths: [usize; 2],
        every: usize,
        format: KvFormat,
        blocks: usize,
    ) -> Result<Self, ComputeError> {
        for (what, value) in
            ["the rank of latent attention", "the rotated width of latent attention"].into_iter().zip(widths)
        {
            if !value.is_multiple_of(LANES) {
                return Err(ComputeError::Shape { what, value, backend: "CPU", needs: "a multiple of 16" });
            }
        }
        if every == 0 || !(KV_BLOCK_TOKENS.is_multiple_of(every) || every.is_multiple_of(KV_BLOCK_TOKENS)) {
            return Err(ComputeError::Shape {
                what: "the number of tokens that are compressed to one",
                value: every,
                backend: "CPU",
                needs: "a divisor or a multiple of 32",
            });
        }
        let tokens = blocks * (KV_BLOCK_TOKENS / every).max(1);
        Ok(Self {
            numbers: cache_region(tokens * widths.iter().sum::<usize>() * format.bytes())?,
            scales: cache_region(tokens * 2 * format.scale_bytes())?,
            widths,
            format,
            blocks,
            every,
        })
    }

    /// A block's numbers and scales.
    pub fn block_bytes(&mut self, block: usize) -> [&mut [u8]; 2] {
        let width = self.widths.iter().sum::<usize>() * self.format.bytes();
        let of_block = (KV_BLOCK_TOKENS / self.every).max(1);
        [(&mut self.numbers, of_block * width), (&mut self.scales, of_block * 2 * self.format.scale_bytes())]
            .map(|(region, bytes)| &mut region[block * bytes..][..bytes])
    }

    /// Pointers for threads that write different tokens, or read others.
    pub fn part(&mut self) -> LatentPart {
        LatentPart {
            numbers: SendPtr(self.numbers.as_mut_ptr()),
            scales: SendPtr(self.scales.as_mut_ptr().cast()),
            widths: self.widths,
            format: self.format,
            blocks: self.blocks,
            every: self.every,
        }
    }
}

impl LatentPart {
    /// Numbers of a token.
    pub fn width(&self) -> usize {
        self.widths[0] + self.widths[1]
    }

    /// Bytes from one token to the next.
    fn stride(&self) -> usize {
        self.width() * self.format.bytes()
    }

    /// Vectors of a block.
    pub fn of_block(&self) -> usize {
        (KV_BLOCK_TOKENS / self.every).max(1)
    }

    /// Where a sequence's vector is stored: in the block of the last token that it represents.
    pub fn place(&self, blocks: &[u32], number: usize) -> (u32, usize) {
        let last = (number + 1) * self.every - 1;
        let slot = last % KV_BLOCK_TOKENS / self.every.min(KV_BLOCK_TOKENS);
        (blocks[last / KV_BLOCK_TOKENS], slot)
    }

    /// Index of a vector of a block.
    fn token(&self, block: u32, slot: usize) -> usize {
        assert!((block as usize) < self.blocks, "block {block} is not in the cache");
        block as usize * self.of_block() + slot
    }

    /// Stores a token, `[compressed, rotated]`.
    ///
    /// # Safety
    /// The CPU has `S`; no other thread uses the token.
    #[inline(always)]
    pub unsafe fn write<S: Simd>(&self, block: u32, slot: usize, token: &[f32]) {
        assert!(token.len() == self.width() && slot < self.of_block());
        let index = self.token(block, slot);
        let (compressed, rotated) = token.split_at(self.widths[0]);
        // SAFETY: the regions hold `blocks * of_block()` vectors.
        unsafe {
            let to = self.numbers.at(index * self.stride());
            match self.format {
                KvFormat::F16 => {
                    let to = to.cast::<u16>();
                    to_f16::<S>(compressed, to);
                    to_f16::<S>(rotated, to.add(compressed.len()));
                }
                KvFormat::Int8 => {
                    let (to, scales) = (to.cast::<i8>(), self.scales.at(2 * index));
                    *scales = to_i8::<S>(compressed, to);
                    *scales.add(1) = to_i8::<S>(rotated, to.add(compressed.len()));
                }
            }
        }
    }

    /// Decodes some tokens of a block to f32, `[token][rank + rotated]`.
    ///
    /// # Safety
    /// The CPU has `S`; no thread writes these tokens.
    #[inline(always)]
    pub unsafe fn decode<S: Simd>(&self, block: u32, tokens: Range<usize>, out: &mut [f32]) {
        let width = self.width();
        assert!(tokens.end <= self.of_block() && out.len() >= tokens.len() * width);
        for (place, slot) in tokens.enumerate() {
            let index = self.token(block, slot);
            // SAFETY: as for writing; widths are whole vectors.
            unsafe {
                let from = self.numbers.at(index * self.stride());
                for d in (0..width).step_by(LANES) {
                    let to = out.as_mut_ptr().add(place * width + d);
                    match self.format {
                        KvFormat::F16 => S::store(to, S::load_f16(from.cast::<u16>().add(d))),
                        KvFormat::Int8 => {
                            let part = usize::from(d >= self.widths[0]);
                            let scale = S::splat(*self.scales.at(2 * index + part));
                            S::store(to, S::mul(S::load_i8(from.cast::<i8>().add(d)), scale));
                        }
                    }
                }
            }
        }
    }
}

/// Some heads of one row.
#[derive(Debug)]
pub(in crate::cpu) struct LatentHeads<'a> {
    pub cache: LatentPart,
    /// The sequence's blocks.
    pub blocks: &'a [u32],
    /// Positions that the row attends to: `0..visible`.
    pub visible: usize,
    /// The visible positions that count, in ascending order; `None`: all.
    pub selected: Option<&'a [f32]>,
    pub heads: Range<usize>,
    /// The row's absorbed queries, `[heads][rank]`.
    pub absorbed: &'a [f32],
    /// The row's queries; the last `rotated` columns of each count.
    pub queries: &'a [f32],
    pub query_dim: usize,
}

/// A thread's working memory.
#[derive(Debug, Default)]
pub(in crate::cpu) struct LatentScratch {
    pub block: Vec<f32>,
    /// Tokens' scores, and the scores that are chosen among.
    pub scores: Vec<f32>,
    pub candidates: Vec<f32>,
}

impl LatentHeads<'_> {
    /// Tokens that the row attends to.
    fn tokens(&self) -> usize {
        self.selected.map_or(self.visible, <[f32]>::len)
    }

    /// Decodes the next tokens, from number `first` of those that count.
    ///
    /// # Safety
    /// As [`LatentPart::decode`].
    #[inline(always)]
    unsafe fn decode<S: Simd>(&self, first: usize, tokens: usize, out: &mut [f32]) {
        let Some(selected) = self.selected else {
            // SAFETY: the caller's.
            return unsafe { self.cache.decode::<S>(self.blocks[first / KV_BLOCK_TOKENS], 0..tokens, out) };
        };
        let width = self.cache.width();
        for (position, out) in selected[first..first + tokens].iter().zip(out.chunks_exact_mut(width)) {
            let position = *position as usize;
            assert!(position < self.visible, "a selected token is not visible");
            let (block, slot) = self.cache.place(self.blocks, position);
            // SAFETY: the caller's.
            unsafe { self.cache.decode::<S>(block, slot..slot + 1, out) };
        }
    }
}

/// Softmax over the tokens so far, for each head that a thread has claimed.
struct Softmax {
    /// The largest score.
    best: [f32; HEADS_TOGETHER],
    /// The sum of the weights, relative to `best`.
    sums: [f32; HEADS_TOGETHER],
}

/// Attends with some heads of a row. `out` holds those heads, `[rank]` each.
///
/// # Safety
/// The CPU has `S`; no thread writes the tokens that the row attends to.
#[inline(always)]
unsafe fn attend_latent<S: Simd>(of: &LatentHeads<'_>, scratch: &mut LatentScratch, out: &mut [f32]) {
    let [rank, _] = of.cache.widths;
    scratch.block.resize(KV_BLOCK_TOKENS * of.cache.width(), 0.0);
    let mut softmax = Softmax { best: [NO_SCORE; HEADS_TOGETHER], sums: [0.0; HEADS_TOGETHER] };
    out.fill(0.0);
    let (all, heads) = (of.tokens(), of.heads.len());
    for first in (0..all).step_by(KV_BLOCK_TOKENS) {
        let tokens = KV_BLOCK_TOKENS.min(all - first);
        let mut place = 0;
        // SAFETY: the caller's.
        unsafe {
            of.decode::<S>(first, tokens, &mut scratch.block);
            while place + HEADS_ABREAST <= heads {
                attend_block::<S, HEADS_ABREAST>(of, (&scratch.block, tokens), place, &mut softmax, out);
                place += HEADS_ABREAST;
            }
            for place in place..heads {
                attend_block::<S, 1>(of, (&scratch.block, tokens), place, &mut softmax, out);
            }
        }
    }
    for (place, sum) in softmax.sums[..heads].iter().enumerate() {
        out[place * rank..][..rank].iter_mut().for_each(|x| *x /= sum);
    }
}

/// Attends with `N` heads, starting at head `place` of those in `out`, to the tokens of a decoded
/// block. A head's sums have the same order for every `N`.
///
/// # Safety
/// The CPU has `S`; `out` holds the heads, and the block its tokens.
#[inline(always)]
unsafe fn attend_block<S: Simd, const N: usize>(
    of: &LatentHeads<'_>,
    (block, tokens): (&[f32], usize),
    place: usize,
    softmax: &mut Softmax,
    out: &mut [f32],
) {
    let [rank, rotated] = of.cache.widths;
    let width = of.cache.width();
    let (mut absorbed, mut queries) = ([[].as_slice(); N], [[].as_slice(); N]);
    for i in 0..N {
        let head = of.heads.start + place + i;
        absorbed[i] = &of.absorbed[head * rank..][..rank];
        queries[i] = &of.queries[(head + 1) * of.query_dim - rotated..][..rotated];
    }
    let mut weights = [[f32::NEG_INFINITY; KV_BLOCK_TOKENS]; N];
    let mut factors = [0.0; N];
    // SAFETY: the caller's; all slices are as long as the widths say, which are whole vectors.
    unsafe {
        for (number, token) in block.chunks_exact(width).take(tokens).enumerate() {
            let mut scores = [S::splat(0.0); N];
            for (key, queries) in [(&token[..rank], &absorbed), (&token[rank..], &queries)] {
                for d in (0..key.len()).step_by(LANES) {
                    let key = S::load(key.as_ptr().add(d));
                    for i in 0..N {
                        scores[i] = S::fma(S::load(queries[i].as_ptr().add(d)), key, scores[i]);
                    }
                }
            }
            for i in 0..N {
                weights[i][number] = S::reduce_add(scores[i]);
            }
        }
        for i in 0..N {
            let (best, sum) = (&mut softmax.best[place + i], &mut softmax.sums[place + i]);
            let highest = weights[i].iter().copied().fold(*best, f32::max);
            for tile in weights[i].as_chunks_mut::<LANES>().0 {
                let score = S::load(tile.as_ptr());
                S::store(tile.as_mut_ptr(), S::exp(S::sub(score, S::splat(highest))));
            }
            weights[i][tokens..].fill(0.0);
            factors[i] = (*best - highest).exp();
            *best = highest;
            *sum = *sum * factors[i] + weights[i].iter().sum::<f32>();
        }
        let out = out[place * rank..][..N * rank].as_mut_ptr();
        for d in (0..rank).step_by(LANES) {
            let mut sums = [S::splat(0.0); N];
            for i in 0..N {
                sums[i] = S::mul(S::load(out.add(i * rank + d)), S::splat(factors[i]));
            }
            for (token, values) in block.chunks_exact(width).take(tokens).enumerate() {
                let value = S::load(values.as_ptr().add(d));
                for i in 0..N {
                    sums[i] = S::fma(value, S::splat(weights[i][token]), sums[i]);
                }
            }
            for (i, sum) in sums.iter().enumerate() {
                S::store(out.add(i * rank + d), *sum);
            }
        }
    }
}

/// `sum + Σ a * b`, by lane.
///
/// # Safety
/// The CPU has `S`; both have the same whole number of vectors.
#[inline(always)]
pub(super) unsafe fn dot<S: Simd>(a: &[f32], b: &[f32], mut sum: S::F) -> S::F {
    debug_assert!(a.len() == b.len() && a.len().is_multiple_of(LANES));
    for i in (0..a.len()).step_by(LANES) {
        // SAFETY: within both.
        unsafe { sum = S::fma(S::load(a.as_ptr().add(i)), S::load(b.as_ptr().add(i)), sum) };
    }
    sum
}

entry! {
    /// Stores one token, `[compressed, rotated]`.
    pub(in crate::cpu) fn write_latent_on(to: &LatentPart, block: u32, slot: usize, token: &[f32]) = write_latent
}
entry! {
    /// Latent attention of some heads of a row.
    pub(in crate::cpu) fn attend_latent_on(of: &LatentHeads<'_>, scratch: &mut LatentScratch, out: &mut [f32]) = attend_latent
}

/// Stores one token of a sequence.
///
/// # Safety
/// The CPU has `S`; no other thread uses the token.
#[inline(always)]
unsafe fn write_latent<S: Simd>(to: &LatentPart, block: u32, slot: usize, token: &[f32]) {
    // SAFETY: the caller's.
    unsafe { to.write::<S>(block, slot, token) };
}
