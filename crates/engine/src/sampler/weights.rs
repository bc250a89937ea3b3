//! Weights of tokens: what their probabilities are in proportion to.

/// Numbers that are summed separately, so that compilers use vectors.
const LANES: usize = 16;
/// Tokens of a block, whose sum is stored.
const BLOCK: usize = 1024;

/// Tokens between two bounds that need not be brought closer.
const FEW: usize = 256;

/// Weights of all tokens, and their sums.
#[derive(Debug, Default)]
pub struct Weights {
    all: Vec<f32>,
    /// Sums of blocks of [`BLOCK`].
    sums: Vec<f64>,
}

impl Weights {
    /// Computes `exp((logit - best) / temperature)` of each logit: at most 1, and 0 below 2^-126.
    pub fn compute(&mut self, logits: &[f32], best: f32, temperature: f32) {
        let factor = std::f32::consts::LOG2_E / temperature;
        self.all.clear();
        self.all.extend(logits.iter().map(|&logit| power_of_two((logit - best) * factor)));
        self.sums.clear();
        self.sums.extend(self.all.chunks(BLOCK).map(|block| f64::from(sum_from(block, 0.0).0)));
    }

    /// A token's weight.
    pub fn of(&self, id: u32) -> f64 {
        f64::from(self.all[id as usize])
    }

    /// The sum of all weights.
    pub fn total(&self) -> f64 {
        self.sums.iter().sum()
    }

    /// Number and sum of the weights that are at least `least`.
    pub fn from(&self, least: f32) -> (usize, f64) {
        let add = |(count, sum): (usize, f64), block: &[f32]| {
            let (of_block, more) = sum_from(block, least);
            (count + more as usize, sum + f64::from(of_block))
        };
        self.all.chunks(BLOCK).fold((0, 0.0), add)
    }

    /// The sum of these tokens' weights.
    pub fn sum_of(&self, tokens: &[(f32, u32)]) -> f64 {
        tokens.iter().map(|token| self.of(token.1)).sum()
    }

    /// How many of these tokens, from the first on, have weights that sum to at least `sum`; all if
    /// they do not.
    pub fn count_to(&self, tokens: &[(f32, u32)], sum: f64) -> usize {
        let mut left = sum;
        let counts = |token: &&(f32, u32)| {
            let is_needed = left > 0.0;
            left -= self.of(token.1);
            is_needed
        };
        tokens.iter().take_while(counts).count()
    }

    /// The one of these tokens at which their sum so far exceeds `target`; the last one if none
    /// does.
    pub fn find_among(&self, tokens: &[(f32, u32)], target: f64) -> Option<u32> {
        let mut left = target;
        let exceeds = |token: &&(f32, u32)| {
            left -= self.of(token.1);
            left < 0.0
        };
        tokens.iter().find(exceeds).or(tokens.last()).map(|token| token.1)
    }

    /// The tokens with at least this weight.
    pub fn tokens_from(&self, least: f32) -> impl Iterator<Item = u32> {
        let blocks = self.all.chunks(LANES).zip((0..).step_by(LANES));
        let some = blocks.filter(move |(block, _)| block.iter().fold(false, |any, w| any | (*w >= least)));
        some.flat_map(move |(block, first)| {
            block.iter().zip(first..).filter(move |(w, _)| **w >= least).map(|(_, id)| id)
        })
    }

    /// An upper and a lower bound: weights from the upper one on sum to less than `sum`, those from
    /// the lower one on to at least `sum`, as those from `least` on do. Few are between them, or
    /// only equal ones.
    pub fn bounds_of(&self, sum: f64, least: f32) -> [f32; 2] {
        // Positive numbers have the order of their bits. No weight is above 1.
        let (mut upper, mut lower) = ((1.0f32.to_bits() + 1, 0), (least.to_bits(), self.all.len()));
        while upper.0 - lower.0 > 1 && lower.1 - upper.1 > FEW {
            let middle = lower.0 + (upper.0 - lower.0) / 2;
            let (count, of_middle) = self.from(f32::from_bits(middle));
            *(if of_middle < sum { &mut upper } else { &mut lower }) = (middle, count);
        }
        [upper, lower].map(|(bits, _)| f32::from_bits(bits))
    }

    /// Of the tokens with at least the weight `least`, the one at which their sum so far exceeds
    /// `target`; `None` if their sum does not.
    pub fn find_from(&self, least: f32, target: f64) -> Option<u32> {
        let mut left = target;
        for (block, first) in self.all.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
            let sum = f64::from(sum_from(block, least).0);
            if left >= sum {
                left -= sum;
                continue;
            }
            for (weight, id) in block.iter().zip(first..).filter(|(weight, _)| **weight >= least) {
                left -= f64::from(*weight);
                if left < 0.0 {
                    return Some(id);
                }
            }
        }
        None
    }

    /// The token at which the sum of all weights so far exceeds `target`; the last one with a
    /// weight if none does.
    pub fn find(&self, target: f64) -> u32 {
        let (mut left, mut last) = (target, 0);
        for (block, sum) in self.sums.iter().enumerate() {
            let first = block * BLOCK;
            let end = self.all.len().min(first + BLOCK);
            if left >= *sum && end < self.all.len() {
                left -= sum;
                continue;
            }
            for id in first..end {
                let weight = self.all[id];
                if weight > 0.0 {
                    last = id as u32;
                    left -= f64::from(weight);
                }
                if left < 0.0 {
                    return last;
                }
            }
        }
        last
    }
}

/// Sum and number of the numbers that are at least `least`.
fn sum_from(numbers: &[f32], least: f32) -> (f32, f32) {
    let (mut sums, mut counts) = ([0.0f32; LANES], [0.0f32; LANES]);
    let (chunks, rest) = numbers.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            let counts_in = chunk[lane] >= least;
            sums[lane] += if counts_in { chunk[lane] } else { 0.0 };
            counts[lane] += if counts_in { 1.0 } else { 0.0 };
        }
    }
    let rest = rest.iter().filter(|number| **number >= least);
    let (mut sum, mut count) = (sums.iter().sum::<f32>(), counts.iter().sum::<f32>());
    for number in rest {
        sum += number;
        count += 1.0;
    }
    (sum, count)
}

/// `2^x` of a number of at most 0, with a relative error of 2e-7; 0 below 2^-126. In plain
/// operations, so that compilers use vectors and every machine has the same bits.
fn power_of_two(x: f32) -> f32 {
    // Added to a number, it leaves the nearest whole number in the last bits.
    const ROUNDING: f32 = 12_582_912.0;
    let bounded = if x > -126.0 { x } else { -126.0 };
    let rounded = bounded + ROUNDING;
    let fraction = bounded - (rounded - ROUNDING);
    // The Taylor series of e^(fraction ln 2), where |fraction| is at most a half.
    const C: [f32; 6] =
        [std::f32::consts::LN_2, 0.240_226_5, 0.055_504_11, 0.009_618_129, 0.001_333_355_8, 0.000_154_035_3];
    let series = C[5] * fraction + C[4];
    let series = series * fraction + C[3];
    let series = series * fraction + C[2];
    let series = series * fraction + C[1];
    let series = series * fraction + C[0];
    let series = series * fraction + 1.0;
    let exponent = rounded.to_bits().wrapping_sub(ROUNDING.to_bits()).wrapping_add(127) << 23;
    let power = series * f32::from_bits(exponent);
    if x >= -126.0 { power } else { 0.0 }
}

/// The largest logit and its token; the lowest of equal ones.
pub fn argmax(logits: &[f32]) -> (u32, f32) {
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut most = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            most[lane] = if chunk[lane] > most[lane] { chunk[lane] } else { most[lane] };
        }
    }
    let best = most.iter().chain(rest).fold(f32::NEG_INFINITY, |best, &x| if x > best { x } else { best });
    let of_chunk = chunks.iter().position(|chunk| chunk.iter().fold(false, |any, &x| any | (x == best)));
    let first = of_chunk.map_or(chunks.len() * LANES, |chunk| chunk * LANES);
    let at = logits[first..].iter().position(|&logit| logit == best);
    (at.map_or(0, |at| (first + at) as u32), best)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn powers_of_two_are_exact_to_the_last_bits() {
        let mut x = 0.0f32;
        while x > -126.0 {
            let exact = f64::from(x).exp2();
            assert!((f64::from(power_of_two(x)) / exact - 1.0).abs() < 4e-7, "2^{x}");
            x -= 0.037;
        }
        assert_eq!([0.0, -1.0, -126.0].map(power_of_two), [1.0, 0.5, f32::MIN_POSITIVE]);
        assert_eq!([-126.1, -1e30, f32::NEG_INFINITY, f32::NAN].map(power_of_two), [0.0; 4]);
    }

    proptest! {
        #[test]
        fn sums_and_places_are_those_of_a_plain_loop(
            logits in prop::collection::vec(-30.0f32..8.0, 1..3000),
            draw in 0.0f64..1.0,
            least in 1e-9f32..1.0,
        ) {
            let mut weights = Weights::default();
            let (best, most) = argmax(&logits);
            prop_assert_eq!(logits.iter().position(|&x| x == most), Some(best as usize));
            weights.compute(&logits, most, 0.7);
            let all: Vec<f64> = (0..logits.len() as u32).map(|id| weights.of(id)).collect();
            let total: f64 = all.iter().sum();
            prop_assert!((weights.total() / total - 1.0).abs() < 1e-5);
            let ids: Vec<u32> = weights.tokens_from(least).collect();
            let expected = (0..).zip(&all).filter(|(_, w)| **w >= f64::from(least)).map(|(id, _)| id);
            prop_assert_eq!(&ids, &expected.collect::<Vec<u32>>());
            let (count, sum) = weights.from(least);
            let of_ids: f64 = ids.iter().map(|id| weights.of(*id)).sum();
            prop_assert!(count == ids.len() && (sum / of_ids - 1.0).abs() < 1e-5);
            let found = weights.find(draw * weights.total());
            let before: f64 = all[..found as usize].iter().sum();
            let rounding = 1e-5 * total;
            let target = draw * total;
            prop_assert!(before <= target + rounding && target <= before + weights.of(found) + rounding);
        }
    }
}
