//! A queue pair's resources: rings of slots, the window, the completion queue.

use super::options::QueueOptions;
use super::window::Window;
use crate::device::Context;
use crate::error::{Error, Result};
use crate::memory::{MemoryRegion, ProtectionDomain};
use crate::sys::*;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// Registered memory, divided into slots.
pub(super) struct SlotRing {
    pub(super) region: MemoryRegion,
    pub(super) slot_bytes: usize,
    pub(super) slots: usize,
}

impl SlotRing {
    pub(super) fn new(domain: &Arc<ProtectionDomain>, slot_bytes: usize, slots: u32) -> Result<Self> {
        let slots = slots as usize;
        Ok(Self { region: MemoryRegion::new(domain, slot_bytes * slots, false)?, slot_bytes, slots })
    }

    pub(super) fn slot(&self, index: usize) -> *mut u8 {
        assert!(index < self.slots, "slot {index} of {}", self.slots);
        // SAFETY: the offset is inside the region, which has `slots` slots of `slot_bytes`.
        unsafe { self.region.start().add(index * self.slot_bytes) }
    }

    pub(super) fn sge(&self, index: usize, offset: usize, len: usize) -> ibv_sge {
        ibv_sge {
            addr: self.slot(index) as u64 + offset as u64,
            length: len as u32,
            lkey: self.region.lkey(),
        }
    }
}

/// All memory that the device may use through the pair.
pub(super) struct PairMemory {
    pub(super) sends: SlotRing,
    pub(super) receives: SlotRing,
    pub(super) window: Option<Window>,
}

/// The completion queue of one pair, for sends and receives.
pub(super) struct CompletionQueue {
    pub(super) raw: NonNull<ibv_cq>,
    context: Arc<Context>,
}

impl CompletionQueue {
    pub(super) fn new(context: &Arc<Context>, entries: u32) -> Result<Self> {
        // SAFETY: the context is open. There is no completion channel, so no events are raised.
        let raw = unsafe {
            (context.library.ibv_create_cq)(context.raw.as_ptr(), entries as i32, null_mut(), null_mut(), 0)
        };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last_os("ibv_create_cq", context.name()))?;
        Ok(Self { raw, context: Arc::clone(context) })
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: the pair that used this queue is destroyed or was never created.
        unsafe { (self.context.library.ibv_destroy_cq)(self.raw.as_ptr()) };
    }
}

impl PairMemory {
    pub(super) fn new(
        domain: &Arc<ProtectionDomain>,
        options: QueueOptions,
        sends: u32,
        receives: u32,
    ) -> Result<Self> {
        let window = (options.window_bytes > 0)
            .then(|| MemoryRegion::new(domain, options.window_bytes, true).map(|region| Window { region }))
            .transpose()?;
        Ok(Self {
            sends: SlotRing::new(domain, options.slot_bytes, sends)?,
            receives: SlotRing::new(domain, options.slot_bytes, receives)?,
            window,
        })
    }
}
