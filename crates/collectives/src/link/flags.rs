//! The two words of a hand-over: how far the other side has come, and whether this side sleeps.
//!
//! A rank about to sleep sets its flag and looks once more; its peer publishes and then looks at the flag. Both have a
//! full fence between the two, so at least one of them sees the other: no wake-up is lost.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// How far one side has come.
pub(super) trait Position {
    /// Stores with release: what was written before can be seen by whoever sees the position.
    fn release(&self, value: u64);
    /// Loads with acquire.
    fn acquire(&self) -> u64;
}

/// Whether one side sleeps.
pub(super) trait Sleeps {
    fn set(&self);
    fn is_set(&self) -> bool;
    /// Clears, and says whether it was set.
    fn take(&self) -> bool;
    /// A sequentially consistent fence.
    fn full_fence();
}

impl Position for AtomicU64 {
    fn release(&self, value: u64) {
        self.store(value, Ordering::Release);
    }
    fn acquire(&self) -> u64 {
        self.load(Ordering::Acquire)
    }
}

impl Sleeps for AtomicU32 {
    fn set(&self) {
        self.store(1, Ordering::Relaxed);
    }
    fn is_set(&self) -> bool {
        self.load(Ordering::Relaxed) != 0
    }
    fn take(&self) -> bool {
        self.swap(0, Ordering::Relaxed) != 0
    }
    fn full_fence() {
        fence(Ordering::SeqCst);
    }
}

/// Publishes a position. True when the other side sleeps and must be woken up, by this call's caller alone.
pub(super) fn publish<S: Sleeps>(position: &impl Position, value: u64, sleeps: &S) -> bool {
    position.release(value);
    S::full_fence();
    sleeps.is_set() && sleeps.take()
}

/// Announces sleep and returns the position after that: if it is still too low, sleep is safe.
pub(super) fn announce<S: Sleeps>(sleeps: &S, position: &impl Position) -> u64 {
    sleeps.set();
    S::full_fence();
    position.acquire()
}
