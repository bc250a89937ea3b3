//! Weights of tokens: what their probabilities are in proportion to.

/// Numbers that are processed together, so that compilers use vectors.
pub(super) const LANES: usize = 16;
/// Tokens of a block, whose sum is found before its tokens are looked at.
pub(super) const BLOCK: usize = 1024;
/// The weight of the most probable token.
pub(super) const ONE: u32 = 1 << 30;
/// Tokens are looked at if their weight is at least this, or this divided by 16 several times if
/// these do not suffice.
const FIRST_CUT: u32 = ONE >> 4;
/// Tokens between two weights that need not be brought closer.
const FEW: u64 = 256;

/// Tokens that are kept: those with more than a weight, and the first of those that have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    weight: u32,
    /// How many of the tokens that have it are kept.
    ties: usize,
}

impl Kept {
    /// All tokens that have a weight.
    pub const ALL: Self = Self { weight: 0, ties: 0 };

    /// Those that have at least this weight.
    #[must_use]
    pub fn at_least(self, weight: u32) -> Self {
        if weight > self.weight { Self { weight: weight - 1, ties: 0 } } else { self }
    }
}

/// What tokens must have in all.
#[derive(Debug, Clone, Copy)]
pub enum Goal {
    /// Their number.
    Count(u64),
    /// The sum of their weights.
    Sum(u64),
}

impl Goal {
    /// What these tokens have of it.
    #[inline(always)]
    fn of(self, tokens: Tokens) -> u64 {
        match self {
            Self::Count(_) => tokens.count,
            Self::Sum(_) => tokens.sum,
        }
    }
}

/// All tokens with at least a weight.
#[derive(Debug, Clone, Copy)]
struct Tokens {
    least: u32,
    count: u64,
    sum: u64,
}

/// Weights of all tokens, at most [`ONE`].
#[derive(Debug, Default)]
pub struct Weights {
    all: Vec<u32>,
    /// Weights between two others.
    candidates: Vec<u32>,
}

impl Weights {
    /// Computes `exp((logit - best) / temperature)` of each logit, in units of 2^-30.
    #[inline(always)]
    pub fn compute(&mut self, logits: &[f32], best: f32, temperature: f32) {
        let factor = std::f32::consts::LOG2_E / temperature;
        self.all.resize(logits.len(), 0);
        for (weight, logit) in self.all.iter_mut().zip(logits) {
            let bits = power_of_two((logit - best) * factor).to_bits();
            // A conversion of the float has too many special cases for a vector.
            let (exponent, digits) = (bits >> 23, bits & 0x007f_ffff | 0x0080_0000);
            *weight = digits << 7 >> 127u32.wrapping_sub(exponent).min(31);
        }
    }

    /// A token's weight.
    #[cfg(test)]
    pub fn of(&self, id: u32) -> u32 {
        self.all[id as usize]
    }

    /// The sum of the kept tokens' weights.
    #[inline(always)]
    pub fn sum_of(&self, kept: Kept) -> u64 {
        let above: u64 = self.all.chunks(BLOCK).map(|block| above(block, kept.weight).1).sum();
        above + kept.ties as u64 * u64::from(kept.weight)
    }

    /// Number and sum of the weights that are at least `least`.
    #[inline(always)]
    fn from(&self, least: u32) -> Tokens {
        let add = |all: Tokens, block: &[u32]| {
            let (count, sum) = above(block, least - 1);
            Tokens { count: all.count + count, sum: all.sum + sum, ..all }
        };
        self.all.chunks(BLOCK).fold(Tokens { least, count: 0, sum: 0 }, add)
    }

    /// The fewest first tokens that reach the goal, or all, and the sum of their weights.
    #[inline(always)]
    pub fn first(&mut self, goal: Goal) -> (Kept, u64) {
        let (Goal::Count(wanted) | Goal::Sum(wanted)) = goal;
        // The first tokens that do not reach the goal, and more that do.
        let mut upper = Tokens { least: ONE + 1, count: 0, sum: 0 };
        let mut lower = self.from(FIRST_CUT);
        while goal.of(lower) < wanted {
            if lower.least == 1 {
                return (Kept::ALL, lower.sum);
            }
            upper = lower;
            lower = self.from((lower.least >> 4).max(1));
        }
        while upper.least - lower.least > 1 && lower.count - upper.count > FEW {
            // Weights are close to each other in proportion, not in difference.
            let middle = match upper.least.ilog2() - lower.least.ilog2() {
                0 | 1 => lower.least + (upper.least - lower.least) / 2,
                doublings => lower.least << (doublings / 2),
            };
            let middle = self.from(middle);
            *(if goal.of(middle) < wanted { &mut upper } else { &mut lower }) = middle;
        }
        let Self { all, candidates } = self;
        candidates.clear();
        let is_between = |weight: &u32| (lower.least..upper.least).contains(weight);
        for chunk in all.chunks(LANES) {
            if chunk.iter().fold(false, |any, weight| any | is_between(weight)) {
                candidates.extend(chunk.iter().filter(|weight| is_between(weight)));
            }
        }
        candidates.sort_unstable_by(|a, b| b.cmp(a));
        let (mut tokens, mut ties, mut before) = (upper, 0, 0);
        for &weight in candidates.iter() {
            ties = if weight == before { ties + 1 } else { 1 };
            before = weight;
            tokens = Tokens { count: tokens.count + 1, sum: tokens.sum + u64::from(weight), ..tokens };
            if goal.of(tokens) >= wanted {
                break;
            }
        }
        (Kept { weight: before, ties }, tokens.sum)
    }

    /// The kept token at which the sum so far, in the order of ids, exceeds `target`; `None` if the
    /// sum of all does not.
    #[inline(always)]
    pub fn at(&self, kept: Kept, target: u64) -> Option<u32> {
        let (mut left, mut ties) = (target, kept.ties);
        for (block, first) in self.all.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
            let of_block = match ties {
                0 => 0,
                _ => block.iter().filter(|weight| **weight == kept.weight).count().min(ties),
            };
            let sum = above(block, kept.weight).1 + of_block as u64 * u64::from(kept.weight);
            if left >= sum {
                (left, ties) = (left - sum, ties - of_block);
                continue;
            }
            for (&weight, id) in block.iter().zip(first..) {
                let is_tie = weight == kept.weight && ties > 0;
                ties -= usize::from(is_tie);
                if !is_tie && weight <= kept.weight {
                    continue;
                }
                if left < u64::from(weight) {
                    return Some(id);
                }
                left -= u64::from(weight);
            }
        }
        None
    }
}

/// Number and sum of a block's weights above this one.
#[inline(always)]
fn above(weights: &[u32], least: u32) -> (u64, u64) {
    debug_assert!(weights.len() <= BLOCK);
    // The lower 16 bits and the others separately: 64 numbers of a lane do not overflow.
    let [mut counts, mut low, mut high] = [[0u32; LANES]; 3];
    let (chunks, rest) = weights.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            let is_above = chunk[lane] > least;
            let weight = if is_above { chunk[lane] } else { 0 };
            counts[lane] += u32::from(is_above);
            low[lane] += weight & 0xffff;
            high[lane] += weight >> 16;
        }
    }
    let sum = |lanes: [u32; LANES]| lanes.iter().map(|lane| u64::from(*lane)).sum::<u64>();
    let all = (sum(counts), sum(low) + (sum(high) << 16));
    let rest = rest.iter().filter(|weight| **weight > least);
    rest.fold(all, |(count, sum), weight| (count + 1, sum + u64::from(*weight)))
}

/// `2^x` of a number of at most 0, with a relative error of 2e-7; 0 below 2^-126. In plain
/// operations, so that compilers use vectors and every machine has the same bits.
#[inline(always)]
pub(super) fn power_of_two(x: f32) -> f32 {
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
#[inline(always)]
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
}
