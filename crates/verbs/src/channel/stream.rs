//! A connected stream of bytes to one peer.

use super::abort::Abort;
use super::lane::Lane;
use super::wait::{WaitStep, Waiter};
use crate::device::Context;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

/// A connected stream to one peer.
pub struct Channel {
    /// The port of each cable.
    ports: Vec<(Arc<Context>, u8)>,
    /// The first has short slots; the others, if any, have long slots.
    lanes: Vec<Lane>,
    /// Index, among the lanes with long slots, of the one to try first for the next long write.
    next_bulk: usize,
    /// The stream number of the next data frame to send, and of the next to read.
    next_out: u32,
    next_in: u32,
    /// The lane whose oldest frame is being read, and the bytes of it that were consumed.
    reading: Option<usize>,
    consumed: usize,
    abort: Abort,
    /// The error that broke the channel. Every later call returns it again.
    broken: Option<Error>,
}

impl Channel {
    pub(super) fn new(ports: Vec<(Arc<Context>, u8)>, lanes: Vec<Lane>, abort: Abort) -> Self {
        Self {
            ports,
            lanes,
            next_bulk: 0,
            next_out: 0,
            next_in: 0,
            reading: None,
            consumed: 0,
            abort,
            broken: None,
        }
    }

    /// Takes in arrived frames and returns credits. Fails if a request failed, a frame was lost, or
    /// [`Abort`] was raised; every later call then fails too.
    pub fn poll(&mut self) -> Result<()> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        if let Some(reason) = self.abort.raised() {
            let reason = reason.to_string();
            return self.record(Err(Error::Aborted { reason }));
        }
        let polled = self.lanes.iter_mut().try_for_each(Lane::poll);
        self.record(polled)
    }

    /// The error that broke the channel, if it is broken.
    pub fn failure(&self) -> Option<&Error> {
        self.broken.as_ref()
    }

    /// Stores the first error of the channel.
    fn record<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.broken.get_or_insert_with(|| error.clone());
        }
        result
    }

    /// Sends as many of `bytes` as possible without waiting, and returns their number, which may be
    /// 0. The bytes are copied.
    pub fn send(&mut self, bytes: &[u8]) -> Result<usize> {
        self.send_parts(bytes, &[])
    }

    /// Like [`Self::send`] for `first` followed by `second`, in one frame if they fit.
    pub fn send_parts(&mut self, first: &[u8], second: &[u8]) -> Result<usize> {
        let sent = self.send_frames(first, second)?;
        if sent == first.len() + second.len() {
            return Ok(sent);
        }
        // A poll may find freed slots and credits.
        self.poll()?;
        let (first, second) = unsent(first, second, sent);
        Ok(sent + self.send_frames(first, second)?)
    }

    fn send_frames(&mut self, first: &[u8], second: &[u8]) -> Result<usize> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let mut sent = 0;
        while sent < first.len() + second.len() {
            let (first, second) = unsent(first, second, sent);
            let frame = self.send_frame(first, second);
            match self.record(frame)? {
                0 => break,
                len => sent += len,
            }
        }
        Ok(sent)
    }

    fn send_frame(&mut self, first: &[u8], second: &[u8]) -> Result<usize> {
        let bulk_lanes = self.lanes.len() - 1;
        let mut sent = 0;
        if bulk_lanes == 0 || first.len() + second.len() <= self.lanes[0].payload_bytes() {
            sent = self.lanes[0].send_data(self.next_out, first, second)?;
        } else {
            for turn in 0..bulk_lanes {
                let bulk = (self.next_bulk + turn) % bulk_lanes;
                sent = self.lanes[1 + bulk].send_data(self.next_out, first, second)?;
                if sent > 0 {
                    self.next_bulk = bulk + 1;
                    break;
                }
            }
        }
        if sent > 0 {
            self.next_out = self.next_out.wrapping_add(1);
        }
        Ok(sent)
    }

    /// The next bytes of the stream that are contiguous; empty if none have arrived. They stay in
    /// place until [`Self::consume`].
    pub fn peek(&mut self) -> Result<&[u8]> {
        if self.reading.is_none() && !self.find_next() {
            self.poll()?;
            self.find_next();
        }
        Ok(self.peeked())
    }

    /// The bytes of the last [`Self::peek`] that were not consumed.
    pub fn peeked(&self) -> &[u8] {
        self.reading.map_or(&[], |lane| &self.lanes[lane].front()[self.consumed..])
    }

    fn find_next(&mut self) -> bool {
        self.reading = self.lanes.iter().position(|lane| lane.front_seq() == Some(self.next_in));
        self.reading.is_some()
    }

    /// Consumes `len` of the bytes that [`Self::peek`] returned, at most all of them.
    pub fn consume(&mut self, len: usize) -> Result<()> {
        let Some(lane) = self.reading else { return Ok(()) };
        let frame_bytes = self.lanes[lane].front().len();
        self.consumed = frame_bytes.min(self.consumed + len);
        if self.consumed < frame_bytes {
            return Ok(());
        }
        self.reading = None;
        self.consumed = 0;
        self.next_in = self.next_in.wrapping_add(1);
        let popped = self.lanes[lane].pop();
        self.record(popped)
    }

    /// Copies arrived bytes to `into`, as many as fit, and returns their number, which may be 0.
    pub fn try_recv(&mut self, into: &mut [u8]) -> Result<usize> {
        let mut filled = 0;
        while filled < into.len() {
            let bytes = self.peek()?;
            let len = bytes.len().min(into.len() - filled);
            if len == 0 {
                break;
            }
            into[filled..filled + len].copy_from_slice(&bytes[..len]);
            filled += len;
            self.consume(len)?;
        }
        Ok(filled)
    }

    /// Sends all of `out` and fills all of `into` at the same time, so that two sides that both
    /// call this cannot block each other. Spins at first, then yields; fails after `limit` without
    /// progress.
    pub fn transfer(&mut self, out: &[u8], into: &mut [u8], limit: Duration) -> Result<()> {
        let (mut sent, mut received) = (0, 0);
        let mut waiter = Waiter::new(limit);
        while sent < out.len() || received < into.len() {
            let sent_now = self.send(&out[sent..])?;
            let received_now = self.try_recv(&mut into[received..])?;
            (sent, received) = (sent + sent_now, received + received_now);
            if sent_now + received_now == 0 {
                self.wait("a transfer", &mut waiter, || {
                    format!("{sent} of {} bytes sent, {received} of {} received", out.len(), into.len())
                })?;
                continue;
            }
            waiter.restart();
        }
        Ok(())
    }

    /// Sends all of `bytes`.
    pub fn send_all(&mut self, bytes: &[u8], limit: Duration) -> Result<()> {
        self.transfer(bytes, &mut [], limit)
    }

    /// Fills all of `into`.
    pub fn recv_exact(&mut self, into: &mut [u8], limit: Duration) -> Result<()> {
        self.transfer(&[], into, limit)
    }

    /// Waits until all sends have completed. Call it before dropping the channel. On a reliable
    /// connection, a send completes when the peer has acknowledged it, so the peer must not drop
    /// its end earlier.
    pub fn drain(&mut self, limit: Duration) -> Result<()> {
        let mut waiter = Waiter::new(limit);
        while !self.lanes.iter().all(Lane::is_drained) {
            self.poll()?;
            self.wait("draining", &mut waiter, || "the device still holds sends".to_string())?;
        }
        Ok(())
    }

    /// Asks the peer for a frame on every lane, whose number reveals a lost frame before it. For
    /// callers that wait long. Fails if a port is down, because then no frame can arrive.
    pub fn probe(&mut self) -> Result<()> {
        let checked = self.check_ports();
        self.record(checked)?;
        let probed = self.lanes.iter_mut().try_for_each(Lane::probe);
        self.record(probed)
    }

    /// Fails if a port of the channel is not active.
    pub fn check_ports(&self) -> Result<()> {
        self.ports.iter().try_for_each(|(context, port)| {
            let state = context.port_state(*port)?;
            if state.is_active() {
                return Ok(());
            }
            Err(Error::PortDown { device: context.name().to_string(), port: *port, state })
        })
    }

    /// One round of a wait without progress.
    fn wait(&mut self, what: &'static str, waiter: &mut Waiter, state: impl Fn() -> String) -> Result<()> {
        match waiter.step() {
            WaitStep::Continue => {}
            WaitStep::Probe => self.probe()?,
            WaitStep::TimedOut => {
                return Err(Error::Timeout { what, after: waiter.limit, state: state() });
            }
        }
        self.poll()
    }
}

/// The rest of the two parts after the first `sent` bytes.
fn unsent<'a>(first: &'a [u8], second: &'a [u8], sent: usize) -> (&'a [u8], &'a [u8]) {
    let of_first = sent.min(first.len());
    (&first[of_first..], &second[sent - of_first..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_parts_are_cut_at_any_byte() {
        let cut = |sent| unsent(b"abc", b"de", sent);
        assert_eq!(cut(0), (&b"abc"[..], &b"de"[..]));
        assert_eq!(cut(2), (&b"c"[..], &b"de"[..]));
        assert_eq!(cut(4), (&b""[..], &b"e"[..]));
        assert_eq!(cut(5), (&b""[..], &b""[..]));
    }
}
