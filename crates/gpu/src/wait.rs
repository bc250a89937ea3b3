//! Waits of the host's threads that serve a device. A wait spins for a moment, because waking a
//! thread takes long, then yields, then sleeps between polls.

use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

/// How long a wait spins, if the host has enough cores.
const SPIN: Duration = Duration::from_millis(2);
/// How long it then yields before it sleeps.
const YIELD: Duration = Duration::from_millis(20);
const SLEEP: Duration = Duration::from_micros(50);
/// With fewer cores, waits do not spin, because ranks and drivers need the cores.
const MIN_CORES_TO_SPIN: usize = 4;

/// How a thread waits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waits {
    spin: Duration,
}

impl Waits {
    /// `is_real`: the device is a real GPU, which does not compute on the host's cores.
    pub fn new(is_real: bool) -> Self {
        let spins = is_real && cores() >= MIN_CORES_TO_SPIN;
        Self { spin: if spins { SPIN } else { Duration::ZERO } }
    }

    /// The next order; `None` if there are no more.
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
    /// Call this after a poll in vain. Returns, now and then only, how long this wait has lasted:
    /// reading the clock takes longer than a poll.
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
