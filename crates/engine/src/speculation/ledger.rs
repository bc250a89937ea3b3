//! The gains and losses of drafts, so that they lose no more than a small part of the time.

use super::{Rows, StepCosts, counted_s};

/// Fraction of the time of steps without drafts that drafts may lose.
const LOSS_SHARE: f32 = 0.015;
/// Maximum gains that later losses are set against. Small, because a text that stops repeating
/// itself must not lose what another has gained.
const MOST_SAVED: f32 = 4.0;

/// One step that only decodes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Verified {
    /// Requests that it decoded.
    pub requests: usize,
    /// Steps that decode them at the same time if nothing is guessed.
    pub apart: usize,
    /// Tokens of their drafts.
    pub drafted: usize,
    /// Tokens that requests received.
    pub tokens: usize,
    /// Time from its beginning until its tokens were chosen; `None` if prompts were part of it.
    pub seconds: Option<f32>,
    /// Time spent on guesses before it.
    pub guessing_s: f32,
}

/// An account of the measured time that drafts save and cost, in steps without drafts. While it is
/// overdrawn, there are no drafts. So all of them together lose no more than [`LOSS_SHARE`] of the
/// time, plus once [`MOST_SAVED`] steps and the loss of one step with a draft, however wrong all
/// predictions are.
#[derive(Debug)]
pub struct Ledger {
    balance: f32,
}

impl Default for Ledger {
    fn default() -> Self {
        Self { balance: MOST_SAVED }
    }
}

impl Ledger {
    /// True if drafts may be tried.
    pub fn allows_drafts(&self) -> bool {
        self.balance >= 0.0
    }

    /// Records a step, after its time was recorded in `costs`.
    pub fn note(&mut self, step: Verified, costs: &StepCosts) {
        let rows = Rows { all: step.requests, steps: step.apart };
        let Some(plain) = rows.plain_s(costs).filter(|plain| *plain > 0.0) else { return };
        let guessing = step.guessing_s / plain;
        self.balance += if step.drafted == 0 && step.apart == 1 {
            LOSS_SHARE - guessing
        } else {
            let usual = costs.expected(step.requests + step.drafted).unwrap_or(plain);
            let seconds = step.seconds.map_or(usual, |seconds| counted_s(seconds, usual));
            step.tokens as f32 / step.requests as f32 - seconds / plain - guessing
        };
        self.balance = self.balance.min(MOST_SAVED);
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use thunder_testing::Random;

    use super::super::{
        Calibration, Candidate, HitRate, MAX_DRAFT, MAX_ROWS, ModelRecord, Rows, StepCosts, choose,
    };
    use super::*;

    /// The source of guesses.
    #[derive(Clone, Copy, PartialEq)]
    enum From {
        /// The text. Its guesses cost nothing, and are counted without being verified.
        Text,
        /// A model whose pass takes this many steps.
        Model(f32),
    }

    /// Texts, machine and guesses of a simulation, as functions of the number of tokens since its
    /// beginning.
    struct World {
        requests: usize,
        from: From,
        /// Probability that a text's next guess is right.
        chance: fn(usize) -> f32,
        /// Apparent probability where guesses are not verified.
        unverified: fn(usize) -> f32,
        /// Seconds of a step with this number of rows.
        step_s: fn(usize, usize) -> f32,
        /// About every tenth step takes this much longer.
        disturbed: f32,
    }

    const WORLD: World = World {
        requests: 1,
        from: From::Text,
        chance: |_| 0.0,
        unverified: |_| 0.0,
        step_s: |rows, _| 0.010 * (1.0 + 0.04 * (rows - 1) as f32),
        disturbed: 1.0,
    };

    /// Tokens by time with drafts, relative to the same without drafts, over the tokens of
    /// `counted`. This is the engine's loop, with computed times in place of a clock.
    fn ratio(world: &World, counted: Range<usize>, seed: u64) -> f32 {
        let mut random = Random::new(seed);
        let mut chance = |share: f32| (random.below(1_000_000) as f32) < 1e6 * share;
        let (mut costs, mut calibration) = (StepCosts::default(), Calibration::default());
        let mut ledger = Ledger::default();
        let pass_s = if let From::Model(steps) = world.from { 0.010 * steps } else { f32::MAX };
        let mut record = ModelRecord::new(pass_s);
        let mut rates: Vec<HitRate> = (0..world.requests).map(|_| HitRate::quick()).collect();
        let (mut tokens, mut with_s, mut plain_s) = (0, 0.0, 0.0);
        while tokens < counted.end {
            let requests = world.requests;
            let candidate = |index: usize| match world.from {
                From::Text => {
                    Candidate::new(index, false, calibration.chance(rates[index].share()), MAX_DRAFT)
                }
                From::Model(_) => Candidate::new(index, true, record.rate.share(), MAX_DRAFT),
            };
            let mut candidates: Vec<_> = (0..requests).map(candidate).collect();
            if ledger.allows_drafts() && !costs.is_stale(requests) {
                let rows = Rows { all: requests, steps: 1 };
                choose(&mut candidates, (&costs, &record.passes), rows, MAX_DRAFT + 1);
            } else {
                candidates.clear();
            }
            let drafted: usize = candidates.iter().map(|candidate| candidate.count).sum();
            let deepest = candidates.iter().map(|candidate| candidate.count).max().unwrap_or(0);
            let guessing_s = if world.from == From::Text { 0.0 } else { pass_s * deepest as f32 };
            let slower = if chance(0.1) { world.disturbed } else { 1.0 };
            let seconds = (world.step_s)(requests + drafted, tokens) * slower;
            let mut given = 0;
            for (index, rate) in rates.iter_mut().enumerate() {
                let count = candidates.get(index).map_or(0, |candidate| candidate.count);
                let (right, unverified) = ((world.chance)(tokens), (world.unverified)(tokens));
                let hits = (0..count).take_while(|_| chance(right)).count();
                given += hits + 1;
                match world.from {
                    From::Text => {
                        let verified = (0..count.min(hits + 1)).map(|number| number < hits);
                        let seen: Vec<bool> =
                            verified.chain((count == 0).then(|| chance(unverified))).collect();
                        for hit in seen {
                            calibration.note(rate.share(), hit);
                            rate.note(hit);
                        }
                    }
                    From::Model(_) => {
                        (0..count.min(hits + 1)).for_each(|number| record.rate.note(number < hits));
                    }
                }
            }
            costs.note(requests + drafted, seconds);
            let verified = Verified { requests, apart: 1, drafted, tokens: given, ..Verified::default() };
            ledger.note(Verified { seconds: Some(seconds), guessing_s, ..verified }, &costs);
            if tokens >= counted.start {
                with_s += seconds + guessing_s;
                // The same disturbance would have affected a step without drafts.
                let plain = (world.step_s)(requests, tokens) * slower;
                plain_s += plain * given as f32 / requests as f32;
            }
            tokens += given;
        }
        plain_s / with_s
    }

    fn least(world: &World, counted: Range<usize>) -> f32 {
        (0..20).map(|seed| ratio(world, counted.clone(), seed)).fold(f32::MAX, f32::min)
    }

    #[test]
    fn repetitive_text_is_much_faster() {
        let repetitive = World { chance: |_| 0.97, unverified: |_| 0.97, ..WORLD };
        let ratio = least(&repetitive, 0..500);
        assert!(ratio > 2.0, "{ratio}");
        // Also with disturbance by other programs, and with a model.
        let disturbed = least(&World { disturbed: 3.0, ..repetitive }, 0..500);
        assert!(disturbed > 1.6, "{disturbed}");
        let by_model = least(&World { from: From::Model(0.1), ..repetitive }, 0..500);
        assert!(by_model > 1.6, "{by_model}");
    }

    #[test]
    fn nothing_loses_more_than_three_percent() {
        let dear = |rows: usize, _| 0.010 * (1.0 + 0.5 * (rows - 1) as f32);
        // Rows cost nothing at first, and then much, because another program uses the memory.
        let turns = |rows: usize, tokens: usize| {
            0.010 * (1.0 + if tokens < 500 { 0.01 } else { 0.6 } * (rows - 1) as f32)
        };
        let worlds = [
            ("never right", World { ..WORLD }),
            ("seldom right", World { chance: |_| 0.2, unverified: |_| 0.2, ..WORLD }),
            ("on the edge", World { chance: |_| 0.5, unverified: |_| 0.5, step_s: dear, ..WORLD }),
            ("right only where it is not verified", World { unverified: |_| 0.95, ..WORLD }),
            ("the same, of dear rows", World { unverified: |_| 0.95, step_s: dear, ..WORLD }),
            ("of four requests", World { unverified: |_| 0.95, requests: 4, ..WORLD }),
            ("disturbed", World { unverified: |_| 0.9, disturbed: 4.0, ..WORLD }),
            ("rows become dear", World { chance: |_| 0.4, unverified: |_| 0.9, step_s: turns, ..WORLD }),
            ("a wrong model", World { from: From::Model(0.3), ..WORLD }),
            ("a wrong and dear model", World { from: From::Model(3.0), step_s: dear, ..WORLD }),
        ];
        for (what, world) in worlds {
            let ratio = least(&world, 0..2000);
            assert!(ratio >= 0.97, "{what}: {ratio}");
        }
    }

    #[test]
    fn what_one_text_gains_no_other_one_loses() {
        // Repetitive, then random text that still looks repetitive where it is not verified.
        let world =
            World { chance: |tokens| if tokens < 3000 { 0.97 } else { 0.0 }, unverified: |_| 0.97, ..WORLD };
        let ratio = least(&world, 3100..5100);
        assert!(ratio >= 0.97, "{ratio}");
        // Drafts are used again when a text becomes repetitive at last.
        let again = World { chance: |tokens| if tokens < 2000 { 0.0 } else { 0.97 }, ..world };
        let ratio = least(&again, 2100..3000);
        assert!(ratio > 1.6, "{ratio}");
        assert!(MAX_ROWS > again.requests);
    }

    #[test]
    fn requests_that_decode_together_must_gain_what_stages_would() {
        let mut costs = StepCosts::default();
        costs.note(2, 0.010);
        costs.note(4, 0.020);
        let together = |drafted, tokens| {
            let mut ledger = Ledger::default();
            let seconds = Some(0.020);
            let step = Verified { requests: 4, apart: 2, drafted, tokens, seconds, guessing_s: 0.0 };
            (0..5).for_each(|_| ledger.note(step, &costs));
            ledger.allows_drafts()
        };
        // In the time of such a step, two stages give each request two tokens.
        assert!(!together(0, 4) && !together(8, 4) && together(8, 9));
    }
}
