//! Sums over ranks in which the host does not wait for the device. The device stores its partial
//! sums in memory that the host sees, and a host thread answers. The device waits for the answer
//! within a submission for a bounded time, or between two submissions, at a gate.
//!
//! An exchange that ends without an answer poisons all later ones, which give up at once. The step
//! is then lost, but the device stays usable.

mod boxes;
mod measure;
mod numbers;
mod proof;
#[cfg(test)]
mod tests;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use thunder_collectives::{Group, Stats};
use thunder_compute::ComputeError;

use crate::buffer::Memory;
use crate::device::Device;
use crate::device::gate::Gates;
use crate::device::numbering::ARGUMENTS;
use crate::kernel::{Coherent, EXCHANGE_THREADS, Exchange as Form, Kernel, Look};
use boxes::Boxes;
pub(crate) use boxes::{ENDED, MAX_WORDS, Poison, next};
pub(crate) use measure::QUEUED_KIB;
pub use measure::{ExchangeForm, ExchangeTime, HostWay, exchange_times, host_ways};
use numbers::Numbers;
pub(crate) use proof::{MAX_SOFTWARE_LOOKS, looks_per_s};
use worker::Worker;
pub(crate) use worker::{Failure, Summer};

/// Words that a workgroup sends and receives: four for each thread.
const WORDS_OF_A_GROUP: usize = 4 * EXCHANGE_THREADS as usize;

/// Maximum workgroups of an exchange in two kernels. All of them poll the host's flag.
const MAX_GROUPS: usize = 16;

/// Sums that are exchanged with the host.
pub(crate) struct Mailbox {
    boxes: Arc<Boxes>,
    /// Why the device gave up, in its own memory.
    state: Memory,
    worker: Worker,
    /// Gates between the kernels of an exchange, in place of waits within them.
    gates: Option<Gates>,
    /// Number of gates so far.
    gate: u64,
    look: Look,
    /// Polls of the host's flag after which a thread leaves polling to the next thread, or gives
    /// up.
    pub(crate) looks: u32,
    /// Sums of at most this many words are exchanged by a single kernel.
    pub(crate) words_at_once: usize,
    /// Exchanges are three kernels, whose accesses are coherent with the host.
    pub(crate) is_coherent: bool,
    /// Whether the worker has a summer.
    serving: bool,
}

/// Rows whose numbers are summed: `x` from word `first` on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub x: &'a Memory,
    pub first: usize,
    pub rows: usize,
    pub width: usize,
    pub stride: usize,
}

impl Mailbox {
    fn new(device: &mut Device, is_real: bool, gates: Option<Gates>) -> Result<Option<Self>, ComputeError> {
        let Some(boxes) = Boxes::new(device)?.map(Arc::new) else { return Ok(None) };
        let state = device.memory(16, "the state of exchanges")?;
        let worker = Worker::start(Arc::clone(&boxes), gates.clone(), (is_real, device.cores))
            .map_err(|error| device.failed(format!("no thread for exchanges: {error}")))?;
        device.numbering = Some(Arc::<Numbers>::clone(worker.numbers()));
        Ok(Some(Self {
            boxes,
            state,
            worker,
            gates,
            gate: 0,
            look: if is_real { Look::Once } else { Look::Often },
            looks: 0,
            words_at_once: WORDS_OF_A_GROUP,
            is_coherent: false,
            serving: false,
        }))
    }

    /// Whether the device waits between submissions, not within them.
    pub fn is_gated(&self) -> bool {
        self.gates.is_some()
    }

    /// Its first word is not 0 after the device has given up.
    pub fn state(&self) -> &Memory {
        &self.state
    }

    /// The number of the last exchange.
    #[cfg(test)]
    pub fn number(&self) -> u32 {
        self.worker.numbers().last()
    }

    /// Whether sums of this many words fit.
    pub fn fits(&self, words: usize) -> bool {
        (1..=MAX_WORDS).contains(&words)
    }

    /// Whether the worker has a summer.
    pub fn is_serving(&self) -> bool {
        self.serving
    }

    /// What the group's sums have cost since the last call.
    pub fn take_stats(&self) -> Stats {
        self.worker.take_stats()
    }

    /// Lends the summer to the worker, until [`Mailbox::take_back`].
    pub fn begin(&mut self, summer: Summer) {
        self.serving = true;
        self.worker.begin(summer);
    }

    /// Records the exchange of rows. The sums replace the rows, or are added to `to`. The device
    /// numbers it: the worker gets the order before the commands. If the device never fulfils an
    /// order, only the worker's wait ends; but nobody would answer commands without an order.
    pub fn record(
        &mut self,
        device: &mut Device,
        rows: Rows<'_>,
        to: Option<&Memory>,
    ) -> Result<(), ComputeError> {
        debug_assert!(self.serving);
        let number = self.gates.is_some().then(|| {
            // A gate is waited for once.
            self.gate += 1;
            self.worker.numbers().next([rows.rows, rows.width, rows.stride], self.gate)
        });
        self.dispatch(device, number, rows, to)
    }

    /// `number`: that of the exchange, if the device does not number it.
    fn dispatch(
        &self,
        device: &mut Device,
        number: Option<u32>,
        Rows { x, first, rows, width, stride }: Rows<'_>,
        to: Option<&Memory>,
    ) -> Result<(), ComputeError> {
        let words = rows * stride;
        debug_assert!(self.fits(words) && first.is_multiple_of(4) && words.is_multiple_of(4));
        let [outbox, inbox, answered] = self.boxes.memories();
        let groups = words.div_ceil(WORDS_OF_A_GROUP).min(MAX_GROUPS) as u32;
        let in_one = words <= self.words_at_once && !self.is_coherent;
        let groups = if in_one { 1 } else { groups };
        let slot = number.map_or(0, Boxes::first_vector) as u32;
        let arguments = [
            first as u32 / 4,
            words as u32 / 4,
            slot,
            number.unwrap_or(0),
            self.looks,
            groups,
            width as u32,
            stride as u32,
        ];
        let arguments = if number.is_some() { &arguments[..ARGUMENTS] } else { &arguments };
        let mut run = |kernel: Kernel, buffers: &[&Memory], groups: u32| {
            device.dispatch(&kernel, buffers, arguments, [groups, 1, 1])
        };
        let (state, adds, look, to_rows) = (&self.state, to.is_some(), self.look, to.unwrap_or(x));
        if in_one {
            let mut buffers = vec![x, outbox, state, inbox, answered];
            buffers.extend(to);
            return run(Kernel::Exchange(Form::Both { adds, look }), &buffers, 1);
        }
        if self.is_coherent {
            run(Kernel::Coherent(Coherent::Send), &[x, outbox, state], groups)?;
            run(Kernel::Coherent(Coherent::Await), &[outbox, state, answered], 1)?;
            let take = Kernel::Coherent(Coherent::Take { adds });
            return run(take, &[outbox, state, inbox, to_rows], groups);
        }
        run(Kernel::Exchange(Form::Send), &[x, outbox, state], groups)?;
        if let Some(gates) = &self.gates {
            device.submit_and_wait_at(gates, self.gate)?;
        }
        let receive = Kernel::Exchange(Form::Receive { adds, look });
        let buffers = [outbox, state, inbox, answered, to_rows];
        device.dispatch(&receive, &buffers, arguments, [groups, 1, 1])
    }

    /// The exchange at which the device gave up, and why. Valid after the device has finished its
    /// commands.
    pub fn verdict(&self) -> Option<(u32, Poison)> {
        self.boxes.verdict()
    }

    /// Waits for all exchanges. Their commands must have been submitted. After a failure, do not
    /// use the mailbox again.
    pub fn take_back(&mut self, device: &Device) -> (Summer, Result<(), Failure>) {
        self.serving = false;
        let (summer, outcome) = self.worker.take_back(|| device.check().is_ok());
        let poisoned = |(number, poison)| Failure::Poison(number, poison);
        let outcome = outcome.and_then(|()| self.verdict().map_or(Ok(()), |found| Err(poisoned(found))));
        (summer, outcome)
    }

    /// [`Mailbox::take_back`], for a group.
    pub fn take_group(&mut self, device: &Device) -> (Box<Group>, Result<(), Failure>) {
        match self.take_back(device) {
            (Summer::Group(group), outcome) => (group, outcome),
            (Summer::Stand(_), _) => unreachable!("the worker was given a group"),
        }
    }
}

/// How long the device waits for an answer before the step is lost. Peers need much less time,
/// because they compute the same layer. Drivers reset a device whose commands take some seconds; a
/// software driver never does.
pub(crate) fn patience(is_real: bool) -> Duration {
    match (is_real, cfg!(target_vendor = "apple")) {
        // Its loops end after about ten seconds anyway.
        (false, _) => Duration::from_secs(30),
        // macOS ends submissions of a GPU that shows a display after about half a second.
        (true, true) => Duration::from_millis(300),
        (true, false) => Duration::from_millis(1800),
    }
}
