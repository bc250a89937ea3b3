//! Turns requests into steps of a sharded model: scheduling, KV cache, sampling, the rank loop.

mod answer;
pub mod assembly;
mod blocks;
pub mod engine_loop;
pub mod handle;
mod protocol;
pub mod rank;
pub mod request;
mod sampler;

pub use engine_loop::{EngineLoop, Limits};
pub use handle::{Counters, Engine, EventStream, Inbox, ModelInfo, Submission};
pub use rank::{EngineError, RankWorker};
pub use request::{Event, FinishReason, Request, Sampling, SubmitError, TokenLogprob, Usage};
