//! One queue pair of a channel: sends and receives frames and keeps the credits.

use super::credit::Credits;
use super::frame::{FrameKind, HEADER_BYTES, Header};
use crate::error::{Error, Result};
use crate::profile::FRAME_BYTES;
use crate::queue::{QueuePair, ReadyToSend, Received, RemoteWindow};
use std::collections::VecDeque;

/// Bytes at the end of a window for the peer's total of freed slots, in a cache line of its own.
pub(super) const CREDIT_BYTES: usize = 64;
/// Bytes at the end of a slot for the flag that follows a one-sided frame.
const FLAG_BYTES: usize = 8;

/// Frames that arrived. `data` holds the data frames that were not read yet.
enum Incoming {
    /// Frames in posted receives. `fresh` holds those whose headers were not read yet.
    Received { fresh: Vec<Received>, data: VecDeque<(Header, Received)> },
    /// Frames that the peer wrote into the local window, one slot after the other. `data` has each
    /// frame's offset; `remote` is the peer's window.
    Written { remote: RemoteWindow, data: VecDeque<(Header, usize)> },
}

/// A connected queue pair of a channel, with its credits.
pub(super) struct Lane {
    pair: QueuePair<ReadyToSend>,
    incoming: Incoming,
    credits: Credits,
    /// The local session, sent in every frame, and the peer's, expected in every frame.
    sessions: (u32, u32),
    /// The lane number of the next frame to arrive.
    expected: u32,
    /// True if the peer asked for a frame by a probe.
    reply_due: bool,
    slot_bytes: usize,
    slots: u32,
    peer_slots: u32,
    /// Minimum size of a send, so that it spans as many device frames as the receive does.
    min_send_bytes: usize,
}

/// The parts of a lane, known once both sides are ready.
pub(super) struct LaneParts {
    pub(super) pair: QueuePair<ReadyToSend>,
    /// The peer's window, if the lane is one-sided.
    pub(super) remote: Option<RemoteWindow>,
    pub(super) sessions: (u32, u32),
    pub(super) slot_bytes: usize,
    pub(super) slots: u32,
    pub(super) peer_slots: u32,
    pub(super) equal_frames: bool,
}

impl Lane {
    pub(super) fn new(parts: LaneParts) -> Self {
        let slots = parts.slots as usize;
        let incoming = match parts.remote {
            Some(remote) => Incoming::Written { remote, data: VecDeque::with_capacity(slots) },
            None => {
                Incoming::Received { fresh: Vec::with_capacity(slots), data: VecDeque::with_capacity(slots) }
            }
        };
        Self {
            pair: parts.pair,
            incoming,
            credits: Credits::new(parts.slots, parts.peer_slots, parts.remote.is_none()),
            sessions: parts.sessions,
            expected: 0,
            reply_due: false,
            slot_bytes: parts.slot_bytes,
            slots: parts.slots,
            peer_slots: parts.peer_slots,
            min_send_bytes: if parts.equal_frames { parts.slot_bytes - FRAME_BYTES + 1 } else { 0 },
        }
    }

    /// Most payload bytes of a frame.
    pub(super) fn payload_bytes(&self) -> usize {
        self.slot_bytes - HEADER_BYTES - FLAG_BYTES
    }

    /// True if all sends have completed.
    pub(super) fn is_drained(&self) -> bool {
        self.pair.outstanding() == 0
    }

    /// Sends one frame with `first` followed by `second`, as much as fits. Returns the number of
    /// bytes; 0 if no frame can be sent now.
    pub(super) fn send_data(&mut self, stream_seq: u32, first: &[u8], second: &[u8]) -> Result<usize> {
        if !self.credits.allow_data() {
            return Ok(0);
        }
        let first = &first[..first.len().min(self.payload_bytes())];
        let second = &second[..second.len().min(self.payload_bytes() - first.len())];
        Ok(if self.send(FrameKind::Data, stream_seq, first, second)? {
            first.len() + second.len()
        } else {
            0
        })
    }

    /// Asks the peer for a frame. Does nothing on a one-sided lane, which cannot lose one.
    pub(super) fn probe(&mut self) -> Result<()> {
        if matches!(self.incoming, Incoming::Received { .. }) && self.credits.allow_control() {
            self.send(FrameKind::Probe, 0, &[], &[])?;
        }
        Ok(())
    }

    fn send(&mut self, kind: FrameKind, stream_seq: u32, first: &[u8], second: &[u8]) -> Result<bool> {
        let Some(mut slot) = self.pair.send_slot() else { return Ok(false) };
        let seq = self.credits.next_seq();
        let freed = self.credits.report_freed();
        let len = (first.len() + second.len()) as u32;
        Header { session: self.sessions.0, lane_seq: seq, stream_seq, freed, len, kind }.write(&mut slot);
        let middle = HEADER_BYTES + first.len();
        let frame_bytes = middle + second.len();
        slot[HEADER_BYTES..middle].copy_from_slice(first);
        slot[middle..frame_bytes].copy_from_slice(second);
        match &self.incoming {
            Incoming::Received { .. } => slot.send(frame_bytes.max(self.min_send_bytes))?,
            Incoming::Written { remote, .. } => {
                let start = (seq % self.peer_slots) as usize * self.slot_bytes;
                let flag_offset = start + self.slot_bytes - FLAG_BYTES;
                slot.write_then_flag(frame_bytes, remote, start, flag(seq, frame_bytes), flag_offset)?;
            }
        }
        self.credits.on_sent();
        Ok(true)
    }

    /// Takes in arrived frames and sends due credits.
    pub(super) fn poll(&mut self) -> Result<()> {
        match &mut self.incoming {
            Incoming::Received { fresh, .. } => {
                self.pair.poll(|token| fresh.push(token))?;
                self.read_headers()?;
            }
            Incoming::Written { .. } => {
                self.pair.poll(drop)?;
                self.read_window()?;
            }
        }
        self.return_credits()
    }

    /// Reads the headers of received frames, in the order of arrival.
    fn read_headers(&mut self) -> Result<()> {
        let Incoming::Received { fresh, data } = &mut self.incoming else { return Ok(()) };
        for token in fresh.drain(..) {
            let header = Header::read(self.pair.bytes(&token)).map_err(|what| bad_frame(&self.pair, what))?;
            let missing = check_header(&header, self.sessions.1, self.expected, &mut self.credits)
                .map_err(|what| bad_frame(&self.pair, what))?;
            if missing > 0 {
                let (queue, got) = (self.pair.name().to_string(), header.lane_seq);
                let expected_before = self.expected.wrapping_sub(1);
                return Err(Error::Lost { queue, missing, expected_before, got });
            }
            self.expected = self.expected.wrapping_add(1);
            if header.kind == FrameKind::Data {
                data.push_back((header, token));
                continue;
            }
            // Reposted at once, not after unread data: the credit that this frame took must be
            // returned.
            self.reply_due |= header.kind == FrameKind::Probe;
            self.pair.repost(token)?;
            self.credits.on_freed();
        }
        Ok(())
    }

    /// Takes in the frames in the window whose flags have arrived.
    fn read_window(&mut self) -> Result<()> {
        let Incoming::Written { data, .. } = &mut self.incoming else { return Ok(()) };
        let Some(window) = self.pair.window() else { return Ok(()) };
        let credit_at = self.slots as usize * self.slot_bytes;
        if !self.credits.on_peer_freed(window.flag(credit_at) as u32) {
            return Err(bad_frame(&self.pair, "the peer freed more frames than were sent".to_string()));
        }
        while data.len() < self.slots as usize {
            let start = (self.expected % self.slots) as usize * self.slot_bytes;
            let found = window.flag(start + self.slot_bytes - FLAG_BYTES);
            let frame_bytes = (found & u64::from(u32::MAX)) as usize;
            if found != flag(self.expected, frame_bytes) || frame_bytes == 0 {
                break;
            }
            if frame_bytes > self.slot_bytes - FLAG_BYTES {
                return Err(bad_frame(&self.pair, format!("{frame_bytes} bytes are more than a slot holds")));
            }
            // SAFETY: the flag that follows these bytes has arrived, so the peer has written them,
            // and it writes them again only after `pop` frees the slot.
            let frame = unsafe { window.bytes(start, frame_bytes) };
            let header = Header::read(frame).map_err(|what| bad_frame(&self.pair, what))?;
            let missing = check_header(&header, self.sessions.1, self.expected, &mut self.credits)
                .map_err(|what| bad_frame(&self.pair, what))?;
            if missing > 0 || header.kind != FrameKind::Data {
                return Err(bad_frame(
                    &self.pair,
                    format!("{header:?} in the slot of frame {}", self.expected),
                ));
            }
            data.push_back((header, start));
            self.expected = self.expected.wrapping_add(1);
        }
        Ok(())
    }

    /// The stream number of the oldest unread frame.
    pub(super) fn front_seq(&self) -> Option<u32> {
        match &self.incoming {
            Incoming::Received { data, .. } => data.front().map(|(header, _)| header.stream_seq),
            Incoming::Written { data, .. } => data.front().map(|(header, _)| header.stream_seq),
        }
    }

    /// The payload of the oldest unread frame; empty if there is none.
    pub(super) fn front(&self) -> &[u8] {
        match &self.incoming {
            Incoming::Received { data, .. } => data.front().map_or(&[], |(header, token)| {
                &self.pair.bytes(token)[HEADER_BYTES..HEADER_BYTES + header.len as usize]
            }),
            Incoming::Written { data, .. } => match (data.front(), self.pair.window()) {
                // SAFETY: as in `read_window`: the peer has written these bytes, and their slot is
                // not freed while the frame is in `data`.
                (Some((header, start)), Some(window)) => unsafe {
                    window.bytes(start + HEADER_BYTES, header.len as usize)
                },
                _ => &[],
            },
        }
    }

    /// Frees the slot of the oldest unread frame.
    pub(super) fn pop(&mut self) -> Result<()> {
        let popped = match &mut self.incoming {
            Incoming::Received { data, .. } => match data.pop_front() {
                Some((_, token)) => self.pair.repost(token).map(|()| true)?,
                None => false,
            },
            Incoming::Written { data, .. } => data.pop_front().is_some(),
        };
        if popped {
            self.credits.on_freed();
        }
        self.return_credits()
    }

    /// Reports freed slots to the peer, if there are many or it asked.
    fn return_credits(&mut self) -> Result<()> {
        if !self.reply_due && !self.credits.report_is_due() {
            return Ok(());
        }
        match &self.incoming {
            Incoming::Received { .. } => {
                if self.credits.allow_control() && self.send(FrameKind::Credit, 0, &[], &[])? {
                    self.reply_due = false;
                }
            }
            Incoming::Written { remote, .. } => {
                let credit_at = self.peer_slots as usize * self.slot_bytes;
                if let Some(mut slot) = self.pair.send_slot() {
                    let total = u64::from(self.credits.report_freed());
                    slot[..8].copy_from_slice(&total.to_le_bytes());
                    slot.write(8, remote, credit_at)?;
                }
            }
        }
        Ok(())
    }
}

/// The flag that marks a one-sided frame as complete. It is never 0, because a frame has a header,
/// and never equal to the flag of the frame that was in the slot before.
fn flag(seq: u32, frame_bytes: usize) -> u64 {
    u64::from(seq) << 32 | frame_bytes as u64
}

/// Checks a frame's header against the connection and takes in its credits. Returns the number of
/// frames missing before it.
pub(super) fn check_header(
    header: &Header,
    session: u32,
    expected: u32,
    credits: &mut Credits,
) -> std::result::Result<u32, String> {
    if header.session != session {
        return Err(format!("it belongs to session {:#x}, not to {session:#x}", header.session));
    }
    let missing = header.lane_seq.wrapping_sub(expected);
    if missing > u32::MAX / 2 {
        return Err(format!("frame {} is a repeat or late, expected {expected}", header.lane_seq));
    }
    if !credits.on_peer_freed(header.freed) {
        return Err(format!("its total of freed frames, {}, is more than were sent", header.freed));
    }
    Ok(missing)
}

fn bad_frame(pair: &QueuePair<ReadyToSend>, what: String) -> Error {
    Error::BadFrame { queue: pair.name().to_string(), what }
}
