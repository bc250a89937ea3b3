//! A draft model's guesses for one request.

use crate::sampler::{Sampler, Scratch};
use crate::speculation::{HitRate, MAX_DRAFT};

/// A draft model's guesses of one request's next tokens, and how often they were right.
#[derive(Debug)]
pub struct ModelGuesses {
    /// Chooses as the request's sampler would, from the draft model's logits.
    sampler: Sampler,
    ignores_eos: bool,
    /// `None` until a guess of this request was verified.
    rate: Option<HitRate>,
    tokens: [u32; MAX_DRAFT],
    count: usize,
    /// The next step verifies `tokens`.
    is_proposed: bool,
    /// The model was chosen to read the text up to its end.
    pub catches_up: bool,
}

impl ModelGuesses {
    /// No guesses yet. `sampler` is a copy of the request's.
    pub fn new(sampler: Sampler, ignores_eos: bool) -> Self {
        Self {
            sampler,
            ignores_eos,
            rate: None,
            tokens: [0; MAX_DRAFT],
            count: 0,
            is_proposed: false,
            catches_up: false,
        }
    }

    /// The rate of right guesses: of this request, or of all requests while nothing is known about
    /// it.
    pub fn rate(&self, all: HitRate) -> HitRate {
        self.rate.unwrap_or(all)
    }

    /// Starts guessing after the request's last token, with the choices that `sampler` will make.
    pub fn begin(&mut self, sampler: &Sampler) {
        self.sampler.follow(sampler);
        (self.count, self.is_proposed) = (0, true);
    }

    /// True if the guess is the most probable token, so that logits are not needed.
    pub fn is_argmax(&self) -> bool {
        self.sampler.is_argmax()
    }

    /// Chooses the next token from a draft model's logits, which are overwritten.
    pub fn choose(&mut self, logits: &mut [f32], scratch: &mut Scratch) -> u32 {
        let token = self.sampler.choose(logits, scratch);
        self.sampler.accept(token);
        token
    }

    /// Appends a guess. False if no token can follow it.
    pub fn push(&mut self, token: u32, eos: &[u32]) -> bool {
        if let Some(place) = self.tokens.get_mut(self.count) {
            *place = token;
            self.count += 1;
        }
        self.ignores_eos || !eos.contains(&token)
    }

    /// The guessed tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens[..self.count]
    }

    /// Clears the guesses, because the next step verifies others.
    pub fn forget(&mut self) {
        self.is_proposed = false;
    }

    /// Records that the first `right` of `verified` tokens were right, for this request and for
    /// all. Returns false if the model has not guessed them.
    pub fn note_verified(&mut self, right: usize, verified: usize, all: &mut HitRate) -> bool {
        if !std::mem::take(&mut self.is_proposed) || verified == 0 {
            return false;
        }
        let own = self.rate.get_or_insert(HitRate::of_text(all.share()));
        // Tokens after the first wrong one were not checked.
        for index in 0..verified.min(right + 1) {
            own.note(index < right);
            all.note(index < right);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::Sampling;
    use crate::scheduler::{Generation, Limits, Scheduler, Wanted};

    /// Tokens of the vocabulary of the made-up models.
    const VOCAB: usize = 5;
    /// Answers of three tokens.
    const ANSWERS: usize = 20_000;

    /// The served model's logits after a token, and the draft model's, which are sometimes wrong.
    fn logits(token: u32) -> [[f32; VOCAB]; 2] {
        let served = [0u32, 1, 2, 3, 4].map(|next| ((token * 7 + next * 3) % 5) as f32 * 0.6);
        let mut draft = served.map(|logit| logit * 0.8);
        draft.swap(0, token as usize % VOCAB);
        [served, draft]
    }

    /// The answer of three tokens to a prompt of one token; adds the number of right guesses among
    /// two in each step.
    fn answer(sampling: &Sampling, hits: &mut [usize; 2]) -> [u32; 3] {
        let limits = Limits { sequences: 1, rows: 8, kv_blocks: 1, draft_rows: 2, ..Limits::default() };
        let mut scheduler = Scheduler::new(limits, 1, 32, Vec::new());
        let generation = Generation { max_tokens: Some(3), wanted: Wanted::Logits, ..Generation::default() };
        let id = scheduler.submit(&[1], generation).expect("a prompt");
        let (mut sampler, mut scratch) = (Sampler::new(sampling, &[1]), Scratch::default());
        let mut guesses = ModelGuesses::new(Sampler::new(sampling, &[1]), true);
        let (mut tokens, mut events) = (vec![1], Vec::new());
        while tokens.len() < 4 {
            guesses.begin(&sampler);
            let mut last = tokens[tokens.len() - 1];
            for _ in 0..2 {
                last = guesses.choose(&mut logits(last)[1], &mut scratch);
                guesses.push(last, &[]);
            }
            scheduler.propose(id, guesses.tokens());
            let step = scheduler.next_step().expect("a step");
            let rows = step.parts().next().expect("a part").tokens.to_vec();
            // Like the engine loop: chooses no token after a wrong one.
            let mut chosen: Vec<u32> = Vec::new();
            for (row, &token) in rows.iter().enumerate() {
                let is_right = chosen[..] == rows[1..=row];
                chosen.push(if is_right { sampler.choose(&mut logits(token)[0], &mut scratch) } else { 0 });
                if is_right {
                    sampler.accept(chosen[row]);
                }
            }
            scheduler.apply(&chosen, &mut events);
            hits[0] += events.len() - 1;
            hits[1] += rows.len() - 1;
            tokens.extend(events.drain(..).map(|event| event.token));
        }
        [tokens[1], tokens[2], tokens[3]]
    }

    #[test]
    fn guessed_answers_have_the_served_models_distribution() {
        let plain = Sampling { temperature: 1.0, ..Sampling::default() };
        let mut counts = [0usize; VOCAB * VOCAB * VOCAB];
        let mut hits = [0; 2];
        for seed in 0..ANSWERS {
            let seed = (seed as u64).wrapping_mul(0xd134_2543_de82_ef95);
            let [a, b, c] = answer(&Sampling { seed: Some(seed), ..plain.clone() }, &mut hits);
            counts[(a as usize * VOCAB + b as usize) * VOCAB + c as usize] += 1;
        }
        let share = hits[0] as f64 / hits[1] as f64;
        assert!((0.4..0.9).contains(&share), "both right and wrong guesses are tested: {share}");
        let probability = |before: u32, next: usize| {
            let weights = logits(before)[0].map(|logit| f64::from(logit).exp());
            weights[next] / weights.iter().sum::<f64>()
        };
        let chi_square: f64 = (0..counts.len())
            .map(|index| {
                let (a, b, c) = (index / 25, index / 5 % 5, index % 5);
                let expected =
                    ANSWERS as f64 * probability(1, a) * probability(a as u32, b) * probability(b as u32, c);
                (counts[index] as f64 - expected).powi(2) / expected
            })
            .sum();
        // 124 degrees of freedom: 99.9 % of all draws are below 179.
        assert!(chi_square < 179.0, "{chi_square}");
        // Always trusting the model would be far off.
        let of_draft: f64 = (0..VOCAB)
            .map(|next| {
                let weights = logits(1)[1].map(|logit| f64::from(logit).exp());
                let wrong = weights[next] / weights.iter().sum::<f64>();
                ANSWERS as f64 * (wrong - probability(1, next)).powi(2) / probability(1, next)
            })
            .sum();
        assert!(of_draft > 1000.0, "the models are too alike for this test: {of_draft}");
    }

    #[test]
    fn guesses_after_the_first_wrong_one_do_not_count() {
        let mut guesses = ModelGuesses::new(Sampler::new(&Sampling::default(), &[]), false);
        let mut all = HitRate::lasting();
        assert!(!guesses.note_verified(1, 2, &mut all), "nothing was guessed");
        let sampler = Sampler::new(&Sampling::default(), &[]);
        guesses.begin(&sampler);
        assert!(guesses.push(7, &[2]) && guesses.push(8, &[2]));
        assert!(!guesses.push(2, &[2]), "nothing follows the end of the text");
        assert_eq!(guesses.tokens(), [7, 8, 2]);
        let (mut own, mut expected) = (HitRate::of_text(all.share()), all);
        assert!(guesses.note_verified(1, 3, &mut all));
        for hit in [true, false] {
            own.note(hit);
            expected.note(hit);
        }
        assert_eq!((all, guesses.rate(HitRate::lasting())), (expected, own));
        assert!(!guesses.note_verified(1, 3, &mut all), "a step verifies a draft once");
    }
}
