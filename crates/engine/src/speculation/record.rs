//! The record of a draft model: how often it is right, and what it costs.

use super::{HitRate, NEWEST, StepCosts};

/// Fraction of the time that may be lost by trying a model again that was not worthwhile.
const TRY_SHARE: f32 = 0.01;
/// Maximum saved seconds for such trials.
const MOST_CREDIT_S: f32 = 1.0;
/// Assumed tokens of an answer until one is known.
const FIRST_ANSWER: f32 = 128.0;
/// Assumed cost of a token of a text until it was measured, as a fraction of a pass: products of
/// many rows read the weights once.
const UNMEASURED_TOKEN: f32 = 0.1;

/// A draft model's record, over all requests.
#[derive(Debug)]
pub struct ModelRecord {
    /// Share of verified tokens that were right.
    pub rate: HitRate,
    /// Seconds of a pass, by the number of requests that it guesses for.
    pub passes: StepCosts,
    /// Seconds per token of a text that the model reads.
    read_s: f32,
    /// Seconds that may be lost.
    credit_s: f32,
    /// Recent tokens per answer.
    answer: f32,
}

impl ModelRecord {
    /// The record of a model with this time for a pass.
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

    /// Records the time in which the model has read tokens of a text.
    pub fn note_read(&mut self, tokens: usize, seconds: f32) {
        self.read_s += NEWEST * (seconds / tokens as f32 - self.read_s);
    }

    /// Records the time of a step.
    pub fn note_step(&mut self, seconds: f32) {
        self.credit_s = (self.credit_s + TRY_SHARE * seconds).min(MOST_CREDIT_S);
    }

    /// Records the length of an answer.
    pub fn note_answer(&mut self, tokens: usize) {
        self.answer += NEWEST * (tokens as f32 - self.answer);
    }

    /// Expected remaining tokens of an answer with `generated` tokens: up to the usual length, or,
    /// if it is longer, as many tokens again.
    pub fn expected_left(&self, generated: usize) -> f32 {
        let generated = generated as f32;
        if generated < self.answer { self.answer - generated } else { generated }.max(1.0)
    }

    /// Seconds for the model to read `tokens` tokens.
    pub fn reading_s(&self, tokens: usize) -> f32 {
        self.read_s * tokens as f32
    }

    /// Deducts seconds that something took longer than expected.
    pub fn charge(&mut self, seconds: f32) {
        self.credit_s = (self.credit_s - seconds.max(0.0)).max(-MOST_CREDIT_S);
    }

    /// Deducts seconds for something that will probably not pay. Returns false if too few are left.
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
