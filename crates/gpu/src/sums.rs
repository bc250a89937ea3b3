//! Sums over the tensor-parallel group: inside of a submission where the device's mailbox was
//! proved, else between submissions, at a gate that the host opens, else by a submission, a wait
//! and a sum of the host.

use std::ops::Range;

use thunder_collectives::{Group, Op};
use thunder_compute::ComputeError;

use crate::adapter::DeviceInfo;
use crate::backend::GpuBackend;
use crate::buffer::{Buffer, Memory};
use crate::device::Device;
use crate::follow::Next;
use crate::mailbox::{Failure, Mailbox, Poison, Rows, Summer};

/// Whether sums over ranks are exchanged inside of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mailboxes {
    /// On real GPUs, if the start-up proof passes.
    #[default]
    Auto,
    /// On every device on which the proof passes.
    Always,
    /// Never: for ranks that share a GPU, which cannot compute for one while another waits on it.
    Never,
}

impl Mailboxes {
    /// Whether a rank of a group of this size may have one.
    pub(crate) fn may_be_for(self, info: &DeviceInfo, ranks: usize) -> bool {
        (ranks > 1 || self == Self::Always) && self.are_wanted(info.is_real())
    }

    /// The environment variable `THUNDER_MAILBOXES`, `always` or `never`, comes first.
    fn are_wanted(self, is_real: bool) -> bool {
        match std::env::var("THUNDER_MAILBOXES").as_deref() {
            Ok("always") => true,
            Ok("never") => false,
            _ => self == Self::Always || self == Self::Auto && is_real,
        }
    }
}

/// The group, and how the device's sums reach it.
pub(crate) struct Sums {
    size: usize,
    /// `None` while the mailbox has it.
    group: Option<Box<Group>>,
    pub(crate) mailbox: Option<Mailbox>,
    /// The mailbox has failed: gates are to be tried.
    tries_gates: bool,
    is_real: bool,
    /// The loss of a step, found where it could not be returned.
    failure: Option<ComputeError>,
}

impl Sums {
    pub fn new(group: Group) -> Self {
        Self {
            size: group.size(),
            group: Some(Box::new(group)),
            mailbox: None,
            tries_gates: false,
            is_real: false,
            failure: None,
        }
    }

    /// Ranks of the group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether sums are exchanged inside of submissions.
    pub fn has_mailbox(&self) -> bool {
        self.mailbox.as_ref().is_some_and(|mailbox| !mailbox.is_gated())
    }

    /// Proves a mailbox, if it is wanted and the group has other ranks.
    pub fn prove(&mut self, device: &mut Device, info: &DeviceInfo, wanted: Mailboxes) -> Outcome {
        if self.size == 1 || !wanted.are_wanted(info.is_real()) {
            return Ok(());
        }
        self.is_real = info.is_real();
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

    /// Proves a mailbox with gates, if another one was refused or has failed.
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

    /// The group, after all sums that were recorded.
    pub fn group(&mut self, device: &mut Device) -> &mut Group {
        if self.group.is_none() {
            let submitted = device.submit();
            self.take_back(device);
            if let Err(error) = submitted {
                self.failure.get_or_insert(error);
            }
        }
        match &mut self.group {
            Some(group) => group,
            None => unreachable!("the mailbox has given it back"),
        }
    }

    /// Takes the group back from the mailbox. If the step was lost, there is no mailbox afterwards.
    fn take_back(&mut self, device: &Device) {
        let Some(mailbox) = &mut self.mailbox else { return };
        if !mailbox.is_serving() {
            return;
        }
        let (group, outcome) = mailbox.take_group(device);
        self.group = Some(group);
        let Err(failure) = outcome else { return };
        // A group that is lost needs no other way.
        self.tries_gates = !mailbox.is_gated() && !matches!(failure, Failure::Comm(_));
        self.mailbox = None;
        let error = lost(failure, device);
        let name = &device.name;
        tracing::warn!(device = name, %error, "sums inside of a submission have failed");
        self.failure.get_or_insert(error);
    }

    /// Submits the sums that were recorded.
    pub fn submit(&self, device: &mut Device) -> Outcome {
        match &self.mailbox {
            Some(mailbox) if mailbox.is_serving() => device.submit(),
            _ => Ok(()),
        }
    }

    /// Fails if a sum of the commands that the device has done was lost.
    pub fn check(&mut self, device: &Device) -> Outcome {
        if self.mailbox.as_ref().is_some_and(|mailbox| mailbox.is_serving() && mailbox.verdict().is_some()) {
            self.take_back(device);
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Records the sum of rows inside of the submission; false if it must be summed by the host.
    fn exchange(
        &mut self,
        device: &mut Device,
        rows: Rows<'_>,
        to: Option<&Memory>,
    ) -> Result<bool, ComputeError> {
        self.try_gates(device)?;
        let Some(mailbox) = &mut self.mailbox else { return Ok(false) };
        if rows.width == 0 || !mailbox.fits(rows.rows * rows.stride) {
            return Ok(false);
        }
        if let Some(group) = self.group.take() {
            mailbox.begin(Summer::Group(group));
        }
        mailbox.record(device, rows, to)?;
        Ok(true)
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

impl GpuBackend {
    /// Sums rows of `x` over the ranks, in rank order, and adds them to `to`, if there is one; then
    /// `x` is not defined afterwards.
    pub(crate) fn sum_rows(
        &mut self,
        x: &mut Buffer,
        rows: Range<usize>,
        to: Option<&mut Buffer>,
    ) -> Outcome {
        if self.sums.size() > 1 {
            self.sums.failure.take().map_or(Ok(()), Err)?;
            let stride = x.stride();
            let all =
                Rows { x: &x.memory, first: rows.start * stride, rows: rows.len(), width: x.width, stride };
            debug_assert!(to.as_ref().is_none_or(|to| to.stride() == stride));
            if self.sums.exchange(&mut self.device, all, to.as_ref().map(|to| &to.memory))? {
                return Ok(());
            }
            let mut values = vec![0.0; rows.len() * x.width];
            self.read_rows(x, rows.clone(), &mut values)?;
            self.sums.group(&mut self.device).all_reduce(&mut values, Op::Sum)?;
            self.write_rows(x, rows.start, &values)?;
        }
        match to {
            Some(to) => self.add_rows(x, rows, to),
            None => Ok(()),
        }
    }

    /// Submits what was recorded, waits for it and reads words, unless a sum was lost before.
    pub(crate) fn read_words(&mut self, memory: &Memory, range: Range<usize>, out: &mut Vec<u32>) -> Outcome {
        self.device.read(memory, range, out)?;
        self.sums.check(&self.device)
    }

    /// [`Self::read_words`] of what a step ends with; the device may get the `next` one.
    pub(crate) fn read_largest_words(
        &mut self,
        memory: &Memory,
        range: Range<usize>,
        out: &mut Vec<u32>,
        next: Option<(Next, usize)>,
    ) -> Outcome {
        self.device.read_step(memory, range, out, next)?;
        self.sums.check(&self.device)
    }
}
