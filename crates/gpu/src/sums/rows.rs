//! The backend's sums of rows over ranks.

use std::ops::Range;

use thunder_collectives::Op;
use thunder_compute::ComputeError;

use super::{MOST_LONG_ROWS, Outcome, Recorded, Target};
use crate::backend::GpuBackend;
use crate::buffer::{BLOCK_COLUMNS, Buffer, Memory};
use crate::device::host_rows::HostRows;
use crate::device::read::Ballot;
use crate::follow::{Next, Vote};
use crate::kernel::{Input, Kernel, TokenSearch};
use crate::mailbox::{MAX_WORDS, Rows};
use crate::operations::leaving::Levels;

/// Maximum words of a few long rows.
const MOST_LONG_WORDS: usize = 8 * MAX_WORDS;

fn of_rows<'a>(x: &'a Buffer, rows: &Range<usize>) -> Rows<'a> {
    let stride = x.stride();
    Rows { x: &x.memory, first: rows.start * stride, rows: rows.len(), width: x.width, stride }
}

impl GpuBackend {
    /// Sums rows of `x` over the ranks, in rank order and in place.
    pub(crate) fn sum_rows(&mut self, x: &mut Buffer, rows: Range<usize>) -> Outcome {
        if self.sums.size() == 1 {
            return Ok(());
        }
        if self.exchange_long_rows(x, &rows)? {
            return Ok(());
        }
        match self.exchange_rows(x, &rows, None, None)? {
            Recorded::No => self.sum_by_host(x, rows),
            _ => Ok(()),
        }
    }

    /// Records the sums of a few long rows, which are the logits of one or two requests, in parts.
    /// Returns false for others, and if sums are not relayed and mailboxes are too slow for them.
    fn exchange_long_rows(&mut self, x: &Buffer, rows: &Range<usize>) -> Result<bool, ComputeError> {
        let words = rows.len() * x.stride();
        let are_long = rows.len() <= MOST_LONG_ROWS && (MAX_WORDS + 1..=MOST_LONG_WORDS).contains(&words);
        if !are_long || !self.sums.exchanges_logits() {
            return Ok(false);
        }
        self.sums.failure.take().map_or(Ok(()), Err)?;
        for first in (0..words).step_by(MAX_WORDS) {
            let width = MAX_WORDS.min(words - first);
            let part =
                Rows { x: &x.memory, first: rows.start * x.stride() + first, rows: 1, width, stride: width };
            let target = Target { to: None, left: None };
            if self.sums.exchange(&mut self.device, part, target)? == Recorded::No {
                // The relay or the mailbox has failed since.
                return Err(self.device.failed("sums over the ranks were lost: the step is lost"));
            }
        }
        Ok(true)
    }

    /// Sums rows of `x` over the ranks, in rank order, and adds them to `to`. The content of `x` is
    /// undefined afterwards. `weights`: the id of the weights that made `x`.
    pub(crate) fn add_sums(
        &mut self,
        x: &mut Buffer,
        rows: Range<usize>,
        to: &mut Buffer,
        weights: Option<u64>,
    ) -> Outcome {
        debug_assert!(self.sums.size() > 1 && to.stride() == x.stride());
        let blocks = to.stride() / BLOCK_COLUMNS;
        let norm = weights.and_then(|weights| self.norms_after.get(&weights).cloned());
        let leaves = self.sums.leaves(rows.len() * x.stride())
            && self.plain_input() == Input::Bytes
            && self.generated(to.rows.max(rows.end)) >= rows.end;
        let left = match norm.filter(|_| leaves) {
            Some(norm) => Some((norm, self.levels_at(0, to, blocks, Input::Bytes)?)),
            None => None,
        };
        let of_left = left.as_ref().map(|(norm, levels)| (norm, levels));
        match (self.exchange_rows(x, &rows, Some(to), of_left)?, &left) {
            (Recorded::No, _) => {
                self.sum_by_host(x, rows.clone())?;
                self.add_rows(x, rows, to)?;
            }
            (Recorded::SumsAndLevels, Some((norm, _))) => {
                self.note_levels(to, rows, (blocks, Input::Bytes, Some(norm.id)), 0);
            }
            _ => {}
        }
        if let Some(weights) = weights {
            self.note_added(weights, to);
        }
        Ok(())
    }

    fn exchange_rows(
        &mut self,
        x: &Buffer,
        rows: &Range<usize>,
        to: Option<&Buffer>,
        left: Option<(&Memory, &Levels)>,
    ) -> Result<Recorded, ComputeError> {
        self.sums.failure.take().map_or(Ok(()), Err)?;
        let target = Target { to: to.map(|to| &to.memory), left };
        match self.sums.exchange(&mut self.device, of_rows(x, rows), target)? {
            Recorded::No if self.sum_in_pieces(x, rows, to)? => Ok(Recorded::Sums),
            recorded => Ok(recorded),
        }
    }

    /// Sums rows in the host's memory, if that is possible. Smaller sums go by the host if they go
    /// by no mailbox: other ranks may have one.
    fn sum_in_pieces(
        &mut self,
        x: &Buffer,
        rows: &Range<usize>,
        to: Option<&Buffer>,
    ) -> Result<bool, ComputeError> {
        let is_large = rows.len() * x.stride() > MAX_WORDS;
        let Some(mut pieces) = self.sums.pieces.take_if(|_| is_large) else { return Ok(false) };
        let sums = &mut self.sums;
        let summed = pieces.sum(&mut self.device, of_rows(x, rows), to.map(|to| &to.memory), |device| {
            sums.check(device)?;
            Ok(sums.group(device).barrier()?)
        });
        self.sums.pieces = Some(pieces);
        summed.map(|()| true)
    }

    fn sum_by_host(&mut self, x: &mut Buffer, rows: Range<usize>) -> Outcome {
        if let Some(mut host_rows) = self.sums.host_rows.take() {
            let summed = self.sum_host_rows(&mut host_rows, of_rows(x, &rows));
            self.sums.host_rows = Some(host_rows);
            if summed? {
                return Ok(());
            }
        }
        let mut values = vec![0.0; rows.len() * x.width];
        self.read_rows(x, rows.clone(), &mut values)?;
        self.sums.group(&mut self.device).all_reduce(&mut values, Op::Sum)?;
        self.write_rows(x, rows.start, &values)
    }

    /// Sums rows where host and device both see them. Returns false if there is no space.
    fn sum_host_rows(&mut self, host_rows: &mut HostRows, rows: Rows<'_>) -> Result<bool, ComputeError> {
        let Some(values) = host_rows.stored(&mut self.device, rows)? else { return Ok(false) };
        self.sums.check(&self.device)?;
        self.sums.group(&mut self.device).all_reduce(values, Op::Sum)?;
        host_rows.take(&mut self.device, rows)?;
        Ok(true)
    }

    /// Submits the recorded commands, waits for them and reads words, unless a sum was lost before.
    pub(crate) fn read_words(&mut self, memory: &Memory, range: Range<usize>, out: &mut Vec<u32>) -> Outcome {
        self.device.read(memory, range, out)?;
        self.sums.check(&self.device)
    }

    /// [`Self::read_words`] for a step's last result; the device may get the `next` step.
    /// `can_share`, if all ranks vote on it: whether each row's largest number could be shared.
    pub(crate) fn read_largest_words(
        &mut self,
        (memory, range): (&Memory, Range<usize>),
        out: &mut Vec<u32>,
        next: Option<(Next, usize)>,
        can_share: Option<bool>,
    ) -> Outcome {
        let lost = self.sums.state().unwrap_or(&self.nothing).clone();
        let Self { device, sums, .. } = self;
        let mut ballot = can_share.map(|shares| move |vote| sums.vote(Vote { shares, ..vote }));
        let ballot: Option<Ballot<'_>> = ballot.as_mut().map(|ballot| ballot as Ballot<'_>);
        device.read_step((memory, range), (Some(&lost), ballot), out, next)?;
        self.sums.check(&self.device)
    }

    /// Records the exchange of each row's largest number, of those of its `parts`, with the other
    /// ranks. Returns where they will be: for each row and rank, a column and a number.
    pub(crate) fn share_largest(
        &mut self,
        (found, parts): (&Memory, usize),
        rows: usize,
    ) -> Result<Option<Memory>, ComputeError> {
        let (ranks, rank, first) = (self.sums.size(), self.sums.rank, self.tokens.first);
        let width = 2 * ranks * rows;
        // Mailboxes take vectors of four words.
        let stride = width.next_multiple_of(4);
        let to = Self::grown(&mut self.device, &mut self.shared_largest, 4 * stride, "largest numbers")?;
        let search = TokenSearch { parts, ranks, rank, first, ..Default::default() };
        let groups = [rows as u32, 1, 1];
        self.device.dispatch(&Kernel::ShareLargest, &[found, &to], &search.arguments(), groups)?;
        let exchanged = Rows { x: &to, first: 0, rows: 1, width, stride };
        let target = Target { to: None, left: None };
        let recorded = self.sums.exchange(&mut self.device, exchanged, target)?;
        Ok((recorded != Recorded::No).then_some(to))
    }
}
