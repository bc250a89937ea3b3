//! Chooses a token from logits.

use thunder_compute::choice::{Weights, argmax};
use thunder_compute::{Choice, RowEdits, TokenEdit};

use crate::sampling::Sampling;

/// Below this temperature the choice is greedy: with f32 logits, other tokens' probabilities round
/// to 0.
const COLDEST: f32 = 1e-5;

/// Words of [`Draws`] in a message.
pub const DRAW_WORDS: usize = 6;

/// One request's sampler: its random numbers, and the tokens that penalties count.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    random: RandomNumbers,
    /// Tokens seen: (id, times generated, in the prompt), sorted by id.
    seen: Vec<(u32, u32, bool)>,
}

/// Memory that all samplers share.
#[derive(Debug, Default)]
pub struct Scratch {
    weights: Weights,
    pub edits: RowEdits,
}

/// Random numbers by SplitMix64 (Steele, Lea, Flood 2014). Each token takes one, so a draw depends
/// only on the seed and the token's position.
#[derive(Debug, Clone, Copy, PartialEq)]
struct RandomNumbers(u64);

impl RandomNumbers {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    /// The number after the next `index` ones.
    fn at(self, index: usize) -> u32 {
        let state = self.0.wrapping_add(Self::STEP.wrapping_mul(index as u64 + 1));
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 32) as u32
    }

    fn next(&mut self) -> u32 {
        let number = self.at(0);
        self.0 = self.0.wrapping_add(Self::STEP);
        number
    }
}

/// A request's next choices: a rank that has the logits, after their changes, can choose by itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draws {
    choice: Choice,
    random: RandomNumbers,
}

impl Draws {
    /// The choice after the next `index` ones.
    pub fn at(self, index: usize) -> Choice {
        Choice { draw: self.random.at(index), ..self.choice }
    }

    pub fn words(self) -> [u32; DRAW_WORDS] {
        let Choice { temperature, top_k, top_p, min_p, .. } = self.choice;
        let [low, high] = [self.random.0 as u32, (self.random.0 >> 32) as u32];
        [temperature.to_bits(), top_k, top_p.to_bits(), min_p.to_bits(), low, high]
    }

    pub fn from_words(words: [u32; DRAW_WORDS]) -> Self {
        let [temperature, top_k, top_p, min_p, low, high] = words;
        let [temperature, top_p, min_p] = [temperature, top_p, min_p].map(f32::from_bits);
        let choice = Choice { temperature, top_k, top_p, min_p, draw: 0 };
        Self { choice, random: RandomNumbers(u64::from(high) << 32 | u64::from(low)) }
    }
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
        let seed = sampling.seed.unwrap_or_else(|| {
            use std::hash::{BuildHasher, Hasher, RandomState};
            RandomState::new().build_hasher().finish()
        });
        let mut sampling = sampling.clone();
        sampling.logit_bias.sort_unstable_by_key(|bias| bias.0);
        Self { sampling, random: RandomNumbers(seed), seen }
    }

    /// Copies the state of another sampler of the same request. From the same logits, this one then
    /// chooses what the other one will choose.
    pub fn follow(&mut self, other: &Self) {
        self.random = other.random;
        self.seen.clone_from(&other.seen);
    }

    /// True if [`Sampler::choose`] would return the most probable token of the unmodified logits.
    pub fn is_argmax(&self) -> bool {
        let s = &self.sampling;
        s.temperature < COLDEST && !self.has_edits()
    }

    fn has_penalties(&self) -> bool {
        let s = &self.sampling;
        s.repetition_penalty != 1.0 || s.presence_penalty != 0.0 || s.frequency_penalty != 0.0
    }

    /// Chooses a token, among those that `scratch.edits` allow. Overwrites `logits`, which has one
    /// number for each token of the vocabulary, and clears the edits.
    pub fn choose(&mut self, logits: &mut [f32], scratch: &mut Scratch) -> u32 {
        self.edit(&mut scratch.edits.tokens);
        scratch.edits.apply(logits);
        scratch.edits.clear();
        if self.sampling.temperature < COLDEST {
            return argmax(logits).0;
        }
        let choice = Choice { draw: self.random.next(), ..self.choice() };
        choice.choose(logits, &mut scratch.weights)
    }

    /// The next choices, after the changes of [`Sampler::edit`]; `None` if they are the most
    /// probable tokens.
    pub fn draws(&self) -> Option<Draws> {
        let is_drawn = self.sampling.temperature >= COLDEST;
        is_drawn.then(|| Draws { choice: self.choice(), random: self.random })
    }

    /// True if penalties or biases change logits.
    pub fn has_edits(&self) -> bool {
        !self.sampling.logit_bias.is_empty() || self.has_penalties()
    }

    /// Appends the changes of logits before the next choice.
    pub fn edit(&self, edits: &mut Vec<TokenEdit>) {
        let s = &self.sampling;
        let (mut seen, mut biases) = (self.seen.iter().peekable(), s.logit_bias.iter().peekable());
        loop {
            let next = [seen.peek().map(|seen| seen.0), biases.peek().map(|bias| bias.0)];
            let Some(token) = next.into_iter().flatten().min() else { return };
            let mut edit = TokenEdit { token, repetition: 1.0, added: 0.0 };
            if let Some((_, count, _)) = seen.next_if(|seen| seen.0 == token) {
                edit.repetition = s.repetition_penalty;
                if *count > 0 {
                    edit.added -= s.presence_penalty + s.frequency_penalty * *count as f32;
                }
            }
            while let Some((_, bias)) = biases.next_if(|bias| bias.0 == token) {
                edit.added += bias;
            }
            edits.push(edit);
        }
    }

    /// How a token is chosen; the draw is still to come.
    fn choice(&self) -> Choice {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        Choice { temperature, top_k: u32::try_from(top_k).unwrap_or(u32::MAX), top_p, min_p, draw: 0 }
    }

    /// Continues after a token that another sampler of the same request has chosen.
    pub fn skip(&mut self, id: u32) {
        if self.sampling.temperature >= COLDEST {
            self.random.next();
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

    /// Forgets a token that [`Sampler::accept`] counted.
    pub fn forget(&mut self, id: u32) {
        if let Ok(at) = self.seen.binary_search_by_key(&id, |entry| entry.0) {
            let (_, count, in_prompt) = &mut self.seen[at];
            *count -= 1;
            if *count == 0 && !*in_prompt {
                self.seen.remove(at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_rank_chooses_what_the_sampler_would() {
        let mut random = thunder_testing::Random::new(5);
        let sampling = Sampling { top_p: 0.9, top_k: 700, seed: Some(9), ..plain() };
        let mut sampler = Sampler::new(&sampling, &[]);
        let draws = Draws::from_words(sampler.draws().expect("the temperature is above 0").words());
        let (mut scratch, mut weights) = (Scratch::default(), Weights::default());
        for index in 0..100 {
            let mut logits: Vec<f32> = (0..3000).map(|_| random.below(2000) as f32 / 1000.0).collect();
            let of_rank = draws.at(index).choose(&logits, &mut weights);
            assert_eq!(sampler.choose(&mut logits, &mut scratch), of_rank);
        }
        assert!(Sampler::new(&Sampling { temperature: 0.0, ..plain() }, &[]).draws().is_none());
    }

    #[test]
    fn changes_are_in_order_and_those_of_a_forgotten_token_are_as_before() {
        let sampling = Sampling {
            repetition_penalty: 2.0,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            logit_bias: vec![(9, 1.0), (3, -1.0), (5, 4.0)],
            ..plain()
        };
        let mut sampler = Sampler::new(&sampling, &[7, 3, 7]);
        let edits = |sampler: &Sampler| {
            let mut edits = Vec::new();
            sampler.edit(&mut edits);
            edits.iter().map(|edit| (edit.token, edit.repetition, edit.added)).collect::<Vec<_>>()
        };
        let before = [(3, 2.0, -1.0), (5, 1.0, 4.0), (7, 2.0, 0.0), (9, 1.0, 1.0)];
        assert_eq!(edits(&sampler), before);
        [5, 7, 5, 20].iter().for_each(|token| sampler.accept(*token));
        let after = [(3, 2.0, -1.0), (5, 2.0, 3.0), (7, 2.0, -0.75), (9, 1.0, 1.0), (20, 2.0, -0.75)];
        assert_eq!(edits(&sampler), after);
        [5, 7, 5, 20].iter().for_each(|token| sampler.forget(*token));
        assert_eq!(edits(&sampler), before);
    }
}
