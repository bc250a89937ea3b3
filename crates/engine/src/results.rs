//! A step's results on rank 0.

use thunder_compute::Largest;
use thunder_compute::choice::RowLikelihoods;

/// The results of one step, gathered from the ranks of the last stage. For each rank `[row]`: the
/// logits of the rank's part of the vocabulary if
/// [`RowResults::logits`](crate::scheduler::RowResults::logits), otherwise the bits of a token id
/// and its logit: of the chosen token, or of the most probable one; then, if it was asked for,
/// `[row]` of how likely the tokens are, which is read from the first rank; then the reports of its
/// work. At the end, `[row][hidden]`.
#[derive(Debug, Clone, Copy)]
pub struct StepResults<'a> {
    /// Rows that have results.
    pub(crate) rows: usize,
    /// Vocabulary rows of each rank.
    pub(crate) vocab: &'a [usize],
    pub(crate) has_logits: bool,
    /// Numbers of a row that say how likely tokens are.
    pub(crate) likely: usize,
    /// Numbers in each rank's reports.
    pub(crate) report: usize,
    /// Numbers in a hidden state; 0 if there are none.
    pub(crate) hidden: usize,
    pub(crate) gathered: &'a [f32],
}

impl<'a> StepResults<'a> {
    /// True if there are logits instead of most probable tokens.
    pub fn has_logits(&self) -> bool {
        self.has_logits
    }

    /// The token that ranks have found for a row, without logits; `None` if a logit is not finite.
    pub fn token(&self, row: usize) -> Option<u32> {
        let mut best = Largest::NONE;
        for rank in 0..self.vocab.len() {
            let of_rank = rank * (self.rows * (2 + self.likely) + self.report);
            let &[id, value] = &self.gathered[of_rank + row * 2..][..2] else { continue };
            // The lowest id wins a tie, as on one rank.
            best = best.or(Largest { column: id.to_bits(), value });
        }
        best.value.is_finite().then_some(best.column)
    }

    /// How likely the chosen token of a row is, without logits; `None` if no rank was asked.
    pub fn likely(&self, row: usize) -> Option<RowLikelihoods<'a>> {
        let words = self.gathered.get(self.rows * 2 + row * self.likely..)?.get(..self.likely)?;
        RowLikelihoods::from_words(words)
    }

    /// A row's logits over the whole vocabulary.
    pub fn logits(&self, row: usize, out: &mut Vec<f32>) {
        out.clear();
        self.parts(row).for_each(|part| out.extend_from_slice(part));
    }

    /// A token's logit in a row. The token must be of the vocabulary.
    pub fn logit(&self, row: usize, token: u32) -> f32 {
        let mut column = token as usize;
        for part in self.parts(row) {
            if let Some(logit) = part.get(column) {
                return *logit;
            }
            column -= part.len();
        }
        f32::NAN
    }

    /// Each rank's part of a row's logits.
    fn parts(&self, row: usize) -> impl Iterator<Item = &'a [f32]> {
        let (rows, report, gathered) = (self.rows, self.report, self.gathered);
        self.vocab.iter().scan(0, move |start, &vocab| {
            let part = &gathered[*start + row * vocab..][..vocab];
            *start += rows * vocab + report;
            Some(part)
        })
    }

    /// A row's hidden state after the last norm.
    pub fn hidden(&self, row: usize) -> &'a [f32] {
        let first = self.gathered.len() - self.rows * self.hidden;
        &self.gathered[first + row * self.hidden..][..self.hidden]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tokens_logit_is_that_of_its_row() {
        // Two ranks with three rows of four and three logits, each with two numbers of its report.
        let gathered: Vec<f32> = (0..12 + 2 + 9 + 2).map(|number| number as f32).collect();
        let results = StepResults {
            rows: 3,
            vocab: &[4, 3],
            has_logits: true,
            likely: 0,
            report: 2,
            hidden: 0,
            gathered: &gathered,
        };
        for row in 0..3 {
            let mut logits = Vec::new();
            results.logits(row, &mut logits);
            assert_eq!(logits.len(), 7);
            assert_eq!([logits[0], logits[4]], [4.0 * row as f32, 14.0 + 3.0 * row as f32]);
            let each: Vec<f32> = (0..7).map(|token| results.logit(row, token)).collect();
            assert_eq!(each, logits);
        }
    }
}
