//! Memory that kernels stream through: page-aligned, zeroed, in huge pages where the kernel grants them.

use std::io;
use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

/// Zeroed bytes, aligned to a page, so that each 64-byte line of a packed matrix is one cache line.
#[derive(Debug)]
pub(crate) struct Region {
    map: Option<MmapMut>,
}

impl Region {
    /// Allocates `len` bytes. Pages are taken from the system when they are first written.
    ///
    /// # Errors
    /// When the system refuses the address space.
    pub(crate) fn zeroed(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self { map: None });
        }
        let map = MmapMut::map_anon(len)?;
        // A 4 KiB page holds 7 groups of 4-bit weights: without huge pages, every few cache lines cost a TLB miss. A
        // kernel that has none only makes us slower, so its refusal is not an error.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self { map: Some(map) })
    }
}

impl Deref for Region {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.map.as_deref_mut().unwrap_or(&mut [])
    }
}
