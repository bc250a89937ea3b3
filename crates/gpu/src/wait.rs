//! The host's threads that serve a device: their cores, and their waits. A wait spins for a moment,
//! because waking a thread takes long, then yields, then sleeps between polls.

use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use thunder_compute::cpu::pool::allowed_cores;

/// How long a wait spins, if the host has enough cores.
const SPIN: Duration = Duration::from_millis(2);
/// How long it then yields before it sleeps.
const YIELD: Duration = Duration::from_millis(20);
const SLEEP: Duration = Duration::from_micros(50);
/// With fewer cores, waits do not spin, because ranks and drivers need the cores.
const MIN_CORES_TO_SPIN: usize = 4;

/// The consecutive cores of a rank, among [`allowed_cores`]. The first is that of the thread that
/// records the device's commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cores {
    /// The first core's index.
    pub first: usize,
    /// How many there are.
    pub count: usize,
}

impl Cores {
    /// The number of the core for a serving thread; `None` if there is only the first core.
    pub(crate) fn of_thread(self, index: usize) -> Option<usize> {
        let others = self.count.checked_sub(1).filter(|others| *others > 0)?;
        allowed_cores().get(self.first + 1 + index % others).copied()
    }
}

/// How a thread waits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Waits {
    spin: Duration,
}

impl Waits {
    /// `is_real`: the device is a real GPU, which does not compute on the host's cores.
    pub fn new(is_real: bool) -> Self {
        let spins = is_real && host_cores() >= MIN_CORES_TO_SPIN;
        Self { spin: if spins { SPIN } else { Duration::ZERO } }
    }

    /// Whether the host has cores for waits that spin.
    pub fn can_spin(self) -> bool {
        self.spin > Duration::ZERO
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
pub(crate) fn host_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_serve_a_device_leave_the_first_core_to_the_one_that_records() {
        let all = allowed_cores();
        let of =
            |first, count| (0..3).map(|index| Cores { first, count }.of_thread(index)).collect::<Vec<_>>();
        assert_eq!(of(0, 1), [None; 3], "there is no other core");
        assert_eq!(of(0, 2), [all.get(1).copied(); 3]);
        assert_eq!(of(all.len(), 4), [None; 3], "these cores are not there");
    }
}
