//! The API over scripted engines: what clients see, and what the engine sees of them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod chat;
mod completions;
mod errors;
mod lifecycle;
mod support;
