//! The prefix cache's tier on disk, between steps.

use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use thunder_compute::Backend;

use super::EngineLoop;
use crate::error::EngineError;

/// Microseconds since 1970.
pub(super) fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

impl<B: Backend> EngineLoop<B> {
    /// Has the ranks write what was kept, and read some of what a prompt waits for.
    pub(super) fn use_disk(&mut self) -> Result<(), EngineError> {
        self.store_noted()?;
        if !self.scheduler.waits_for_disk() {
            return Ok(());
        }
        // Ranks of a pipeline read the same blocks at the same step.
        while self.scheduler.steps_in_flight() > 0 {
            self.apply_oldest_step()?;
        }
        // Requests that have ended meanwhile left blocks, which those read may take.
        self.store_noted()?;
        let most = self.worker.most_blocks_read();
        if self.scheduler.begin_reading(most, &mut self.transfers) {
            let count = self.worker.load_on_all(&self.transfers)?;
            let tokens = self.scheduler.finish_reading(count);
            self.inbox.counters.disk_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Has the ranks write what was kept since the last call, before a step may use its blocks.
    pub(super) fn store_noted(&mut self) -> Result<(), EngineError> {
        if self.disk.is_some() {
            self.scheduler.take_noted(&mut self.transfers);
            if !self.transfers.is_empty() {
                self.worker.store_on_all(&self.transfers)?;
            }
        }
        Ok(())
    }

    /// Copies rank 0's numbers to the shared counters.
    pub(super) fn publish_disk(&self) {
        let (Some(disk), counters) = (&self.disk, &self.inbox.counters) else { return };
        let of_disk = disk.counters();
        for (to, from) in [
            (&counters.disk_bytes, &of_disk.bytes),
            (&counters.disk_written, &of_disk.written),
            (&counters.disk_dropped, &of_disk.dropped),
            (&counters.disk_damaged, &of_disk.damaged),
        ] {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}
