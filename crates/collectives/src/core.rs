//! The engine under every algorithm: messages to and from any number of peers at once, and the wait when none moves.
//!
//! Algorithms are `async` so that the same code serves blocking calls (which never suspend: the wait happens inside) and
//! the non-blocking form (which suspends instead of waiting). There is no runtime.

mod board;
mod exchange;
mod mates;
mod wait;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use crate::header::{HEADER_BYTES, Header, Kind};
use crate::link::board::Board;
use crate::link::{Closed, Link};
use crate::watch::Watch;
use crate::{CommError, DType, Transport, Wire};

/// One message on its way to a peer. The pointer is valid while the operation runs.
struct Outgoing {
    active: bool,
    header: [u8; HEADER_BYTES],
    header_sent: usize,
    data: *const u8,
    length: usize,
    /// Bytes that are there to be sent; less than `length` while they are still being made.
    limit: usize,
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
    /// The ranks by host, where they share memory; each by itself where not.
    pub hosts: Vec<Vec<usize>>,
    /// What the ranks of this host share.
    board: Option<Board>,
    /// The record of all that is waited for, and its header.
    awaited: Option<(u64, Header)>,
    /// Whether the ranks can read each other's memory, once they know.
    pub reads_mates: Option<bool>,
    watch: Option<Watch>,
    pub patience: Patience,
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    sources: Vec<*const u8>,
    /// How sums travel, and their room on the way.
    pub wire: Wire,
    pub wire_room: Vec<u8>,
    /// Partial sums of an algorithm, kept so that only the first operation pays for the memory.
    pub scratch: Vec<f32>,
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
    /// When the operation under way began, as far as anyone has looked at the clock.
    started: Option<Instant>,
    turns: u32,
    waiting_since: Option<Instant>,
    /// When the links were last examined, if any must be.
    examined: Option<Instant>,
    saw_departure: bool,
    saw_divergence: bool,
    /// Whether the wait under way has given the core away, and how many waits lately ended so.
    yielded: bool,
    shared_core: i32,
}

// SAFETY: the raw pointers are used only while an operation runs, by the thread that runs it.
unsafe impl Send for Core {}

impl Drop for Core {
    fn drop(&mut self) {
        if self.failure.is_some() {
            self.links.iter_mut().flatten().for_each(|link| link.abandon());
        }
    }
}

impl Core {
    pub fn new(
        rank: usize,
        links: Vec<Option<Box<dyn Link>>>,
        hosts: Vec<Vec<usize>>,
        board: Option<Board>,
        watch: Option<Watch>,
        patience: Patience,
    ) -> Self {
        let size = links.len();
        let examined = links.iter().flatten().any(|link| link.is_examined()).then(Instant::now);
        let outgoing = || Outgoing {
            active: false,
            header: [0; HEADER_BYTES],
            header_sent: 0,
            data: std::ptr::null(),
            length: 0,
            limit: 0,
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
            hosts,
            board,
            awaited: None,
            reads_mates: None,
            watch,
            patience,
            outgoing: (0..size).map(|_| outgoing()).collect(),
            incoming: (0..size).map(|_| incoming()).collect(),
            sources: Vec::with_capacity(size),
            wire: Wire::Exact,
            wire_room: Vec::new(),
            scratch: Vec::new(),
            descriptors: Vec::with_capacity(2 * size + 1),
            failure: None,
            sequence: 0,
            idle: false,
            cooperative: Arc::default(),
            busy: false,
            started: None,
            turns: 0,
            waiting_since: None,
            examined,
            saw_departure: false,
            saw_divergence: false,
            yielded: false,
            shared_core: 0,
        }
    }

    pub fn transport(&self, peer: usize) -> Transport {
        self.links[peer].as_ref().map_or(Transport::Itself, |link| link.transport())
    }

    /// Starts an operation: nothing of an earlier one is left, and the group is good.
    pub fn begin(&mut self, start: Option<Instant>, kind: Kind, idle: bool) -> Result<(), CommError> {
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
        // What is noticed now was so before the operation began.
        self.started = None;
        self.check_verdict()?;
        self.started = start;
        for message in &mut self.outgoing {
            message.active = false;
        }
        for message in &mut self.incoming {
            message.active = false;
        }
        self.moved();
        Ok(())
    }

    /// Ends an operation, with whatever result, and says when it began, as far as anyone has looked at the clock.
    pub fn end(&mut self) -> Option<Instant> {
        self.busy = false;
        self.started
    }

    /// The description of a message of the operation under way.
    pub fn header(&self, kind: Kind, dtype: DType, op: u8, phase: u8, length: usize) -> Header {
        // Ranks send and receive at different times between collectives, so those are not counted.
        let sequence = if kind == Kind::SendReceive { 0 } else { self.sequence };
        Header { kind, dtype: dtype as u8, op, phase, sequence, length: length as u64 }
    }

    /// Queues a message to a peer.
    ///
    /// # Safety
    /// `data` must be valid for the header's length, and stay so until the message has been sent.
    pub unsafe fn queue_send(&mut self, peer: usize, header: Header, data: *const u8) {
        let message = &mut self.outgoing[peer];
        debug_assert!(!message.active && peer != self.rank);
        message.active = true;
        message.header = header.encode();
        message.header_sent = 0;
        message.data = data;
        message.length = header.length as usize;
        if header.is_inline() {
            let place = Header::inline_mut(&mut message.header);
            // SAFETY: the caller vouches for `data`; an inline payload fits into its place.
            unsafe { std::ptr::copy_nonoverlapping(data, place.as_mut_ptr(), message.length) };
            message.length = 0;
        }
        message.limit = message.length;
        message.sent = 0;
    }

    /// Lets only the first `limit` bytes of the message to `peer` go out for now.
    pub fn limit_send(&mut self, peer: usize, limit: usize) {
        debug_assert!(limit <= self.outgoing[peer].length);
        self.outgoing[peer].limit = limit;
    }

    pub fn queue_receive(&mut self, peer: usize, expected: Header, data: *mut u8) {
        let message = &mut self.incoming[peer];
        debug_assert!(!message.active && peer != self.rank);
        message.active = true;
        message.expected = expected;
        message.header_read = 0;
        message.data = data;
        message.length = if expected.is_inline() { 0 } else { expected.length as usize };
        message.read = 0;
    }

    /// Whether all messages have come to their end.
    pub fn idle_messages(&self) -> bool {
        !self.outgoing.iter().any(|message| message.active)
            && !self.incoming.iter().any(|message| message.active)
    }

    /// Sends what there is room for.
    pub fn step_sends(&mut self) -> Result<bool, CommError> {
        let mut moved = false;
        for peer in 0..self.size {
            let message = &mut self.outgoing[peer];
            let Some(link) = self.links[peer].as_mut().filter(|_| message.active) else { continue };
            let header = &message.header[message.header_sent..];
            // SAFETY: the caller of the exchange vouches for `length` bytes at `data`.
            let data = unsafe {
                std::slice::from_raw_parts(message.data.add(message.sent), message.limit - message.sent)
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
            if self.incoming[peer].active {
                moved |= self.step_receive(peer)?;
            }
        }
        Ok(moved)
    }

    /// Stores what has come of a peer's message.
    pub fn step_receive(&mut self, peer: usize) -> Result<bool, CommError> {
        let mut moved = self.step_header(peer)?;
        if !self.header_done(peer) {
            return Ok(moved);
        }
        let message = &mut self.incoming[peer];
        if message.read < message.length
            && let Some(link) = &mut self.links[peer]
        {
            // SAFETY: the caller of the exchange vouches for `length` bytes at `data`.
            let result =
                unsafe { link.receive_into(message.data.add(message.read), message.length - message.read) };
            match result {
                Ok(count) => {
                    message.read += count;
                    moved |= count > 0;
                }
                Err(Closed) => return Err(self.closed(peer)),
            }
        }
        self.finish_receive(peer);
        Ok(moved)
    }

    /// Bytes of a peer's message that have been stored or consumed.
    pub fn received(&self, peer: usize) -> usize {
        self.incoming[peer].read
    }

    /// Whether a message from this peer is still expected.
    pub fn expects(&self, peer: usize) -> bool {
        self.incoming[peer].active
    }

    /// Whether a message to this peer is still on its way.
    pub fn is_sending(&self, peer: usize) -> bool {
        self.outgoing[peer].active
    }

    /// What `arrived` has counted.
    pub fn view(&self, peer: usize) -> &[u8] {
        self.links[peer].as_ref().map_or(&[], |link| link.view())
    }

    /// Gives back the first `count` bytes of the view.
    pub fn consume(&mut self, peer: usize, count: usize) {
        if let Some(link) = &mut self.links[peer] {
            link.consume(count);
        }
        self.incoming[peer].read += count;
        self.finish_receive(peer);
    }

    /// Whether a peer's header has come, and was the right one.
    pub fn header_done(&self, peer: usize) -> bool {
        self.incoming[peer].header_read == HEADER_BYTES
    }

    /// Ends a peer's message if it is whole.
    pub fn finish_receive(&mut self, peer: usize) {
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
    pub fn step_header(&mut self, peer: usize) -> Result<bool, CommError> {
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
        if message.header_read < HEADER_BYTES {
            return Ok(count > 0);
        }
        if !message.expected.matches(&message.header) {
            let (theirs, ours) = (message.header, message.expected);
            return Err(self.mismatch(peer, &theirs, &ours));
        }
        if message.expected.is_inline() && !message.data.is_null() {
            let payload = Header::inline(&message.header).as_ptr();
            // SAFETY: the caller of the exchange vouches for as many bytes at `data`; the payload is within the header.
            unsafe { std::ptr::copy_nonoverlapping(payload, message.data, message.expected.length as usize) };
        }
        Ok(true)
    }

    /// Ends the group because a peer is in another operation.
    fn mismatch(&mut self, rank: usize, theirs: &[u8; HEADER_BYTES], ours: &Header) -> CommError {
        let (theirs, ours) = (Header::describe(theirs), Header::describe(&ours.encode()));
        self.fail(CommError::Mismatch { rank, theirs, ours })
    }

    /// Looks for payload of a peer's message, at most `want` bytes, and says how many `view` shows.
    pub fn arrived(&mut self, peer: usize, want: usize) -> Result<usize, CommError> {
        let Some(link) = &mut self.links[peer] else { return Ok(0) };
        match link.arrived(want) {
            Ok(count) => Ok(count),
            Err(Closed) => Err(self.closed(peer)),
        }
    }
}
