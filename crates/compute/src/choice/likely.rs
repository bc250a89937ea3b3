//! How likely tokens are.

use super::weights::{BLOCK, LANES, argmax, power_of_two};
use crate::cpu::simd::widest::{Work, widest};

/// Logits of a chunk. A chunk without a logit above the smallest one that is kept is skipped.
const CHUNK: usize = 64;
/// Numbers of [`RowLikelihoods`] before those of the likeliest tokens.
const HEAD_WORDS: usize = 3;

/// The probabilities of tokens, as natural logarithms.
#[derive(Debug, Clone, Copy)]
pub struct Likelihoods {
    best: f32,
    /// The logarithm of the sum of all exponentials, relative to the best logit's.
    log_sum: f64,
}

impl Likelihoods {
    /// Those that follow from these logits, which must be finite. The error is less than 4e-6.
    pub fn new(logits: &[f32]) -> Self {
        let mut all = Self { best: 0.0, log_sum: 0.0 };
        widest(LogSum { logits, all: &mut all });
        all
    }

    /// Of a token with this logit.
    pub fn of(self, logit: f32) -> f32 {
        (f64::from(logit) - f64::from(self.best) - self.log_sum) as f32
    }
}

/// How likely a row's chosen token is, and its likeliest tokens.
#[derive(Debug, Clone, Copy)]
pub struct RowLikelihoods<'a>(&'a [f32]);

impl<'a> RowLikelihoods<'a> {
    /// Reads the numbers of a row, [`Self::words`] as they are.
    pub fn from_words(words: &'a [f32]) -> Option<Self> {
        (words.len() >= HEAD_WORDS).then_some(Self(words))
    }

    /// Numbers of a row with this many of the likeliest tokens: its largest logit, the logarithm of
    /// the sum of all exponentials relative to that one's, the chosen token's logit, then the bits
    /// of an id and its logit for each of these tokens. If the vocabulary has less of them, the id
    /// is `u32::MAX`.
    pub const fn words(count: usize) -> usize {
        HEAD_WORDS + 2 * count
    }

    /// Fills in the numbers of a row with these logits.
    pub(super) fn fill(logits: &[f32], chosen: u32, words: &mut [f32]) {
        let (head, top) = words.split_at_mut(HEAD_WORDS);
        let all = Likelihoods::new(logits);
        head.copy_from_slice(&[all.best, all.log_sum as f32, logits[chosen as usize]]);
        let top = top.as_chunks_mut::<2>().0;
        let found =
            likeliest(logits, top.len()).into_iter().chain(std::iter::repeat((u32::MAX, f32::NEG_INFINITY)));
        for (words, (id, logit)) in top.iter_mut().zip(found) {
            *words = [f32::from_bits(id), logit];
        }
    }

    /// The chosen token's log-probability.
    pub fn chosen(self) -> f32 {
        self.all().of(self.0[2])
    }

    /// The likeliest tokens and their log-probabilities, the likeliest first.
    pub fn likeliest(self) -> impl Iterator<Item = (u32, f32)> + use<'a> {
        let all = self.all();
        let top = self.0[HEAD_WORDS..].as_chunks::<2>().0.iter();
        top.map(move |[id, logit]| (id.to_bits(), all.of(*logit))).filter(|(id, _)| *id != u32::MAX)
    }

    fn all(self) -> Likelihoods {
        Likelihoods { best: self.0[0], log_sum: f64::from(self.0[1]) }
    }
}

/// The tokens with the largest logits, at most `count`, the largest first; of equal ones, the one
/// with the lowest id. Logits must be finite.
pub fn likeliest(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let count = count.min(logits.len());
    let mut found = Vec::with_capacity(count + 1);
    if count > 0 {
        widest(Likeliest { logits, count, found: &mut found });
    }
    found
}

struct LogSum<'a> {
    logits: &'a [f32],
    all: &'a mut Likelihoods,
}

impl Work for LogSum<'_> {
    #[inline(always)]
    fn run(self) {
        let best = argmax(self.logits).1;
        let power = |logit: f32| power_of_two((logit - best) * std::f32::consts::LOG2_E);
        let mut sum = 0.0;
        for block in self.logits.chunks(BLOCK) {
            let (chunks, rest) = block.as_chunks::<LANES>();
            let mut sums = [0.0f32; LANES];
            for chunk in chunks {
                for lane in 0..LANES {
                    sums[lane] += power(chunk[lane]);
                }
            }
            let rest = rest.iter().map(|logit| power(*logit));
            sum += sums.into_iter().chain(rest).map(f64::from).sum::<f64>();
        }
        *self.all = Likelihoods { best, log_sum: sum.ln() };
    }
}

struct Likeliest<'a> {
    logits: &'a [f32],
    count: usize,
    found: &'a mut Vec<(u32, f32)>,
}

impl Work for Likeliest<'_> {
    #[inline(always)]
    fn run(self) {
        let Self { logits, count, found } = self;
        for (chunk, first) in logits.chunks(CHUNK).zip((0..).step_by(CHUNK)) {
            let least = if found.len() < count { f32::NEG_INFINITY } else { found[count - 1].1 };
            if !chunk.iter().fold(false, |any, logit| any | (*logit > least)) {
                continue;
            }
            for (id, &logit) in (first..).zip(chunk) {
                // Tokens before this one have lower ids.
                let place = found.partition_point(|likelier| likelier.1 >= logit);
                if place < count {
                    found.insert(place, (id, logit));
                    found.truncate(count);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn likelihoods_are_those_of_the_softmax() {
        let logits = [0.0, 2.0, 1.0];
        let total = (1.0f32 + 2f32.exp() + 1f32.exp()).ln();
        let likelihoods = Likelihoods::new(&logits);
        assert!((likelihoods.of(0.0) + total).abs() < 1e-6);
        // One more than the vocabulary has.
        let mut words = vec![0.0; RowLikelihoods::words(4)];
        RowLikelihoods::fill(&logits, 2, &mut words);
        let row = RowLikelihoods::from_words(&words).unwrap();
        assert!((row.chosen() - (1.0 - total)).abs() < 1e-6);
        let ids: Vec<u32> = row.likeliest().map(|(id, _)| id).collect();
        assert_eq!(ids, [1, 2, 0]);
        assert!(row.likeliest().all(|(id, it)| (it - likelihoods.of(logits[id as usize])).abs() < 1e-6));
        assert!(RowLikelihoods::from_words(&[]).is_none());
    }

    #[test]
    fn sums_over_large_vocabularies_are_exact_enough() {
        let mut random = thunder_testing::Random::new(7);
        for (best, spread) in [(0.0, 1e-3), (0.0, 12.0), (40.0, 1.0)] {
            let mut logits: Vec<f32> = (0..262_144).map(|_| random.float() * spread).collect();
            logits[70_001] += best;
            let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
            let error = (f64::from(-Likelihoods::new(&logits).of(0.0)) - sum.ln()).abs();
            assert!(error < 4e-6, "{best}, {spread}: {error:e}");
        }
    }

    proptest! {
        #[test]
        fn likelihoods_are_those_of_sorting_and_of_double_precision(
            logits in prop::collection::vec((-400i16..400).prop_map(|x| f32::from(x) * 0.05), 1..3000),
            count in 0usize..25,
        ) {
            let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
            all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            all.truncate(count);
            prop_assert_eq!(likeliest(&logits, count), all);
            let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
            let all = Likelihoods::new(&logits);
            prop_assert!((f64::from(all.best) + all.log_sum - sum.ln()).abs() < 1e-6);
        }
    }
}
