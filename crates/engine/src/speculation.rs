//! Drafts: guesses of a request's next tokens, which one step verifies together. A row's token does
//! not depend on the other rows, so the answer is the same as without drafts.

mod calibration;
mod choice;
mod costs;
mod ledger;
mod lookup;
mod record;

pub use calibration::Calibration;
pub use choice::{Candidate, Choice, Rows, choose};
pub use costs::{StepCosts, counted_s};
pub use ledger::{Ledger, Verified};
pub use lookup::PromptLookup;
pub use record::ModelRecord;
pub use thunder_compute::MAX_DRAFT;

/// With more rows than this, a step waits for arithmetic instead of memory, so drafts cost too
/// much.
pub const MAX_ROWS: usize = 32;

/// Weight of the newest observation in a running mean.
const NEWEST: f32 = 0.15;
/// Weight of the newest guess in a draft model's rate for one text. A larger weight makes drafts
/// too long on average, because they follow each lucky run.
const OF_TEXT: f32 = 0.06;
/// Weight of the newest guess in a rate over many.
const LASTING: f32 = 0.02;
/// Assumed rate of guesses about which nothing is known.
const UNKNOWN_SHARE: f32 = 0.5;

/// The recent share of right guesses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HitRate {
    share: f32,
    /// Weight of the next observation, which decreases to `least`.
    weight: f32,
    least: f32,
}

impl HitRate {
    /// A rate that follows changes quickly, because a text starts and stops repeating itself.
    pub fn quick() -> Self {
        Self { share: UNKNOWN_SHARE, weight: NEWEST, least: NEWEST }
    }

    /// A rate of one text, which starts with the share of others.
    pub fn of_text(share: f32) -> Self {
        Self { share, weight: OF_TEXT, least: OF_TEXT }
    }

    /// A rate over many guesses.
    pub fn lasting() -> Self {
        Self { share: UNKNOWN_SHARE, weight: 0.5, least: LASTING }
    }

    /// Records whether a guess was right.
    pub fn note(&mut self, hit: bool) {
        self.share += self.weight * (f32::from(u8::from(hit)) - self.share);
        self.weight = (self.weight / (1.0 + self.weight)).max(self.least);
    }

    /// The share, 0 to 1.
    pub fn share(self) -> f32 {
        self.share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_rate_is_a_mean_that_one_guess_changes_little() {
        let mut rate = HitRate::lasting();
        [true, false, false, false].into_iter().for_each(|hit| rate.note(hit));
        // As if half a hit had been seen before.
        assert!((rate.share() - 1.5 / 5.0).abs() < 1e-6, "{rate:?}");
        (0..500).for_each(|_| rate.note(false));
        assert!(rate.share() < 0.01);
        rate.note(true);
        assert!(rate.share() < 2.0 * LASTING, "{rate:?}");
        let mut quick = HitRate::quick();
        quick.note(true);
        assert_eq!(quick.share(), 0.5 + 0.5 * NEWEST);
    }
}
