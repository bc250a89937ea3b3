//! Memory that kernels stream through: zeroed, aligned to cache lines, in huge pages where the kernel grants them.

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use memmap2::{MmapMut, MmapRaw};

/// Where a region begins: a cache line.
pub(super) const LINE_BYTES: usize = 64;
/// Mappings of whole huge pages are aligned to them; others need not be, and then have small pages at both ends.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Matrices share mappings of at least this size, so that small ones lie in huge pages too.
const CHUNK_BYTES: usize = 64 << 20;

/// A part of a mapping that nobody else has.
#[derive(Debug)]
pub(crate) struct Region {
    map: Option<Arc<MmapRaw>>,
    start: usize,
    len: usize,
}

impl Region {
    /// Allocates `len` bytes. Pages are taken from the system when they are first written.
    ///
    /// # Errors
    /// When the system refuses the address space.
    pub(crate) fn zeroed(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self { map: None, start: 0, len });
        }
        Ok(Self { map: Some(map(len)?), start: 0, len })
    }
}

fn map(len: usize) -> io::Result<Arc<MmapRaw>> {
    let map = MmapMut::map_anon(len)?;
    // A 4 KiB page holds 7 groups of 4-bit weights: without huge pages, every few cache lines cost a TLB miss. A kernel
    // that has none only makes us slower, so its refusal is not an error.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Ok(Arc::new(MmapRaw::from(map)))
}

/// Asks for huge pages for the whole ones within so many bytes, which nobody has written yet.
pub(crate) fn prefer_huge_pages<T>(start: *const T, bytes: usize) {
    #[cfg(target_os = "linux")]
    {
        let first = start.addr().next_multiple_of(HUGE_PAGE_BYTES);
        let whole = (start.addr() + bytes).saturating_sub(first) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        if whole > 0 {
            let at = start.with_addr(first).cast_mut().cast();
            // SAFETY: advice on how to back pages within an allocation changes none of their contents. Without it, all is only slower.
            unsafe { libc::madvise(at, whole, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, bytes);
}

/// Hands out regions of shared mappings. What a region held is given back only with its whole mapping.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    chunk: Option<Arc<MmapRaw>>,
    used: usize,
}

impl Arena {
    /// `len` zeroed bytes.
    ///
    /// # Errors
    /// As [`Region::zeroed`].
    pub(crate) fn take(&mut self, len: usize) -> io::Result<Region> {
        if len == 0 {
            return Region::zeroed(0);
        }
        let map = match &self.chunk {
            Some(chunk) if self.used + len <= chunk.len() => chunk.clone(),
            _ => {
                let chunk = map(len.max(CHUNK_BYTES).next_multiple_of(HUGE_PAGE_BYTES))?;
                (self.chunk, self.used) = (Some(chunk.clone()), 0);
                chunk
            }
        };
        let start = self.used;
        self.used = (start + len).next_multiple_of(LINE_BYTES);
        Ok(Region { map: Some(map), start, len })
    }
}

impl Deref for Region {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.map {
            // SAFETY: the region lies within its mapping, which lives as long as this; nobody else writes it.
            Some(map) => unsafe { std::slice::from_raw_parts(map.as_ptr().add(self.start), self.len) },
            None => &[],
        }
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &self.map {
            // SAFETY: as above, and regions of a mapping do not overlap.
            Some(map) => unsafe {
                std::slice::from_raw_parts_mut(map.as_mut_ptr().add(self.start), self.len)
            },
            None => &mut [],
        }
    }
}
