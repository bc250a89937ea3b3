//! How likely tokens are.

use super::weights::{BLOCK, LANES, argmax, power_of_two};
use crate::cpu::simd::widest::{Work, widest};

/// Logits of a chunk. A chunk without a logit above the smallest one that is kept is skipped.
const CHUNK: usize = 64;

/// The natural logarithm of the sum of the exponentials of logits, which must be finite. A token's
/// log-probability is its logit minus this. The error is less than 4e-6.
pub fn log_sum(logits: &[f32]) -> f64 {
    let mut log_sum = 0.0;
    widest(LogSum { logits, log_sum: &mut log_sum });
    log_sum
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
    log_sum: &'a mut f64,
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
        *self.log_sum = f64::from(best) + sum.ln();
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
    fn sums_over_large_vocabularies_are_exact_enough() {
        let mut random = thunder_testing::Random::new(7);
        for (best, spread) in [(0.0, 1e-3), (0.0, 12.0), (40.0, 1.0)] {
            let mut logits: Vec<f32> = (0..262_144).map(|_| random.float() * spread).collect();
            logits[70_001] += best;
            let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
            let error = (log_sum(&logits) - sum.ln()).abs();
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
            prop_assert!((log_sum(&logits) - sum.ln()).abs() < 1e-6);
        }
    }
}
