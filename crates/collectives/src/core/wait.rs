//! The wait when nothing moves: spin, give the core away, sleep; and what ends it early.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Core;
use crate::header::HEADER_BYTES;
use crate::link::{Closed, Interest};
use crate::watch::{Verdict, Watch, Why};
use crate::{CommError, platform};

/// Turns of a wait before it looks at the clock.
const TURNS_BEFORE_CLOCK: u32 = 64;
/// After a connection has closed: how long to wait for the news of who is really to blame.
const NEWS_LIMIT: Duration = Duration::from_millis(100);

/// After this the processor is offered to others at each turn: the rank that is waited for may be queued behind this one.
const PURE_SPIN: Duration = Duration::from_micros(10);
/// Waits that it takes to forget that a core is shared.
const SHARED_CORE_LIMIT: i32 = 16;
/// Between two looks at links that do not report their own end.
const EXAMINE_EVERY: Duration = Duration::from_millis(50);
/// How long a process may take to answer a ping before it counts as stopped.
const PING_LIMIT: Duration = Duration::from_millis(300);

impl Core {
    /// Between two looks at the links: goes straight on after progress, else waits a little or suspends.
    pub async fn turn(&mut self, moved: bool) -> Result<(), CommError> {
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

    pub(super) fn moved(&mut self) {
        if self.turns > 0 {
            // Waits that end only once the core is given away mean that the peer needs this core.
            let change = if self.yielded { 1 } else { -1 };
            self.shared_core = (self.shared_core + change).clamp(0, SHARED_CORE_LIMIT);
            self.yielded = false;
        }
        self.turns = 0;
        self.waiting_since = None;
        self.saw_departure = false;
        self.saw_divergence = false;
    }

    fn interest(&self, peer: usize) -> Interest {
        let out = &self.outgoing[peer];
        let unsent = out.header_sent < HEADER_BYTES || out.sent < out.limit;
        let receive = self.incoming[peer].active || self.awaits_record_of(peer);
        Interest { receive, send: out.active && unsent }
    }

    /// How long nothing has moved; an error when that is too long, or when a peer that is waited for has left.
    fn check_patience(&mut self) -> Result<Duration, CommError> {
        let since = *self.waiting_since.get_or_insert_with(Instant::now);
        self.started.get_or_insert(since);
        let waited = since.elapsed();
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
        if let Some((peer, theirs, ours)) = self.diverged()? {
            // Likewise: it may have ended what this rank waits for, and be in the next operation.
            if self.saw_divergence {
                return Err(self.mismatch(peer, &theirs, &ours));
            }
            self.saw_divergence = true;
            return Ok(Duration::ZERO);
        }
        self.examine(waited)?;
        if waited >= self.patience.stall_limit && !self.idle {
            let awaited = (0..self.size).find(|peer| self.interest(*peer).any()).unwrap_or(self.rank);
            let blamed = self.silent_rank()?.unwrap_or(awaited);
            let transport = self.transport(blamed);
            return Err(self.fail(CommError::Stalled { rank: blamed, transport, after: waited }));
        }
        Ok(waited)
    }

    /// Looks now and then at the links that do not report their own end, also those that nothing is awaited from: what
    /// fails one pair fails the group.
    fn examine(&mut self, waited: Duration) -> Result<(), CommError> {
        if self.examined.is_none_or(|last| last.elapsed() < EXAMINE_EVERY) {
            return Ok(());
        }
        self.examined = Some(Instant::now());
        for peer in 0..self.size {
            let lasts = waited >= EXAMINE_EVERY && self.interest(peer).any();
            if let Some(Err(Closed)) = self.links[peer].as_mut().map(|link| link.examine(lasts)) {
                return Err(self.closed(peer));
            }
        }
        Ok(())
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
        let news = libc::pollfd { fd: watch.descriptor(), events: libc::POLLIN, revents: 0 };
        self.descriptors.push(news);
        let mut still = match (&self.board, &self.awaited) {
            (Some(board), Some((number, _))) => board.arm(*number),
            _ => true,
        };
        for peer in 0..self.size {
            let interest = Interest { receive: self.incoming[peer].active, send: self.outgoing[peer].active };
            // Whoever has posted since the board was armed has rung: no rank of the board may be left out.
            let any = interest.any() || self.on_awaited_board(peer);
            if let Some(link) = self.links[peer].as_mut().filter(|_| any) {
                still &= link.arm(interest);
                link.descriptors(interest, &mut self.descriptors);
            }
        }
        if still {
            let stall = (!self.idle).then(|| self.patience.stall_limit.saturating_sub(waited));
            let examination = self.examined.map(|_| EXAMINE_EVERY);
            let limit = stall.into_iter().chain(examination).min();
            // An error of poll leaves a wait that spins, which is slow but right.
            let _ = platform::poll(&mut self.descriptors, limit);
        }
        for peer in 0..self.size {
            let any = self.interest(peer).any() || self.on_awaited_board(peer);
            if let Some(link) = self.links[peer].as_mut().filter(|_| any) {
                link.disarm();
            }
        }
        if let Some(board) = self.board.as_ref().filter(|_| self.awaited.is_some()) {
            board.disarm();
        }
        if self.descriptors[0].revents != 0 {
            watch.drain();
        }
        Ok(())
    }

    /// Whether every peer is still there, without a message to any of them.
    pub fn check_peers(&mut self) -> Result<(), CommError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        self.started = None;
        self.check_verdict()?;
        self.examine(Duration::ZERO)?;
        let departed = |watch: &Watch| (0..self.size).find(|rank| watch.departed(*rank));
        match self.watch.as_ref().and_then(departed) {
            Some(rank) => Err(self.closed(rank)),
            None => Ok(()),
        }
    }

    pub(super) fn check_verdict(&mut self) -> Result<(), CommError> {
        let Some(verdict) = self.watch.as_ref().and_then(Watch::verdict) else { return Ok(()) };
        let after = self.after();
        let lost = |rank| CommError::PeerLost { rank, transport: self.transport(rank), after };
        let error = match verdict {
            Verdict::Lost(rank) => lost(rank),
            // Both ranks are there: what that one has lost is its link to this one.
            Verdict::Aborted { by, rank, why: Why::Lost } if rank == self.rank => lost(by),
            Verdict::Aborted { by, rank, why: Why::LinkFailed } if rank == self.rank => {
                let reason = format!("rank {by} says so, its own error tells why");
                CommError::LinkFailed { rank: by, transport: self.transport(by), reason }
            }
            Verdict::Aborted { by, rank, why: Why::Stalled } if rank == self.rank => {
                CommError::Aborted { by, rank, why: "it waited too long for this rank" }
            }
            Verdict::Aborted { rank, why: Why::Lost | Why::LinkFailed, .. } => lost(rank),
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
    pub(super) fn closed(&mut self, peer: usize) -> CommError {
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
        // The peer is still there, so it is the link that failed, if it can say why.
        let departed = self.watch.as_ref().is_none_or(|watch| watch.departed(peer));
        if let Some(reason) = self.links[peer].as_ref().and_then(|link| link.fault()).filter(|_| !departed) {
            return self.fail(CommError::LinkFailed { rank: peer, transport, reason });
        }
        self.fail(CommError::PeerLost { rank: peer, transport, after: self.after() })
    }

    /// Since the operation began; zero where it has not.
    fn after(&self) -> Duration {
        self.started.map_or(Duration::ZERO, |started| started.elapsed())
    }

    /// Ends the group here and everywhere.
    pub(super) fn fail(&mut self, error: CommError) -> CommError {
        if let (Some(watch), Some(rank)) = (&self.watch, error.rank()) {
            let why = match error {
                CommError::Stalled { .. } => Why::Stalled,
                CommError::Mismatch { .. } | CommError::Aborted { .. } => Why::Mismatch,
                CommError::LinkFailed { .. } => Why::LinkFailed,
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
