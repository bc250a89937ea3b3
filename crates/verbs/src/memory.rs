//! Protection domains and registered memory.

use crate::device::Context;
use crate::error::{Error, Result};
use crate::sys::*;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

/// Pages of macOS on Apple silicon, and a multiple of every other page size in use.
const ALIGN_BYTES: usize = 16 * 1024;

/// A protection domain. A queue pair can use only the memory regions of its own domain.
pub struct ProtectionDomain {
    pub(crate) context: Arc<Context>,
    pub(crate) raw: NonNull<ibv_pd>,
}

// SAFETY: verbs calls are thread-safe, also when made at the same time.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// Creates a domain on the device.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.library.ibv_alloc_pd)(context.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last_os("ibv_alloc_pd", context.name()))?;
        Ok(Arc::new(Self { context: Arc::clone(context), raw }))
    }

    /// The device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: every object of the domain holds an Arc of it, so the domain is empty.
        unsafe { (self.context.library.ibv_dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Zeroed memory in pages of its own.
struct Pages {
    start: NonNull<u8>,
    layout: Layout,
}

impl Pages {
    fn new(len: usize) -> Result<Self> {
        let rule = || "it must be above 0 and fit in the address space".to_string();
        let layout = Layout::from_size_align(len.next_multiple_of(ALIGN_BYTES), ALIGN_BYTES)
            .ok()
            .filter(|_| len > 0)
            .ok_or_else(|| Error::BadSize { what: "a memory region", value: len, rule: rule() })?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) });
        Ok(Self { start: start.unwrap_or_else(|| handle_alloc_error(layout)), layout })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated with this layout and is freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Registered memory, owned by this region. It is accessed only through the region's queue pair,
/// which knows the parts that the device may be using.
pub(crate) struct MemoryRegion {
    raw: NonNull<ibv_mr>,
    pages: ManuallyDrop<Pages>,
    len: usize,
    domain: Arc<ProtectionDomain>,
}

// SAFETY: the region owns its memory, and verbs calls may be made from any thread.
unsafe impl Send for MemoryRegion {}

impl MemoryRegion {
    /// Allocates and registers `len` zeroed bytes. `peer_writes` permits RDMA WRITEs by the peer.
    pub(crate) fn new(domain: &Arc<ProtectionDomain>, len: usize, peer_writes: bool) -> Result<Self> {
        let pages = Pages::new(len)?;
        let context = &domain.context;
        let access = context.profile.access(peer_writes);
        // SAFETY: the pages are freed only after the region is deregistered (see drop).
        let raw = unsafe {
            (context.library.ibv_reg_mr)(
                domain.raw.as_ptr(),
                pages.start.as_ptr().cast(),
                pages.layout.size(),
                access,
            )
        };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last_os("ibv_reg_mr", context.name()))?;
        Ok(Self { raw, pages: ManuallyDrop::new(pages), len, domain: Arc::clone(domain) })
    }

    /// The first byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.pages.start.as_ptr()
    }

    /// The length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The key for the local device.
    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: the region is registered until drop.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    /// The key for a peer.
    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: the region is registered until drop.
        unsafe { (*self.raw.as_ptr()).rkey }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: the region is registered, and this deregisters it once. The pages are freed after
        // it.
        let errno = unsafe { (self.domain.context.library.ibv_dereg_mr)(self.raw.as_ptr()) };
        // If that failed, the device may still write to the pages, so they must never be freed.
        if errno == 0 {
            // SAFETY: the pages are dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.pages) };
        }
    }
}
