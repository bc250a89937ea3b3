//! What an algorithm sees of a pair of ranks: an ordered, bounded stream of bytes in each
//! direction.
//!
//! A link never blocks. `send` takes as many bytes as fit. `view` shows received bytes in place, so
//! that a reduction can read directly from the link's own buffer; `consume` frees their space for
//! the peer. A transport with frames and credits (RDMA) fits this: a frame's payload is the view,
//! and consuming it returns the credit.

use crate::Transport;
use crate::platform::Process;

pub(crate) mod board;
pub(crate) mod rdma;
pub(crate) mod shm;
pub(crate) mod tcp;
mod wakeup;

/// The peer's end of the link is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Closed;

/// What a sleeping rank waits for on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Interest {
    /// Bytes from the peer.
    pub receive: bool,
    /// Space for bytes to the peer.
    pub send: bool,
}

impl Interest {
    pub fn any(self) -> bool {
        self.receive || self.send
    }
}

/// One rank's end of the link between a pair.
pub(crate) trait Link: Send {
    /// What the link runs over.
    fn transport(&self) -> Transport;

    /// Takes bytes of `first`, then of `second`, as many as fit. Returns their number.
    fn send(&mut self, first: &[u8], second: &[u8]) -> Result<usize, Closed>;

    /// Marks the end of a message: the next one starts at an offset that suits the transport.
    fn end_send(&mut self) {}

    /// Looks for at most `want` received bytes. Returns how many `view` now shows without a gap.
    fn fill_view(&mut self, want: usize) -> Result<usize, Closed>;

    /// The bytes that `fill_view` has counted.
    fn view(&self) -> &[u8];

    /// Frees the first `count` bytes of the view.
    fn consume(&mut self, count: usize);

    /// The counterpart of `end_send`.
    fn end_receive(&mut self) {}

    /// Moves received bytes to `to`. Returns their number.
    ///
    /// # Safety
    /// `to` must be valid for writes of `length` bytes.
    unsafe fn receive_into(&mut self, to: *mut u8, length: usize) -> Result<usize, Closed> {
        let count = self.fill_view(length)?.min(length);
        // SAFETY: the view holds `count` bytes, and the caller vouches for `to`.
        unsafe { std::ptr::copy_nonoverlapping(self.view().as_ptr(), to, count) };
        self.consume(count);
        Ok(count)
    }

    /// Prepares for sleep: from now on the peer's next step in `interest` makes one of
    /// `descriptors` ready. False if that step has already happened.
    fn arm(&mut self, interest: Interest) -> bool;

    /// Ends sleep: removes the peer's wake-ups from the descriptors.
    fn disarm(&mut self);

    /// Adds what to `poll`, and for which events.
    fn descriptors(&self, interest: Interest, set: &mut Vec<libc::pollfd>);

    /// True when only `check_health` can tell whether the link still leads to the peer.
    fn needs_health_checks(&self) -> bool {
        false
    }

    /// Checks whether the link is still good, if it needs checks. `_lasts` is true in a wait that
    /// lasts: then also checks whether a message was lost.
    fn check_health(&mut self, _lasts: bool) -> Result<(), Closed> {
        Ok(())
    }

    /// True when the link itself reports the peer's end (a socket does, after the last byte; memory
    /// does not).
    fn reports_end(&self) -> bool;

    /// Tells the link that the group has failed: bytes that have not reached the peer are no longer
    /// needed.
    fn abandon(&mut self) {}

    /// True when all received bytes are consumed; false if the link cannot tell. Does not record
    /// what it sees, so that `arm` still reports it as new.
    fn is_empty(&self) -> bool {
        false
    }

    /// Makes the peer's descriptors ready, for a peer that sleeps for a reason other than this
    /// link.
    fn wake(&self) {}

    /// The peer's process, where its memory may be readable.
    fn process(&self) -> Option<Process> {
        None
    }

    /// After `Closed`: what is wrong with the link, if the link can tell that from the peer's end
    /// and from a cut cable.
    fn fault(&self) -> Option<String> {
        None
    }
}
