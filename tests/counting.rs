//! An allocator for tests that counts: the system's, which counts what threads take that are not exempt.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static IS_EXEMPT: Cell<bool> = const { Cell::new(false) };
}

/// Allocations so far.
pub fn allocations() -> usize {
    ALLOCATIONS.load(Ordering::SeqCst)
}

/// The calling thread's are not counted from now on.
#[allow(dead_code, reason = "not every test has such a thread")]
pub fn exempt_this_thread() {
    IS_EXEMPT.set(true);
}

fn count() {
    if !IS_EXEMPT.get() {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
    }
}

struct Counting;

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(p, layout) }
    }
    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's.
        unsafe { System.realloc(p, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;
