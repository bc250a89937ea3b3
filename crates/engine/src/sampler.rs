//! Chooses a token from logits.

mod weights;

use crate::sampling::Sampling;
use weights::Weights;
pub use weights::argmax;

/// Tokens are candidates if their weight is at least this, or a power of it if these do not
/// suffice. The likeliest token has weight 1.
const FIRST_CUT: f32 = 1.0 / 16.0;
/// A nucleus among more candidates is not sorted.
const MANY_CANDIDATES: usize = 4096;
/// Below this temperature the choice is greedy: with f32 logits, other tokens' probabilities round
/// to 0.
const COLDEST: f32 = 1e-5;

/// One request's sampler: its random numbers, and the tokens that penalties count.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    state: u64,
    /// Tokens seen: (id, times generated, in the prompt), sorted by id.
    seen: Vec<(u32, u32, bool)>,
}

/// Memory that all samplers share.
#[derive(Debug, Default)]
pub struct Scratch {
    weights: Weights,
    candidates: Vec<(f32, u32)>,
}

impl Sampler {
    /// A sampler for an answer to `prompt`.
    pub fn new(sampling: &Sampling, prompt: &[u32]) -> Self {
        let mut seen = Vec::new();
        if sampling.repetition_penalty != 1.0 {
            let mut ids = prompt.to_vec();
            ids.sort_unstable();
            ids.dedup();
            seen.extend(ids.into_iter().map(|id| (id, 0, true)));
        }
        // A generated seed need not be secret, only different for each request.
        let state = sampling.seed.unwrap_or_else(|| {
            use std::hash::{BuildHasher, Hasher, RandomState};
            RandomState::new().build_hasher().finish()
        });
        Self { sampling: sampling.clone(), state, seen }
    }

    /// Copies the state of another sampler of the same request. From the same logits, this one then
    /// chooses what the other one will choose.
    pub fn follow(&mut self, other: &Self) {
        self.state = other.state;
        self.seen.clone_from(&other.seen);
    }

    /// True if [`Sampler::choose`] would return the most probable token of the unmodified logits.
    pub fn is_argmax(&self) -> bool {
        let s = &self.sampling;
        s.temperature < COLDEST && s.logit_bias.is_empty() && !self.has_penalties()
    }

    fn has_penalties(&self) -> bool {
        let s = &self.sampling;
        s.repetition_penalty != 1.0 || s.presence_penalty != 0.0 || s.frequency_penalty != 0.0
    }

    /// Chooses a token. Overwrites `logits`, which has one number for each token of the vocabulary.
    pub fn choose(&mut self, logits: &mut [f32], scratch: &mut Scratch) -> u32 {
        self.penalize(logits);
        for &(id, bias) in &self.sampling.logit_bias {
            logits[id as usize] += bias;
        }
        if self.sampling.temperature < COLDEST {
            return argmax(logits).0;
        }
        let draw = self.next_uniform();
        self.draw(logits, draw, scratch)
    }

    /// Continues after a token that another sampler of the same request has chosen.
    pub fn skip(&mut self, id: u32) {
        if self.sampling.temperature >= COLDEST {
            self.next_uniform();
        }
        self.accept(id);
    }

    /// Counts a generated token for the penalties.
    pub fn accept(&mut self, id: u32) {
        if !self.has_penalties() {
            return;
        }
        match self.seen.binary_search_by_key(&id, |entry| entry.0) {
            Ok(at) => self.seen[at].1 += 1,
            Err(at) => self.seen.insert(at, (id, 1, false)),
        }
    }

    fn penalize(&self, logits: &mut [f32]) {
        let s = &self.sampling;
        for &(id, count, _) in &self.seen {
            let logit = &mut logits[id as usize];
            *logit = if *logit > 0.0 { *logit / s.repetition_penalty } else { *logit * s.repetition_penalty };
            if count > 0 {
                *logit -= s.presence_penalty + s.frequency_penalty * count as f32;
            }
        }
    }

    /// A number in 0..1 by SplitMix64 (Steele, Lea, Flood 2014). Each token takes one, so a draw
    /// depends only on the seed and the token's position.
    fn next_uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn draw(&self, logits: &[f32], draw: f64, scratch: &mut Scratch) -> u32 {
        let s = &self.sampling;
        let (likeliest, best) = argmax(logits);
        let Scratch { weights, candidates } = scratch;
        weights.compute(logits, best, s.temperature);
        if s.top_k == 0 && s.top_p >= 1.0 {
            return match s.min_p > 0.0 {
                true => weights.find_from(s.min_p, draw * weights.from(s.min_p).1).unwrap_or(likeliest),
                false => weights.find(draw * weights.total()),
            };
        }
        let (cut, count) = self.cut(weights);
        if s.top_k == 0 && count > MANY_CANDIDATES {
            return self.draw_of_many(logits, draw, cut, scratch).unwrap_or(likeliest);
        }
        candidates.clear();
        candidates.extend(weights.tokens_from(cut).map(|id| (logits[id as usize], id)));
        if s.top_k > 0 && s.top_k < candidates.len() {
            candidates.select_nth_unstable_by(s.top_k, likelier);
            candidates.truncate(s.top_k);
        }
        candidates.sort_unstable_by(likelier);
        if s.top_p < 1.0 {
            let of_k = || f64::from(s.top_p) * weights.sum_of(candidates);
            let nucleus = if s.top_k > 0 { of_k() } else { self.nucleus(weights) };
            let count = weights.count_to(candidates, nucleus);
            candidates.truncate(count.max(1));
        }
        candidates.truncate(candidates.partition_point(|c| weights.of(c.1) >= f64::from(s.min_p)));
        weights.find_among(candidates, draw * weights.sum_of(candidates)).unwrap_or(likeliest)
    }

    /// Draws from a nucleus that has many tokens, without sorting them: only those that may be its
    /// last are.
    fn draw_of_many(&self, logits: &[f32], draw: f64, cut: f32, scratch: &mut Scratch) -> Option<u32> {
        let Scratch { weights, candidates } = scratch;
        let (nucleus, min_p) = (self.nucleus(weights), self.sampling.min_p);
        let [upper, lower] = weights.bounds_of(nucleus, cut);
        let between = weights.tokens_from(lower).filter(|id| weights.of(*id) < f64::from(upper));
        candidates.clear();
        candidates.extend(between.map(|id| (logits[id as usize], id)));
        candidates.sort_unstable_by(likelier);
        candidates.truncate(weights.count_to(candidates, nucleus - weights.from(upper).1));
        candidates.truncate(candidates.partition_point(|c| weights.of(c.1) >= f64::from(min_p)));
        let least = upper.max(min_p);
        let above = weights.from(least).1;
        let target = draw * (above + weights.sum_of(candidates));
        weights.find_from(least, target).or_else(|| weights.find_among(candidates, target - above))
    }

    /// Sum of the weights of the nucleus among all tokens, at least.
    fn nucleus(&self, weights: &Weights) -> f64 {
        f64::from(self.sampling.top_p) * weights.total()
    }

    /// Minimum weight of tokens that can be chosen by `top_k` or `top_p`, and their number.
    fn cut(&self, weights: &Weights) -> (f32, usize) {
        let (top_k, nucleus) = (self.sampling.top_k, self.nucleus(weights));
        let mut cut = FIRST_CUT;
        while cut > f32::MIN_POSITIVE {
            let (count, sum) = weights.from(cut);
            let suffices = if top_k > 0 { count >= top_k } else { sum >= nucleus };
            if suffices {
                return (cut, count);
            }
            cut *= FIRST_CUT;
        }
        (0.0, weights.from(0.0).0)
    }
}

/// The order of candidates: by logit, then by id.
fn likelier(a: &(f32, u32), b: &(f32, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Natural logarithms of probabilities: of token `id`, and of the `count` most probable tokens,
/// best first.
pub fn log_probabilities(
    logits: &[f32],
    id: u32,
    count: usize,
    scratch: &mut Scratch,
) -> (f32, Vec<(u32, f32)>) {
    let log_sum = log_sum(logits);
    let log = |logit: f32| (f64::from(logit) - log_sum) as f32;
    let candidates = &mut scratch.candidates;
    candidates.clear();
    candidates.extend(logits.iter().zip(0..).map(|(&logit, id)| (logit, id)));
    if count > 0 && count < candidates.len() {
        candidates.select_nth_unstable_by(count, likelier);
    }
    candidates.truncate(count);
    candidates.sort_unstable_by(likelier);
    (log(logits[id as usize]), candidates.iter().map(|&(logit, id)| (id, log(logit))).collect())
}

/// Natural logarithms of the probabilities of tokens `ids`.
pub fn log_probabilities_of(logits: &[f32], ids: &[u32]) -> Vec<f32> {
    let log_sum = log_sum(logits);
    ids.iter().map(|&id| (f64::from(logits[id as usize]) - log_sum) as f32).collect()
}

/// The natural logarithm of the sum of all tokens' exponentials.
fn log_sum(logits: &[f32]) -> f64 {
    let best = argmax(logits).1;
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - best).exp()).sum();
    f64::from(best) + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(sampling: Sampling, logits: &[f32], times: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(&Sampling { seed: Some(7), ..sampling }, &[]);
        let mut counts = vec![0; logits.len()];
        for _ in 0..times {
            counts[sampler.choose(&mut logits.to_vec(), &mut Scratch::default()) as usize] += 1;
        }
        counts
    }

    fn plain() -> Sampling {
        Sampling { temperature: 1.0, ..Sampling::default() }
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0, 1.0, 2.0, -30.0];
        let counts = sample(plain(), &logits, 20_000);
        let total: f32 = logits.iter().map(|l: &f32| l.exp()).sum();
        for (count, logit) in counts.iter().zip(logits) {
            assert!((*count as f32 / 20_000.0 - logit.exp() / total).abs() < 0.015, "{counts:?}");
        }
    }

    #[test]
    fn top_k_top_p_and_min_p_remove_unlikely_tokens() {
        let logits = [3.0, 2.0, 1.0, 0.0];
        let possible = |sampling| sample(sampling, &logits, 3000).iter().map(|c| *c > 0).collect::<Vec<_>>();
        assert_eq!(possible(Sampling { top_k: 2, ..plain() }), [true, true, false, false]);
        // Probabilities are 0.64, 0.24, 0.09, 0.03.
        assert_eq!(possible(Sampling { top_p: 0.9, ..plain() }), [true, true, true, false]);
        assert_eq!(possible(Sampling { top_p: 0.01, ..plain() }), [true, false, false, false]);
        assert_eq!(possible(Sampling { min_p: 0.3, ..plain() }), [true, true, false, false]);
        assert_eq!(possible(Sampling { temperature: 0.0, ..plain() }), [true, false, false, false]);
        let banned = Sampling { logit_bias: vec![(0, -100.0)], ..Sampling::default() };
        assert_eq!(possible(banned), [false, true, false, false]);
    }

    #[test]
    fn penalties_lower_tokens_seen_before() {
        for sampling in [
            Sampling { presence_penalty: 1.0, ..Sampling::default() },
            Sampling { frequency_penalty: 1.0, ..Sampling::default() },
            Sampling { repetition_penalty: 2.0, ..Sampling::default() },
        ] {
            let mut sampler = Sampler::new(&sampling, &[]);
            let mut choose = || {
                let id = sampler.choose(&mut [1.0, 0.9, 0.2], &mut Scratch::default());
                sampler.accept(id);
                id
            };
            assert_eq!((choose(), choose()), (0, 1), "{sampling:?}");
        }
        let mut sampler = Sampler::new(&Sampling { repetition_penalty: 2.0, ..Sampling::default() }, &[0]);
        assert_eq!(sampler.choose(&mut [1.0, 0.9], &mut Scratch::default()), 1, "the prompt is counted too");
    }

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let (own, top) = log_probabilities(&[0.0, 2.0, 1.0], 0, 2, &mut Scratch::default());
        let total = (1.0f32 + 2f32.exp() + 1f32.exp()).ln();
        assert!((own + total).abs() < 1e-6);
        assert_eq!(top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2]);
        assert!((top[0].1 - (2.0 - total)).abs() < 1e-6);
    }

    #[test]
    fn a_vocabulary_without_likely_tokens_is_kept_whole() {
        // All are equal: the nucleus is half of them, in the order of their ids.
        let logits = vec![0.0; 10_000];
        let mut sampler = Sampler::new(&Sampling { top_p: 0.5, seed: Some(3), ..plain() }, &[]);
        let ids: Vec<u32> =
            (0..200).map(|_| sampler.choose(&mut logits.clone(), &mut Scratch::default())).collect();
        assert!(ids.iter().all(|id| *id < 5000) && ids.iter().any(|id| *id > 4000), "{ids:?}");
        // More tokens are wanted than have a weight.
        let mut few = vec![f32::NEG_INFINITY; 100];
        few[40] = 1.0;
        assert_eq!(sample(Sampling { top_k: 50, ..plain() }, &few, 20)[40], 20);
    }

    #[test]
    fn a_nucleus_of_many_tokens_is_drawn_from_as_if_it_were_sorted() {
        let mut random = thunder_testing::Random::new(5);
        let logits: Vec<f32> = (0..9000).map(|_| random.below(2000) as f32 / 1000.0).collect();
        let sampling = Sampling { top_p: 0.7, temperature: 1.5, ..Sampling::default() };
        for min_p in [0.0, 0.5, 0.9] {
            let sampler = Sampler::new(&Sampling { min_p, ..sampling.clone() }, &[]);
            let mut all: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
            all.sort_by(likelier);
            let weight = |l: f32| (f64::from(l - all[0].0) / 1.5).exp();
            let nucleus = 0.7 * all.iter().map(|c| weight(c.0)).sum::<f64>();
            let mut sum = 0.0;
            let is_kept = |c: &&(f32, u32)| {
                let is_needed = sum < nucleus;
                sum += weight(c.0);
                is_needed
            };
            let kept: Vec<_> = all.iter().take_while(is_kept).collect();
            let kept: Vec<_> = kept.into_iter().filter(|c| weight(c.0) >= f64::from(min_p)).collect();
            assert!(kept.len() > 500, "{}", kept.len());
            let total: f64 = kept.iter().map(|c| weight(c.0)).sum();
            // Draws at equal distances meet each token as often as its share says.
            let (draws, mut met) = (200_000, vec![0; logits.len()]);
            let mut scratch = Scratch::default();
            let draws_in = (0..draws).step_by(50).map(|i| (f64::from(i) + 0.5) / f64::from(draws));
            draws_in.for_each(|draw| met[sampler.draw(&logits, draw, &mut scratch) as usize] += 50);
            let mut expected = vec![0.0; logits.len()];
            kept.iter().for_each(|c| expected[c.1 as usize] = weight(c.0) / total * f64::from(draws));
            let off = met.iter().zip(&expected).filter(|(met, e)| (f64::from(**met) - **e).abs() > 51.0);
            assert!(off.count() <= 2, "the last token of the nucleus may differ by rounding");
        }
    }

    proptest! {
        #[test]
        fn top_p_keeps_the_same_tokens_as_a_full_sort(
            logits in prop::collection::vec(-4.0f32..4.0, 600..900), top_p in 0.05f32..1.0, draw in 0.0f64..1.0,
        ) {
            let sampler = Sampler::new(&Sampling { top_p, temperature: 0.9, ..Sampling::default() }, &[]);
            let chosen = sampler.draw(&logits, draw, &mut Scratch::default());
            // The definition: sort all tokens, keep the nucleus, walk to the draw.
            let mut all: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
            all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            let weight = |l: f32| (f64::from(l - all[0].0) / f64::from(0.9f32)).exp();
            let total: f64 = all.iter().map(|c| weight(c.0)).sum();
            let mut sum = 0.0;
            let keep = all.iter().take_while(|c| { let before = sum; sum += weight(c.0); before < f64::from(top_p) * total }).count();
            let kept: f64 = all[..keep].iter().map(|c| weight(c.0)).sum();
            let mut left = draw * kept;
            let expected = all[..keep].iter().find(|c| { left -= weight(c.0); left < 1e-9 }).map(|c| c.1);
            let place = |id| all.iter().position(|c| c.1 == id).unwrap() as i64;
            // The sums are computed in another order, which may move a draw to the next token.
            prop_assert!((place(chosen) - expected.map_or(0, place)).abs() <= 1);
        }
    }
}
