//! Send slots.

use super::raw_pair::RawPair;
use super::window::RemoteWindow;
use crate::error::{Error, Result};
use crate::sys::*;
use std::ops::{Deref, DerefMut};
use std::ptr::null_mut;

/// A free send slot: fill its bytes, then post it. If dropped without posting, it stays free.
pub struct SendSlot<'a> {
    raw: &'a mut RawPair,
    index: usize,
}

impl<'a> SendSlot<'a> {
    /// The next free slot; `None` while all are in flight.
    pub(super) fn next(raw: &'a mut RawPair) -> Option<Self> {
        let slots = raw.memory.sends.slots;
        let index = (raw.posted % slots as u64) as usize;
        (raw.outstanding() < slots).then_some(Self { raw, index })
    }
}

impl Deref for SendSlot<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let ring = &self.raw.memory.sends;
        // SAFETY: the slot's last send has completed, so the device does not use it, and the borrow
        // of the pair prevents posting.
        unsafe { std::slice::from_raw_parts(ring.slot(self.index), ring.slot_bytes) }
    }
}

impl DerefMut for SendSlot<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        let ring = &self.raw.memory.sends;
        // SAFETY: as in `deref`; `&mut self` makes this the only borrow.
        unsafe { std::slice::from_raw_parts_mut(ring.slot(self.index), ring.slot_bytes) }
    }
}

impl SendSlot<'_> {
    fn check(&self, len: usize) -> Result<()> {
        let slot_bytes = self.raw.memory.sends.slot_bytes;
        let rule = || format!("a slot has {slot_bytes} bytes");
        if len <= slot_bytes {
            Ok(())
        } else {
            Err(Error::BadSize { what: "a send", value: len, rule: rule() })
        }
    }

    /// Sends the first `len` bytes to the peer's next posted receive.
    pub fn send(self, len: usize) -> Result<()> {
        self.check(len)?;
        let mut sge = self.raw.memory.sends.sge(self.index, 0, len);
        let mut request = blank_request(self.raw.posted, &mut sge, IBV_WR_SEND);
        request.send_flags = IBV_SEND_SIGNALED;
        self.raw.post_send(&mut request)
    }

    /// Writes the first `len` bytes to the peer's window at `offset`.
    pub fn write(self, len: usize, to: &RemoteWindow, offset: usize) -> Result<()> {
        self.check(len)?;
        let mut sge = self.raw.memory.sends.sge(self.index, 0, len);
        let mut request = blank_request(self.raw.posted, &mut sge, IBV_WR_RDMA_WRITE);
        request.remote_addr = to.locate(offset, len)?;
        request.rkey = to.rkey;
        request.send_flags = IBV_SEND_SIGNALED;
        self.raw.post_send(&mut request)
    }

    /// Like [`Self::write`], then writes `flag` at `flag_offset`. The peer sees the flag only after
    /// the data. The flag is a second request, because the bytes of one request may arrive in any
    /// order. It uses the slot's last 8 bytes.
    pub fn write_then_flag(
        mut self,
        len: usize,
        to: &RemoteWindow,
        offset: usize,
        flag: u64,
        flag_offset: usize,
    ) -> Result<()> {
        let flag_at = self.deref().len() - 8;
        self.check(len + 8)?;
        self[flag_at..].copy_from_slice(&flag.to_le_bytes());
        let ring = &self.raw.memory.sends;
        let (mut data, mut mark) = (ring.sge(self.index, 0, len), ring.sge(self.index, flag_at, 8));
        let mut second = blank_request(self.raw.posted, &mut mark, IBV_WR_RDMA_WRITE);
        second.remote_addr = to.locate(flag_offset, 8)?;
        second.rkey = to.rkey;
        second.send_flags = IBV_SEND_SIGNALED;
        let mut first = blank_request(self.raw.posted, &mut data, IBV_WR_RDMA_WRITE);
        first.remote_addr = to.locate(offset, len)?;
        first.rkey = to.rkey;
        first.next = &mut second;
        self.raw.post_send(&mut first)
    }
}

fn blank_request(id: u64, sge: &mut ibv_sge, opcode: i32) -> ibv_send_wr {
    ibv_send_wr {
        wr_id: id,
        next: null_mut(),
        sg_list: sge,
        num_sge: 1,
        opcode,
        send_flags: 0,
        imm_data: 0,
        remote_addr: 0,
        rkey: 0,
        _rest: [0; 9],
    }
}
