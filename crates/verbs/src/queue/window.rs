//! Memory that a peer writes by RDMA WRITE.

use crate::error::{Error, Result};
use crate::memory::MemoryRegion;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};

/// A peer's window, as needed to write to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteWindow {
    /// Start in the peer's address space.
    pub address: u64,
    /// The window's key.
    pub rkey: u32,
    /// Length in bytes.
    pub len: usize,
}

impl RemoteWindow {
    /// The address of `len` bytes at `offset`, if they are inside the window.
    pub(crate) fn locate(&self, offset: usize, len: usize) -> Result<u64> {
        let within = offset.checked_add(len).is_some_and(|end| end <= self.len);
        // The peer sent the address, so it may be wrong: refuse a range that exceeds the address
        // space.
        let at = self.address.checked_add(offset as u64).filter(|at| at.checked_add(len as u64).is_some());
        at.filter(|_| within).ok_or_else(|| Error::BadSize {
            what: "the end of a remote write",
            value: offset.saturating_add(len),
            rule: format!("the peer's window has {} bytes at {:#x}", self.len, self.address),
        })
    }
}

/// Local memory that the peer writes. The peer writes a flag after its data; once the flag is seen,
/// the data is complete.
pub struct Window {
    pub(super) region: MemoryRegion,
}

impl Window {
    /// The description that the peer needs.
    pub fn remote(&self) -> RemoteWindow {
        let address = self.region.start() as u64;
        RemoteWindow { address, rkey: self.region.rkey(), len: self.region.len() }
    }

    /// The 8-byte flag at `offset`. Panics unless `offset` is a multiple of 8 and inside the
    /// window. Reads after this call see what the peer wrote before the flag.
    pub fn flag(&self, offset: usize) -> u64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.region.len(), "flag at {offset} is outside");
        // SAFETY: the flag is in bounds and aligned (the region starts at a page), and this side
        // accesses it only here, atomically.
        let flag = unsafe { AtomicU64::from_ptr(self.region.start().add(offset).cast()) };
        u64::from_le(flag.load(Ordering::Acquire))
    }

    /// The `len` bytes at `offset`.
    ///
    /// # Safety
    /// The peer must not write these bytes while they are borrowed: its flag for them was seen, and
    /// they were not yet released to the peer.
    pub(crate) unsafe fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.region.len()),
            "{offset}+{len} is outside"
        );
        // SAFETY: the range is in bounds; the caller guarantees that the peer does not write it.
        unsafe { std::slice::from_raw_parts(self.region.start().add(offset), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_outside_the_peers_window_is_refused() {
        let window = RemoteWindow { address: 0x1000, rkey: 1, len: 64 };
        assert_eq!(window.locate(32, 32).unwrap(), 0x1020);
        for (offset, len) in [(32, 33), (65, 0), (usize::MAX, 2)] {
            assert!(window.locate(offset, len).is_err(), "{offset}+{len}");
        }
    }
}
