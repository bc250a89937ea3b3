//! Sums over ranks of one host, whose hosts relay partial sums: each device leaves its own in
//! memory of the host that all ranks share and all devices have imported; threads of each rank copy
//! those of the others to the memory of their own device; and the device adds them in rank order.
//! (No device of NVIDIA's sees what changes in the host's memory while its kernel runs.)
//!
//! What makes it right:
//! - A vector of four words holds three numbers and a check word, which is made of them and of the
//!   exchange's number. A vector of another exchange, or of this one with an old word in it, does
//!   not pass; with two old words in it, one of 2^32 would, and aligned vectors are written at
//!   once. The thread that copies checks it, and so does the device.
//! - Exchanges use two slots in turn. A device writes to a slot for exchange `n` after it has
//!   received all that others left for `n - 1`. They had then received all of `n - 2`, the last one
//!   in this slot, as their commands do one exchange after the other; so their hosts had copied it.
//! - A workgroup waits for the same workgroup of other ranks only, which leaves its part before it
//!   waits. So devices need not have room for all workgroups at the same time.
//! - Waits are bounded by a number of looks. Then the device poisons itself: it gives up all that
//!   follows, and says so in memory that all hosts see.

mod copy;
mod measure;
mod proof;
#[cfg(test)]
mod tests;
mod threads;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use thunder_collectives::{CommError, Group, SharedMemory};
use thunder_compute::ComputeError;

use crate::buffer::Memory;
use crate::device::Device;
use crate::device::shared::{Place, Shared};
use crate::kernel::{EXCHANGE_THREADS, Kernel, Look, RELAY_WORDS, Relay as Form};
use crate::mailbox::{ENDED, Failure, MAX_WORDS, Poison, Rows, next};
use crate::operations::leaving::Levels;
use copy::Copies;
pub use measure::relay_way;
use threads::Threads;

/// Vectors before the first slot: of each rank the exchange at which its device gave up, and why.
pub(crate) const HEADER_VECTORS: usize = 256;
/// Vectors of a slot.
pub(crate) const SLOT_VECTORS: usize = MAX_WORDS.div_ceil(RELAY_WORDS).next_multiple_of(256);
/// Drivers import memory in units of at most this many bytes, so far.
const IMPORT_BYTES: usize = 64 << 10;
/// Groups of at most this many ranks exchange so: a kernel's text names each.
const MAX_RANKS: usize = 8;

/// Exchanges with the host's other ranks.
pub(crate) struct Relay {
    /// The shared memory, as the device sees it.
    outbox: Memory,
    /// The reason for which the device gave up, in its own memory.
    state: Memory,
    host: Arc<Host>,
    threads: Threads,
    look: Look,
    /// Looks of a thread before it gives up.
    pub(crate) looks: u32,
    /// The form that leaves levels is right.
    pub(crate) can_leave: bool,
    /// The number of the exchange that was recorded last.
    number: u32,
}

/// What takes sums.
#[derive(Clone, Copy)]
pub(crate) enum To<'a> {
    /// The partial sums' place.
    Place,
    /// These rows, to which they are added.
    Rows(&'a Memory),
    /// The same, which are left as levels too, times a norm's weights.
    Left(&'a Memory, &'a Memory, &'a Levels),
}

/// What the host's threads use.
struct Host {
    rank: usize,
    ranks: usize,
    shared: Arc<SharedMemory>,
    /// What other ranks left, in the device's memory.
    inbox: Shared,
    /// The host's word to the device that it gives up.
    ended: Shared,
    /// That word was given.
    is_over: AtomicBool,
}

impl Host {
    /// The exchange at which a rank's device gave up, and why.
    fn verdict(&self, rank: usize) -> Option<(u32, Poison)> {
        let word = |at: usize| self.shared.words()[4 * rank + at].load(Ordering::Acquire);
        Poison::of(word(1)).map(|poison| (word(0), poison))
    }

    /// Tells the device to give up, now and in all exchanges to come, and threads to end.
    fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.ended.publish(0, ENDED);
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}

impl Relay {
    /// The inner error says why this rank has none. All ranks call it together.
    fn new(
        device: &mut Device,
        group: &mut Group,
        is_real: bool,
    ) -> Result<Result<Self, String>, ComputeError> {
        let (rank, ranks) = (group.rank(), group.size());
        let bytes = 16 * (HEADER_VECTORS + 2 * ranks * SLOT_VECTORS);
        let bytes = bytes.next_multiple_of(IMPORT_BYTES);
        let shared = match group.share_memory(bytes)? {
            Ok(shared) if ranks <= MAX_RANKS => Arc::new(shared),
            Ok(_) => return Ok(Err(format!("{ranks} ranks are more than {MAX_RANKS}"))),
            Err(reason) => return Ok(Err(reason)),
        };
        if device.max_threads() < EXCHANGE_THREADS {
            return Ok(Err(format!("it has workgroups of {} threads at most", device.max_threads())));
        }
        let outbox = match device.import(&shared, bytes) {
            Ok(outbox) => outbox,
            Err(reason) => return Ok(Err(reason)),
        };
        let inbox = device.shared(bytes, Place::Device)?;
        let (Some(inbox), Some(ended)) = (inbox, device.shared(256, Place::Device)?) else {
            return Ok(Err("its driver gives no memory that host and device both see".to_owned()));
        };
        let state = device.memory(16, "the state of exchanges")?;
        let is_over = AtomicBool::new(false);
        let host = Arc::new(Host { rank, ranks, shared, inbox, ended, is_over });
        let threads = Threads::start(&host, is_real)
            .map_err(|error| device.failed(format!("no threads for exchanges: {error}")))?;
        let look = if is_real { Look::Once } else { Look::Often };
        Ok(Ok(Self { outbox, state, host, threads, look, looks: 0, can_leave: false, number: 0 }))
    }

    /// Whether sums of this many words fit.
    pub fn fits(&self, words: usize) -> bool {
        (1..=MAX_WORDS).contains(&words)
    }

    /// Has the peers watched, with the group, until [`Self::take_group`].
    pub fn begin(&self, group: Box<Group>) {
        self.threads.begin(group);
    }

    /// The number of the exchange that was recorded last.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Records the exchange of rows.
    pub fn record(&mut self, device: &mut Device, rows: Rows<'_>, to: To<'_>) -> Result<(), ComputeError> {
        self.number = next(self.number);
        let vectors = (rows.rows * rows.stride).div_ceil(RELAY_WORDS);
        self.threads.copy(Copies { number: self.number, vectors });
        self.dispatch(device, self.number, rows, to)
    }

    fn dispatch(
        &self,
        device: &mut Device,
        number: u32,
        Rows { x, first, rows, width, stride }: Rows<'_>,
        to: To<'_>,
    ) -> Result<(), ComputeError> {
        let words = rows * stride;
        debug_assert!(self.fits(words));
        let form = self.form(!matches!(to, To::Place), matches!(to, To::Left(..)));
        let number = number as usize;
        let arguments = [first, words, number % 2, number, self.looks as usize, width, stride];
        let Host { inbox, ended, .. } = &*self.host;
        let mut buffers = vec![x, &self.outbox, &inbox.memory, &self.state, &ended.memory];
        match to {
            To::Place => {}
            To::Rows(rows) => buffers.push(rows),
            To::Left(rows, norm, Levels { levels, scales, squares }) => {
                buffers.extend([rows, norm, levels, scales, squares]);
            }
        }
        let groups = words.div_ceil(RELAY_WORDS).div_ceil(form.threads()) as u32;
        device.dispatch(&Kernel::Relay(form), &buffers, &arguments.map(|word| word as u32), [groups, 1, 1])
    }

    fn form(&self, adds: bool, leaves: bool) -> Form {
        let Host { rank, ranks, .. } = *self.host;
        Form { rank, ranks, adds, leaves, look: self.look }
    }

    /// Whether a rank's device has given up, or a peer is lost: no exchange will be right.
    pub fn is_over(&self) -> bool {
        self.host.is_over() || (0..self.host.ranks).any(|rank| self.host.verdict(rank).is_some())
    }

    /// Counts the exchange that comes next, if another rank's device has given it up already, as
    /// this rank's then loses it too: returns its number.
    pub fn skip_lost(&mut self) -> Option<u32> {
        let lost = (0..self.host.ranks).find_map(|rank| self.host.verdict(rank))?.0;
        (lost != self.number).then(|| {
            self.number = next(self.number);
            self.number
        })
    }

    /// The exchange at which this device gave up, and why. Known once it has done its commands.
    pub fn verdict(&self) -> Option<(u32, Poison)> {
        self.host.verdict(self.host.rank)
    }

    /// The group, if [`Self::begin`] has lent it, and the loss that was noticed since.
    pub fn take_group(&self) -> (Option<Box<Group>>, Option<CommError>) {
        self.threads.take()
    }

    /// Whether all exchanges were right that the device has done. After a failure they must not be
    /// used any more. `lost`: what [`Self::take_group`] gave.
    pub fn outcome(&self, group: &mut Group, lost: Option<CommError>) -> Result<(), Failure> {
        match (lost, self.verdict()) {
            (Some(error), _) => Err(Failure::Comm(error)),
            (None, Some((number, poison))) => Err(match group.check() {
                // The device may have noticed first.
                Err(error) => Failure::Comm(error),
                Ok(()) => Failure::Poison(number, poison),
            }),
            (None, None) => Ok(()),
        }
    }
}
