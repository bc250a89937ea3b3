//! Turns requests into steps of a sharded model: scheduling, KV cache, sampling, the rank loop.

mod answer;
mod blocks;
pub mod handle;
mod protocol;
pub mod rank;
pub mod request;
mod sampler;
pub mod scheduler;

pub use handle::{Counters, Engine, Inbox, ModelInfo, Stream, Submission};
pub use rank::{EngineError, Rank};
pub use request::{Event, FinishReason, Request, Sampling, SubmitError, TokenLogprob, Usage};
pub use scheduler::{Limits, Scheduler};
