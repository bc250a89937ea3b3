//! Memory that the host reads and writes while the device uses it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use thunder_compute::ComputeError;
use wgpu::hal::Device as _;
use wgpu::{BufferDescriptor, BufferUsages, Features};

use super::Device;
use crate::adapter::block_on;
use crate::buffer::Memory;

#[cfg(not(target_vendor = "apple"))]
type Api = wgpu::hal::api::Vulkan;
#[cfg(target_vendor = "apple")]
type Api = wgpu::hal::api::Metal;

/// Whose memory it is, if host and device have separate memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Cached host memory: the device writes, the host reads, or both do both.
    Host,
    /// Device memory, through its window on the bus; host memory if there is no window. The host
    /// writes, the device reads.
    Device,
}

/// Words in memory that both host and device access. The host's accesses are atomic and relaxed,
/// except through [`Self::start`].
#[derive(Debug)]
pub(crate) struct Shared {
    pub memory: Memory,
    words: *const AtomicU32,
}

// SAFETY: `memory` keeps the pointer's target alive, and all accesses through a shared reference
// are atomic.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Device {
    /// Whether the driver has memory that both sides access, according to its features.
    pub fn has_shared_memory(&self) -> bool {
        self.device.features().contains(Features::MAPPABLE_PRIMARY_BUFFERS)
    }

    /// Maximum threads of a workgroup.
    pub fn max_threads(&self) -> u32 {
        let limits = self.device.limits();
        limits.max_compute_invocations_per_workgroup.min(limits.max_compute_workgroup_size_x)
    }

    /// Zeroed memory that both sides access; `None` if the driver refuses.
    pub fn shared(&mut self, bytes: usize, place: Place) -> Result<Option<Shared>, ComputeError> {
        self.check()?;
        if !self.has_shared_memory() {
            return Ok(None);
        }
        let mapping = match place {
            Place::Host => BufferUsages::MAP_READ,
            Place::Device => BufferUsages::MAP_WRITE,
        };
        let size = bytes.next_multiple_of(16).max(16) as u64;
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        // A buffer that was mapped at creation counts as initialized. wgpu would clear any other
        // buffer later, while the host writes to it. wgpu refuses submissions that use a mapped
        // buffer, hence `unmap`.
        let buffer = self.device.create_buffer(&BufferDescriptor {
            label: None,
            size,
            usage: mapping | BufferUsages::STORAGE,
            mapped_at_creation: true,
        });
        if block_on(scope.pop()).is_some() {
            return Ok(None);
        }
        buffer.unmap();
        // wgpu maps a copy of memory that only the device writes. The next submission copies it
        // back, so submit before the host writes.
        self.queue.submit([]);
        self.wait()?;
        // SAFETY: the device and the buffer are alive, and neither is destroyed here. Vulkan's
        // allocator keeps this memory mapped as long as the buffer lives, Metal's shared storage is
        // always mapped, and `map_buffer` only returns the address.
        let mapped = unsafe {
            let (Some(device), Some(raw)) = (self.device.as_hal::<Api>(), buffer.as_hal::<Api>()) else {
                return Ok(None);
            };
            device.map_buffer(&raw, 0..size)
        };
        let Some(mapped) = mapped.ok().filter(|mapped| mapped.is_coherent) else { return Ok(None) };
        let words = mapped.ptr.as_ptr().cast::<AtomicU32>().cast_const();
        if !words.cast::<AtomicU64>().is_aligned() {
            return Ok(None);
        }
        self.next_id += 1;
        let shared = Shared { memory: Memory::new(buffer, self.next_id), words };
        shared.fill(0, size as usize / 4, 0);
        write_through();
        Ok(Some(shared))
    }
}

impl Shared {
    fn len(&self) -> usize {
        self.memory.bytes() as usize / 4
    }

    /// Where the host sees it, for a host that uses it alone for a while.
    pub fn start(&mut self) -> *mut u32 {
        self.words.cast_mut().cast()
    }

    fn words(&self) -> &[AtomicU32] {
        // SAFETY: the mapping has this many words, and lives as long as `memory`.
        unsafe { std::slice::from_raw_parts(self.words, self.len()) }
    }

    /// The words from `first` on, as pairs. `first` and `count` are even.
    fn pairs(&self, first: usize, count: usize) -> &[AtomicU64] {
        let words = &self.words()[first..first + count];
        assert!(first.is_multiple_of(2) && count.is_multiple_of(2), "{count} words from word {first}");
        // SAFETY: the mapping and every second word of it are aligned for pairs, and the pairs lie
        // within the words.
        unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<AtomicU64>(), count / 2) }
    }

    /// One word.
    pub fn load(&self, at: usize) -> u32 {
        self.words()[at].load(Ordering::Acquire)
    }

    /// Stores one word, after all earlier writes.
    pub fn publish(&self, at: usize, value: u32) {
        write_through();
        self.words()[at].store(value, Ordering::Release);
        write_through();
    }

    /// Sets `count` words.
    pub fn fill(&self, first: usize, count: usize, value: u32) {
        let pair = u64::from(value) << 32 | u64::from(value);
        self.pairs(first, count).iter().for_each(|place| place.store(pair, Ordering::Relaxed));
    }

    /// Writes pairs of words, starting at pair `first`.
    pub fn write_pairs(&self, first: usize, pairs: &[u64]) {
        for (place, pair) in self.pairs(2 * first, 2 * pairs.len()).iter().zip(pairs) {
            place.store(*pair, Ordering::Relaxed);
        }
    }

    /// Flushes earlier writes out of the core.
    pub fn write_through(&self) {
        write_through();
    }

    /// Writes an even number of words.
    pub fn write(&self, first: usize, words: &[u32]) {
        for (place, pair) in self.pairs(first, words.len()).iter().zip(words.as_chunks::<2>().0) {
            place.store(u64::from(pair[1]) << 32 | u64::from(pair[0]), Ordering::Relaxed);
        }
    }

    /// Reads the words of `count` vectors of three words and a check word, starting at vector
    /// `first`. False if one of them is not of `number`.
    pub fn read_checked(&self, first: usize, count: usize, number: u32, out: &mut Vec<u32>) -> bool {
        out.clear();
        self.pairs(4 * first, 4 * count).as_chunks::<2>().0.iter().all(|places| {
            let words = checked(places.each_ref().map(|place| place.load(Ordering::Relaxed)), number);
            out.extend(words.into_iter().flatten());
            words.is_some()
        })
    }

    /// Reads words up to the first that equals `absent`. Returns the number of words read, which is
    /// even.
    pub fn read_present(&self, first: usize, absent: u32, out: &mut [u32]) -> usize {
        let pairs = self.pairs(first, out.len());
        for (index, (place, out)) in pairs.iter().zip(out.as_chunks_mut::<2>().0).enumerate() {
            let pair = place.load(Ordering::Relaxed);
            *out = [pair as u32, (pair >> 32) as u32];
            if out.contains(&absent) {
                return 2 * index;
            }
        }
        out.len()
    }
}

/// The check word of three words that belong to the exchange or report `number`, computed as in the
/// kernels.
pub(crate) fn check([a, b, c]: [u32; 3], number: u32) -> u32 {
    let mixed = a.wrapping_mul(0x9e37_79b1).wrapping_add(b).wrapping_mul(0x85eb_ca6b).wrapping_add(c);
    mixed.wrapping_mul(0xc2b2_ae35).wrapping_add(number)
}

/// The three words of a vector of the exchange or report `number`; `None` if it is not.
pub(crate) fn checked([low, high]: [u64; 2], number: u32) -> Option<[u32; 3]> {
    let words = [low as u32, (low >> 32) as u32, high as u32];
    (check(words, number) == (high >> 32) as u32).then_some(words)
}

/// Flushes write-combined memory out of the core.
fn write_through() {
    fence(Ordering::SeqCst);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
