//! The clock of a bounded wait.

use std::time::{Duration, Instant};

/// How long a wait sees nothing before it asks the peer for a frame, whose number tells of a loss.
const PROBE_AFTER: Duration = Duration::from_millis(50);
/// Rounds of a wait that only spin; after these the thread yields between rounds.
const SPINS: u32 = 2000;
/// Rounds of a wait between two looks at the clock.
const ROUNDS_PER_LOOK: u32 = 64;

pub(super) enum Round {
    Again,
    Probe,
    Over,
}

/// The clock of a wait, which counts from the last progress.
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

    pub(super) fn restart(&mut self) {
        *self = Self::new(self.limit);
    }

    pub(super) fn round(&mut self) -> Round {
        self.rounds = self.rounds.saturating_add(1);
        if self.rounds > SPINS {
            std::thread::yield_now()
        } else {
            std::hint::spin_loop()
        }
        if !self.rounds.is_multiple_of(ROUNDS_PER_LOOK) {
            return Round::Again;
        }
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        self.after(waited)
    }

    fn after(&mut self, waited: Duration) -> Round {
        if waited >= self.limit {
            return Round::Over;
        }
        if waited >= PROBE_AFTER * (self.probes + 1) {
            self.probes += 1;
            return Round::Probe;
        }
        Round::Again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_probes_then_ends_and_progress_starts_it_anew() {
        let mut waiter = Waiter::new(Duration::from_millis(120));
        let probes: Vec<u64> = (0..120)
            .filter(|waited| matches!(waiter.after(Duration::from_millis(*waited)), Round::Probe))
            .collect();
        assert_eq!(probes, [50, 100]);
        assert!(matches!(waiter.after(Duration::from_millis(120)), Round::Over));
        waiter.restart();
        let started = Instant::now();
        while !matches!(waiter.round(), Round::Over) {}
        assert!(started.elapsed() >= Duration::from_millis(120));
        waiter.restart();
        assert!(matches!(waiter.round(), Round::Again));
    }
}
