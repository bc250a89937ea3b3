//! What has been seen of a draft model: how often it is right, and what it costs.

use super::{HitRate, NEWEST, StepCosts};

/// Part of the time that may be lost by trying a model again that was not worth it.
const TRY_SHARE: f32 = 0.01;
/// Most seconds of it that are saved up.
const MOST_CREDIT_S: f32 = 1.0;
/// Tokens of an answer, as long as none is known.
const FIRST_ANSWER: f32 = 128.0;
/// What a token of a text costs until it was measured, as a part of a pass: products of many rows
/// read the weights once.
const UNMEASURED_TOKEN: f32 = 0.1;

/// A draft model's record, over all requests.
#[derive(Debug)]
pub struct ModelRecord {
    /// Tokens that were verified and right.
    pub rate: HitRate,
    /// Seconds of a pass, by the requests that it guesses for.
    pub passes: StepCosts,
    /// Seconds for each token of a text that the model reads.
    read_s: f32,
    /// Seconds that may be lost.
    credit_s: f32,
    /// Tokens of an answer, lately.
    answer: f32,
}

impl ModelRecord {
    /// The record of a model that takes this time for a pass.
    pub fn new(pass_s: f32) -> Self {
        let mut passes = StepCosts::default();
        passes.note(1, pass_s);
        Self {
            rate: HitRate::lasting(),
            passes,
            read_s: UNMEASURED_TOKEN * pass_s,
            credit_s: 0.0,
            answer: FIRST_ANSWER,
        }
    }

    /// Notes the time in which the model has read tokens of a text.
    pub fn note_read(&mut self, tokens: usize, seconds: f32) {
        self.read_s += NEWEST * (seconds / tokens as f32 - self.read_s);
    }

    /// Notes the time of a step.
    pub fn note_step(&mut self, seconds: f32) {
        self.credit_s = (self.credit_s + TRY_SHARE * seconds).min(MOST_CREDIT_S);
    }

    /// Notes the length of an answer.
    pub fn note_answer(&mut self, tokens: usize) {
        self.answer += NEWEST * (tokens as f32 - self.answer);
    }

    /// Tokens that an answer with `generated` tokens will probably still have: as many as others,
    /// or if it is longer than those, as many again.
    pub fn expected_left(&self, generated: usize) -> f32 {
        let generated = generated as f32;
        if generated < self.answer { self.answer - generated } else { generated }.max(1.0)
    }

    /// Seconds for the model to read `tokens` tokens.
    pub fn reading_s(&self, tokens: usize) -> f32 {
        self.read_s * tokens as f32
    }

    /// Takes seconds that something took longer than was expected.
    pub fn charge(&mut self, seconds: f32) {
        self.credit_s = (self.credit_s - seconds.max(0.0)).max(-MOST_CREDIT_S);
    }

    /// Takes seconds for something that will probably not pay; false if too few are left.
    pub fn may_try(&mut self, seconds: f32) -> bool {
        let may = seconds <= self.credit_s;
        if may {
            self.credit_s -= seconds;
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hundredth_of_the_time_may_be_lost_by_trying() {
        let mut record = ModelRecord::new(0.1);
        assert!(!record.may_try(0.1), "nothing was earned");
        let mut lost = 0.0;
        for _ in 0..1000 {
            record.note_step(0.5);
            lost += if record.may_try(0.1) { 0.1 } else { 0.0 };
        }
        assert!((4.0..=5.0).contains(&lost), "{lost}");
        (0..10_000).for_each(|_| record.note_step(1.0));
        assert!(!record.may_try(1.1 * MOST_CREDIT_S), "it is not saved up for ever");
        record.charge(1.5 * MOST_CREDIT_S);
        (0..40).for_each(|_| record.note_step(1.0));
        assert!(!record.may_try(0.01), "what took longer is paid for first");
        (0..20).for_each(|_| record.note_step(1.0));
        assert!(record.may_try(0.01));
    }

    #[test]
    fn answers_are_expected_to_be_as_long_as_earlier_ones() {
        let mut record = ModelRecord::new(0.1);
        (0..100).for_each(|_| record.note_answer(20));
        let left = [0, 15, 300].map(|generated| record.expected_left(generated).round());
        assert_eq!(left, [20.0, 5.0, 300.0]);
    }
}
