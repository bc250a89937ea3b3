//! Turns the engine's events into a whole response body or a stream of chunks.

pub(crate) mod envelope;
pub(crate) mod format;
pub(crate) mod logprobs;
pub(crate) mod reply;
pub(crate) mod sse;
pub(crate) mod streams;
