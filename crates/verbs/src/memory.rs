//! Protection domains and the memory that a device may touch.

use crate::device::Context;
use crate::error::{Error, Result};
use crate::sys::*;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

/// macOS on Apple silicon has pages of 16 KiB; a multiple of every page size in use.
const ALIGN_BYTES: usize = 16 * 1024;

/// A protection domain: queue pairs reach only the regions of their own.
pub struct ProtectionDomain {
    pub(crate) context: Arc<Context>,
    pub(crate) raw: NonNull<ibv_pd>,
}

// SAFETY: the verbs calls may be made from any thread, several at once.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// A new domain on the device.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.library.ibv_alloc_pd)(context.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last_os("ibv_alloc_pd", context.name()))?;
        Ok(Arc::new(Self { context: Arc::clone(context), raw }))
    }

    /// The device it is on.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: everything made in it held an Arc of it, so it is empty.
        unsafe { (self.context.library.ibv_dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Zeroed memory on pages of its own.
struct Pages {
    start: NonNull<u8>,
    layout: Layout,
}

impl Pages {
    fn new(len: usize) -> Result<Self> {
        let rule = || "it must be above 0 and fit in memory".to_string();
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
        // SAFETY: allocated with this layout, released once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Registered memory, which it owns. What lies in it is reached only through the queue pair that it belongs to, which
/// knows which parts the device may be touching.
pub(crate) struct MemoryRegion {
    raw: NonNull<ibv_mr>,
    pages: ManuallyDrop<Pages>,
    len: usize,
    domain: Arc<ProtectionDomain>,
}

// SAFETY: it owns its memory; the verbs calls may be made from any thread.
unsafe impl Send for MemoryRegion {}

impl MemoryRegion {
    /// Registers `len` new, zeroed bytes; `peer_writes` lets the peer's RDMA WRITEs in.
    pub(crate) fn new(domain: &Arc<ProtectionDomain>, len: usize, peer_writes: bool) -> Result<Self> {
        let pages = Pages::new(len)?;
        let context = &domain.context;
        let access = context.profile.access(peer_writes);
        // SAFETY: the pages live until after the region is deregistered, see drop.
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

    /// Its start.
    pub(crate) fn start(&self) -> *mut u8 {
        self.pages.start.as_ptr()
    }

    /// Its length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The key by which the local device knows it.
    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: registered until drop.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    /// The key by which a peer names it.
    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: registered until drop.
        unsafe { (*self.raw.as_ptr()).rkey }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: registered, deregistered once; the pages are released after this.
        let errno = unsafe { (self.domain.context.library.ibv_dereg_mr)(self.raw.as_ptr()) };
        // Where that failed the device may still write here: memory that is never given back is the safe way out.
        if errno == 0 {
            // SAFETY: dropped once, here, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.pages) };
        }
    }
}
