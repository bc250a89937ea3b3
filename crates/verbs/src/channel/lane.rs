//! One queue pair of a channel: frames out, frames in, credits.

use super::credit::Credits;
use super::frame::{HEADER_BYTES, Header, Kind};
use crate::error::{Error, Result};
use crate::profile::FRAME_BYTES;
use crate::queue::{QueuePair, ReadyToSend, Received, RemoteWindow};
use std::collections::VecDeque;

/// Bytes at the end of a window for the peer's total of freed frames; a cache line of their own.
pub(super) const CREDIT_BYTES: usize = 64;
/// Bytes at the end of a slot for the flag that follows a one-sided frame.
const FLAG_BYTES: usize = 8;

/// How frames come in.
enum Arrivals {
    /// Into posted receives. `fresh` holds tokens between poll and a look at their headers.
    Received { fresh: Vec<Received>, data: VecDeque<(Header, Received)> },
    /// Written into our window by the peer, slot after slot; `data` holds where.
    Written { remote: RemoteWindow, data: VecDeque<(Header, usize)> },
}

pub(super) struct Lane {
    pair: QueuePair<ReadyToSend>,
    arrivals: Arrivals,
    credits: Credits,
    /// Ours, put in every frame, and the peer's, expected in every frame.
    sessions: (u32, u32),
    /// The number of the next frame to come.
    expected: u32,
    /// The peer asked for a frame.
    answer_due: bool,
    slot_bytes: usize,
    slots: u32,
    peer_slots: u32,
    /// The least that a send must be, so that it spans as many frames of the device as the receive does.
    min_send_bytes: usize,
}

/// What a lane is built from, once both sides are known.
pub(super) struct LaneParts {
    pub(super) pair: QueuePair<ReadyToSend>,
    /// The peer's window: the lane is one-sided.
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
        let arrivals = match parts.remote {
            Some(remote) => Arrivals::Written { remote, data: VecDeque::with_capacity(slots) },
            None => {
                Arrivals::Received { fresh: Vec::with_capacity(slots), data: VecDeque::with_capacity(slots) }
            }
        };
        Self {
            pair: parts.pair,
            arrivals,
            credits: Credits::new(parts.slots, parts.peer_slots, parts.remote.is_none()),
            sessions: parts.sessions,
            expected: 0,
            answer_due: false,
            slot_bytes: parts.slot_bytes,
            slots: parts.slots,
            peer_slots: parts.peer_slots,
            min_send_bytes: if parts.equal_frames { parts.slot_bytes - FRAME_BYTES + 1 } else { 0 },
        }
    }

    /// The most that a frame carries.
    pub(super) fn payload_bytes(&self) -> usize {
        self.slot_bytes - HEADER_BYTES - FLAG_BYTES
    }

    /// Everything that was sent has left.
    pub(super) fn is_drained(&self) -> bool {
        self.pair.outstanding() == 0
    }

    /// Sends as much of the two parts, one behind the other, as fits into a frame; 0 if no frame can be sent now.
    pub(super) fn send_data(&mut self, stream_seq: u32, first: &[u8], second: &[u8]) -> Result<usize> {
        if !self.credits.allow_data() {
            return Ok(0);
        }
        let first = &first[..first.len().min(self.payload_bytes())];
        let second = &second[..second.len().min(self.payload_bytes() - first.len())];
        Ok(if self.send(Kind::Data, stream_seq, first, second)? { first.len() + second.len() } else { 0 })
    }

    /// Asks the peer for a frame. On a lane that cannot lose one there is nothing to ask.
    pub(super) fn probe(&mut self) -> Result<()> {
        if matches!(self.arrivals, Arrivals::Received { .. }) && self.credits.allow_control() {
            self.send(Kind::Probe, 0, &[], &[])?;
        }
        Ok(())
    }

    fn send(&mut self, kind: Kind, stream_seq: u32, first: &[u8], second: &[u8]) -> Result<bool> {
        let Some(mut slot) = self.pair.send_slot() else { return Ok(false) };
        let seq = self.credits.next_seq();
        let freed = self.credits.tell();
        let len = (first.len() + second.len()) as u32;
        Header { session: self.sessions.0, lane_seq: seq, stream_seq, freed, len, kind }.write(&mut slot);
        let middle = HEADER_BYTES + first.len();
        let frame_bytes = middle + second.len();
        slot[HEADER_BYTES..middle].copy_from_slice(first);
        slot[middle..frame_bytes].copy_from_slice(second);
        match &self.arrivals {
            Arrivals::Received { .. } => slot.send(frame_bytes.max(self.min_send_bytes))?,
            Arrivals::Written { remote, .. } => {
                let start = (seq % self.peer_slots) as usize * self.slot_bytes;
                let flag_offset = start + self.slot_bytes - FLAG_BYTES;
                slot.write_then_flag(frame_bytes, remote, start, flag(seq, frame_bytes), flag_offset)?;
            }
        }
        self.credits.on_sent();
        Ok(true)
    }

    /// Takes in what has come and sends what is due.
    pub(super) fn poll(&mut self) -> Result<()> {
        match &mut self.arrivals {
            Arrivals::Received { fresh, .. } => {
                self.pair.poll(|token| fresh.push(token))?;
                self.sort_fresh()?;
            }
            Arrivals::Written { .. } => {
                self.pair.poll(drop)?;
                self.look_into_window()?;
            }
        }
        self.return_credits()
    }

    /// Reads the headers of what was received, in the order of arrival.
    fn sort_fresh(&mut self) -> Result<()> {
        let Arrivals::Received { fresh, data } = &mut self.arrivals else { return Ok(()) };
        for token in fresh.drain(..) {
            let header = Header::read(self.pair.bytes(&token)).map_err(|what| bad_frame(&self.pair, what))?;
            let missing = accept(&header, self.sessions.1, self.expected, &mut self.credits)
                .map_err(|what| bad_frame(&self.pair, what))?;
            if missing > 0 {
                let (queue, got) = (self.pair.name().to_string(), header.lane_seq);
                let expected_before = self.expected.wrapping_sub(1);
                return Err(Error::Lost { queue, missing, expected_before, got });
            }
            self.expected = self.expected.wrapping_add(1);
            if header.kind == Kind::Data {
                data.push_back((header, token));
                continue;
            }
            // Never left waiting behind data that nobody reads: the credits that it took must come back.
            self.answer_due |= header.kind == Kind::Probe;
            self.pair.repost(token)?;
            self.credits.on_freed();
        }
        Ok(())
    }

    /// Takes the frames whose flag is there.
    fn look_into_window(&mut self) -> Result<()> {
        let Arrivals::Written { data, .. } = &mut self.arrivals else { return Ok(()) };
        let Some(window) = self.pair.window() else { return Ok(()) };
        let credit_at = self.slots as usize * self.slot_bytes;
        if !self.credits.on_told(window.flag(credit_at) as u32) {
            return Err(bad_frame(&self.pair, "more credits than frames were sent".to_string()));
        }
        while data.len() < self.slots as usize {
            let start = (self.expected % self.slots) as usize * self.slot_bytes;
            let found = window.flag(start + self.slot_bytes - FLAG_BYTES);
            let frame_bytes = (found & u64::from(u32::MAX)) as usize;
            if found != flag(self.expected, frame_bytes) || frame_bytes == 0 {
                break;
            }
            if frame_bytes > self.slot_bytes - FLAG_BYTES {
                return Err(bad_frame(&self.pair, format!("{frame_bytes} bytes in a slot")));
            }
            // SAFETY: the flag for these bytes was seen, and they are released to the peer by `pop` alone.
            let frame = unsafe { window.bytes(start, frame_bytes) };
            let header = Header::read(frame).map_err(|what| bad_frame(&self.pair, what))?;
            let missing = accept(&header, self.sessions.1, self.expected, &mut self.credits)
                .map_err(|what| bad_frame(&self.pair, what))?;
            if missing > 0 || header.kind != Kind::Data {
                return Err(bad_frame(&self.pair, format!("{header:?} in slot of frame {}", self.expected)));
            }
            data.push_back((header, start));
            self.expected = self.expected.wrapping_add(1);
        }
        Ok(())
    }

    /// The number in the stream of the oldest frame that waits to be read.
    pub(super) fn front_seq(&self) -> Option<u32> {
        match &self.arrivals {
            Arrivals::Received { data, .. } => data.front().map(|(header, _)| header.stream_seq),
            Arrivals::Written { data, .. } => data.front().map(|(header, _)| header.stream_seq),
        }
    }

    /// The payload of that frame; empty if there is none.
    pub(super) fn front(&self) -> &[u8] {
        match &self.arrivals {
            Arrivals::Received { data, .. } => data.front().map_or(&[], |(header, token)| {
                &self.pair.bytes(token)[HEADER_BYTES..HEADER_BYTES + header.len as usize]
            }),
            Arrivals::Written { data, .. } => match (data.front(), self.pair.window()) {
                // SAFETY: as in `look_into_window`: the frame is not released while it is in `data`.
                (Some((header, start)), Some(window)) => unsafe {
                    window.bytes(start + HEADER_BYTES, header.len as usize)
                },
                _ => &[],
            },
        }
    }

    /// Gives that frame's slot back.
    pub(super) fn pop(&mut self) -> Result<()> {
        let popped = match &mut self.arrivals {
            Arrivals::Received { data, .. } => match data.pop_front() {
                Some((_, token)) => self.pair.repost(token).map(|()| true)?,
                None => false,
            },
            Arrivals::Written { data, .. } => data.pop_front().is_some(),
        };
        if popped {
            self.credits.on_freed();
        }
        self.return_credits()
    }

    /// Tells the peer of freed slots, when there are many or it asked.
    fn return_credits(&mut self) -> Result<()> {
        if !self.answer_due && !self.credits.owes() {
            return Ok(());
        }
        match &self.arrivals {
            Arrivals::Received { .. } => {
                if self.credits.allow_control() && self.send(Kind::Credit, 0, &[], &[])? {
                    self.answer_due = false;
                }
            }
            Arrivals::Written { remote, .. } => {
                let credit_at = self.peer_slots as usize * self.slot_bytes;
                if let Some(mut slot) = self.pair.send_slot() {
                    let total = u64::from(self.credits.tell());
                    slot[..8].copy_from_slice(&total.to_le_bytes());
                    slot.write(8, remote, credit_at)?;
                }
            }
        }
        Ok(())
    }
}

/// Marks a one-sided frame as whole. Never 0, as a frame has a header, and never that of an earlier frame in the slot.
fn flag(seq: u32, frame_bytes: usize) -> u64 {
    u64::from(seq) << 32 | frame_bytes as u64
}

/// Checks a frame against the connection; how many frames are missing before it.
pub(super) fn accept(
    header: &Header,
    session: u32,
    expected: u32,
    credits: &mut Credits,
) -> std::result::Result<u32, String> {
    if header.session != session {
        return Err(format!("it belongs to session {:#x}, this is {session:#x}", header.session));
    }
    let missing = header.lane_seq.wrapping_sub(expected);
    if missing > u32::MAX / 2 {
        return Err(format!("frame {} came again or late, {expected} is due", header.lane_seq));
    }
    if !credits.on_told(header.freed) {
        return Err(format!("it frees {} frames, more than were sent", header.freed));
    }
    Ok(missing)
}

fn bad_frame(pair: &QueuePair<ReadyToSend>, what: String) -> Error {
    Error::BadFrame { queue: pair.name().to_string(), what }
}
