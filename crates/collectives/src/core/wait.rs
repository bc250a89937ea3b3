//! The wait when no message moves: spin, yield the core, sleep; and the conditions that end it
//! early.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Core;
use crate::header::HEADER_BYTES;
use crate::link::{Closed, Interest};
use crate::watch::Watch;
use crate::{CommError, platform};

/// A wait reads the clock only after this many rounds.
const ROUNDS_BEFORE_CLOCK: u32 = 64;
/// A wait spins without yielding for this long. Afterwards it yields the core each round, as the
/// rank that it waits for may need this core.
const PURE_SPIN: Duration = Duration::from_micros(10);
/// Number of waits after which a shared core is no longer assumed.
const SHARED_CORE_LIMIT: i32 = 16;
/// Interval between checks of links that do not report their own end.
const LINK_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// How long a process may take to answer a ping before it counts as stopped.
const PING_LIMIT: Duration = Duration::from_secs(1);

impl Core {
    /// Called between two passes over the links. Returns at once if any byte moved; otherwise waits
    /// a little or suspends.
    pub async fn pause_unless(&mut self, moved: bool) -> Result<(), CommError> {
        if moved {
            self.note_progress();
            return Ok(());
        }
        self.check_watch()?;
        if self.cooperative.load(Ordering::Relaxed) {
            self.check_limits()?;
            yield_once().await;
            return Ok(());
        }
        self.rounds += 1;
        if self.rounds < ROUNDS_BEFORE_CLOCK && !self.wait_policy.oversubscribed {
            std::hint::spin_loop();
            return Ok(());
        }
        let waited = self.check_limits()?;
        let spin = if self.idle { self.wait_policy.idle_spin } else { self.wait_policy.spin };
        if waited >= spin {
            return self.sleep(waited);
        }
        let pure_spin = if self.shared_core > 0 { Duration::ZERO } else { PURE_SPIN };
        if self.wait_policy.oversubscribed || waited >= pure_spin {
            self.yielded = true;
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        Ok(())
    }

    pub(super) fn note_progress(&mut self) {
        if self.rounds > 0 {
            // A wait that ends only after the core was yielded means that the peer needs this core.
            let change = if self.yielded { 1 } else { -1 };
            self.shared_core = (self.shared_core + change).clamp(0, SHARED_CORE_LIMIT);
            self.yielded = false;
        }
        self.rounds = 0;
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

    /// Returns how long nothing has moved. An error when that is too long, or when an awaited peer
    /// has left.
    fn check_limits(&mut self) -> Result<Duration, CommError> {
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
            // Bytes that the peer wrote before it left may have become visible since the last pass:
            // check once more.
            if self.saw_departure {
                return Err(self.closed(peer));
            }
            self.saw_departure = true;
            return Ok(Duration::ZERO);
        }
        if let Some((peer, theirs, ours)) = self.diverged()? {
            // Likewise: the peer may have completed what this rank waits for and be in the next
            // operation.
            if self.saw_divergence {
                return Err(self.mismatch(peer, &theirs, &ours));
            }
            self.saw_divergence = true;
            return Ok(Duration::ZERO);
        }
        self.check_links(waited)?;
        if waited >= self.wait_policy.stall_limit && !self.idle {
            let awaited = (0..self.size).find(|peer| self.interest(*peer).any()).unwrap_or(self.rank);
            let blamed = self.silent_rank()?.unwrap_or(awaited);
            let transport = self.transport(blamed);
            return Err(self.fail(CommError::Stalled { rank: blamed, transport, after: waited }));
        }
        Ok(waited)
    }

    /// Checks the links that do not report their own end, at intervals. Includes links that nothing
    /// is awaited from: if one pair fails, the group fails.
    fn check_links(&mut self, waited: Duration) -> Result<(), CommError> {
        if self.last_link_check.is_none_or(|last| last.elapsed() < LINK_CHECK_INTERVAL) {
            return Ok(());
        }
        self.last_link_check = Some(Instant::now());
        for peer in 0..self.size {
            let lasts = waited >= LINK_CHECK_INTERVAL && self.interest(peer).any();
            if let Some(Err(Closed)) = self.links[peer].as_mut().map(|link| link.check_health(lasts)) {
                return Err(self.closed(peer));
            }
        }
        Ok(())
    }

    /// A rank whose process does not answer a ping. The rank that this one waits for may itself
    /// wait for that rank.
    fn silent_rank(&mut self) -> Result<Option<usize>, CommError> {
        let deadline = Instant::now() + PING_LIMIT;
        if let Some(watch) = &self.watch {
            watch.ping(self.rank);
        }
        loop {
            self.check_watch()?;
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
        let wake_up = libc::pollfd { fd: watch.descriptor(), events: libc::POLLIN, revents: 0 };
        self.descriptors.push(wake_up);
        let mut still = match (&self.board, &self.awaited) {
            (Some(board), Some((number, _))) => board.arm(*number),
            _ => true,
        };
        for peer in 0..self.size {
            let interest = Interest { receive: self.incoming[peer].active, send: self.outgoing[peer].active };
            // A peer that posted after the board was armed has already sent its wake-up, so every
            // rank of the board must be armed.
            let any = interest.any() || self.on_awaited_board(peer);
            if let Some(link) = self.links[peer].as_mut().filter(|_| any) {
                still &= link.arm(interest);
                link.descriptors(interest, &mut self.descriptors);
            }
        }
        if still {
            let stall = (!self.idle).then(|| self.wait_policy.stall_limit.saturating_sub(waited));
            let link_check = self.last_link_check.map(|_| LINK_CHECK_INTERVAL);
            let limit = stall.into_iter().chain(link_check).min();
            // If poll fails, the wait spins: slow but correct.
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

    /// Checks that every peer is still there, without sending a message.
    pub fn check_peers(&mut self) -> Result<(), CommError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        self.started = None;
        self.check_watch()?;
        self.check_links(Duration::ZERO)?;
        let departed = |watch: &Watch| (0..self.size).find(|rank| watch.departed(*rank));
        match self.watch.as_ref().and_then(departed) {
            Some(rank) => Err(self.closed(rank)),
            None => Ok(()),
        }
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
