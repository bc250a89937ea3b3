//! How often guesses are right, given their expected rate.

use super::{HitRate, LASTING};

/// Number of ranges of shares that are distinguished.
const RANGES: usize = 8;
/// Weight of a range's first guess: as if some guesses with the expected rate had been seen before.
const FIRST: f32 = 0.1;

/// The share of right guesses over all texts, by the share that their text had before. A share that
/// follows a text quickly is too high after a lucky run and too low after an unlucky one, so its
/// real value must be measured. Guesses that were not verified count too.
#[derive(Debug)]
pub struct Calibration {
    ranges: [HitRate; RANGES],
}

impl Default for Calibration {
    fn default() -> Self {
        let middle = |range: usize| (range as f32 + 0.5) / RANGES as f32;
        Self {
            ranges: std::array::from_fn(|range| HitRate {
                share: middle(range),
                weight: FIRST,
                least: LASTING,
            }),
        }
    }
}

impl Calibration {
    /// Records whether a guess was right, for a text whose share of right guesses was `share`.
    pub fn note(&mut self, share: f32, hit: bool) {
        self.ranges[range(share)].note(hit);
    }

    /// The probability that a guess is right, for a text with this share.
    pub fn chance(&self, share: f32) -> f32 {
        self.ranges[range(share)].share()
    }
}

fn range(share: f32) -> usize {
    ((share * RANGES as f32) as usize).min(RANGES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use thunder_testing::Random;

    /// Texts of 60 guesses each, with one probability for each text.
    fn seen(probabilities: &[f32]) -> Calibration {
        let (mut calibration, mut random) = (Calibration::default(), Random::new(5));
        for text in 0..200 {
            let mut rate = HitRate::quick();
            for _ in 0..60 {
                let hit = (random.below(1000) as f32) < 1000.0 * probabilities[text % probabilities.len()];
                calibration.note(rate.share(), hit);
                rate.note(hit);
            }
        }
        calibration
    }

    #[test]
    fn a_lucky_run_of_a_free_text_is_not_taken_for_a_repetition() {
        let free = seen(&[0.6]);
        assert!(free.chance(0.85) < 0.7, "{free:?}");
        assert!(free.chance(0.3) > 0.4, "nor an unlucky one for the opposite: {free:?}");
        let mixed = seen(&[0.6, 0.98]);
        assert!(mixed.chance(0.95) > 0.93 && mixed.chance(0.7) < 0.8, "{mixed:?}");
    }

    #[test]
    fn without_experience_a_share_is_taken_at_its_word() {
        let fresh = Calibration::default();
        for share in [0.0, 0.4, 0.93, 1.0] {
            assert!((fresh.chance(share) - share).abs() <= 0.5 / RANGES as f32 + 1e-6);
        }
    }
}
