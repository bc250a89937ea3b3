//! Ends a channel's waits from outside.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Tells a polling channel that its peer is gone. UC connections and Apple's devices never report
/// that. The caller watches the peer (over TCP, or as a child process) and raises this from any
/// thread; the channel's next poll fails.
#[derive(Clone, Default)]
pub struct Abort(Arc<Inner>);

#[derive(Default)]
struct Inner {
    raised: AtomicBool,
    reason: OnceLock<String>,
}

impl Abort {
    /// A new abort, not raised.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends every wait of channels that hold a clone of this. The first reason is kept.
    pub fn raise(&self, reason: impl Into<String>) {
        self.0.reason.get_or_init(|| reason.into());
        self.0.raised.store(true, Ordering::Release);
    }

    /// The reason, once raised.
    pub fn raised(&self) -> Option<&str> {
        if !self.0.raised.load(Ordering::Acquire) {
            return None;
        }
        self.0.reason.get().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_reaches_every_clone() {
        let abort = Abort::new();
        let seen = abort.clone();
        assert_eq!(seen.raised(), None);
        abort.raise("rank 1 closed its connection");
        abort.raise("rank 1 is late");
        assert_eq!(seen.raised(), Some("rank 1 closed its connection"));
    }
}
