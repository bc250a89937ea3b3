//! What every algorithm runs on: messages to and from any number of peers at once, and the wait
//! when none of them moves.
//!
//! Algorithms are `async` so that one implementation serves the blocking calls (which wait inside
//! and never suspend) and the non-blocking form (which suspends instead of waiting). There is no
//! async runtime.

mod board;
mod exchange;
mod failure;
mod message;
mod peer_memory;
mod wait;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use crate::header::{Header, OperationKind};
use crate::link::Link;
use crate::link::board::Board;
use crate::watch::Watch;
use crate::{CommError, DType, Transport, Wire};
use message::{Incoming, Outgoing};

/// How long a wait spins, and when it gives up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WaitPolicy {
    pub spin: Duration,
    /// More local ranks than cores: a spinning rank would keep the rank that it waits for from
    /// running.
    pub oversubscribed: bool,
    pub idle_spin: Duration,
    pub stall_limit: Duration,
}

pub(crate) struct Core {
    pub rank: usize,
    pub size: usize,
    links: Vec<Option<Box<dyn Link>>>,
    /// The ranks by host, where they share memory; otherwise each rank is a host of its own.
    pub hosts: Vec<Vec<usize>>,
    /// The shared memory of this host's ranks.
    board: Option<Board>,
    /// The number and header of the record that this rank waits for from all ranks of the board.
    awaited: Option<(u64, Header)>,
    /// Whether the ranks can read each other's memory; `None` until they have tried.
    pub reads_peers: Option<bool>,
    watch: Option<Watch>,
    pub wait_policy: WaitPolicy,
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    sources: Vec<*const u8>,
    /// How the values of an all-reduce travel, and a buffer for them.
    pub wire: Wire,
    pub wire_buffer: Vec<u8>,
    /// Partial sums of an algorithm. Kept, so that only the first operation allocates.
    pub scratch: Vec<f32>,
    descriptors: Vec<libc::pollfd>,
    failure: Option<CommError>,
    /// Number of collectives so far. Ranks whose numbers differ are not in the same operation.
    sequence: u32,
    /// True when the operation under way has no stall limit.
    idle: bool,
    /// True: suspend instead of waiting. Shared, because the operation under way borrows the rest.
    pub cooperative: Arc<AtomicBool>,
    /// True from the start of an operation to its end.
    busy: bool,
    /// When the operation under way began, or when a wait in it first read the clock.
    started: Option<Instant>,
    rounds: u32,
    waiting_since: Option<Instant>,
    /// When the links were last checked; `None` if no link needs checks.
    last_link_check: Option<Instant>,
    saw_departure: bool,
    saw_divergence: bool,
    /// Whether the wait under way has yielded its core, and how many recent waits ended only after
    /// that.
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
        wait_policy: WaitPolicy,
    ) -> Self {
        let size = links.len();
        let last_link_check =
            links.iter().flatten().any(|link| link.needs_health_checks()).then(Instant::now);
        Self {
            rank,
            size,
            links,
            hosts,
            board,
            awaited: None,
            reads_peers: None,
            watch,
            wait_policy,
            outgoing: (0..size).map(|_| Outgoing::none()).collect(),
            incoming: (0..size).map(|_| Incoming::none()).collect(),
            sources: Vec::with_capacity(size),
            wire: Wire::Exact,
            wire_buffer: Vec::new(),
            scratch: Vec::new(),
            descriptors: Vec::with_capacity(2 * size + 1),
            failure: None,
            sequence: 0,
            idle: false,
            cooperative: Arc::default(),
            busy: false,
            started: None,
            rounds: 0,
            waiting_since: None,
            last_link_check,
            saw_departure: false,
            saw_divergence: false,
            yielded: false,
            shared_core: 0,
        }
    }

    pub fn transport(&self, peer: usize) -> Transport {
        self.links[peer].as_ref().map_or(Transport::Itself, |link| link.transport())
    }

    /// Starts an operation: checks that the group is good and clears the messages of earlier
    /// operations.
    pub fn begin(
        &mut self,
        start: Option<Instant>,
        kind: OperationKind,
        idle: bool,
    ) -> Result<(), CommError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        if self.busy {
            // The operation's `Pending` was leaked. The rest of its messages would be taken for
            // those of the next operation.
            let why = "an operation was leaked before its end";
            return Err(self.fail(CommError::Aborted { by: self.rank, rank: self.rank, why }));
        }
        self.busy = true;
        self.idle = idle;
        if kind != OperationKind::SendReceive {
            self.sequence = self.sequence.wrapping_add(1);
        }
        // A failure that is noticed now happened before the operation began.
        self.started = None;
        self.check_watch()?;
        self.started = start;
        for message in &mut self.outgoing {
            message.active = false;
        }
        for message in &mut self.incoming {
            message.active = false;
        }
        self.note_progress();
        Ok(())
    }

    /// Ends an operation, whatever its result. Returns when it began, if the clock was read.
    pub fn end(&mut self) -> Option<Instant> {
        self.busy = false;
        self.started
    }

    /// The header of a message of the operation under way.
    pub fn header(&self, kind: OperationKind, dtype: DType, op: u8, phase: u8, length: usize) -> Header {
        // Send and receive are not collective: ranks call them different numbers of times.
        let sequence = if kind == OperationKind::SendReceive { 0 } else { self.sequence };
        Header { kind, dtype: dtype as u8, op, phase, sequence, length: length as u64 }
    }
}
