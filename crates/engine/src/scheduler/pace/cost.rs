//! The time of a step's prompts, learned from steps of all sizes.

use serde::{Deserialize, Serialize};
use thunder_cost::idle_experts;
use thunder_model::ShardFootprint;

use super::StepLoad;

/// Terms of a prompt's time: one for the step (reading the weights), one for each row, one for each
/// token that a row attends to, one for reading all routed experts.
const TERMS: usize = 4;
/// The standard deviation of a step's time, as a share of it.
const NOISE: f64 = 0.2;
/// Relative change of the machine's speed from step to step, which affects all terms equally.
const DRIFT: f64 = 0.06;
/// Relative change of each term by itself.
const OWN_DRIFT: f64 = 0.03;
/// A term that seems to be 0 may still grow to this share of a step.
const LEAST_SHARE: f64 = 0.05;
/// A measurement counts as at most this many times the expected time, and at least as the inverse,
/// because another program may have slowed the machine down.
const FURTHEST: f64 = 2.0;
/// Before the first measurement: the fixed term's share of the step, a pair's share of a row, and
/// the uncertainty of all terms.
const FIRST_FIXED: f64 = 0.03;
const FIRST_PAIR: f64 = 1e-4;
const FIRST_EXPERTS: f64 = 0.3;
const FIRST_ERRORS: [f64; TERMS] = [0.5, 0.5, 1e-3, 0.5];

/// Routed experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutedExperts {
    /// Number of experts.
    pub experts: usize,
    /// Number of experts that a token uses.
    pub chosen: usize,
}

impl RoutedExperts {
    /// The experts that these ranks hold; `None` if the model has none.
    pub fn of(footprints: &[ShardFootprint]) -> Option<Self> {
        let held = footprints.iter().find(|footprint| footprint.experts > 0)?;
        Some(Self { experts: held.experts, chosen: held.chosen })
    }

    /// The expected fraction of the experts that some rows use.
    fn taken(self, rows: usize) -> f64 {
        1.0 - idle_experts(self.experts as f64, self.chosen as f64, rows as f64)
    }
}

/// Seconds of the prompts in a step. Steps are similar for long times, and then do not show how
/// their time divides into terms. Therefore each term has an uncertainty, and a measurement changes
/// the uncertain terms most (a Kalman filter).
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PromptCost {
    /// The model's routed experts. Each further row adds fewer experts that no earlier row has
    /// read.
    routed: Option<RoutedExperts>,
    /// Seconds of each term.
    terms: [f64; TERMS],
    /// Covariance of the terms' errors.
    errors: [[f64; TERMS]; TERMS],
}

impl PromptCost {
    pub fn new(routed: Option<RoutedExperts>) -> Self {
        Self { routed, ..Self::default() }
    }

    pub fn is_measured(&self) -> bool {
        self.terms[1] > 0.0
    }

    /// Seconds of a step's prompts, independent of their length.
    pub fn fixed_s(&self) -> f32 {
        self.terms[0] as f32
    }

    /// Seconds of a row at this position.
    pub fn row_s(&self, start: usize) -> f32 {
        (self.terms[1] + self.terms[2] * start as f64) as f32
    }

    /// Seconds to read the routed experts that `rows` rows use and `before` other rows do not.
    pub fn experts_s(&self, rows: usize, before: usize) -> f32 {
        (self.terms[3] * (self.taken(before + rows) - self.taken(before))) as f32
    }

    fn taken(&self, rows: usize) -> f64 {
        self.routed.map_or(0.0, |routed| routed.taken(rows))
    }

    /// Records a step that took `seconds`, including `decode_s` for its generated tokens.
    pub fn note(&mut self, load: &StepLoad, seconds: f64, decode_s: f64) {
        let amounts = [1.0, load.prompt as f64, load.prompt_pairs, self.taken(load.prompt)];
        let measured = (seconds - decode_s).max(0.0);
        if !self.is_measured() {
            self.begin(&amounts, measured);
        }
        let expected = dot(&self.terms, &amounts);
        self.drift(&amounts, expected);
        // The filter's usual update: each term changes in proportion to its covariance with the
        // error.
        let shared = self.errors.map(|errors| dot(&errors, &amounts));
        let noise = NOISE * (expected + decode_s);
        let variance = dot(&shared, &amounts) + noise * noise;
        let surprise = measured.clamp(expected / FURTHEST, expected * FURTHEST) - expected;
        for row in 0..TERMS {
            let gain = shared[row] / variance;
            let least = if row == 1 { 1e-3 * expected / amounts[1] } else { 0.0 };
            self.terms[row] = (self.terms[row] + gain * surprise).max(least);
            for (error, other) in self.errors[row].iter_mut().zip(&shared) {
                *error -= gain * other;
            }
        }
    }

    /// Initializes the terms from the first measurement, most of it as the cost of rows.
    fn begin(&mut self, amounts: &[f64; TERMS], measured: f64) {
        let row = measured / amounts[1];
        let (units, shares) = if amounts[3] > 0.0 {
            let all = measured / amounts[3];
            (
                [measured, row, row, all],
                [FIRST_FIXED, 1.0 - FIRST_FIXED - FIRST_EXPERTS, FIRST_PAIR, FIRST_EXPERTS],
            )
        } else {
            ([measured, row, row, 0.0], [FIRST_FIXED, 1.0 - FIRST_FIXED, FIRST_PAIR, 0.0])
        };
        self.errors = [[0.0; TERMS]; TERMS];
        for term in 0..TERMS {
            self.terms[term] = shares[term] * units[term];
            self.errors[term][term] = (FIRST_ERRORS[term] * units[term]).powi(2);
        }
    }

    /// Increases the uncertainty of the terms before the next step.
    fn drift(&mut self, amounts: &[f64; TERMS], expected: f64) {
        let scales: [f64; TERMS] = std::array::from_fn(|term| match amounts[term] {
            0.0 => self.terms[term],
            amount => self.terms[term].max(LEAST_SHARE * expected / amount),
        });
        for (row, scale) in scales.iter().enumerate() {
            for column in 0..TERMS {
                self.errors[row][column] += DRIFT * DRIFT * self.terms[row] * self.terms[column];
            }
            self.errors[row][row] += (OWN_DRIFT * scale).powi(2);
        }
        // The uncertainty of a term that no step shows does not exceed its size.
        for (term, scale) in scales.into_iter().enumerate() {
            let shrink = (scale / self.errors[term][term].sqrt()).min(1.0);
            for other in 0..TERMS {
                self.errors[term][other] *= shrink;
                self.errors[other][term] *= shrink;
            }
        }
    }
}

fn dot(left: &[f64; TERMS], right: &[f64; TERMS]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(start: usize, rows: usize) -> StepLoad {
        let mut load = StepLoad::default();
        load.add(true, start, rows);
        load
    }

    #[test]
    fn steps_of_two_sizes_tell_what_a_step_and_a_row_take() {
        let mut cost = PromptCost::default();
        assert!(!cost.is_measured());
        for _ in 0..30 {
            cost.note(&load(0, 200), 0.020 + 200.0 * 0.001, 0.0);
            cost.note(&load(0, 20), 0.015 + 0.020 + 20.0 * 0.001, 0.015);
        }
        let (fixed, row) = (cost.fixed_s(), cost.row_s(0));
        assert!((0.017..0.023).contains(&fixed) && (0.0009..0.0011).contains(&row), "{fixed} s, {row} s");
        // Then only one size, on a machine that becomes half as fast: the shares do not change.
        for _ in 0..3000 {
            cost.note(&load(0, 20), 2.0 * (0.020 + 20.0 * 0.001), 0.0);
        }
        let (fixed, row) = (cost.fixed_s(), cost.row_s(0));
        assert!((0.034..0.046).contains(&fixed) && (0.0017..0.0023).contains(&row), "{fixed} s, {row} s");
    }

    #[test]
    fn steps_of_two_sizes_tell_what_experts_take() {
        let routed = RoutedExperts { experts: 256, chosen: 8 };
        let mut cost = PromptCost::new(Some(routed));
        let seconds = |rows: usize| 0.002 + 0.0015 * rows as f64 + 0.140 * routed.taken(rows);
        for _ in 0..40 {
            cost.note(&load(0, 1000), seconds(1000), 0.0);
            cost.note(&load(0, 8), 0.013 + seconds(8), 0.013);
            cost.note(&load(0, 30), 0.013 + seconds(30), 0.013);
        }
        let (row, all) = (cost.row_s(0), cost.experts_s(10_000, 0));
        assert!((0.0013..0.0017).contains(&row) && (0.12..0.16).contains(&all), "{row} s, {all} s");
        let (first, second) = (cost.experts_s(30, 0), cost.experts_s(30, 30));
        assert!(second < 0.5 * first, "{first} s, then {second} s");
        // Without experts, there is nothing to read.
        let mut dense = PromptCost::new(None);
        (0..40).for_each(|_| dense.note(&load(0, 100), 0.1, 0.0));
        assert!(dense.experts_s(100, 0) == 0.0 && dense.row_s(0).is_finite());
    }

    #[test]
    fn long_contexts_tell_what_a_pair_takes() {
        let mut cost = PromptCost::default();
        for start in (0..20_000).step_by(100).chain((0..10_000).step_by(100)) {
            let load = load(start, 100);
            cost.note(&load, 0.010 + 0.1 + 1e-7 * load.prompt_pairs, 0.0);
        }
        let (short, long) = (cost.row_s(0), cost.row_s(20_000));
        assert!((0.0009..0.0012).contains(&short) && (0.0027..0.0033).contains(&long), "{short} s, {long} s");
    }

    #[test]
    fn a_step_that_something_else_has_slowed_down_counts_little() {
        let mut cost = PromptCost::default();
        (0..40).for_each(|_| cost.note(&load(0, 100), 0.1, 0.0));
        cost.note(&load(0, 100), 10.0, 0.0);
        let seconds = cost.fixed_s() + 100.0 * cost.row_s(0);
        assert!((0.1..0.15).contains(&seconds), "{seconds}");
        // Measured times of zero, at first or later, still give finite positive times.
        let mut none = PromptCost::default();
        none.note(&load(0, 100), 0.1, 0.2);
        assert!(!none.is_measured());
        none.note(&load(0, 100), 0.1, 0.0);
        (0..200).for_each(|_| none.note(&load(0, 100), 0.1, 0.2));
        assert!(none.row_s(0) > 0.0 && none.row_s(0) < 1e-4 && none.fixed_s().is_finite());
    }
}
