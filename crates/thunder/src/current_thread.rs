//! Runs futures on the calling thread, for commands with a few requests to their agent.

use anyhow::Context;
use tokio::runtime::{Builder, Runtime};

/// A runtime without additional threads.
pub fn runtime() -> anyhow::Result<Runtime> {
    Builder::new_current_thread().enable_all().build().context("cannot start a runtime")
}
