//! Chooses the tokens, or compressed tokens, that a row attends to, and blocks of them.

use std::ops::Range;

use super::latent::{LatentPart, LatentScratch, dot};
use crate::backend::SelectionBlocks;
use crate::cpu::dispatch::entry;
use crate::cpu::simd::Simd;
use crate::step::KV_BLOCK_TOKENS;

/// The indexer's heads of one row.
#[derive(Debug)]
pub(in crate::cpu) struct SelectionHeads<'a> {
    pub cache: LatentPart,
    /// The sequence's blocks.
    pub blocks: &'a [u32],
    /// Tokens to choose from: `0..visible`.
    pub visible: usize,
    /// Most positions, or blocks, to choose.
    pub chosen: usize,
    /// A row's choice of blocks, in which the keys to choose from are.
    pub within: Option<(&'a [f32], SelectionBlocks)>,
    /// `[heads][width of a key]`.
    pub queries: &'a [f32],
    /// One for each head.
    pub weights: &'a [f32],
}

impl SelectionHeads<'_> {
    /// The blocks to choose from; `None`: all keys are.
    fn blocks_within(&self) -> Option<&[f32]> {
        self.within.map(|(chosen, _)| &chosen[1..=chosen[0] as usize])
    }

    /// The keys to choose from, in ascending order.
    fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let whole = self.within.is_none().then_some(0..self.visible);
        let keys = self.within.map_or(1, |(_, blocks)| blocks.keys);
        let of_block = move |block: &f32| {
            let first = *block as usize * keys;
            first..self.visible.min(first + keys)
        };
        whole.into_iter().chain(self.blocks_within().unwrap_or_default().iter().map(of_block))
    }

    /// The key at this place of [`Self::ranges`]. Only the newest block may be incomplete.
    fn key(&self, place: usize) -> usize {
        match (self.blocks_within(), self.within) {
            (Some(chosen), Some((_, blocks))) => {
                chosen[place / blocks.keys] as usize * blocks.keys + place % blocks.keys
            }
            _ => place,
        }
    }
}

/// Scores the keys that a row may select, in the order of [`SelectionHeads::ranges`].
///
/// # Safety
/// The CPU has `S`; no thread writes the visible tokens.
#[inline(always)]
unsafe fn score_keys<S: Simd>(of: &SelectionHeads<'_>, block: &mut Vec<f32>, scores: &mut Vec<f32>) {
    let (width, of_block) = (of.cache.width(), of.cache.of_block());
    block.resize(KV_BLOCK_TOKENS * width, 0.0);
    scores.clear();
    for mut range in of.ranges() {
        while !range.is_empty() {
            let (number, slot) = of.cache.place(of.blocks, range.start);
            let keys = range.len().min(of_block - slot);
            // SAFETY: the caller's; a key's width is whole vectors.
            unsafe {
                of.cache.decode::<S>(number, slot..slot + keys, block);
                for key in block.chunks_exact(width).take(keys) {
                    let mut score = 0.0;
                    for (query, weight) in of.queries.chunks_exact(width).zip(of.weights) {
                        score += weight * S::reduce_add(dot::<S>(query, key, S::splat(0.0))).max(0.0);
                    }
                    scores.push(score);
                }
            }
            range.start += keys;
        }
    }
}

/// The places of the largest scores in ascending order, as many as `out` has space for; of equal
/// ones, the first.
fn take_largest(scores: &[f32], candidates: &mut Vec<f32>, out: &mut [f32]) {
    let chosen = out.len();
    candidates.clear();
    candidates.extend_from_slice(scores);
    let (above, threshold, _) = candidates.select_nth_unstable_by(chosen - 1, |a, b| b.total_cmp(a));
    let threshold = *threshold;
    let mut equal = chosen - above.iter().filter(|score| score.total_cmp(&threshold).is_gt()).count();
    let mut taken = 0;
    for (place, score) in scores.iter().enumerate() {
        let order = score.total_cmp(&threshold);
        if order.is_gt() || (order.is_eq() && equal > 0) {
            equal -= usize::from(order.is_eq());
            out[taken] = place as f32;
            taken += 1;
        }
    }
}

/// Selects the tokens of a row: their number, then their positions in ascending order.
///
/// # Safety
/// The CPU has `S`; no thread writes the visible tokens.
#[inline(always)]
unsafe fn select<S: Simd>(of: &SelectionHeads<'_>, scratch: &mut LatentScratch, out: &mut [f32]) {
    let all: usize = of.ranges().map(|range| range.len()).sum();
    let chosen = of.chosen.min(all);
    out[0] = chosen as f32;
    let positions = &mut out[1..=chosen];
    if chosen == all {
        of.ranges().flatten().zip(positions).for_each(|(position, out)| *out = position as f32);
        return;
    }
    let LatentScratch { block, scores, candidates } = scratch;
    // SAFETY: the caller's.
    unsafe { score_keys::<S>(of, block, scores) };
    take_largest(scores, candidates, positions);
    positions.iter_mut().for_each(|place| *place = of.key(*place as usize) as f32);
}

/// Chooses blocks for a row, of `keys` keys each: their number, then their numbers in ascending
/// order. The newest one is always chosen.
///
/// # Safety
/// The CPU has `S`; no thread writes the visible tokens.
#[inline(always)]
unsafe fn select_blocks<S: Simd>(
    of: &SelectionHeads<'_>,
    keys: usize,
    scratch: &mut LatentScratch,
    out: &mut [f32],
) {
    let all = of.visible.div_ceil(keys);
    let chosen = of.chosen.min(all);
    out[0] = chosen as f32;
    let numbers = &mut out[1..=chosen];
    if chosen == all {
        numbers.iter_mut().enumerate().for_each(|(number, out)| *out = number as f32);
        return;
    }
    let LatentScratch { block, scores, candidates } = scratch;
    // SAFETY: the caller's.
    unsafe { score_keys::<S>(of, block, scores) };
    for number in 0..all {
        let of_block = &scores[number * keys..of.visible.min((number + 1) * keys)];
        scores[number] = of_block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    }
    scores.truncate(all);
    scores[all - 1] = f32::INFINITY;
    take_largest(scores, candidates, numbers);
}

entry! {
    /// The tokens that a row attends to.
    pub(in crate::cpu) fn select_on(of: &SelectionHeads<'_>, scratch: &mut LatentScratch, out: &mut [f32]) = select
}
entry! {
    /// The blocks of keys that a row chooses.
    pub(in crate::cpu) fn select_blocks_on(of: &SelectionHeads<'_>, keys: usize, scratch: &mut LatentScratch, out: &mut [f32]) = select_blocks
}
