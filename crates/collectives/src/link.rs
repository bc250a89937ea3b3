//! What an algorithm sees of a pair of ranks: an ordered, bounded stream of bytes in each direction.
//!
//! A link never blocks. `send` takes what there is room for, `view` shows what has arrived, in place, so that a reduction
//! can read straight from the link's own buffer; `consume` gives that room back to the peer. A transport with frames and
//! credits (RDMA) fits: a frame's payload is the view, and consuming it returns the credit.

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
    /// Room for bytes to the peer.
    pub send: bool,
}

impl Interest {
    pub fn any(self) -> bool {
        self.receive || self.send
    }
}

/// One pair's link, as one of its two ranks holds it.
pub(crate) trait Link: Send {
    /// What it runs over.
    fn transport(&self) -> Transport;

    /// Takes as many bytes of `first`, then of `second`, as there is room for, and says how many.
    fn send(&mut self, first: &[u8], second: &[u8]) -> Result<usize, Closed>;

    /// Marks the end of a message: the next one starts where the transport likes it best.
    fn end_send(&mut self) {}

    /// Looks for arrived bytes, at most `want`, and says how many `view` now shows without a gap.
    fn fill_view(&mut self, want: usize) -> Result<usize, Closed>;

    /// The bytes counted by `arrived`.
    fn view(&self) -> &[u8];

    /// Gives back the first `count` bytes of the view.
    fn consume(&mut self, count: usize);

    /// The counterpart of `end_send`.
    fn end_receive(&mut self) {}

    /// Moves arrived bytes to `to` and says how many.
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

    /// Prepares for sleep: from now on the peer's next step in `interest` makes one of `descriptors` ready. False when that step
    /// has been made already.
    fn arm(&mut self, interest: Interest) -> bool;

    /// Awake again: takes the peer's wake-ups off the descriptors.
    fn disarm(&mut self);

    /// Adds what to `poll`, and for which events.
    fn descriptors(&self, interest: Interest, set: &mut Vec<libc::pollfd>);

    /// Whether the link must be examined to know that it still leads to the peer.
    fn needs_health_checks(&self) -> bool {
        false
    }

    /// Looks whether the link is still good, where it must be; for a wait that lasts also whether a message was lost.
    fn check_health(&mut self, _lasts: bool) -> Result<(), Closed> {
        Ok(())
    }

    /// Whether the link itself reports the peer's end (a socket does, after the last byte; memory does not).
    fn reports_end(&self) -> bool;

    /// The group has failed: what has not reached the peer need not reach it any more.
    fn abandon(&mut self) {}

    /// Whether all that has come is consumed; false where the link cannot tell. Takes no note of what it sees, so that `arm`
    /// still counts it as news.
    fn is_empty(&self) -> bool {
        false
    }

    /// Makes the peer's descriptors ready, for a peer that sleeps because of something else than this link.
    fn wake(&self) {}

    /// The peer's process, where its memory may be readable.
    fn process(&self) -> Option<Process> {
        None
    }

    /// After `Closed`: what is wrong with the link, where it can tell that from the end of the peer and from a cut cable.
    fn fault(&self) -> Option<String> {
        None
    }
}
