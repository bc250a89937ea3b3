//! The prefix cache's tier on disk, between steps.

use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use thunder_compute::Backend;

use super::{EngineLoop, PING_INTERVAL};
use crate::error::EngineError;

/// Microseconds since 1970.
pub(super) fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

impl<B: Backend> EngineLoop<B> {
    /// Makes the ranks write what was kept, and read a part of what a prompt waits for.
    pub(super) fn use_disk(&mut self) -> Result<(), EngineError> {
        self.store_noted()?;
        self.count_disk()?;
        if !self.scheduler.waits_for_disk() {
            return Ok(());
        }
        // Ranks of a pipeline must read the same blocks at the same step.
        while self.scheduler.steps_in_flight() > 0 {
            self.apply_oldest_step()?;
        }
        // Requests that have ended meanwhile left blocks, which the blocks to read may overwrite.
        self.store_noted()?;
        let most = self.worker.most_blocks_read();
        if self.scheduler.begin_reading(most, &mut self.transfers) {
            let count = self.worker.load_on_all(&self.transfers)?;
            let tokens = self.scheduler.finish_reading(count);
            self.inbox.counters.disk_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Makes the ranks write what was kept since the last call, before a step may reuse its blocks.
    pub(super) fn store_noted(&mut self) -> Result<(), EngineError> {
        if self.disk.is_some() {
            self.scheduler.take_noted(&mut self.transfers);
            if !self.transfers.is_empty() {
                self.worker.store_on_all(&self.transfers)?;
            }
        }
        Ok(())
    }

    /// Queries the other ranks' counters, if the last ones are old and no step is in flight.
    pub(super) fn count_disk(&mut self) -> Result<(), EngineError> {
        let is_old = self.disk_counted.is_none_or(|counted| counted.elapsed() >= PING_INTERVAL);
        if self.disk.is_some() && is_old && self.info.ranks > 1 && self.scheduler.steps_in_flight() == 0 {
            self.disk_of_others = self.worker.count_on_others()?;
            self.disk_counted = Some(Instant::now());
        }
        Ok(())
    }

    /// Copies the sums over all ranks to the shared counters.
    pub(super) fn publish_disk(&self) {
        let (Some(disk), counters) = (&self.disk, &self.inbox.counters) else { return };
        let all = disk.counters().all().into_iter().zip(self.disk_of_others);
        let shared =
            [&counters.disk_bytes, &counters.disk_written, &counters.disk_dropped, &counters.disk_damaged];
        for (to, (own, others)) in shared.into_iter().zip(all) {
            to.store(own + others, Ordering::Relaxed);
        }
    }
}
