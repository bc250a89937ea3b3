//! Memory that kernels stream through: zeroed, aligned to cache lines, in huge pages where the kernel grants them.

use std::alloc::{Layout, handle_alloc_error};
use std::io;
use std::marker::PhantomData;
use std::mem::needs_drop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use memmap2::{MmapMut, MmapRaw};

/// Where a region begins: a cache line.
pub(in crate::cpu) const LINE_BYTES: usize = 64;
/// Mappings of whole huge pages are aligned to them; others need not be, and then have small pages at both ends.
pub(in crate::cpu) const HUGE_PAGE_BYTES: usize = 2 << 20;
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
    /// Allocates `len` bytes, from a huge page's start on if they fill one. Pages are taken from the system when they are first
    /// written.
    ///
    /// # Errors
    /// When the system refuses the address space.
    pub(crate) fn zeroed(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self { map: None, start: 0, len });
        }
        // Systems align mappings to huge pages by themselves when they are whole ones, and not all of them do.
        let room = if len < HUGE_PAGE_BYTES { 0 } else { HUGE_PAGE_BYTES };
        let map = map(len + room)?;
        let start = if room == 0 { 0 } else { map.as_ptr().align_offset(HUGE_PAGE_BYTES).min(room) };
        Ok(Self { map: Some(map), start, len })
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

/// Types for which zeros are a value.
///
/// # Safety
/// All zeros are a value of the type.
pub(crate) unsafe trait Zero {}

/// Zeros of a type, in memory as [`Region::zeroed`] gives it.
#[derive(Debug)]
pub(crate) struct Array<T> {
    region: Region,
    of: PhantomData<T>,
}

impl<T: Zero> Array<T> {
    /// Allocates `len` of them; ends the process as a `Vec` would when there is no memory.
    pub(crate) fn zeroed(len: usize) -> Self {
        const { assert!(align_of::<T>() <= LINE_BYTES && size_of::<T>() > 0 && !needs_drop::<T>()) };
        let bytes = len * size_of::<T>();
        let region = Region::zeroed(bytes).unwrap_or_else(|_| {
            handle_alloc_error(Layout::from_size_align(bytes, LINE_BYTES).unwrap_or(Layout::new::<T>()))
        });
        Self { region, of: PhantomData }
    }
}

impl<T: Zero> Default for Array<T> {
    fn default() -> Self {
        Self::zeroed(0)
    }
}

impl<T> Deref for Array<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self.region.len() / size_of::<T>() {
            0 => &[],
            // SAFETY: so many of them, aligned to a cache line, zeros at first.
            len => unsafe { std::slice::from_raw_parts(self.region.as_ptr().cast(), len) },
        }
    }
}

impl<T> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self.region.len() / size_of::<T>() {
            0 => &mut [],
            // SAFETY: as above.
            len => unsafe { std::slice::from_raw_parts_mut(self.region.as_mut_ptr().cast(), len) },
        }
    }
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

/// The first `len` elements of `all`; elements that `all` lacks are added as `value`.
pub(in crate::cpu) fn grown<T: Clone>(all: &mut Vec<T>, len: usize, value: T) -> &mut [T] {
    if all.len() < len {
        all.resize(len, value);
    }
    &mut all[..len]
}
