//! Send slots: filled, then posted.

use super::core::Core;
use super::window::RemoteWindow;
use crate::error::{Error, Result};
use crate::sys::*;
use std::ops::{Deref, DerefMut};
use std::ptr::null_mut;

/// A free send slot: bytes to fill, then to post. Dropped without being posted, it stays free.
pub struct SendSlot<'a> {
    core: &'a mut Core,
    index: usize,
}

impl<'a> SendSlot<'a> {
    /// The next free slot; none while all are on their way.
    pub(super) fn next(core: &'a mut Core) -> Option<Self> {
        let slots = core.memory.sends.slots;
        let index = (core.posted % slots as u64) as usize;
        (core.outstanding() < slots).then_some(Self { core, index })
    }
}

impl Deref for SendSlot<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let ring = &self.core.memory.sends;
        // SAFETY: the slot is free (its last send has completed), so the device does not have it; the borrow of the
        // pair keeps it from being posted meanwhile.
        unsafe { std::slice::from_raw_parts(ring.slot(self.index), ring.slot_bytes) }
    }
}

impl DerefMut for SendSlot<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        let ring = &self.core.memory.sends;
        // SAFETY: as in `deref`; `&mut self` makes it the only borrow.
        unsafe { std::slice::from_raw_parts_mut(ring.slot(self.index), ring.slot_bytes) }
    }
}

impl SendSlot<'_> {
    fn check(&self, len: usize) -> Result<()> {
        let slot_bytes = self.core.memory.sends.slot_bytes;
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
        let mut sge = self.core.memory.sends.sge(self.index, 0, len);
        let mut request = blank_request(self.core.posted, &mut sge, IBV_WR_SEND);
        request.send_flags = IBV_SEND_SIGNALED;
        self.core.post_send(&mut request)
    }

    /// Writes the first `len` bytes at `offset` of the peer's window.
    pub fn write(self, len: usize, to: &RemoteWindow, offset: usize) -> Result<()> {
        self.check(len)?;
        let mut sge = self.core.memory.sends.sge(self.index, 0, len);
        let mut request = blank_request(self.core.posted, &mut sge, IBV_WR_RDMA_WRITE);
        request.remote_addr = to.locate(offset, len)?;
        request.rkey = to.rkey;
        request.send_flags = IBV_SEND_SIGNALED;
        self.core.post_send(&mut request)
    }

    /// As [`Self::write`], then writes `flag` at `flag_offset`, which the peer sees no earlier than the data: a second
    /// request, since the bytes of one may arrive in any order. The slot's last 8 bytes carry the flag.
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
        let ring = &self.core.memory.sends;
        let (mut data, mut mark) = (ring.sge(self.index, 0, len), ring.sge(self.index, flag_at, 8));
        let mut second = blank_request(self.core.posted, &mut mark, IBV_WR_RDMA_WRITE);
        second.remote_addr = to.locate(flag_offset, 8)?;
        second.rkey = to.rkey;
        second.send_flags = IBV_SEND_SIGNALED;
        let mut first = blank_request(self.core.posted, &mut data, IBV_WR_RDMA_WRITE);
        first.remote_addr = to.locate(offset, len)?;
        first.rkey = to.rkey;
        first.next = &mut second;
        self.core.post_send(&mut first)
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
