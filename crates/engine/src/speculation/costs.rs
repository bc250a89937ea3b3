//! Times of steps, by number of rows.

use super::{MAX_DRAFT, MAX_ROWS};

/// Assumed cost of one more row until it was measured, as a share of a step.
const UNMEASURED_ROW: f32 = 0.02;
/// Weights of a time below and above the mean. Occasional slow steps, for example because of
/// another program, say nothing about the rows.
const FASTER: f32 = 0.3;
const SLOWER: f32 = 0.1;
/// A longer time counts as this many times the usual one: something else slowed it down.
const SLOWEST: f32 = 2.0;
/// Maximum number of measurements that count for a number of rows, in comparison with other
/// numbers: a mean holds no more.
const MOST_COUNTED: f32 = 8.0;
/// A time that is older than this many steps is measured again before drafts are compared with it.
const STALE_STEPS: u32 = 64;

/// A measured time as it counts, if it usually takes `usual_s`.
pub fn counted_s(seconds: f32, usual_s: f32) -> f32 {
    seconds.min(SLOWEST * usual_s)
}

/// Times of steps that only decode, by number of rows.
#[derive(Debug)]
pub struct StepCosts {
    /// By number of rows: seconds, or 0 if not measured.
    seconds: [f32; MAX_ROWS + MAX_DRAFT + 1],
    /// By number of rows: how often it was measured, at most [`MOST_COUNTED`].
    counts: [f32; MAX_ROWS + MAX_DRAFT + 1],
    /// By measured number of rows: seconds that never decrease with more rows, as close to
    /// `seconds` as possible.
    rising: [f32; MAX_ROWS + MAX_DRAFT + 1],
    /// By number of rows: the step that was measured last.
    last: [u32; MAX_ROWS + MAX_DRAFT + 1],
    /// Number of steps so far; it wraps around.
    steps: u32,
}

impl Default for StepCosts {
    fn default() -> Self {
        const ROWS: usize = MAX_ROWS + MAX_DRAFT + 1;
        let none = [0.0; ROWS];
        Self { seconds: none, counts: none, rising: none, last: [0; ROWS], steps: 0 }
    }
}

impl StepCosts {
    /// Records a step's time.
    pub fn note(&mut self, rows: usize, seconds: f32) {
        self.steps = self.steps.wrapping_add(1);
        let Some(mean) = self.seconds.get_mut(rows) else { return };
        self.last[rows] = self.steps;
        self.counts[rows] = (self.counts[rows] + 1.0).min(MOST_COUNTED);
        if *mean == 0.0 {
            *mean = seconds;
        } else {
            let weight = if seconds < *mean { FASTER } else { SLOWER };
            *mean += weight * (counted_s(seconds, *mean) - *mean);
        }
        self.fit();
    }

    /// Fits `rising`. Times that decrease with more rows are replaced by their mean, weighted by
    /// the number of measurements, because the minimum of a few rare measurements says little (pool
    /// adjacent violators).
    fn fit(&mut self) {
        const ROWS: usize = MAX_ROWS + MAX_DRAFT + 1;
        // Runs of rows with the same time: its seconds, its weight, its first row.
        let (mut runs, mut count) = ([(0.0f32, 0.0f32, 0usize); ROWS], 0);
        for rows in (1..ROWS).filter(|rows| self.seconds[*rows] > 0.0) {
            let mut run = (self.seconds[rows], self.counts[rows], rows);
            while count > 0 && runs[count - 1].0 >= run.0 {
                let before = runs[count - 1];
                let weight = before.1 + run.1;
                run = ((before.0 * before.1 + run.0 * run.1) / weight, weight, before.2);
                count -= 1;
            }
            runs[count] = run;
            count += 1;
        }
        for (index, (seconds, _, first)) in runs[..count].iter().enumerate() {
            let end = runs[..count].get(index + 1).map_or(ROWS, |next| next.2);
            self.rising[*first..end].fill(*seconds);
        }
    }

    /// True if steps with `rows` rows were measured.
    pub fn is_measured(&self, rows: usize) -> bool {
        self.seconds.get(rows).is_some_and(|seconds| *seconds > 0.0)
    }

    /// True if steps with `rows` rows were measured, but long ago.
    pub fn is_stale(&self, rows: usize) -> bool {
        self.is_measured(rows) && self.steps.wrapping_sub(self.last[rows]) >= STALE_STEPS
    }

    /// Seconds of a step with `rows` rows, as measured or extrapolated from fewer rows, and never
    /// more than for more rows. `None` for too many rows, or if nothing was measured.
    pub fn expected(&self, rows: usize) -> Option<f32> {
        let above = self.seconds.get(rows..).filter(|above| !above.is_empty())?;
        let below = (1..=rows).rev().find(|rows| self.seconds[*rows] > 0.0)?;
        let own = self.rising[below] * (1.0 + UNMEASURED_ROW * (rows - below) as f32);
        let next = above.iter().position(|seconds| *seconds > 0.0);
        Some(next.map_or(own, |next| own.min(self.rising[rows + next])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_between_measured_ones_cost_no_more_than_those_above() {
        let mut costs = StepCosts::default();
        assert_eq!(costs.expected(1), None);
        costs.note(2, 1.0);
        assert_eq!((costs.expected(1), costs.expected(2)), (None, Some(1.0)));
        assert_eq!(costs.expected(4), Some(1.0 + 2.0 * UNMEASURED_ROW));
        costs.note(5, 1.01);
        assert_eq!(costs.expected(4), Some(1.01));
        assert_eq!(costs.expected(MAX_ROWS + MAX_DRAFT + 1), None, "too many rows");
        assert_eq!(costs.expected(5), Some(1.01));
        // Two rows seem to take longer than five, so neither is known well.
        costs.note(2, 2.0);
        let [two, five] = [2, 5].map(|rows| costs.expected(rows).unwrap_or_default());
        assert_eq!(two, five);
        assert!(1.01 < two && two < 1.1, "{two}");
    }

    #[test]
    fn one_lucky_measurement_does_not_make_fewer_rows_cheap() {
        let mut costs = StepCosts::default();
        (0..20).for_each(|_| (1..6).for_each(|rows| costs.note(rows, 1.0 + 0.1 * rows as f32)));
        costs.note(9, 1.0);
        let of = |rows| costs.expected(rows).unwrap_or_default();
        assert!(of(5) > 1.35 && of(1) == 1.1 && of(9) == of(5), "{} {} {}", of(1), of(5), of(9));
        (0..20).for_each(|_| costs.note(9, 1.0));
        assert!((1.0..1.4).contains(&costs.expected(5).unwrap_or_default()), "it was no luck");
    }

    #[test]
    fn a_step_that_something_else_has_slowed_down_counts_little() {
        let mut costs = StepCosts::default();
        (0..40).for_each(|step| costs.note(1, if step % 4 == 0 { 5.0 } else { 1.0 }));
        assert!(costs.expected(1).is_some_and(|seconds| seconds < 1.15), "{:?}", costs.expected(1));
        (0..40).for_each(|_| costs.note(1, 3.0));
        assert!(costs.expected(1).is_some_and(|seconds| seconds > 2.9), "it is slower for good");
    }

    #[test]
    fn old_times_are_measured_again() {
        let mut costs = StepCosts::default();
        assert!(!costs.is_stale(1), "there is nothing to compare with");
        costs.note(1, 1.0);
        (1..STALE_STEPS).for_each(|_| costs.note(4, 1.5));
        assert!(!costs.is_stale(1));
        costs.note(4, 1.5);
        assert!(costs.is_stale(1) && !costs.is_stale(4));
        costs.note(1, 1.0);
        assert!(!costs.is_stale(1));
    }
}
