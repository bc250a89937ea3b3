//! Memory that a peer writes into by itself.

use crate::error::{Error, Result};
use crate::memory::MemoryRegion;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};

/// A window as its peer must know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteWindow {
    /// Where it starts, in the peer's address space.
    pub address: u64,
    /// Its key.
    pub rkey: u32,
    /// Its length in bytes.
    pub len: usize,
}

impl RemoteWindow {
    /// The address of `len` bytes at `offset`, if they lie within.
    pub(crate) fn locate(&self, offset: usize, len: usize) -> Result<u64> {
        let within = offset.checked_add(len).is_some_and(|end| end <= self.len);
        // The address is the peer's word: a window that goes beyond the end of memory is none.
        let at = self.address.checked_add(offset as u64).filter(|at| at.checked_add(len as u64).is_some());
        at.filter(|_| within).ok_or_else(|| Error::BadSize {
            what: "the end of a remote write",
            value: offset.saturating_add(len),
            rule: format!("the peer's window has {} bytes at {:#x}", self.len, self.address),
        })
    }
}

/// Local memory that the peer writes. It is read by copying, and a flag tells when: what lies behind a flag that the
/// peer wrote after its data is whole.
pub struct Window {
    pub(super) region: MemoryRegion,
}

impl Window {
    /// What the peer must be told.
    pub fn remote(&self) -> RemoteWindow {
        let address = self.region.start() as u64;
        RemoteWindow { address, rkey: self.region.rkey(), len: self.region.len() }
    }

    /// The 8 bytes at `offset`, which must be a multiple of 8 and inside. What the peer wrote before them is seen by
    /// reads after this.
    pub fn flag(&self, offset: usize) -> u64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.region.len(), "flag at {offset} is outside");
        // SAFETY: in bounds, aligned (the region starts on a page), and only ever accessed atomically here.
        let flag = unsafe { AtomicU64::from_ptr(self.region.start().add(offset).cast()) };
        u64::from_le(flag.load(Ordering::Acquire))
    }

    /// The bytes at `offset`.
    ///
    /// # Safety
    /// The peer must not write them while they are borrowed: its flag for them was seen and they were not yet
    /// released to it.
    pub(crate) unsafe fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.region.len()),
            "{offset}+{len} is outside"
        );
        // SAFETY: in bounds; the caller vouches for the peer.
        unsafe { std::slice::from_raw_parts(self.region.start().add(offset), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_beyond_the_peers_window_is_refused_here() {
        let window = RemoteWindow { address: 0x1000, rkey: 1, len: 64 };
        assert_eq!(window.locate(32, 32).unwrap(), 0x1020);
        for (offset, len) in [(32, 33), (65, 0), (usize::MAX, 2)] {
            assert!(window.locate(offset, len).is_err(), "{offset}+{len}");
        }
    }
}
