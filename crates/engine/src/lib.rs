//! Turns requests into steps of a sharded model: scheduling, KV cache, sampling, the rank loop.

pub mod handle;
pub mod request;

pub use handle::{Counters, Engine, Inbox, ModelInfo, Stream, Submission};
pub use request::{Event, FinishReason, Request, Sampling, SubmitError, TokenLogprob, Usage};
