//! How likely tokens are.

use super::weights::{BLOCK, LANES, argmax, power_of_two};
use crate::cpu::simd::widest::{Work, widest};

/// Logits that are compared with the least of the largest before they are looked at one by one.
const CHUNK: usize = 64;

/// The natural logarithm of the sum of all logits' exponentials, which are all finite. A token's
/// log-probability is its logit minus this.
pub fn log_sum(logits: &[f32]) -> f64 {
    let mut log_sum = 0.0;
    widest(LogSum { logits, log_sum: &mut log_sum });
    log_sum
}

/// The tokens with the largest logits, at most `count`, the largest first; of equal ones, the one
/// with the lowest id.
pub fn likeliest(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
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
                let place = found.partition_point(|found| found.1 >= logit);
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
