//! The messages to and from each peer: queued, moved as far as the links allow, ended.

use super::Core;
use crate::CommError;
use crate::header::{HEADER_BYTES, Header};
use crate::link::Closed;

/// A message to a peer. The pointer is valid while the operation runs.
pub(super) struct Outgoing {
    pub active: bool,
    pub header: [u8; HEADER_BYTES],
    pub header_sent: usize,
    pub data: *const u8,
    pub length: usize,
    /// Bytes that may be sent now; less than `length` while the rest is still being computed.
    pub limit: usize,
    pub sent: usize,
}

/// A message expected from a peer.
pub(super) struct Incoming {
    pub active: bool,
    pub expected: Header,
    pub header: [u8; HEADER_BYTES],
    pub header_read: usize,
    pub data: *mut u8,
    pub length: usize,
    pub read: usize,
}

impl Outgoing {
    pub fn none() -> Self {
        Self {
            active: false,
            header: [0; HEADER_BYTES],
            header_sent: 0,
            data: std::ptr::null(),
            length: 0,
            limit: 0,
            sent: 0,
        }
    }
}

impl Incoming {
    pub fn none() -> Self {
        Self {
            active: false,
            expected: Header::default(),
            header: [0; HEADER_BYTES],
            header_read: 0,
            data: std::ptr::null_mut(),
            length: 0,
            read: 0,
        }
    }
}

impl Core {
    /// Queues a message to a peer.
    ///
    /// # Safety
    /// `data` must be valid for the header's length until the message has been sent.
    pub unsafe fn queue_send(&mut self, peer: usize, header: Header, data: *const u8) {
        let message = &mut self.outgoing[peer];
        debug_assert!(!message.active && peer != self.rank);
        message.active = true;
        message.header = header.encode();
        message.header_sent = 0;
        message.data = data;
        message.length = header.length as usize;
        if header.is_inline() {
            let payload = Header::inline_mut(&mut message.header);
            // SAFETY: the caller vouches for `data`; an inline payload fits into the header.
            unsafe { std::ptr::copy_nonoverlapping(data, payload.as_mut_ptr(), message.length) };
            message.length = 0;
        }
        message.limit = message.length;
        message.sent = 0;
    }

    /// Allows only the first `limit` bytes of the message to `peer` to be sent for now.
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

    /// True when no message is under way.
    pub fn all_messages_done(&self) -> bool {
        !self.outgoing.iter().any(|message| message.active)
            && !self.incoming.iter().any(|message| message.active)
    }

    /// Sends as much as the links take. True when any byte was sent.
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

    pub(super) fn step_receives(&mut self) -> Result<bool, CommError> {
        let mut moved = false;
        for peer in 0..self.size {
            if self.incoming[peer].active {
                moved |= self.step_receive(peer)?;
            }
        }
        Ok(moved)
    }

    /// Stores the bytes of a peer's message that have arrived. True when there were any.
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

    /// True while a message from this peer is expected.
    pub fn expects(&self, peer: usize) -> bool {
        self.incoming[peer].active
    }

    /// True while a message to this peer is being sent.
    pub fn is_sending(&self, peer: usize) -> bool {
        self.outgoing[peer].active
    }

    /// The bytes that `fill_view` has counted.
    pub fn view(&self, peer: usize) -> &[u8] {
        self.links[peer].as_ref().map_or(&[], |link| link.view())
    }

    /// Returns the first `count` bytes of the view to the link.
    pub fn consume(&mut self, peer: usize, count: usize) {
        if let Some(link) = &mut self.links[peer] {
            link.consume(count);
        }
        self.incoming[peer].read += count;
        self.finish_receive(peer);
    }

    /// True when a peer's header has arrived and was the expected one.
    pub fn header_done(&self, peer: usize) -> bool {
        self.incoming[peer].header_read == HEADER_BYTES
    }

    /// Ends a peer's message if it has arrived completely.
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

    /// Reads the bytes of a header that have arrived, and compares the complete header with the
    /// expected one. True when there were any.
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
            // SAFETY: the caller of the exchange vouches for the payload's length at `data`; the
            // payload lies within the header.
            unsafe { std::ptr::copy_nonoverlapping(payload, message.data, message.expected.length as usize) };
        }
        Ok(true)
    }

    /// Looks for at most `want` bytes of a peer's payload. Returns how many bytes `view` shows.
    pub fn fill_view(&mut self, peer: usize, want: usize) -> Result<usize, CommError> {
        let Some(link) = &mut self.links[peer] else { return Ok(0) };
        match link.fill_view(want) {
            Ok(count) => Ok(count),
            Err(Closed) => Err(self.closed(peer)),
        }
    }
}
