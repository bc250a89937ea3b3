//! Futures on the thread that asks for them: what a command needs that asks its agent a few things.

use anyhow::Context;
use tokio::runtime::{Builder, Runtime};

/// A runtime without threads of its own.
pub fn runtime() -> anyhow::Result<Runtime> {
    Builder::new_current_thread().enable_all().build().context("cannot start a runtime")
}
