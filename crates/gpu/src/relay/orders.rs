//! The order of exchanges.

use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::copy::Copies;
use crate::device::numbering::{ARGUMENTS, Last, Numbering};
use crate::kernel::{Kernel, RELAY_UNNUMBERED, RELAY_WORDS};

/// Numbers exchanges in the order in which the device gets them, and has them copied. A step that
/// the device gets ahead, or again, has other numbers than the step that it repeats.
#[derive(Default)]
pub(crate) struct Orders {
    last: Last,
    /// The threads that copy. Only the thread that records takes this lock while exchanges go on.
    copiers: Mutex<Vec<Sender<Copies>>>,
}

impl Orders {
    fn copiers(&self) -> MutexGuard<'_, Vec<Sender<Copies>>> {
        self.copiers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a thread that copies.
    pub(super) fn add(&self, copier: Sender<Copies>) {
        self.copiers().push(copier);
    }

    /// Lets the threads that copy end.
    pub fn close(&self) {
        self.copiers().clear();
    }

    /// The number of the last exchange.
    pub fn number(&self) -> u32 {
        self.last.get()
    }

    /// Counts an exchange that nobody copies.
    pub fn skip(&self) -> u32 {
        self.last.advance()
    }

    /// The number of the next exchange, of this many words, which is copied from now on.
    pub fn next(&self, words: usize) -> u32 {
        let number = self.skip();
        for copier in &*self.copiers() {
            // A thread that has ended has made the device give up.
            let _ = copier.send(Copies { number, vectors: words.div_ceil(RELAY_WORDS) });
        }
        number
    }
}

impl Numbering for Orders {
    fn numbered(&self, kernel: &Kernel, arguments: &[u32]) -> Option<[u32; ARGUMENTS]> {
        let Kernel::Relay(_) = kernel else { return None };
        let &[first, words, RELAY_UNNUMBERED, looks, width, stride] = arguments else { return None };
        Some([first, words, self.next(words as usize), looks, width, stride])
    }
}
