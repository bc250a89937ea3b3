//! The numbers of exchanges with other ranks.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::kernel::Kernel;
use crate::mailbox::next;

/// The arguments of an exchange's kernels.
pub(crate) const ARGUMENTS: usize = 6;

/// Numbers exchanges when their commands are recorded for the device.
pub(crate) trait Numbering: Send + Sync {
    /// The arguments of a kernel with its exchange's number; `None` for kernels that belong to no
    /// exchange, and for those whose arguments have a number.
    fn numbered(&self, kernel: &Kernel, arguments: &[u32]) -> Option<[u32; ARGUMENTS]>;
}

/// The number of the last exchange. Only the thread that records changes it.
#[derive(Debug, Default)]
pub(crate) struct Last(AtomicU32);

impl Last {
    pub fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    pub fn set(&self, number: u32) {
        self.0.store(number, Ordering::Relaxed);
    }

    /// Counts an exchange, and returns its number.
    pub fn advance(&self) -> u32 {
        let number = next(self.get());
        self.set(number);
        number
    }
}
