//! The effect of low-rank adapters on a product: `out[r] += up · (down · x[r])`, for the rows of
//! each adapter.

use std::ops::Range;

use thunder_compute::backend::InputOf;
use thunder_compute::{Backend, ComputeError, Step};

/// The adapters of one product, in the order of the folder's; none if no adapter changes it.
pub(super) struct Adapters<B: Backend>(pub Vec<Adapted<B>>);

/// An adapter's change of a product.
pub(super) enum Adapted<B: Backend> {
    /// Nothing, on any rank.
    Nothing,
    /// Outputs or inputs that this rank has none of.
    Elsewhere,
    Here(LowRank<B>),
}

/// The matrices of an adapter.
pub(super) struct LowRank<B: Backend> {
    /// `[rank, inputs]`. The sum over the ranks' inputs is part of the product's.
    pub down: B::Matrix,
    /// `[outputs, rank]`.
    pub up: B::Matrix,
    pub rank: usize,
}

impl<B: Backend> Adapters<B> {
    /// True if an adapter changes some of these rows, on any rank; all ranks get the same answer.
    pub fn change(&self, step: &Step, rows: &Range<usize>) -> bool {
        let changes = |adapter: u32| {
            let number = (adapter as usize).checked_sub(1);
            number.is_some_and(|number| !matches!(self.0.get(number), None | Some(Adapted::Nothing)))
        };
        let mut sequences = step.sequences.iter();
        !self.0.is_empty()
            && sequences.any(|sequence| changes(sequence.adapter) && !sequence.rows_within(rows).is_empty())
    }

    /// Adds to `out` the changes of its product with `x` by the adapters of these rows.
    pub fn add(
        &self,
        x: &InputOf<'_, B>,
        (step, rows): (&Step, Range<usize>),
        backend: &mut B,
        out: &mut B::Buffer,
    ) -> Result<(), ComputeError> {
        if self.0.is_empty() {
            return Ok(());
        }
        let mut sequences = step.sequences.iter().peekable();
        while let Some(first) = sequences.next() {
            let mut run = first.rows.clone();
            // Neighbours with the same adapter are computed together.
            while let Some(next) = sequences.next_if(|next| next.adapter == first.adapter) {
                run.end = next.rows.end;
            }
            let run = run.start.max(rows.start)..run.end.min(rows.end);
            let number = (first.adapter as usize).checked_sub(1);
            let Some(Adapted::Here(LowRank { down, up, rank })) =
                number.and_then(|number| self.0.get(number))
            else {
                continue;
            };
            if run.is_empty() {
                continue;
            }
            let (height, _) = backend.extent(x.buffer());
            let (_, width) = backend.extent(out);
            let (mut low, mut change) = (backend.scratch(height, *rank)?, backend.scratch(height, width)?);
            backend.linear(*x, run.clone(), down, &mut low)?;
            backend.product(&low, run.clone(), up, &mut change)?;
            backend.add(&change, run, out)?;
            backend.give_back(low);
            backend.give_back(change);
        }
        Ok(())
    }
}
