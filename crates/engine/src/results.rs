//! A step's results on rank 0.

use thunder_compute::Largest;

/// The results of one step, gathered from the ranks of the last stage. Contains `[rank][row]`: the
/// logits of the rank's part of the vocabulary if
/// [`RowResults::logits`](crate::scheduler::RowResults::logits), otherwise the bits of a token id
/// and its logit: of the chosen token, or of the most probable one. After each rank's rows, the
/// reports of its work. At the end, `[row][hidden]`.
#[derive(Debug, Clone, Copy)]
pub struct StepResults<'a> {
    /// Rows that have results.
    pub(crate) rows: usize,
    /// Vocabulary rows of each rank.
    pub(crate) vocab: &'a [usize],
    pub(crate) has_logits: bool,
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
            let of_rank = rank * (self.rows * 2 + self.report);
            let &[id, value] = &self.gathered[of_rank + row * 2..][..2] else { continue };
            // The lowest id wins a tie, as on one rank.
            best = best.or(Largest { column: id.to_bits(), value });
        }
        best.value.is_finite().then_some(best.column)
    }

    /// A row's logits over the whole vocabulary.
    pub fn logits(&self, row: usize, out: &mut Vec<f32>) {
        out.clear();
        let mut start = 0;
        for &vocab in self.vocab {
            out.extend_from_slice(&self.gathered[start + row * vocab..][..vocab]);
            start += self.rows * vocab + self.report;
        }
    }

    /// A token's logit in a row. The token must be of the vocabulary.
    pub fn logit(&self, row: usize, token: u32) -> f32 {
        let (mut start, mut token) = (0, token as usize);
        for &vocab in self.vocab {
            if token < vocab {
                return self.gathered[start + row * vocab + token];
            }
            token -= vocab;
            start += self.rows * vocab + self.report;
        }
        f32::NAN
    }

    /// A row's hidden state after the last norm.
    pub fn hidden(&self, row: usize) -> &'a [f32] {
        let first = self.gathered.len() - self.rows * self.hidden;
        &self.gathered[first + row * self.hidden..][..self.hidden]
    }
}
