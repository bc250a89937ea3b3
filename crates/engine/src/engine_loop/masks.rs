//! Answers with slow grammars: they wait for their masks, but the steps of other answers do not.

use std::time::{Duration, Instant};

use thunder_compute::Backend;

use super::{EngineLoop, PING_INTERVAL};
use crate::active_request::ActiveRequest;
use crate::error::EngineError;
use crate::protocol::Command;

/// Maximum wait for a mask before other requests are checked.
const MASK_POLL: Duration = Duration::from_millis(1);

impl<B: Backend> EngineLoop<B> {
    /// Leaves answers whose masks are late out of the next step.
    pub(super) fn hold_late_masks(&mut self) {
        for (id, request) in &mut self.requests {
            if let Some(is_late) = request.is_mask_late() {
                self.scheduler.hold(*id, is_late);
            }
        }
    }

    /// Waits a moment for a late mask, if nothing is being computed. Also tells the other ranks
    /// that this one is alive.
    pub(super) fn wait_for_masks(&mut self) -> Result<(), EngineError> {
        if self.scheduler.steps_in_flight() > 0 {
            return Ok(());
        }
        let is_late = |request: &mut ActiveRequest| request.is_mask_late() == Some(true);
        let late = self.requests.values_mut().find_map(|request| is_late(request).then_some(request));
        let Some(request) = late else { return Ok(()) };
        request.wait_for_mask(MASK_POLL);
        if self.pinged.elapsed() >= PING_INTERVAL {
            self.pinged = Instant::now();
            self.broadcast(Command::Ping)?;
        }
        Ok(())
    }
}
