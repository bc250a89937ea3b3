//! Sums over the ranks of one host, whose hosts relay partial sums. Each device stores its partial
//! sums in host memory that all ranks share and all devices have imported. Threads of each rank
//! copy the other ranks' sums to their own device's memory, and the device adds them in rank order.
//! (NVIDIA's devices do not see changes of host memory while their kernel runs.)
//!
//! Why this is correct:
//! - A vector of four words holds three numbers and a check word, which is computed from them and
//!   from the exchange's number. A vector of another exchange does not pass the check, nor does one
//!   of this exchange that has one old word. With two old words, one in 2^32 would pass, but
//!   aligned vectors are written at once. Both the copying thread and the device check it.
//! - Exchanges use two slots alternately. A device writes to a slot for exchange `n` after it has
//!   received everything that the others stored for `n - 1`. They had then received all of `n - 2`,
//!   the last exchange in this slot, because their commands run one exchange after the other; so
//!   their hosts had copied it.
//! - A workgroup waits only for the same workgroup of other ranks, which stores its part before it
//!   waits. Devices therefore need not have space for all workgroups at the same time.
//! - Ranks vote on steps that devices get ahead, because a device cannot compute one without the
//!   others. A rank counts its votes, and uses two words alternately: it votes again after it has
//!   seen all votes, when all ranks have read the votes before these.
//! - Waits are bounded by a number of polls. Then the device poisons itself: it gives up all later
//!   exchanges, and says so in memory that all hosts see.

mod copy;
mod measure;
mod orders;
mod proof;
#[cfg(test)]
mod tests;
mod threads;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use thunder_collectives::{CommError, Group, SharedMemory};
use thunder_compute::ComputeError;

use crate::buffer::Memory;
use crate::device::numbering::ARGUMENTS;
use crate::device::shared::{Place, Shared};
use crate::device::{ANSWER_LIMIT_S, Device};
use crate::follow::Vote;
use crate::kernel::{EXCHANGE_THREADS, Kernel, Look, RELAY_UNNUMBERED, RELAY_WORDS, Relay as Form};
use crate::mailbox::{ENDED, Failure, MAX_WORDS, Poison, Rows};
use crate::operations::leaving::Levels;
use crate::wait::Waits;
pub use measure::{PairWays, pair_ways};
pub(crate) use orders::Orders;
pub(crate) use proof::agree;
use threads::Threads;

/// Vectors before the first slot: for each rank, the exchange at which its device gave up, and why.
pub(crate) const HEADER_VECTORS: usize = 256;
/// Vectors of a slot.
pub(crate) const SLOT_VECTORS: usize = MAX_WORDS.div_ceil(RELAY_WORDS).next_multiple_of(256);
/// The first vector of the ranks' votes.
const VOTE_VECTOR: usize = 64;
/// Bits of a vote; the others count votes.
const VOTE_BITS: u32 = 3;
/// Drivers have so far imported memory in units of at most this many bytes.
const IMPORT_BYTES: usize = 64 << 10;
/// Maximum ranks of such a group, because a kernel's text names each rank.
const MAX_RANKS: usize = 8;

/// Exchanges with the host's other ranks.
pub(crate) struct Relay {
    /// The shared memory, as the device sees it.
    outbox: Memory,
    /// Why the device gave up, in its own memory.
    state: Memory,
    host: Arc<Host>,
    threads: Threads,
    look: Look,
    /// Polls of a thread before it gives up.
    pub(crate) looks: u32,
    /// The form that stores levels is correct.
    pub(crate) can_leave: bool,
    /// Numbers exchanges; shared with the device.
    orders: Arc<Orders>,
    /// This rank's votes so far.
    votes: u32,
    /// How long this rank waits for another one's vote.
    pub(crate) longest_vote: Duration,
    waits: Waits,
}

/// Where sums go.
#[derive(Clone, Copy)]
pub(crate) enum To<'a> {
    /// They replace the partial sums.
    Place,
    /// They are added to these rows.
    Rows(&'a Memory),
    /// The same, and the rows are also stored as levels, times a norm's weights.
    Left(&'a Memory, &'a Memory, &'a Levels),
}

/// The part that the host's threads use.
struct Host {
    rank: usize,
    ranks: usize,
    shared: Arc<SharedMemory>,
    /// What other ranks stored, in the device's memory.
    inbox: Shared,
    /// Tells the device that the host gives up.
    ended: Shared,
    /// The host has given up.
    is_over: AtomicBool,
}

impl Host {
    /// The exchange at which a rank's device gave up, and why.
    fn verdict(&self, rank: usize) -> Option<(u32, Poison)> {
        let word = |at: usize| self.shared.words()[4 * rank + at].load(Ordering::Acquire);
        Poison::of(word(1)).map(|poison| (word(0), poison))
    }

    /// Makes the device give up this and all later exchanges, and ends the threads.
    fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.ended.publish(0, ENDED);
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}

impl Relay {
    /// All ranks call this together. The inner error says why this rank has no relay.
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
        let orders = Arc::<Orders>::default();
        let threads = Threads::start(&host, &orders, (is_real, device.cores))
            .map_err(|error| device.failed(format!("no threads for exchanges: {error}")))?;
        device.numbering = Some(Arc::<Orders>::clone(&orders));
        let look = if is_real { Look::Once } else { Look::Often };
        Ok(Ok(Self {
            outbox,
            state,
            host,
            threads,
            look,
            looks: 0,
            can_leave: false,
            orders,
            votes: 0,
            longest_vote: Duration::from_secs(ANSWER_LIMIT_S),
            waits: Waits::new(is_real),
        }))
    }

    /// Its first word is not 0 after the device has given up.
    pub fn state(&self) -> &Memory {
        &self.state
    }

    /// Whether sums of this many words fit.
    pub fn fits(&self, words: usize) -> bool {
        (1..=MAX_WORDS).contains(&words)
    }

    /// Lends the group to the thread that watches the peers, until [`Self::take_group`].
    pub fn begin(&self, group: Box<Group>) {
        self.threads.begin(group);
    }

    /// The number of the last recorded exchange.
    pub fn number(&self) -> u32 {
        self.orders.number()
    }

    /// Records the exchange of rows. The device numbers it.
    pub fn record(&self, device: &mut Device, rows: Rows<'_>, to: To<'_>) -> Result<(), ComputeError> {
        self.dispatch(device, RELAY_UNNUMBERED, rows, to)
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
        let arguments: [_; ARGUMENTS] = [first, words, number as usize, self.looks as usize, width, stride];
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

    /// What all ranks can do. They call this together, while the group is lent. Nothing if
    /// exchanges have ended. If a rank does not vote in time, ends them and returns its number too.
    pub fn vote(&mut self, vote: Vote) -> (Vote, Option<usize>) {
        self.votes = self.votes.wrapping_add(1);
        let Host { rank, ranks, shared, .. } = &*self.host;
        let word = |rank: usize| &shared.words()[4 * (VOTE_VECTOR + rank) + self.votes as usize % 2];
        let count = self.votes << VOTE_BITS;
        word(*rank).store(count | vote.bits(), Ordering::Release);
        let (mut bits, mut silent) = (vote.bits(), None);
        for other in (0..*ranks).filter(|other| other != rank) {
            let mut wait = self.waits.begin();
            bits &= loop {
                let seen = word(other).load(Ordering::Acquire);
                if seen >> VOTE_BITS == count >> VOTE_BITS {
                    break seen;
                }
                let Some(waited) = wait.pause() else { continue };
                if waited >= self.longest_vote {
                    silent = Some(other);
                    self.host.end();
                }
                if self.is_over() {
                    break 0;
                }
            };
        }
        (Vote::of(bits), silent)
    }

    /// Whether a rank's device has given up, or a peer is lost. Further exchanges fail then.
    pub fn is_over(&self) -> bool {
        self.host.is_over() || (0..self.host.ranks).any(|rank| self.host.verdict(rank).is_some())
    }

    /// If another rank's device has already given up the next exchange, counts that exchange and
    /// returns its number, because this rank's device loses it too.
    pub fn skip_lost(&self) -> Option<u32> {
        let lost = (0..self.host.ranks).find_map(|rank| self.host.verdict(rank))?.0;
        (lost != self.number()).then(|| self.orders.skip())
    }

    /// The exchange at which this device gave up, and why. Valid after the device has finished its
    /// commands.
    pub fn verdict(&self) -> Option<(u32, Poison)> {
        self.host.verdict(self.host.rank)
    }

    /// The group, if [`Self::begin`] has lent it, and a loss that was noticed since.
    pub fn take_group(&self) -> (Option<Box<Group>>, Option<CommError>) {
        self.threads.take()
    }

    /// Whether all exchanges that the device has finished were correct. After a failure they must
    /// not be used any more. `lost`: the loss that [`Self::take_group`] returned.
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
