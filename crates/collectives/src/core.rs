//! The engine under every algorithm: messages to and from any number of peers at once, and the wait when none moves.
//!
//! Algorithms are `async` so that the same code serves blocking calls (which never suspend: the wait happens inside) and
//! the non-blocking form (which suspends instead of waiting). There is no runtime.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::header::{HEADER_BYTES, Header, Kind};
use crate::link::{Closed, Interest, Link};
use crate::reduce::reduce;
use crate::watch::{Verdict, Watch, Why};
use crate::{CommError, DType, Op, Transport, platform};

/// Turns of a wait before it looks at the clock.
const TURNS_BEFORE_CLOCK: u32 = 64;
/// After a connection has closed: how long to wait for the news of who is really to blame.
const NEWS_LIMIT: Duration = Duration::from_millis(100);

/// After this the processor is offered to others at each turn: the rank that is waited for may be queued behind this one.
const PURE_SPIN: Duration = Duration::from_micros(10);
/// Waits that it takes to forget that a core is shared.
const SHARED_CORE_LIMIT: i32 = 16;
/// How long a process may take to answer a ping before it counts as stopped.
const PING_LIMIT: Duration = Duration::from_millis(300);

/// One message on its way to a peer. The pointer is valid while the operation runs.
struct Outgoing {
    active: bool,
    header: [u8; HEADER_BYTES],
    header_sent: usize,
    data: *const u8,
    length: usize,
    sent: usize,
}

/// One message expected from a peer.
struct Incoming {
    active: bool,
    expected: Header,
    header: [u8; HEADER_BYTES],
    header_read: usize,
    data: *mut u8,
    length: usize,
    read: usize,
}

/// How a wait behaves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    pub spin: Duration,
    /// More local ranks than cores: a spinning rank keeps the one that it waits for from running.
    pub crowded: bool,
    pub idle_spin: Duration,
    pub stall_limit: Duration,
}

pub(crate) struct Core {
    pub rank: usize,
    pub size: usize,
    links: Vec<Option<Box<dyn Link>>>,
    watch: Option<Watch>,
    patience: Patience,
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    sources: Vec<*const u8>,
    descriptors: Vec<libc::pollfd>,
    failure: Option<CommError>,
    /// Collectives so far; ranks that differ are not in the same operation.
    sequence: u32,
    /// No stall limit in the operation under way.
    idle: bool,
    /// Suspend instead of waiting. Shared, because the operation under way has the rest for itself.
    pub cooperative: Arc<AtomicBool>,
    /// An operation has begun and not ended.
    busy: bool,
    started: Instant,
    turns: u32,
    waiting_since: Option<Instant>,
    saw_departure: bool,
    /// Whether the wait under way has given the core away, and how many waits lately ended so.
    yielded: bool,
    shared_core: i32,
}

// SAFETY: the raw pointers are used only while an operation runs, by the thread that runs it.
unsafe impl Send for Core {}

impl Core {
    pub fn new(
        rank: usize,
        links: Vec<Option<Box<dyn Link>>>,
        watch: Option<Watch>,
        patience: Patience,
    ) -> Self {
        let size = links.len();
        let outgoing = || Outgoing {
            active: false,
            header: [0; HEADER_BYTES],
            header_sent: 0,
            data: std::ptr::null(),
            length: 0,
            sent: 0,
        };
        let incoming = || Incoming {
            active: false,
            expected: Header::default(),
            header: [0; HEADER_BYTES],
            header_read: 0,
            data: std::ptr::null_mut(),
            length: 0,
            read: 0,
        };
        Self {
            rank,
            size,
            links,
            watch,
            patience,
            outgoing: (0..size).map(|_| outgoing()).collect(),
            incoming: (0..size).map(|_| incoming()).collect(),
            sources: Vec::with_capacity(size),
            descriptors: Vec::with_capacity(size + 1),
            failure: None,
            sequence: 0,
            idle: false,
            cooperative: Arc::default(),
            busy: false,
            started: Instant::now(),
            turns: 0,
            waiting_since: None,
            saw_departure: false,
            yielded: false,
            shared_core: 0,
        }
    }

    pub fn transport(&self, peer: usize) -> Transport {
        self.links[peer].as_ref().map_or(Transport::Itself, |link| link.transport())
    }

    /// Starts an operation: nothing of an earlier one is left, and the group is good.
    pub fn begin(&mut self, now: Instant, kind: Kind, idle: bool) -> Result<(), CommError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        if self.busy {
            // Its `Pending` was forgotten: the rest of its messages would be taken for the next one's.
            let why = "it forgot an operation half-way";
            return Err(self.fail(CommError::Aborted { by: self.rank, rank: self.rank, why }));
        }
        self.busy = true;
        self.idle = idle;
        if kind != Kind::SendReceive {
            self.sequence = self.sequence.wrapping_add(1);
        }
        self.started = now;
        for message in &mut self.outgoing {
            message.active = false;
        }
        for message in &mut self.incoming {
            message.active = false;
        }
        self.moved();
        self.check_verdict()
    }

    /// Ends an operation, with whatever result.
    pub fn end(&mut self) {
        self.busy = false;
    }

    /// The description of a message of the operation under way.
    pub fn header(&self, kind: Kind, dtype: DType, op: u8, phase: u8, length: usize) -> Header {
        // Ranks send and receive at different times between collectives, so those are not counted.
        let sequence = if kind == Kind::SendReceive { 0 } else { self.sequence };
        Header { kind, dtype: dtype as u8, op, phase, sequence, length: length as u64 }
    }

    pub fn queue_send(&mut self, peer: usize, header: Header, data: *const u8) {
        let message = &mut self.outgoing[peer];
        debug_assert!(!message.active && peer != self.rank);
        message.active = true;
        message.header = header.encode();
        message.header_sent = 0;
        message.data = data;
        message.length = header.length as usize;
        message.sent = 0;
    }

    pub fn queue_receive(&mut self, peer: usize, expected: Header, data: *mut u8) {
        let message = &mut self.incoming[peer];
        debug_assert!(!message.active && peer != self.rank);
        message.active = true;
        message.expected = expected;
        message.header_read = 0;
        message.data = data;
        message.length = expected.length as usize;
        message.read = 0;
    }

    /// Runs all queued messages to their end.
    ///
    /// # Safety
    /// The pointers of the queued messages must be valid for their lengths until this returns.
    pub async unsafe fn exchange(&mut self) -> Result<(), CommError> {
        loop {
            let sent = self.step_sends()?;
            let received = self.step_receives()?;
            if self.idle_messages() {
                return Ok(());
            }
            self.turn(sent || received).await?;
        }
    }

    /// Runs all queued messages to their end, where those received are not stored but reduced, together with the
    /// `length` bytes at `own`, into `out`. When `own` is also what is being sent, `hold_back` keeps the result from
    /// overwriting what has not been sent.
    ///
    /// # Safety
    /// `out` and `own` must be valid for `length` bytes (and may be the same), every other rank's message queued with
    /// that length, and the pointers of queued sends valid until this returns.
    pub async unsafe fn exchange_reduce(
        &mut self,
        out: *mut u8,
        own: *const u8,
        length: usize,
        (dtype, op): (DType, Op),
        hold_back: bool,
    ) -> Result<(), CommError> {
        let mut done = 0;
        loop {
            let mut moved = self.step_sends()?;
            if done < length {
                let mut ready = length - done;
                if hold_back {
                    for message in self.outgoing.iter().filter(|message| message.active) {
                        ready = ready.min(message.sent - done);
                    }
                }
                for peer in 0..self.size {
                    if peer != self.rank && ready > 0 {
                        moved |= self.step_header(peer)?;
                        if !self.header_done(peer) {
                            ready = 0;
                        } else {
                            ready = ready.min(self.arrived(peer, ready)?);
                        }
                    }
                }
                ready -= ready % dtype.size();
                if ready > 0 {
                    self.sources.clear();
                    for peer in 0..self.size {
                        self.sources.push(match &self.links[peer] {
                            Some(link) => link.view().as_ptr(),
                            // SAFETY: `done < length`, for which the caller vouches.
                            None => unsafe { own.add(done) },
                        });
                    }
                    // SAFETY: each view holds at least `ready` bytes; `out` and `own` hold `length`.
                    unsafe { reduce(dtype, op, out.add(done), &self.sources, ready / dtype.size()) };
                    done += ready;
                    for (link, message) in self.links.iter_mut().zip(&mut self.incoming) {
                        if let Some(link) = link {
                            link.consume(ready);
                            message.read = done;
                        }
                    }
                    moved = true;
                }
            } else {
                for peer in 0..self.size {
                    if self.incoming[peer].active {
                        moved |= self.step_header(peer)?;
                        self.finish_receive(peer);
                    }
                }
            }
            if self.idle_messages() {
                return Ok(());
            }
            self.turn(moved).await?;
        }
    }

    fn idle_messages(&self) -> bool {
        !self.outgoing.iter().any(|message| message.active)
            && !self.incoming.iter().any(|message| message.active)
    }

    fn step_sends(&mut self) -> Result<bool, CommError> {
        let mut moved = false;
        for peer in 0..self.size {
            let message = &mut self.outgoing[peer];
            let Some(link) = self.links[peer].as_mut().filter(|_| message.active) else { continue };
            let header = &message.header[message.header_sent..];
            // SAFETY: the caller of the exchange vouches for `length` bytes at `data`.
            let data = unsafe {
                std::slice::from_raw_parts(message.data.add(message.sent), message.length - message.sent)
            };
            let count = match link.send(header, data) {
                Ok(count) => count,
                Err(Closed) => return Err(self.closed(peer)),
            };
            let of_header = count.min(header.len());
            message.header_sent += of_header;
            message.sent += count - of_header;
            if message.header_sent == HEADER_BYTES && message.sent == message.length {
                link.end_send();
                message.active = false;
            }
            moved |= count > 0;
        }
        Ok(moved)
    }

    fn step_receives(&mut self) -> Result<bool, CommError> {
        let mut moved = false;
        for peer in 0..self.size {
            if !self.incoming[peer].active {
                continue;
            }
            moved |= self.step_header(peer)?;
            if !self.header_done(peer) {
                continue;
            }
            let message = &mut self.incoming[peer];
            if message.read < message.length
                && let Some(link) = &mut self.links[peer]
            {
                // SAFETY: the caller of the exchange vouches for `length` bytes at `data`.
                let result = unsafe {
                    link.receive_into(message.data.add(message.read), message.length - message.read)
                };
                match result {
                    Ok(count) => {
                        message.read += count;
                        moved |= count > 0;
                    }
                    Err(Closed) => return Err(self.closed(peer)),
                }
            }
            self.finish_receive(peer);
        }
        Ok(moved)
    }

    fn header_done(&self, peer: usize) -> bool {
        self.incoming[peer].header_read == HEADER_BYTES
    }

    fn finish_receive(&mut self, peer: usize) {
        let message = &mut self.incoming[peer];
        if message.header_read == HEADER_BYTES
            && message.read == message.length
            && let Some(link) = &mut self.links[peer]
        {
            link.end_receive();
            message.active = false;
        }
    }

    /// Reads what has come of a header, and compares it with the expected one once it is whole.
    fn step_header(&mut self, peer: usize) -> Result<bool, CommError> {
        let message = &mut self.incoming[peer];
        if message.header_read == HEADER_BYTES {
            return Ok(false);
        }
        let Some(link) = &mut self.links[peer] else { return Ok(false) };
        let rest = &mut message.header[message.header_read..];
        // SAFETY: `rest` is a plain slice.
        let count = match unsafe { link.receive_into(rest.as_mut_ptr(), rest.len()) } {
            Ok(count) => count,
            Err(Closed) => return Err(self.closed(peer)),
        };
        message.header_read += count;
        if message.header_read == HEADER_BYTES && message.header != message.expected.encode() {
            let theirs = Header::describe(&message.header);
            let ours = Header::describe(&message.expected.encode());
            return Err(self.fail(CommError::Mismatch { rank: peer, theirs, ours }));
        }
        Ok(count > 0)
    }

    fn arrived(&mut self, peer: usize, want: usize) -> Result<usize, CommError> {
        let Some(link) = &mut self.links[peer] else { return Ok(0) };
        match link.arrived(want) {
            Ok(count) => Ok(count),
            Err(Closed) => Err(self.closed(peer)),
        }
    }

    /// Between two looks at the links: goes straight on after progress, else waits a little or suspends.
    async fn turn(&mut self, moved: bool) -> Result<(), CommError> {
        if moved {
            self.moved();
            return Ok(());
        }
        self.check_verdict()?;
        if self.cooperative.load(Ordering::Relaxed) {
            self.check_patience()?;
            yield_once().await;
            return Ok(());
        }
        self.turns += 1;
        if self.turns < TURNS_BEFORE_CLOCK && !self.patience.crowded {
            std::hint::spin_loop();
            return Ok(());
        }
        let waited = self.check_patience()?;
        let spin = if self.idle { self.patience.idle_spin } else { self.patience.spin };
        if waited >= spin {
            return self.sleep(waited);
        }
        let pure_spin = if self.shared_core > 0 { Duration::ZERO } else { PURE_SPIN };
        if self.patience.crowded || waited >= pure_spin {
            self.yielded = true;
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        Ok(())
    }

    fn moved(&mut self) {
        if self.turns > 0 {
            // Waits that end only once the core is given away mean that the peer needs this core.
            let change = if self.yielded { 1 } else { -1 };
            self.shared_core = (self.shared_core + change).clamp(0, SHARED_CORE_LIMIT);
            self.yielded = false;
        }
        self.turns = 0;
        self.waiting_since = None;
        self.saw_departure = false;
    }

    fn interest(&self, peer: usize) -> Interest {
        Interest { receive: self.incoming[peer].active, send: self.outgoing[peer].active }
    }

    /// How long nothing has moved; an error when that is too long, or when a peer that is waited for has left.
    fn check_patience(&mut self) -> Result<Duration, CommError> {
        let waited = self.waiting_since.get_or_insert_with(Instant::now).elapsed();
        let Some(watch) = &self.watch else { return Ok(waited) };
        let left = (0..self.size).find(|peer| {
            self.interest(*peer).any()
                && watch.departed(*peer)
                && self.links[*peer].as_ref().is_some_and(|link| !link.reports_end())
        });
        if let Some(peer) = left {
            // What the peer wrote before it left may have become visible since the last look: look once more.
            if self.saw_departure {
                return Err(self.closed(peer));
            }
            self.saw_departure = true;
            return Ok(Duration::ZERO);
        }
        if waited >= self.patience.stall_limit && !self.idle {
            let awaited = (0..self.size).find(|peer| self.interest(*peer).any()).unwrap_or(self.rank);
            let blamed = self.silent_rank()?.unwrap_or(awaited);
            let transport = self.transport(blamed);
            return Err(self.fail(CommError::Stalled { rank: blamed, transport, after: waited }));
        }
        Ok(waited)
    }

    /// A rank whose process does not even answer a ping. The one that this rank waits for may itself wait for that one.
    fn silent_rank(&mut self) -> Result<Option<usize>, CommError> {
        let deadline = Instant::now() + PING_LIMIT;
        if let Some(watch) = &self.watch {
            watch.ping(self.rank);
        }
        loop {
            self.check_verdict()?;
            let silent = self.watch.as_ref().and_then(Watch::silent);
            if silent.is_none() || Instant::now() >= deadline {
                return Ok(silent);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn sleep(&mut self, waited: Duration) -> Result<(), CommError> {
        let Some(watch) = &self.watch else { return Ok(()) };
        self.descriptors.clear();
        let descriptor = |fd, events| libc::pollfd { fd, events, revents: 0 };
        self.descriptors.push(descriptor(watch.descriptor(), libc::POLLIN));
        let mut still = true;
        for peer in 0..self.size {
            let interest = Interest { receive: self.incoming[peer].active, send: self.outgoing[peer].active };
            if let Some(link) = self.links[peer].as_mut().filter(|_| interest.any()) {
                still &= link.arm(interest);
                let (fd, events) = link.descriptor(interest);
                self.descriptors.push(descriptor(fd, events));
            }
        }
        if still {
            let limit = (!self.idle).then(|| self.patience.stall_limit.saturating_sub(waited));
            // An error of poll leaves a wait that spins, which is slow but right.
            let _ = platform::poll(&mut self.descriptors, limit);
        }
        for peer in 0..self.size {
            let any = self.incoming[peer].active || self.outgoing[peer].active;
            if let Some(link) = self.links[peer].as_mut().filter(|_| any) {
                link.disarm();
            }
        }
        if self.descriptors[0].revents != 0 {
            watch.drain();
        }
        Ok(())
    }

    fn check_verdict(&mut self) -> Result<(), CommError> {
        let Some(verdict) = self.watch.as_ref().and_then(Watch::verdict) else { return Ok(()) };
        let after = self.started.elapsed();
        let lost = |rank| CommError::PeerLost { rank, transport: self.transport(rank), after };
        let error = match verdict {
            Verdict::Lost(rank) => lost(rank),
            Verdict::Aborted { by, rank, .. } if rank == self.rank => {
                CommError::Aborted { by, rank, why: "it waited too long for this rank" }
            }
            Verdict::Aborted { rank, why: Why::Lost, .. } => lost(rank),
            Verdict::Aborted { rank, why: Why::Stalled, .. } => {
                CommError::Stalled { rank, transport: self.transport(rank), after }
            }
            Verdict::Aborted { by, rank, why: Why::Mismatch } => {
                CommError::Aborted { by, rank, why: "they are not in the same operation" }
            }
        };
        self.failure = Some(error.clone());
        Err(error)
    }

    /// A link has ended. Its peer may have ended because of another rank: the watch knows within a moment.
    fn closed(&mut self, peer: usize) -> CommError {
        let deadline = Instant::now() + NEWS_LIMIT;
        while Instant::now() < deadline {
            if let Err(error) = self.check_verdict() {
                return error;
            }
            if self.watch.as_ref().is_none_or(|watch| watch.departed(peer)) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let transport = self.transport(peer);
        self.fail(CommError::PeerLost { rank: peer, transport, after: self.started.elapsed() })
    }

    /// Ends the group here and everywhere.
    fn fail(&mut self, error: CommError) -> CommError {
        if let (Some(watch), Some(rank)) = (&self.watch, error.rank()) {
            let why = match error {
                CommError::Stalled { .. } => Why::Stalled,
                CommError::Mismatch { .. } | CommError::Aborted { .. } => Why::Mismatch,
                _ => Why::Lost,
            };
            watch.abort(self.rank, rank, why);
        }
        self.failure = Some(error.clone());
        error
    }
}

/// Suspends once.
async fn yield_once() {
    let mut yielded = false;
    std::future::poll_fn(move |_| {
        if std::mem::replace(&mut yielded, true) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
}
