//! Waits of the host's threads that serve a device: they use their core for a moment, as waking a
//! thread takes long, then let others have it, then sleep between looks.

use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

/// How long a wait uses its core, where the host has cores to spare.
const SPIN: Duration = Duration::from_millis(2);
/// How long it then yields before it sleeps.
const YIELD: Duration = Duration::from_millis(20);
const SLEEP: Duration = Duration::from_micros(50);
/// Cores below which waits do not spin: ranks and drivers need them.
const MIN_CORES_TO_SPIN: usize = 4;

/// How a thread waits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waits {
    spin: Duration,
}

impl Waits {
    /// `is_real`: for a device of its own, which needs none of the cores.
    pub fn new(is_real: bool) -> Self {
        let spins = is_real && cores() >= MIN_CORES_TO_SPIN;
        Self { spin: if spins { SPIN } else { Duration::ZERO } }
    }

    /// The next order; `None` if there will be no more.
    pub fn next<T>(self, orders: &Receiver<T>) -> Option<T> {
        let began = Instant::now();
        while began.elapsed() < self.spin {
            match orders.try_recv() {
                Ok(order) => return Some(order),
                Err(TryRecvError::Disconnected) => return None,
                Err(TryRecvError::Empty) => std::hint::spin_loop(),
            }
        }
        orders.recv().ok()
    }

    /// A wait that begins now.
    pub fn begin(self) -> Wait {
        Wait { waits: self, began: Instant::now(), looks: 0 }
    }
}

/// One wait.
pub(crate) struct Wait {
    waits: Waits,
    began: Instant,
    looks: u32,
}

impl Wait {
    /// After a look in vain. Returns how long this wait has lasted, now and then only: to read the
    /// clock takes longer than to look.
    pub fn pause(&mut self) -> Option<Duration> {
        self.looks += 1;
        let spin = self.waits.spin;
        if spin > Duration::ZERO && !self.looks.is_multiple_of(64) {
            std::hint::spin_loop();
            return None;
        }
        let waited = self.began.elapsed();
        if waited > spin + YIELD {
            std::thread::sleep(SLEEP);
        } else if waited > spin {
            std::thread::yield_now();
        }
        Some(waited)
    }
}

/// Cores of the host.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
