//! Memory for weights and caches: zeroed, aligned to cache lines, in huge pages if the system
//! grants them.

use std::alloc::{Layout, handle_alloc_error};
use std::io;
use std::marker::PhantomData;
use std::mem::needs_drop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::{MmapMut, MmapRaw};

use crate::backend::ComputeError;

/// Alignment of a region: a cache line.
pub(in crate::cpu) const LINE_BYTES: usize = 64;
/// Mappings of whole huge pages are aligned to huge pages. Other mappings may have small pages at
/// both ends.
pub(in crate::cpu) const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Smaller caches begin on a huge page.
const LEAST_MOVED_BYTES: usize = 16 * HUGE_PAGE_BYTES;
/// The least pages of a system that has huge ones of this size.
const SMALL_PAGE_BYTES: usize = 4 << 10;
/// Matrices share mappings of at least this size, so that small matrices are in huge pages too.
const MAPPING_BYTES: usize = 64 << 20;

/// A part of a mapping, with one owner.
#[derive(Debug)]
pub(crate) struct Region {
    map: Option<Arc<MmapRaw>>,
    start: usize,
    len: usize,
}

impl Region {
    /// Allocates `len` zeroed bytes; a region of at least one huge page starts on a huge page. The
    /// system provides pages when they are first written.
    ///
    /// # Errors
    /// If the system refuses the address space.
    pub(crate) fn zeroed(len: usize) -> io::Result<Self> {
        Self::zeroed_at(len, 0)
    }

    /// As [`Region::zeroed`], but at `offset` bytes from the beginning of a huge page.
    fn zeroed_at(len: usize, offset: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self { map: None, start: 0, len });
        }
        // Not all systems align large mappings to huge pages themselves.
        let (room, offset) = if len < HUGE_PAGE_BYTES { (0, 0) } else { (HUGE_PAGE_BYTES, offset) };
        let map = map(len + room + offset)?;
        let start = if room == 0 { 0 } else { map.as_ptr().align_offset(HUGE_PAGE_BYTES).min(room) };
        Ok(Self { map: Some(map), start: start + offset, len })
    }
}

/// Allocates zeroed memory for a cache. The system provides pages when they are first written.
pub(in crate::cpu) fn cache_region(bytes: usize) -> Result<Region, ComputeError> {
    /// Caches so far.
    static CACHES: AtomicUsize = AtomicUsize::new(0);
    let number = CACHES.fetch_add(1, Ordering::Relaxed);
    // What is left over at both ends takes memory too.
    let offset = if bytes < LEAST_MOVED_BYTES { 0 } else { cache_offset(number) };
    Region::zeroed_at(bytes, offset).map_err(|error| ComputeError::Memory {
        bytes,
        what: "the cache",
        reason: error.to_string(),
    })
}

/// Where in a huge page the cache with this number begins. A new block is written in the caches of
/// all layers by one step. If all began at the same place, all would need a new huge page in the
/// same step, which then takes a quarter of a second where the system is slow to provide them.
fn cache_offset(number: usize) -> usize {
    // Multiples of the golden ratio divide a huge page evenly, however many there are.
    const STEP: usize = HUGE_PAGE_BYTES / 1000 * 618;
    (number.wrapping_mul(STEP) % HUGE_PAGE_BYTES).next_multiple_of(SMALL_PAGE_BYTES)
}

fn map(len: usize) -> io::Result<Arc<MmapRaw>> {
    let map = MmapMut::map_anon(len)?;
    // A 4 KiB page holds 7 groups of 4-bit weights: without huge pages, every few cache lines cost
    // a TLB miss. A system without huge pages is only slower, so its refusal is not an error.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Ok(Arc::new(MmapRaw::from(map)))
}

/// Types for which all-zero bytes are a valid value.
///
/// # Safety
/// All-zero bytes are a valid value of the type.
pub(crate) unsafe trait Zero {}

/// An array of zeros, in memory from [`Region::zeroed`].
#[derive(Debug)]
pub(crate) struct Array<T> {
    region: Region,
    of: PhantomData<T>,
}

impl<T: Zero> Array<T> {
    /// Allocates `len` zeros. Without memory, ends the process as a `Vec` does.
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
            // SAFETY: the region holds `len` elements, is aligned to a cache line, and was all
            // zeros at first.
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

/// Hands out regions of shared mappings. A mapping is unmapped when all its regions are dropped.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    mapping: Option<Arc<MmapRaw>>,
    used: usize,
}

impl Arena {
    /// Returns `len` zeroed bytes.
    ///
    /// # Errors
    /// As [`Region::zeroed`].
    pub(crate) fn take(&mut self, len: usize) -> io::Result<Region> {
        if len == 0 {
            return Region::zeroed(0);
        }
        let map = match &self.mapping {
            Some(mapping) if self.used + len <= mapping.len() => mapping.clone(),
            _ => {
                let mapping = map(len.max(MAPPING_BYTES).next_multiple_of(HUGE_PAGE_BYTES))?;
                (self.mapping, self.used) = (Some(mapping.clone()), 0);
                mapping
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
            // SAFETY: the region is within its mapping, which lives as long as the region; only the
            // owner writes it.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_need_new_huge_pages_at_different_blocks() {
        for layers in [28, 64] {
            let mut places: Vec<usize> = (0..2 * layers).map(cache_offset).collect();
            places.sort_unstable();
            let widest = places.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default();
            assert!(widest < 2 * HUGE_PAGE_BYTES / layers, "{layers} layers: {widest} bytes");
        }
        let bytes = LEAST_MOVED_BYTES;
        let (mut first, mut second) = (cache_region(bytes).unwrap(), cache_region(bytes).unwrap());
        for region in [&mut first, &mut second] {
            assert_eq!((region.len(), region.as_ptr().align_offset(LINE_BYTES)), (bytes, 0));
            assert!(region.iter().step_by(4096).all(|byte| *byte == 0));
            (region[0], region[bytes - 1]) = (1, 2);
        }
        let place = |region: &Region| region.as_ptr() as usize % HUGE_PAGE_BYTES;
        assert_ne!(place(&first), place(&second));
        assert_eq!(place(&cache_region(bytes - 1).unwrap()), 0);
    }
}
