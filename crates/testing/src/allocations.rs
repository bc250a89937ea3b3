//! An allocator that counts allocations and remembers the largest. A test binary installs it:
//!
//! ```
//! use thunder_testing::allocations::{self, CountingAllocator};
//!
//! #[global_allocator]
//! static ALLOCATOR: CountingAllocator = CountingAllocator;
//!
//! let before = allocations::total();
//! drop(vec![1]);
//! assert_eq!(allocations::total() - before, 1);
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

static TOTAL: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static OF_THREAD: Cell<usize> = const { Cell::new(0) };
    static IS_EXEMPT: Cell<bool> = const { Cell::new(false) };
}

/// Allocations so far by all threads that are not exempt. 0 means that [`CountingAllocator`] is not
/// installed.
pub fn total() -> usize {
    TOTAL.load(Ordering::SeqCst)
}

/// Bytes of the largest allocation so far by any thread.
pub fn largest_bytes() -> usize {
    LARGEST.load(Ordering::SeqCst)
}

/// Allocations so far by the calling thread.
pub fn of_this_thread() -> usize {
    OF_THREAD.get()
}

/// Leaves the calling thread's later allocations out of [`total`].
pub fn exempt_this_thread() {
    IS_EXEMPT.set(true);
}

/// The system's allocator, with a count of `alloc` and `realloc` calls.
#[derive(Debug)]
pub struct CountingAllocator;

fn count(bytes: usize) {
    LARGEST.fetch_max(bytes, Ordering::SeqCst);
    // While a thread ends, its thread-local values may be gone.
    let _ = OF_THREAD.try_with(|count| count.set(count.get() + 1));
    if !IS_EXEMPT.try_with(Cell::get).unwrap_or(false) {
        TOTAL.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
