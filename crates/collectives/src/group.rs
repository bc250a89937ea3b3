//! The group, as its users see it.

use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::algorithm;
use crate::core::{Core, Patience};
use crate::element::{bytes_of, raw_bytes_of};
use crate::header::Kind;
use crate::rendezvous::{self, Endpoint};
use crate::world::{self, Address};
use crate::{Algorithm, CommError, Config, DType, Element, InitError, Op, Transport};

/// A wait that cannot use a core of its own sleeps nearly at once.
const CROWDED_SPIN: Duration = Duration::from_micros(20);
const SPIN: Duration = Duration::from_micros(200);

/// Where one-shot and mesh take the same time on two ranks of one host; `Group::tune` measures it.
const ONE_SHOT_BYTES: usize = 32 << 10;

/// What a group has done so far, as this rank saw it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Operations.
    pub operations: u64,
    /// Payload bytes of the operations' arguments.
    pub bytes: u64,
    /// Time inside operations, waits for late ranks included; idle waits are not counted.
    pub time: Duration,
}

/// A number of ranks that work together; this is one rank's part. Used by one thread at a time.
pub struct Group {
    core: Core,
    config: Config,
    stats: Stats,
    forced: Option<Algorithm>,
    /// Up to this many bytes an all-reduce is one-shot.
    one_shot_bytes: usize,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}

impl Group {
    /// The group of one: every operation is a copy at most.
    pub fn solo() -> Self {
        Self::alone(Config::new(0, 1, ""))
    }

    fn alone(config: Config) -> Self {
        let patience = patience(&config, 1);
        Self {
            core: Core::new(0, vec![None], None, patience),
            config,
            stats: Stats::default(),
            forced: None,
            one_shot_bytes: ONE_SHOT_BYTES,
        }
    }

    /// Forms the group: waits for all ranks, then connects this one with each other.
    ///
    /// # Errors
    /// When ranks do not come, do not know the secret, cannot be reached, or the configuration makes no sense.
    pub fn init(config: Config) -> Result<Self, InitError> {
        config.check()?;
        if config.size == 1 {
            return Ok(Self::alone(config));
        }
        let address = Address::open(&config)?;
        let table = rendezvous::exchange(&config, address.endpoint.clone())?;
        Self::connect(config, address, &table)
    }

    /// The group that the environment describes; the group of one when it describes none.
    ///
    /// # Errors
    /// As [`Config::from_env`] and [`Group::init`].
    pub fn from_env() -> Result<Self, InitError> {
        Config::from_env()?.map_or_else(|| Ok(Self::solo()), Self::init)
    }

    fn connect(config: Config, address: Address, table: &[Endpoint]) -> Result<Self, InitError> {
        let rank = config.rank;
        let world = world::form(&config, rank, address, table)?;
        let patience = patience(&config, world.local_ranks);
        let core = Core::new(rank, world.links, Some(world.watch), patience);
        Ok(Self { core, config, stats: Stats::default(), forced: None, one_shot_bytes: ONE_SHOT_BYTES })
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.core.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.core.size
    }

    /// How this rank talks to another.
    pub fn transport(&self, rank: usize) -> Transport {
        self.core.transport(rank)
    }

    /// Makes every all-reduce use this algorithm, or with `None` the one that suits its size. All ranks must do the same.
    /// Returns what was forced before.
    pub fn force_algorithm(&mut self, algorithm: Option<Algorithm>) -> Option<Algorithm> {
        std::mem::replace(&mut self.forced, algorithm)
    }

    /// The algorithm that an all-reduce of this many bytes uses.
    pub fn algorithm(&self, bytes: usize) -> Algorithm {
        let suited = if bytes <= self.one_shot_bytes { Algorithm::OneShot } else { Algorithm::Mesh };
        self.forced.unwrap_or(suited)
    }

    /// What has been done since the start or the last reset.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Sets the counters to zero and returns what they were.
    pub fn reset_stats(&mut self) -> Stats {
        std::mem::take(&mut self.stats)
    }

    /// Reduces `data` over all ranks, element by element; all ranks get the result, with the same bits.
    ///
    /// # Errors
    /// [`CommError`], as every operation.
    pub fn all_reduce<T: Element>(&mut self, data: &mut [T], op: Op) -> Result<(), CommError> {
        let count = data.len();
        let (pointer, bytes) = raw_bytes_of(data);
        let algorithm = self.algorithm(bytes);
        self.run(bytes, false, Kind::AllReduce, async |core| {
            // SAFETY: `data` is borrowed until the operation has ended.
            unsafe { algorithm::all_reduce(core, pointer, count, (T::DTYPE, op), algorithm).await }
        })
    }

    /// [`Group::all_reduce`] of `send` into `recv`.
    ///
    /// # Errors
    /// Also when the lengths differ.
    pub fn all_reduce_into<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        op: Op,
    ) -> Result<(), CommError> {
        same("all_reduce", "recv", send.len(), recv.len())?;
        recv.copy_from_slice(send);
        self.all_reduce(recv, op)
    }

    /// Every rank's `send`, in rank order, to every rank; rank `r` gives `counts[r]` elements.
    ///
    /// # Errors
    /// Also when a length is not what `counts` says.
    pub fn all_gather<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        counts: &[usize],
    ) -> Result<(), CommError> {
        self.check_counts("all_gather", counts)?;
        same("all_gather", "send", counts[self.rank()], send.len())?;
        same("all_gather", "recv", counts.iter().sum(), recv.len())?;
        let at: usize = counts[..self.rank()].iter().sum();
        recv[at..at + send.len()].copy_from_slice(send);
        self.all_gather_in_place(recv, counts)
    }

    /// [`Group::all_gather`] where this rank's part is in its place in `data` already.
    ///
    /// # Errors
    /// Also when a length is not what `counts` says.
    pub fn all_gather_in_place<T: Element>(
        &mut self,
        data: &mut [T],
        counts: &[usize],
    ) -> Result<(), CommError> {
        self.check_counts("all_gather", counts)?;
        same("all_gather", "data", counts.iter().sum(), data.len())?;
        let own = self.rank();
        let (pointer, bytes) = raw_bytes_of(data);
        let place = |rank: usize| {
            let at: usize = counts[..rank].iter().sum();
            // SAFETY: within the sum of `counts`.
            (unsafe { pointer.add(at * size_of::<T>()) }, counts[rank] * size_of::<T>())
        };
        let outgoing = |_| Some((place(own).0.cast_const(), place(own).1));
        let incoming = |peer| Some(place(peer));
        self.exchange::<T>(Kind::AllGather, bytes, false, outgoing, incoming)?;
        make_valid(data);
        Ok(())
    }

    /// Reduces `send` over all ranks; rank `r` gets part `r` of the result, `counts[r]` elements.
    ///
    /// # Errors
    /// Also when a length is not what `counts` says.
    pub fn reduce_scatter<T: Element>(
        &mut self,
        send: &[T],
        recv: &mut [T],
        counts: &[usize],
        op: Op,
    ) -> Result<(), CommError> {
        self.check_counts("reduce_scatter", counts)?;
        same("reduce_scatter", "send", counts.iter().sum(), send.len())?;
        same("reduce_scatter", "recv", counts[self.rank()], recv.len())?;
        if self.size() == 1 {
            recv.copy_from_slice(send);
        }
        let (from, to) = (bytes_of(send), raw_bytes_of(recv).0);
        self.run(from.len(), false, Kind::ReduceScatter, async |core| {
            // SAFETY: both slices are borrowed until the operation has ended, and their lengths are checked.
            unsafe { algorithm::reduce_scatter(core, from.as_ptr(), to, counts, T::DTYPE, op).await }
        })
    }

    /// The root's `data` to every rank.
    ///
    /// # Errors
    /// [`CommError`], as every operation.
    pub fn broadcast<T: Element>(&mut self, root: usize, data: &mut [T]) -> Result<(), CommError> {
        self.broadcast_with(root, data, false)
    }

    /// [`Group::broadcast`], whose receivers may wait for hours: no stall limit, only the ranks' liveness. They spin for
    /// a moment (`idle_spin`), then sleep, and wake up at once when data come.
    ///
    /// # Errors
    /// [`CommError`], as every operation.
    pub fn broadcast_idle<T: Element>(&mut self, root: usize, data: &mut [T]) -> Result<(), CommError> {
        let idle = root != self.rank();
        self.broadcast_with(root, data, idle)
    }

    fn broadcast_with<T: Element>(
        &mut self,
        root: usize,
        data: &mut [T],
        idle: bool,
    ) -> Result<(), CommError> {
        self.check_rank("broadcast", root)?;
        let own = self.rank();
        let (pointer, bytes) = raw_bytes_of(data);
        let outgoing = |_| (own == root).then_some((pointer.cast_const(), bytes));
        let incoming = |peer| (peer == root).then_some((pointer, bytes));
        self.exchange::<T>(Kind::Broadcast, bytes, idle, outgoing, incoming)?;
        make_valid(data);
        Ok(())
    }

    /// Every rank's `send`, in rank order, to the root, which gives `recv`; rank `r` gives `counts[r]` elements.
    ///
    /// # Errors
    /// Also when a length is not what `counts` says, or the root gives no `recv`.
    pub fn gather<T: Element>(
        &mut self,
        root: usize,
        send: &[T],
        recv: Option<&mut [T]>,
        counts: &[usize],
    ) -> Result<(), CommError> {
        self.check_rank("gather", root)?;
        self.check_counts("gather", counts)?;
        let own = self.rank();
        same("gather", "send", counts[own], send.len())?;
        let recv = match recv {
            Some(recv) if own == root => recv,
            None if own == root => return Err(argument("gather", "the root needs a recv buffer".to_owned())),
            _ => &mut [],
        };
        if own == root {
            same("gather", "recv", counts.iter().sum(), recv.len())?;
            let at: usize = counts[..own].iter().sum();
            recv[at..at + send.len()].copy_from_slice(send);
        }
        let from = bytes_of(send);
        let (pointer, bytes) = raw_bytes_of(recv);
        let outgoing = |peer| (peer == root).then_some((from.as_ptr(), from.len()));
        let incoming = |peer: usize| {
            let at: usize = counts[..peer].iter().sum();
            // SAFETY: within `recv`, whose length is the sum of `counts`, on the root.
            (own == root)
                .then(|| (unsafe { pointer.add(at * size_of::<T>()) }, counts[peer] * size_of::<T>()))
        };
        self.exchange::<T>(Kind::Gather, from.len().max(bytes), false, outgoing, incoming)?;
        make_valid(recv);
        Ok(())
    }

    /// The root's `send`, in parts: rank `r` gets `counts[r]` elements.
    ///
    /// # Errors
    /// Also when a length is not what `counts` says, or the root gives no `send`.
    pub fn scatter<T: Element>(
        &mut self,
        root: usize,
        send: Option<&[T]>,
        recv: &mut [T],
        counts: &[usize],
    ) -> Result<(), CommError> {
        self.check_rank("scatter", root)?;
        self.check_counts("scatter", counts)?;
        let own = self.rank();
        same("scatter", "recv", counts[own], recv.len())?;
        let send = match send {
            Some(send) if own == root => send,
            None if own == root => {
                return Err(argument("scatter", "the root needs a send buffer".to_owned()));
            }
            _ => &[],
        };
        let place = |rank: usize| -> usize { counts[..rank].iter().sum() };
        if own == root {
            same("scatter", "send", counts.iter().sum(), send.len())?;
            recv.copy_from_slice(&send[place(own)..place(own) + counts[own]]);
        }
        let from = bytes_of(send);
        let (pointer, bytes) = raw_bytes_of(recv);
        let outgoing = |peer: usize| {
            let (at, length) = (place(peer) * size_of::<T>(), counts[peer] * size_of::<T>());
            (own == root).then(|| (from[at..at + length].as_ptr(), length))
        };
        let incoming = |peer| (peer == root).then_some((pointer, bytes));
        self.exchange::<T>(Kind::Scatter, from.len().max(bytes), false, outgoing, incoming)?;
        make_valid(recv);
        Ok(())
    }

    /// Part `r` of `send` to rank `r`, and every rank's part for this one, in rank order, into `recv`.
    ///
    /// # Errors
    /// Also when a length is not what the counts say.
    pub fn all_to_all<T: Element>(
        &mut self,
        send: &[T],
        send_counts: &[usize],
        recv: &mut [T],
        recv_counts: &[usize],
    ) -> Result<(), CommError> {
        self.check_counts("all_to_all", send_counts)?;
        self.check_counts("all_to_all", recv_counts)?;
        let own = self.rank();
        same("all_to_all", "send", send_counts.iter().sum(), send.len())?;
        same("all_to_all", "recv", recv_counts.iter().sum(), recv.len())?;
        same("all_to_all", "this rank's own part", send_counts[own], recv_counts[own])?;
        let place = |counts: &[usize], rank: usize| -> usize { counts[..rank].iter().sum() };
        let (from_at, to_at) = (place(send_counts, own), place(recv_counts, own));
        recv[to_at..to_at + recv_counts[own]].copy_from_slice(&send[from_at..from_at + send_counts[own]]);
        let from = bytes_of(send);
        let (pointer, bytes) = raw_bytes_of(recv);
        let outgoing = |peer: usize| {
            let at = place(send_counts, peer) * size_of::<T>();
            let length = send_counts[peer] * size_of::<T>();
            Some((from[at..at + length].as_ptr(), length))
        };
        let incoming = |peer: usize| {
            let at = place(recv_counts, peer) * size_of::<T>();
            // SAFETY: within `recv`, whose length is the sum of its counts.
            Some((unsafe { pointer.add(at) }, recv_counts[peer] * size_of::<T>()))
        };
        self.exchange::<T>(Kind::AllToAll, from.len().max(bytes), false, outgoing, incoming)?;
        make_valid(recv);
        Ok(())
    }

    /// Sends to one rank, which must call [`Group::recv`] with as many elements of the same type.
    ///
    /// # Errors
    /// Also when `to` is this rank.
    pub fn send<T: Element>(&mut self, to: usize, data: &[T]) -> Result<(), CommError> {
        self.check_peer("send", to)?;
        let from = bytes_of(data);
        let outgoing = |peer| (peer == to).then_some((from.as_ptr(), from.len()));
        self.exchange::<T>(Kind::SendReceive, from.len(), false, outgoing, |_| None)
    }

    /// Receives from one rank.
    ///
    /// # Errors
    /// Also when `from` is this rank.
    pub fn recv<T: Element>(&mut self, from: usize, data: &mut [T]) -> Result<(), CommError> {
        self.recv_with(from, data, false)
    }

    /// [`Group::recv`], which may wait for hours: no stall limit, only the ranks' liveness. It spins for a moment
    /// (`idle_spin`), then sleeps, and wakes up at once when data come.
    ///
    /// # Errors
    /// Also when `from` is this rank.
    pub fn recv_idle<T: Element>(&mut self, from: usize, data: &mut [T]) -> Result<(), CommError> {
        self.recv_with(from, data, true)
    }

    fn recv_with<T: Element>(&mut self, from: usize, data: &mut [T], idle: bool) -> Result<(), CommError> {
        self.check_peer("recv", from)?;
        let (pointer, bytes) = raw_bytes_of(data);
        let incoming = |peer| (peer == from).then_some((pointer, bytes));
        self.exchange::<T>(Kind::SendReceive, bytes, idle, |_| None, incoming)?;
        make_valid(data);
        Ok(())
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// [`CommError`], as every operation.
    pub fn barrier(&mut self) -> Result<(), CommError> {
        let nothing = std::ptr::NonNull::<u8>::dangling().as_ptr();
        self.exchange::<u8>(
            Kind::Barrier,
            0,
            false,
            |_| Some((nothing.cast_const(), 0)),
            |_| Some((nothing, 0)),
        )
    }

    /// Forms smaller groups: ranks with the same `color` come together, ordered by `key`, then by rank. The new group has
    /// connections of its own, so it may be used by another thread than this one.
    ///
    /// # Errors
    /// When a rank is lost or the connections cannot be made.
    pub fn split(&mut self, color: u32, key: u32) -> Result<Self, InitError> {
        let mut config = self.config.clone();
        config.listener = None;
        if self.size() == 1 {
            return Ok(Self::alone(config));
        }
        let address = Address::open(&config)?;
        let own = serde_json::to_vec(&(color, key, &address.endpoint))
            .map_err(|error| InitError::system("an address cannot be written")(error.into()))?;
        let mut lengths = vec![0u32; self.size()];
        self.all_gather(&[own.len() as u32], &mut lengths, &vec![1; self.size()])?;
        let counts: Vec<usize> = lengths.iter().map(|length| *length as usize).collect();
        let mut all = vec![0u8; counts.iter().sum()];
        self.all_gather(&own, &mut all, &counts)?;
        let mut members = Vec::new();
        let mut rest = &all[..];
        for (rank, count) in counts.iter().enumerate() {
            let (text, after) = rest.split_at(*count);
            rest = after;
            let (its_color, its_key, endpoint): (u32, u32, Endpoint) = serde_json::from_slice(text)
                .map_err(|error| InitError::system("a rank's address cannot be read")(error.into()))?;
            if its_color == color {
                members.push((its_key, rank, endpoint));
            }
        }
        members.sort_by_key(|(key, rank, _)| (*key, *rank));
        config.rank = members.iter().position(|(_, rank, _)| *rank == self.rank()).unwrap_or_default();
        config.size = members.len();
        if config.size == 1 {
            return Ok(Self::alone(config));
        }
        let table: Vec<Endpoint> = members.into_iter().map(|(_, _, endpoint)| endpoint).collect();
        Self::connect(config, address, &table)
    }

    fn exchange<T: Element>(
        &mut self,
        kind: Kind,
        bytes: usize,
        idle: bool,
        outgoing: impl Fn(usize) -> Option<(*const u8, usize)>,
        incoming: impl Fn(usize) -> Option<(*mut u8, usize)>,
    ) -> Result<(), CommError> {
        self.run(bytes, idle, kind, async |core| {
            // SAFETY: the places are in slices that the calling method borrows until the operation has ended.
            unsafe { algorithm::exchange(core, (kind, T::DTYPE), outgoing, incoming).await }
        })
    }

    /// Runs an operation to its end on this thread.
    fn run(
        &mut self,
        bytes: usize,
        idle: bool,
        kind: Kind,
        operation: impl AsyncFnOnce(&mut Core) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        if self.core.size == 1 {
            return Ok(());
        }
        let start = Instant::now();
        self.core.begin(start)?;
        self.core.idle = idle;
        if kind != Kind::SendReceive {
            self.core.sequence = self.core.sequence.wrapping_add(1).max(1);
        }
        let sequence = self.core.sequence;
        if kind == Kind::SendReceive {
            self.core.sequence = 0;
        }
        let result = block_on(operation(&mut self.core));
        self.core.sequence = sequence;
        self.stats.operations += 1;
        self.stats.bytes += bytes as u64;
        if !idle {
            self.stats.time += start.elapsed();
        }
        result
    }

    fn check_rank(&self, operation: &'static str, rank: usize) -> Result<(), CommError> {
        if rank < self.size() {
            return Ok(());
        }
        Err(argument(operation, format!("rank {rank} is not in a group of {}", self.size())))
    }

    fn check_peer(&self, operation: &'static str, rank: usize) -> Result<(), CommError> {
        self.check_rank(operation, rank)?;
        if rank != self.rank() {
            return Ok(());
        }
        Err(argument(operation, format!("rank {rank} is this rank itself")))
    }

    fn check_counts(&self, operation: &'static str, counts: &[usize]) -> Result<(), CommError> {
        same(operation, "counts", self.size(), counts.len())
    }
}

fn argument(operation: &'static str, why: String) -> CommError {
    CommError::Argument { operation, why }
}

fn same(operation: &'static str, what: &str, expected: usize, found: usize) -> Result<(), CommError> {
    if expected == found {
        return Ok(());
    }
    Err(argument(operation, format!("{what} has {found} elements, {expected} are needed")))
}

/// Booleans that came over a wire can be any byte; makes them 0 or 1 before anyone looks at them.
fn make_valid<T: Element>(data: &mut [T]) {
    if T::DTYPE != DType::Bool {
        return;
    }
    let (pointer, bytes) = raw_bytes_of(data);
    for index in 0..bytes {
        // SAFETY: within `data`, read and written as bytes.
        unsafe {
            let byte = pointer.add(index);
            *byte = u8::from(*byte != 0);
        }
    }
}

fn patience(config: &Config, local_ranks: usize) -> Patience {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let crowded = local_ranks > cores;
    Patience {
        spin: config.spin.unwrap_or(if crowded { CROWDED_SPIN } else { SPIN }),
        crowded,
        idle_spin: if crowded { config.idle_spin.min(CROWDED_SPIN) } else { config.idle_spin },
        stall_limit: config.stall_limit,
    }
}

/// Polls an operation that waits inside and so never suspends.
fn block_on<R>(operation: impl Future<Output = R>) -> R {
    let mut operation = pin!(operation);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(result) = operation.as_mut().poll(&mut context) {
            return result;
        }
    }
}
