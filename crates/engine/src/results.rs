//! A step's results on rank 0.

use thunder_compute::Largest;

/// The results of one step, gathered from the ranks of the last stage. Holds `[rank][row]`: after
/// [`Command::ComputeLogits`](crate::protocol::Command::ComputeLogits) the logits of the rank's
/// part of the vocabulary, after
/// [`Command::ComputeLargest`](crate::protocol::Command::ComputeLargest) the bits of a token id and
/// its logit.
#[derive(Debug, Clone, Copy)]
pub struct StepResults<'a> {
    /// Rows that wanted logits.
    pub(crate) rows: usize,
    /// Vocabulary rows of each rank.
    pub(crate) vocab: &'a [usize],
    pub(crate) gathered: &'a [f32],
}

impl StepResults<'_> {
    /// The likeliest token of a row, after `ComputeLargest`; `None` if a logit is not finite.
    pub fn largest(&self, row: usize) -> Option<u32> {
        let mut best = Largest::NONE;
        for rank in 0..self.vocab.len() {
            let &[id, value] = &self.gathered[(rank * self.rows + row) * 2..][..2] else { continue };
            // The lowest id wins a tie, as on one rank.
            best = best.or(Largest { column: id.to_bits(), value });
        }
        best.value.is_finite().then_some(best.column)
    }

    /// A row's logits over the whole vocabulary, after `ComputeLogits`.
    pub fn logits(&self, row: usize, out: &mut Vec<f32>) {
        out.clear();
        let mut start = 0;
        for &vocab in self.vocab {
            out.extend_from_slice(&self.gathered[start + row * vocab..][..vocab]);
            start += self.rows * vocab;
        }
    }
}
