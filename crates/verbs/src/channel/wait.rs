//! The clock of a bounded wait.

use std::time::{Duration, Instant};

/// Time without progress before a wait asks the peer for a frame, whose number reveals a loss.
const PROBE_AFTER: Duration = Duration::from_millis(50);
/// Rounds of a wait that spin; after these, the thread yields between rounds.
const SPINS: u32 = 2000;
/// Rounds of a wait between two reads of the clock.
const ROUNDS_PER_CLOCK_READ: u32 = 64;

/// What a wait does after a round without progress.
pub(super) enum WaitStep {
    /// Poll again.
    Continue,
    /// Ask the peer for a frame, then poll again.
    Probe,
    /// The limit has passed.
    TimedOut,
}

/// The clock of a wait. It counts from the last progress.
pub(super) struct Waiter {
    pub(super) limit: Duration,
    since: Option<Instant>,
    rounds: u32,
    probes: u32,
}

impl Waiter {
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit, since: None, rounds: 0, probes: 0 }
    }

    /// Starts over, after progress.
    pub(super) fn restart(&mut self) {
        *self = Self::new(self.limit);
    }

    /// Spins or yields for one round.
    pub(super) fn step(&mut self) -> WaitStep {
        self.rounds = self.rounds.saturating_add(1);
        if self.rounds > SPINS {
            std::thread::yield_now()
        } else {
            std::hint::spin_loop()
        }
        if !self.rounds.is_multiple_of(ROUNDS_PER_CLOCK_READ) {
            return WaitStep::Continue;
        }
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        self.step_after(waited)
    }

    fn step_after(&mut self, waited: Duration) -> WaitStep {
        if waited >= self.limit {
            return WaitStep::TimedOut;
        }
        if waited >= PROBE_AFTER * (self.probes + 1) {
            self.probes += 1;
            return WaitStep::Probe;
        }
        WaitStep::Continue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_probes_then_times_out_and_restarts_on_progress() {
        let mut waiter = Waiter::new(Duration::from_millis(120));
        let probes: Vec<u64> = (0..120)
            .filter(|waited| matches!(waiter.step_after(Duration::from_millis(*waited)), WaitStep::Probe))
            .collect();
        assert_eq!(probes, [50, 100]);
        assert!(matches!(waiter.step_after(Duration::from_millis(120)), WaitStep::TimedOut));
        waiter.restart();
        let started = Instant::now();
        while !matches!(waiter.step(), WaitStep::TimedOut) {}
        assert!(started.elapsed() >= Duration::from_millis(120));
        waiter.restart();
        assert!(matches!(waiter.step(), WaitStep::Continue));
    }
}
