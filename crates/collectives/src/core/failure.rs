//! How a group fails: the report of the watch or of a link becomes the error of this and every
//! later operation.

use std::time::{Duration, Instant};

use super::Core;
use crate::CommError;
use crate::header::{HEADER_BYTES, Header};
use crate::watch::{AbortReason, Failure, Watch};

/// After a connection has closed: how long to wait for the watch to name the rank that caused it.
const REPORT_LIMIT: Duration = Duration::from_millis(100);

impl Core {
    pub(super) fn check_watch(&mut self) -> Result<(), CommError> {
        let Some(verdict) = self.watch.as_ref().and_then(Watch::failure) else { return Ok(()) };
        let after = self.elapsed();
        let lost = |rank| CommError::PeerLost { rank, transport: self.transport(rank), after };
        let error = match verdict {
            Failure::Lost(rank) => lost(rank),
            // Both ranks are alive: the other one has lost its link to this one.
            Failure::Aborted { by, rank, why: AbortReason::Lost } if rank == self.rank => lost(by),
            Failure::Aborted { by, rank, why: AbortReason::LinkFailed } if rank == self.rank => {
                let reason = format!("rank {by} reports it; see the error of that rank");
                CommError::LinkFailed { rank: by, transport: self.transport(by), reason }
            }
            Failure::Aborted { by, rank, why: AbortReason::Stalled } if rank == self.rank => {
                CommError::Aborted { by, rank, why: "it waited too long for this rank" }
            }
            Failure::Aborted { rank, why: AbortReason::Lost | AbortReason::LinkFailed, .. } => lost(rank),
            Failure::Aborted { rank, why: AbortReason::Stalled, .. } => {
                CommError::Stalled { rank, transport: self.transport(rank), after }
            }
            Failure::Aborted { by, rank, why: AbortReason::Mismatch } => {
                CommError::Aborted { by, rank, why: "they are not in the same operation" }
            }
        };
        self.failure = Some(error.clone());
        Err(error)
    }

    /// Turns the end of a link into an error. The peer may have ended because of another rank; the
    /// watch learns that within a moment.
    pub(super) fn closed(&mut self, peer: usize) -> CommError {
        let deadline = Instant::now() + REPORT_LIMIT;
        while Instant::now() < deadline {
            if let Err(error) = self.check_watch() {
                return error;
            }
            if self.watch.as_ref().is_none_or(|watch| watch.departed(peer)) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let transport = self.transport(peer);
        // The peer is alive, so the link failed, if the link can say why.
        let departed = self.watch.as_ref().is_none_or(|watch| watch.departed(peer));
        if let Some(reason) = self.links[peer].as_ref().and_then(|link| link.fault()).filter(|_| !departed) {
            return self.fail(CommError::LinkFailed { rank: peer, transport, reason });
        }
        self.fail(CommError::PeerLost { rank: peer, transport, after: self.elapsed() })
    }

    /// Time since the operation began; zero outside of one.
    fn elapsed(&self) -> Duration {
        self.started.map_or(Duration::ZERO, |started| started.elapsed())
    }

    /// Fails the group on this rank and tells all others.
    pub(super) fn fail(&mut self, error: CommError) -> CommError {
        if let (Some(watch), Some(rank)) = (&self.watch, error.rank()) {
            let why = match error {
                CommError::Stalled { .. } => AbortReason::Stalled,
                CommError::Mismatch { .. } | CommError::Aborted { .. } => AbortReason::Mismatch,
                CommError::LinkFailed { .. } => AbortReason::LinkFailed,
                _ => AbortReason::Lost,
            };
            watch.abort(self.rank, rank, why);
        }
        self.failure = Some(error.clone());
        error
    }

    /// Fails the group because a peer is in another operation.
    pub(super) fn mismatch(&mut self, rank: usize, theirs: &[u8; HEADER_BYTES], ours: &Header) -> CommError {
        let (theirs, ours) = (Header::describe(theirs), Header::describe(&ours.encode()));
        self.fail(CommError::Mismatch { rank, theirs, ours })
    }
}
