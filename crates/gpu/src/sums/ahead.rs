//! What ranks that exchange sums within their steps agree on: whether devices may get steps
//! ahead, and on each of these steps.

use std::time::Duration;

use thunder_collectives::{DType, InitError, Op};

use super::{MOST_LONG_ROWS, Outcome, Sums};
use crate::device::Device;
use crate::follow::Vote;
use crate::mailbox::Summer;

/// Logits of 131,072 tokens, and the time in which mailboxes must sum them. Otherwise rank 0
/// gathers logits: half of the bytes, but devices wait for hosts between steps, for about half a
/// millisecond.
const LOGITS_BYTES: usize = 512 << 10;
const MOST_LOGITS_US: f64 = 1000.0;

/// How long ranks with mailboxes wait for each other's votes. GPUs wait less for a sum, so a rank
/// that is later has lost the step anyway.
pub(super) const LONGEST_VOTE: Duration = Duration::from_secs(10);

impl Sums {
    /// Agrees with the other ranks whether devices may get steps ahead. All call this together,
    /// after the models are loaded. `can`: nothing else keeps this rank's device from it.
    pub fn agree_on_ahead(&mut self, device: &mut Device, can: bool) -> Outcome {
        // CPU ranks do not take part.
        if !self.peers {
            return Ok(());
        }
        // Numbers of tokens must arrive as they are.
        let in_queue =
            self.mailbox.as_ref().is_some_and(|mailbox| !mailbox.is_gated()) && self.group(device).is_exact();
        let can = can && !self.was_alone;
        let mut all = [self.relay.is_some(), in_queue].map(|form| u64::from(can && form));
        self.group(device).all_reduce(&mut all, Op::Min)?;
        if all[1] == 1 && !self.is_apart {
            self.part(device)?;
        }
        self.goes_ahead = all[0] == 1 || all[1] == 1 && self.is_apart;
        Ok(())
    }

    /// Gives the mailbox the group, and the hosts a new one, if all ranks can form one: their
    /// network may have few connections.
    fn part(&mut self, device: &mut Device) -> Outcome {
        let rank = self.rank as u32;
        let group = self.group(device);
        let algorithm = group.algorithm(LOGITS_BYTES, DType::F32, Op::Sum);
        let cost = group.costs().into_iter().find(|cost| cost.algorithm == algorithm);
        let are_fast = cost.is_some_and(|cost| cost.predict_us(LOGITS_BYTES) <= MOST_LOGITS_US);
        let new = match group.split(0, rank) {
            Ok(new) => Box::new(new),
            Err(InitError::Comm(error)) => return Err(error.into()),
            Err(error) => {
                let name = &device.name;
                tracing::warn!(device = name, %error, "the ranks have no second group: no steps ahead");
                return Ok(());
            }
        };
        if let (Some(mailbox), Some(group)) = (&mut self.mailbox, self.group.replace(new)) {
            mailbox.begin(Summer::Group(group));
            (self.is_apart, self.sums_logits) = (true, are_fast);
        }
        Ok(())
    }

    /// Maximum rows whose logits of all tokens are summed fast.
    pub fn gathers(&self) -> usize {
        match &self.pieces {
            Some(_) => usize::MAX,
            None if self.exchanges_logits() => MOST_LONG_ROWS,
            None => 0,
        }
    }

    /// Whether logits of a few rows are exchanged within the submission.
    pub(super) fn exchanges_logits(&self) -> bool {
        self.relay.is_some() || self.is_apart && self.sums_logits
    }

    /// Whether the device may get steps ahead.
    pub fn may_go_ahead(&self) -> bool {
        self.size == 1 || self.votes()
    }

    /// Whether ranks vote on each step ahead, for which they share each row's largest number.
    pub fn votes(&self) -> bool {
        self.goes_ahead && self.size() > 1 && (self.relay.is_some() || self.is_apart)
    }

    /// Votes on the next step, and on whether the current one must be recorded again.
    pub(crate) fn vote(&mut self, vote: Vote) -> Vote {
        let all = if self.relay.is_some() { self.vote_in_memory(vote) } else { self.vote_apart(vote) };
        self.shares = all.shares;
        all
    }

    /// The vote of ranks that relay sums, in memory that they share.
    fn vote_in_memory(&mut self, vote: Vote) -> Vote {
        let Some(relay) = &mut self.relay else { return Vote::of(0) };
        // A lost rank ends the wait for its vote.
        if let Some(group) = self.group.take() {
            relay.begin(group);
        }
        let (all, silent) = relay.vote(vote);
        self.silent = silent;
        all
    }

    /// The vote of ranks whose mailboxes have a group of their own.
    fn vote_apart(&mut self, vote: Vote) -> Vote {
        let Some(group) = &mut self.group else { return Vote::of(0) };
        let mut bits = [vote.keeps, vote.shares, vote.gives].map(u64::from);
        let stall_limit = group.set_stall_limit(self.longest_vote);
        let voted = group.all_reduce(&mut bits, Op::Min);
        group.set_stall_limit(stall_limit);
        if let Err(error) = voted {
            self.failure.get_or_insert(error.into());
            bits = [0; 3];
        }
        let [keeps, shares, gives] = bits.map(|bit| bit == 1);
        Vote { keeps, shares, gives }
    }
}
