//! How long steps take, by their rows.

use super::{MAX_DRAFT, MAX_ROWS, NEWEST};

/// What one more row costs until it has been measured, as a share of a step.
const UNMEASURED_ROW: f32 = 0.02;

/// How long steps take that only decode, by their rows.
#[derive(Debug)]
pub struct StepCosts {
    /// By rows: seconds, or 0 if not measured.
    seconds: [f32; MAX_ROWS + MAX_DRAFT + 1],
}

impl Default for StepCosts {
    fn default() -> Self {
        Self { seconds: [0.0; MAX_ROWS + MAX_DRAFT + 1] }
    }
}

impl StepCosts {
    /// Notes a step's time.
    pub fn note(&mut self, rows: usize, seconds: f32) {
        if let Some(mean) = self.seconds.get_mut(rows) {
            *mean = if *mean == 0.0 { seconds } else { *mean + NEWEST * (seconds - *mean) };
        }
    }

    /// Seconds of a step with `rows` rows, as measured or from the nearest measured ones. `None`
    /// for too many rows, or if nothing is known.
    pub fn expected(&self, rows: usize) -> Option<f32> {
        let known = |rows: &usize| self.seconds[*rows] > 0.0;
        let below = (1..=rows.min(self.seconds.len() - 1)).rev().find(known)?;
        if below == rows {
            return Some(self.seconds[rows]);
        }
        let more = |rows: usize, base: f32| base * (1.0 + UNMEASURED_ROW * (rows - below) as f32);
        let from_below = more(rows, self.seconds[below]);
        let above = (rows..self.seconds.len()).find(known);
        // Never more than more rows take.
        (rows < self.seconds.len())
            .then(|| above.map_or(from_below, |above| from_below.min(self.seconds[above])))
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
        costs.note(2, 2.0);
        assert_eq!(costs.expected(2), Some(1.0 + NEWEST));
    }
}
