//! From the engine's events to a whole body or a stream of chunks.

pub(crate) mod answers;
pub(crate) mod envelope;
pub(crate) mod logprobs;
pub(crate) mod reply;
pub(crate) mod sse;
pub(crate) mod types;
