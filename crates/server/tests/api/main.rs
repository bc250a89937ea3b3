//! The API over scripted engines: what clients see, and what the engine sees of them.

mod chat;
mod completions;
mod errors;
mod lifecycle;
mod support;
