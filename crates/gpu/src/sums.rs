//! Sums over the tensor-parallel group. The forms, in order of preference: within a submission,
//! relayed between the devices of one host; within a submission, by the device's mailbox; between
//! submissions, at a gate that the host opens; by a submission, a wait and a sum on the host. Large
//! sums go in pieces by memory of the host where sums are relayed, elsewhere by the host; those of
//! one or two long rows go in parts by the relay, or by a mailbox with a group of its own.

mod ahead;
mod rows;

use std::time::Duration;

use thunder_collectives::{Group, Op, Stats};
use thunder_compute::ComputeError;

use crate::adapter::DeviceInfo;
use crate::buffer::Memory;
use crate::device::Device;
use crate::device::host_rows::HostRows;
use crate::mailbox::{Failure, MAX_WORDS, Mailbox, Poison, Rows, Summer};
use crate::operations::leaving::Levels;
use crate::pieces::Pieces;
use crate::relay::{Relay, To};
use ahead::LONGEST_VOTE;

/// Few rows whose sums are exchanged in several parts, so that no host waits: a relay takes 0.25 ms
/// for 2 MiB, longer than pieces in the host's memory.
const MOST_LONG_ROWS: usize = 2;
/// Whether sums over ranks are exchanged within a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mailboxes {
    /// On real GPUs, if the proof at the start passes.
    #[default]
    Auto,
    /// On every device on which the proof passes.
    Always,
    /// The same, and hosts sum, even if they could relay.
    Host,
    /// Never. For ranks that share a GPU, because it cannot compute for one rank while another
    /// rank's kernel waits.
    Never,
}

impl Mailboxes {
    /// Whether a rank of a group of this size may use a mailbox.
    pub(crate) fn may_be_for(self, info: &DeviceInfo, ranks: usize) -> bool {
        (ranks > 1 || self == Self::Always) && self.or_environment().are_wanted(info.is_real())
    }

    /// The environment variable `THUNDER_MAILBOXES` takes precedence: `always`, `host` or `never`.
    fn or_environment(self) -> Self {
        match std::env::var("THUNDER_MAILBOXES").as_deref() {
            Ok("always") => Self::Always,
            Ok("host") => Self::Host,
            Ok("never") => Self::Never,
            _ => self,
        }
    }

    fn are_wanted(self, is_real: bool) -> bool {
        match self {
            Self::Auto => is_real,
            Self::Always | Self::Host => true,
            Self::Never => false,
        }
    }
}

/// How sums over ranks travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SumForm {
    /// There is one rank.
    None,
    /// Hosts relay partial sums, and devices add them while a kernel waits.
    Relay,
    /// The host sums while a kernel waits.
    Mailbox,
    /// The host sums between two submissions that are already in the queue.
    Gates,
    /// Devices add pieces that they read in the host's memory, between two submissions.
    Pieces,
    /// The host waits and sums.
    Host,
}

/// Where the sums of an exchange go. If they are relayed, they can also be stored as levels.
#[derive(Clone, Copy)]
struct Target<'a> {
    to: Option<&'a Memory>,
    left: Option<(&'a Memory, &'a Levels)>,
}

/// How an exchange was recorded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Recorded {
    /// Not at all: the host must sum.
    No,
    Sums,
    SumsAndLevels,
}

/// The group, and the path of the device's sums to it.
pub(crate) struct Sums {
    size: usize,
    pub(crate) rank: usize,
    /// `None` while the mailbox or the thread that watches the ranks has it.
    group: Option<Box<Group>>,
    pub(crate) relay: Option<Relay>,
    /// All ranks compute on devices of their own, and call the same functions.
    pub(crate) peers: bool,
    /// For sums that are too large for a kernel that waits. All ranks have it, or none.
    pub(crate) pieces: Option<Pieces>,
    /// For sums by the host; without it, the host copies rows.
    pub(crate) host_rows: Option<HostRows>,
    pub(crate) mailbox: Option<Mailbox>,
    /// The mailbox has a group of its own, so hosts can use theirs while devices compute.
    is_apart: bool,
    /// Mailboxes sum logits of a few rows fast enough.
    pub(crate) sums_logits: bool,
    /// Set after relayed sums have failed: the number of the last one. Mailboxes are tried next.
    tries_mailboxes: Option<u32>,
    /// The mailbox has failed; gates are tried next.
    tries_gates: bool,
    is_real: bool,
    /// The loss of a step, found where it could not be returned.
    failure: Option<ComputeError>,
    /// All ranks agree that devices may get steps ahead.
    goes_ahead: bool,
    /// This rank has computed steps without the others: those of a draft model.
    was_alone: bool,
    /// All ranks can share each row's largest number.
    pub(crate) shares: bool,
    /// A rank that did not vote, so this one has ended the exchanges.
    silent: Option<usize>,
    /// How long this rank waits for the others' votes if sums go by mailboxes.
    pub(crate) longest_vote: Duration,
}

impl Sums {
    pub fn new(group: Group) -> Self {
        Self {
            size: group.size(),
            rank: group.rank(),
            group: Some(Box::new(group)),
            relay: None,
            peers: false,
            pieces: None,
            host_rows: None,
            mailbox: None,
            is_apart: false,
            sums_logits: false,
            tries_mailboxes: None,
            tries_gates: false,
            is_real: false,
            failure: None,
            goes_ahead: false,
            was_alone: false,
            shares: false,
            silent: None,
            longest_vote: LONGEST_VOTE,
        }
    }

    /// Ranks of the group. A draft model has a group of its own while it computes.
    pub fn size(&self) -> usize {
        self.group.as_ref().map_or(self.size, |group| group.size())
    }

    /// Notes that a step begins.
    pub fn begin_step(&mut self) {
        self.was_alone |= self.size() < self.size;
    }

    /// How sums travel.
    pub fn form(&self) -> SumForm {
        match &self.mailbox {
            _ if self.size() == 1 => SumForm::None,
            _ if self.relay.is_some() => SumForm::Relay,
            Some(mailbox) if mailbox.is_gated() => SumForm::Gates,
            Some(_) => SumForm::Mailbox,
            None => SumForm::Host,
        }
    }

    /// How a sum of this many words travels.
    pub fn form_of(&self, words: usize) -> SumForm {
        match &self.pieces {
            _ if words <= MAX_WORDS || self.size() == 1 => self.form(),
            Some(_) => SumForm::Pieces,
            None => SumForm::Host,
        }
    }

    /// Proves the best form, if one is wanted and the group has other ranks. `peers`: all of them
    /// compute on devices of this kind and call this function too.
    pub fn prove(
        &mut self,
        device: &mut Device,
        info: &DeviceInfo,
        (wanted, peers): (Mailboxes, bool),
    ) -> Outcome {
        self.is_real = info.is_real();
        self.peers = peers && self.size > 1;
        let wanted = wanted.or_environment();
        let are_wanted = wanted.are_wanted(self.is_real);
        if let Some(mut group) = self.group.take_if(|group| peers && group.size() > 1) {
            let mut all = [u64::from(are_wanted && wanted != Mailboxes::Host)];
            group.all_reduce(&mut all, Op::Min)?;
            if all == [1] {
                let (back, agreed) = Relay::agreed(device, group, self.is_real)?;
                let name = &device.name;
                match agreed {
                    Ok(relay) => self.relay = Some(relay),
                    Err(reason) => {
                        tracing::warn!(device = name, reason, "relayed sums are refused");
                    }
                }
                group = back;
                if self.relay.is_some() {
                    self.prove_pieces(device, &mut group)?;
                }
            }
            self.group = Some(group);
        }
        if self.size > 1 {
            match HostRows::proved(device)? {
                Ok(rows) => self.host_rows = Some(rows),
                Err(reason) => {
                    let name = &device.name;
                    tracing::warn!(device = name, reason, "the host copies rows to sum them");
                }
            }
        }
        match self.size > 1 && are_wanted && self.relay.is_none() {
            true => self.prove_mailbox(device),
            false => Ok(()),
        }
    }

    fn prove_pieces(&mut self, device: &mut Device, group: &mut Group) -> Outcome {
        match Pieces::agreed(device, group)? {
            Ok(pieces) => self.pieces = Some(pieces),
            Err(reason) => {
                let name = &device.name;
                tracing::warn!(device = name, reason, "sums in the host's memory are refused");
            }
        }
        Ok(())
    }

    fn prove_mailbox(&mut self, device: &mut Device) -> Outcome {
        match Mailbox::proved(device, self.is_real)? {
            Ok(mailbox) => self.mailbox = Some(mailbox),
            Err(reason) => {
                let name = &device.name;
                tracing::warn!(device = name, reason, "sums inside of a submission are refused");
                self.tries_gates = true;
            }
        }
        self.try_gates(device)
    }

    /// Proves a mailbox if relayed sums have failed, on all ranks at the same sum.
    fn try_mailboxes(&mut self, device: &mut Device) -> Outcome {
        if self.relay.as_ref().is_some_and(Relay::is_over) {
            self.take_back(device);
            // The relay is still here if only another rank's device has given up.
            if let Some(relay) = self.relay.take() {
                if let Some(number) = relay.skip_lost() {
                    self.note(Failure::Poison(number, Poison::Told), device);
                }
                self.tries_mailboxes = Some(relay.number());
            }
            self.failure.take().map_or(Ok(()), Err)?;
        }
        let Some(number) = self.tries_mailboxes.take() else { return Ok(()) };
        let Some(group) = self.group.as_deref_mut() else { return Ok(()) };
        let mut bounds = [number, u32::MAX - number];
        group.all_reduce(&mut bounds, Op::Max)?;
        if bounds != [number, u32::MAX - number] {
            return Err(device.failed(format!(
                "the ranks lost different sums ({} and {}): start the group anew",
                u32::MAX - bounds[1],
                bounds[0]
            )));
        }
        let name = &device.name;
        tracing::warn!(device = name, "sums go by the host from now on");
        self.prove_mailbox(device)
    }

    /// Proves a mailbox with gates, if another mailbox was refused or has failed.
    fn try_gates(&mut self, device: &mut Device) -> Outcome {
        if !std::mem::take(&mut self.tries_gates) {
            return Ok(());
        }
        let proved = Mailbox::gated(device, self.is_real)?;
        let name = &device.name;
        match proved {
            Ok(mailbox) => {
                tracing::warn!(device = name, "sums are exchanged between two submissions from now on");
                self.mailbox = Some(mailbox);
            }
            Err(reason) => {
                tracing::warn!(
                    device = name,
                    reason,
                    "the host waits for the device at each sum from now on"
                );
            }
        }
        Ok(())
    }

    /// The group, after all recorded sums. If the mailbox has another one, these are only
    /// submitted: other ranks may wait for them.
    pub fn group(&mut self, device: &mut Device) -> &mut Group {
        if self.group.is_none() || self.is_apart {
            let submitted = device.submit_step();
            if self.group.is_none() {
                self.take_back(device);
            }
            if let Err(error) = submitted {
                self.failure.get_or_insert(error);
            }
        }
        match &mut self.group {
            Some(group) => group,
            None => unreachable!("the mailbox has given it back"),
        }
    }

    /// Takes the group back. If the step was lost, the form that lost it is dropped.
    fn take_back(&mut self, device: &Device) {
        if let Some(relay) = &self.relay {
            let (group, lost) = relay.take_group();
            self.group = group.or(self.group.take());
            let outcome = self.group.as_mut().map_or(Ok(()), |group| relay.outcome(group, lost));
            if let Err(failure) = outcome {
                // A lost group needs no other form.
                let number = (!matches!(failure, Failure::Comm(_))).then(|| relay.number());
                (self.relay, self.tries_mailboxes) = (None, number);
                self.note(failure, device);
            }
            return;
        }
        let Some(mailbox) = &mut self.mailbox else { return };
        if !mailbox.is_serving() {
            return;
        }
        let (group, outcome) = mailbox.take_group(device);
        // The others find out that this rank sums no more if the mailbox's own group is dropped.
        if !std::mem::take(&mut self.is_apart) {
            self.group = Some(group);
        }
        let Err(failure) = outcome else { return };
        // A lost group needs no other form.
        self.tries_gates = !mailbox.is_gated() && !matches!(failure, Failure::Comm(_));
        self.mailbox = None;
        self.note(failure, device);
    }

    fn note(&mut self, failure: Failure, device: &Device) {
        let error = lost(failure, device);
        let name = &device.name;
        tracing::warn!(device = name, %error, "sums inside of a submission have failed");
        self.failure.get_or_insert(error);
    }

    /// What sums have cost since the last call.
    pub fn take_stats(&mut self, device: &mut Device) -> Stats {
        let mut all = self.group(device).reset_stats();
        if let Some(mailbox) = &self.mailbox {
            let Stats { operations, bytes, time } = mailbox.take_stats();
            all.operations += operations;
            all.bytes += bytes;
            all.time += time;
        }
        all
    }

    /// Submits the sums that were recorded.
    pub fn submit(&self, device: &mut Device) -> Outcome {
        match self.group.is_none() || self.is_apart {
            true => device.submit_sums(),
            false => Ok(()),
        }
    }

    /// Fails if a sum among the commands that the device has finished was lost.
    pub fn check(&mut self, device: &Device) -> Outcome {
        if let Some(rank) = self.silent.take() {
            self.take_back(device);
            let reason = format!("rank {rank} did not come to the end of a step in time: the step is lost");
            self.failure.get_or_insert(device.failed(reason));
        }
        let of_mailbox = self.mailbox.as_ref().filter(|mailbox| mailbox.is_serving());
        if of_mailbox.is_some_and(|mailbox| mailbox.verdict().is_some())
            || self.relay.as_ref().is_some_and(|relay| relay.verdict().is_some())
        {
            self.take_back(device);
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Where kernels note that a sum was lost.
    fn state(&self) -> Option<&Memory> {
        let of_mailbox = self.mailbox.as_ref().map(Mailbox::state);
        self.relay.as_ref().map(Relay::state).or(of_mailbox)
    }

    /// Whether a sum of this many words can also be stored as levels.
    fn leaves(&self, words: usize) -> bool {
        self.relay.as_ref().is_some_and(|relay| relay.can_leave && relay.fits(words))
    }

    /// Records the sum of rows within the submission.
    fn exchange(
        &mut self,
        device: &mut Device,
        rows: Rows<'_>,
        Target { to, left }: Target<'_>,
    ) -> Result<Recorded, ComputeError> {
        self.try_mailboxes(device)?;
        self.try_gates(device)?;
        if let Some(relay) = &mut self.relay {
            if rows.width == 0 || !relay.fits(rows.rows * rows.stride) {
                return Ok(Recorded::No);
            }
            if let Some(group) = self.group.take() {
                relay.begin(group);
            }
            let (to, recorded) = match (to, left) {
                (None, _) => (To::Place, Recorded::Sums),
                (Some(to), Some((norm, levels))) => (To::Left(to, norm, levels), Recorded::SumsAndLevels),
                (Some(to), None) => (To::Rows(to), Recorded::Sums),
            };
            relay.record(device, rows, to)?;
            return Ok(recorded);
        }
        let Some(mailbox) = &mut self.mailbox else { return Ok(Recorded::No) };
        if rows.width == 0 || !mailbox.fits(rows.rows * rows.stride) {
            return Ok(Recorded::No);
        }
        if let Some(group) = self.group.take_if(|_| !self.is_apart) {
            mailbox.begin(Summer::Group(group));
        }
        mailbox.record(device, rows, to)?;
        Ok(Recorded::Sums)
    }
}

type Outcome = Result<(), ComputeError>;

fn lost(failure: Failure, device: &Device) -> ComputeError {
    let reason = match failure {
        Failure::Comm(error) => return error.into(),
        Failure::Poison(number, Poison::Torn) => {
            format!("sum {number} over the ranks was announced before it was there: the step is lost")
        }
        Failure::Poison(number, Poison::Late | Poison::Told) => format!(
            "sum {number} over the ranks did not come back to it in time: the step is lost; are all ranks on \
             machines with free cores?"
        ),
        Failure::Silent(number) => format!("it left nothing to sum over the ranks for sum {number}"),
    };
    device.failed(reason)
}
