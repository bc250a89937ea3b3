//! The choice of a token from a row's logits.
//!
//! A token's weight is `exp((logit - best) / temperature)`, so it is 1 for the most probable one.
//! Tokens are ordered by their weights, and by their ids if these are equal. The first of them are
//! kept: at most `top_k`; of these, as many as have the share `top_p` of the sum of their weights;
//! of these, those with at least the weight `min_p`. The kept tokens are then laid out in the order
//! of their ids, each as long as its weight, and `draw` is a point between their beginning and end.
//!
//! Weights are whole numbers in units of 2^-30, rounded down, so that sums do not depend on the
//! order of additions, and a device that adds in parallel chooses the same tokens.

mod edits;
mod likely;
mod weights;

use crate::backend::Largest;
use crate::cpu::simd::widest::{Work, widest};
pub use edits::{EXCLUDED, RowEdits, TokenEdit};
pub use likely::{Likelihoods, RowLikelihoods, likeliest};
use weights::{Goal, Kept, LANES, ONE};
pub use weights::{Weights, argmax};

/// How to choose a token from a row's logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Logits are divided by it. At 0, the most probable token is chosen.
    pub temperature: f32,
    /// Maximum number of kept tokens; 0: all.
    pub top_k: u32,
    /// Share of the kept tokens in the sum of weights; from 1 on, all are kept.
    pub top_p: f32,
    /// Minimum weight of kept tokens.
    pub min_p: f32,
    /// The point that is drawn, in units of 2^-32 of the kept tokens' sum.
    pub draw: u32,
}

impl Choice {
    /// The most probable token.
    pub const LARGEST: Self = Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, draw: 0 };

    /// Chooses a token from logits that are all finite.
    pub fn choose(&self, logits: &[f32], weights: &mut Weights) -> u32 {
        let mut token = 0;
        widest(Chooses { choice: self, logits, weights, token: &mut token });
        token
    }

    #[inline(always)]
    fn choose_inlined(&self, logits: &[f32], weights: &mut Weights) -> u32 {
        let (likeliest, best) = argmax(logits);
        if self.temperature <= 0.0 {
            return likeliest;
        }
        weights.compute(logits, best, self.temperature);
        let counts = self.top_k > 0 && (self.top_k as usize) < logits.len();
        let (mut kept, mut sum) = match counts {
            true => weights.first(Goal::Count(u64::from(self.top_k))),
            false => (Kept::ALL, weights.sum_of(Kept::ALL)),
        };
        if let Some(share) = self.share() {
            (kept, sum) = weights.first(Goal::Sum(share_of(sum, share).max(1)));
        }
        let limited = kept.at_least(self.least());
        if limited != kept {
            (kept, sum) = (limited, weights.sum_of(limited));
        }
        weights.at(kept, share_of(sum, self.draw)).unwrap_or(likeliest)
    }

    /// [`Self::min_p`] in units of 2^-30.
    pub fn least(&self) -> u32 {
        (self.min_p * ONE as f32) as u32
    }

    /// [`Self::top_p`] in units of 2^-32; `None` if all tokens are kept.
    pub fn share(&self) -> Option<u32> {
        (self.top_p < 1.0).then(|| (f64::from(self.top_p) * 4_294_967_296.0) as u32)
    }
}

/// [`Choice::choose`] for one kind of vectors.
struct Chooses<'a> {
    choice: &'a Choice,
    logits: &'a [f32],
    weights: &'a mut Weights,
    token: &'a mut u32,
}

impl Work for Chooses<'_> {
    #[inline(always)]
    fn run(self) {
        *self.token = self.choice.choose_inlined(self.logits, self.weights);
    }
}

/// How outputs are chosen from the rows of a step.
#[derive(Debug, Clone, Copy)]
pub struct Choices<'a> {
    /// Outputs are limited to `cap * tanh(output / cap)` first.
    pub cap: Option<f32>,
    /// How outputs are changed then: one for each of the first rows, or empty. If any of them is
    /// not empty, chosen outputs have their values after cap and edits.
    pub edits: &'a [RowEdits],
    /// One for each of the first rows.
    pub rows: &'a [Choice],
    /// Draws for the same rows of the next step, if it will have the same sequences, each with one
    /// token more; otherwise empty. With them, a device can choose before the host asks.
    pub next_draws: &'a [u32],
    /// How many of the likeliest outputs are reported of each row, with how likely the chosen one
    /// is, after the cap; `None`: neither. Of a row that is changed, the report is undefined.
    pub likely: Option<usize>,
}

/// Memory for choices.
#[derive(Debug, Default)]
pub struct ChoiceScratch {
    weights: Weights,
    changed: Vec<f32>,
}

impl Choices<'_> {
    /// True if any row is changed.
    pub fn is_edited(&self) -> bool {
        self.edits.iter().any(|edits| !edits.is_empty())
    }

    /// Numbers that are reported of each row, as [`RowLikelihoods`] has them.
    pub fn likely_words(&self) -> usize {
        self.likely.map_or(0, RowLikelihoods::words)
    }

    /// The chosen outputs of the first rows, and what is reported of them.
    pub fn of_rows<'r>(
        &self,
        rows: impl Iterator<Item = &'r [f32]>,
        scratch: &mut ChoiceScratch,
        chosen: &mut [Largest],
        likely: &mut [f32],
    ) {
        let words = self.likely_words();
        for (index, (chosen, row)) in chosen.iter_mut().zip(rows).enumerate() {
            *chosen = self.of_row(index, row, scratch, &mut likely[index * words..][..words]);
        }
    }

    /// The chosen output of row number `index`; NaN if an output is not finite. Fills in what is
    /// reported of it.
    pub fn of_row(
        &self,
        index: usize,
        row: &[f32],
        scratch: &mut ChoiceScratch,
        likely: &mut [f32],
    ) -> Largest {
        if !are_finite(row) {
            return Largest { column: 0, value: f32::NAN };
        }
        let ChoiceScratch { weights, changed } = scratch;
        let edits = self.edits.get(index).filter(|edits| !edits.is_empty());
        let logits = match (self.cap, edits) {
            (None, None) => row,
            (cap, edits) => {
                changed.clear();
                match cap {
                    Some(cap) => changed.extend(row.iter().map(|output| cap * (output / cap).tanh())),
                    None => changed.extend_from_slice(row),
                }
                edits.into_iter().for_each(|edits| edits.apply(changed));
                &changed[..]
            }
        };
        let column = self.rows[index].choose(logits, weights);
        if !likely.is_empty() {
            RowLikelihoods::fill(logits, column, likely);
        }
        let values = if self.is_edited() { logits } else { row };
        Largest { column, value: values[column as usize] }
    }
}

/// `sum * share / 2^32`, rounded down.
fn share_of(sum: u64, share: u32) -> u64 {
    ((u128::from(sum) * u128::from(share)) >> 32) as u64
}

/// Whether all numbers are finite. Zero times a number is zero unless it is not, and sums are
/// faster than a search.
pub fn are_finite(numbers: &[f32]) -> bool {
    let (chunks, rest) = numbers.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            sums[lane] += chunk[lane] * 0.0;
        }
    }
    rest.iter().map(|number| number * 0.0).chain(sums).sum::<f32>() == 0.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What [`Choice`] describes, with all tokens sorted.
    fn by_sorting(choice: &Choice, logits: &[f32], weights: &mut Weights) -> u32 {
        weights.compute(logits, argmax(logits).1, choice.temperature);
        let mut all: Vec<(u32, u64)> =
            (0..logits.len() as u32).map(|id| (id, u64::from(weights.of(id)))).collect();
        all.sort_by_key(|token| (u64::MAX - token.1, token.0));
        if choice.top_k > 0 {
            all.truncate(choice.top_k as usize);
        }
        let sum = |all: &[(u32, u64)]| all.iter().map(|token| token.1).sum::<u64>();
        if let Some(share) = choice.share() {
            let mut left = share_of(sum(&all), share).max(1) as i64;
            all.retain(|token| {
                let is_needed = left > 0;
                left -= token.1 as i64;
                is_needed
            });
        }
        all.retain(|token| token.1 >= u64::from(choice.least()));
        let mut left = share_of(sum(&all), choice.draw) as i64;
        all.sort_unstable();
        let exceeds = |token: &&(u32, u64)| {
            left -= token.1 as i64;
            left < 0
        };
        all.iter().find(exceeds).expect("the sum exceeds it").0
    }

    /// Logits of few different values, so that many weights are equal, or of many.
    fn logits() -> impl Strategy<Value = Vec<f32>> {
        let few = prop::collection::vec((0u8..6).prop_map(|level| f32::from(level) * 0.9), 1..3000);
        prop_oneof![few, prop::collection::vec(-25.0f32..4.0, 1..3000)]
    }

    proptest! {
        #[test]
        fn choices_are_those_of_sorted_tokens(
            logits in logits(),
            temperature in 0.05f32..3.0,
            top_k in prop_oneof![Just(0u32), 1u32..60, 1u32..4000],
            top_p in prop_oneof![Just(1.0f32), 0.0f32..1.0],
            min_p in prop_oneof![Just(0.0f32), 0.0f32..1.0],
            draws in prop::collection::vec(any::<u32>(), 20),
        ) {
            let mut weights = Weights::default();
            for draw in draws.into_iter().chain([0, u32::MAX]) {
                let choice = Choice { temperature, top_k, top_p, min_p, draw };
                let expected = by_sorting(&choice, &logits, &mut weights);
                prop_assert_eq!(choice.choose(&logits, &mut weights), expected, "{:?}", choice);
            }
        }
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0f32, 1.0, 2.0, -30.0];
        let (mut counts, mut weights) = ([0; 4], Weights::default());
        for draw in (0..20_000u32).map(|n| n.wrapping_mul(0x9e37_79b9)) {
            counts[Choice { temperature: 1.0, draw, ..Choice::LARGEST }.choose(&logits, &mut weights)
                as usize] += 1;
        }
        let total: f32 = logits.iter().map(|l| l.exp()).sum();
        for (count, logit) in counts.iter().zip(logits) {
            assert!((*count as f32 / 20_000.0 - logit.exp() / total).abs() < 0.001, "{counts:?}");
        }
    }
}
