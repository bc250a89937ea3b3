//! How long steps take, by their rows.

use super::{MAX_DRAFT, MAX_ROWS};

/// What one more row costs until it has been measured, as a share of a step.
const UNMEASURED_ROW: f32 = 0.02;
/// Weight of a time below the mean, and of one above it: what makes a step slow now and then, such
/// as another program, says nothing of its rows.
const FASTER: f32 = 0.3;
const SLOWER: f32 = 0.1;
/// A longer time counts as this many times the mean.
const SLOWEST: f32 = 2.0;
/// A time that is older than this many steps is measured again before drafts are compared with it.
const STALE_STEPS: u32 = 64;

/// How long steps take that only decode, by their rows.
#[derive(Debug)]
pub struct StepCosts {
    /// By rows: seconds, or 0 if not measured.
    seconds: [f32; MAX_ROWS + MAX_DRAFT + 1],
    /// By rows: the step that was measured last.
    last: [u32; MAX_ROWS + MAX_DRAFT + 1],
    /// Steps so far; it wraps.
    steps: u32,
}

impl Default for StepCosts {
    fn default() -> Self {
        const ROWS: usize = MAX_ROWS + MAX_DRAFT + 1;
        Self { seconds: [0.0; ROWS], last: [0; ROWS], steps: 0 }
    }
}

impl StepCosts {
    /// Notes a step's time.
    pub fn note(&mut self, rows: usize, seconds: f32) {
        self.steps = self.steps.wrapping_add(1);
        let Some(mean) = self.seconds.get_mut(rows) else { return };
        self.last[rows] = self.steps;
        if *mean == 0.0 {
            *mean = seconds;
            return;
        }
        let weight = if seconds < *mean { FASTER } else { SLOWER };
        *mean += weight * (seconds.min(SLOWEST * *mean) - *mean);
    }

    /// True if steps with `rows` rows were measured, but long ago.
    pub fn is_stale(&self, rows: usize) -> bool {
        self.seconds.get(rows).is_some_and(|seconds| *seconds > 0.0)
            && self.steps.wrapping_sub(self.last[rows]) >= STALE_STEPS
    }

    /// Seconds of a step with `rows` rows, as measured or from fewer rows, and never more than more
    /// rows take. `None` for too many rows, or if nothing is known.
    pub fn expected(&self, rows: usize) -> Option<f32> {
        let above = self.seconds.get(rows..).filter(|above| !above.is_empty())?;
        let below = (1..=rows).rev().find(|rows| self.seconds[*rows] > 0.0)?;
        let own = self.seconds[below] * (1.0 + UNMEASURED_ROW * (rows - below) as f32);
        Some(above.iter().copied().filter(|seconds| *seconds > 0.0).fold(own, f32::min))
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
        // The time for two rows is an old one, since five rows do not take less.
        costs.note(2, 2.0);
        assert_eq!(costs.expected(2), Some(1.01));
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
