//! Raw pointers that threads share.

/// A pointer that threads of a pool share, each writing its own part.
#[derive(Debug)]
pub(super) struct SendPtr<T>(pub *mut T);

impl<T> Clone for SendPtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SendPtr<T> {}

// SAFETY: the pointer is only a number until it is dereferenced, and each dereference has its own
// SAFETY argument.
unsafe impl<T> Send for SendPtr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for SendPtr<T> {}

impl<T> SendPtr<T> {
    /// The address of element `index`.
    ///
    /// # Safety
    /// `index` must be within the allocation.
    pub(super) unsafe fn at(self, index: usize) -> *mut T {
        // SAFETY: the caller's.
        unsafe { self.0.add(index) }
    }
}
