//! Turns requests into steps of a sharded model: scheduling, KV cache blocks, sampling, and the
//! loop of each rank.
//!
//! An [`Engine`] is a handle that takes a [`Request`] from any thread and gives an [`EventStream`].
//! Behind it, rank 0's [`EngineLoop`] asks the [`Scheduler`] for steps, and all ranks compute them
//! as [`RankWorker`]s.
//!
//! The scheduler is a state machine that needs no model. Here a made-up model's next token is
//! always one more than the last:
//!
//! ```
//! use thunder_engine::{Generation, Limits, Scheduler};
//!
//! let limits = Limits { sequences: 4, rows: 256, kv_blocks: 64, ..Limits::default() };
//! let mut scheduler = Scheduler::new(limits, 1, 2048, vec![0]);
//! let generation = Generation { max_tokens: Some(3), ..Generation::default() };
//! let request = scheduler.submit(&[5, 6, 7], generation)?;
//!
//! let (mut answer, mut events) = (Vec::new(), Vec::new());
//! while let Some(step) = scheduler.next_step() {
//!     let wanted = step.parts().filter(|part| part.wanted_rows == 1);
//!     let tokens: Vec<u32> = wanted.map(|part| part.tokens[part.tokens.len() - 1] + 1).collect();
//!     scheduler.apply(&tokens, &mut events);
//!     let of_request = events.drain(..).filter(|event| event.request == request);
//!     answer.extend(of_request.map(|event| event.token));
//! }
//! assert_eq!(answer, [8, 9, 10]);
//! # Ok::<(), thunder_engine::SubmitError>(())
//! ```

mod active_request;
mod answer;
pub mod assembly;
mod constraint;
mod counters;
mod disk;
mod draft_model;
mod drafter;
mod engine_loop;
mod error;
mod event;
mod handle;
mod hidden_rows;
mod model_guesses;
mod model_info;
mod prompt;
mod protocol;
mod rank;
mod request;
mod results;
mod same_shard;
mod sampler;
mod sampling;
mod scheduler;
mod speculation;
mod step_watch;
mod transfer;
mod work;

pub use constraint::{Constraint, Grammar, GrammarError, MAX_GRAMMAR_BYTES, json_form};
pub use counters::{Counters, StepTimes};
pub use disk::{DiskError, DiskSpec};
pub use draft_model::DraftShard;
pub use engine_loop::EngineLoop;
pub use error::EngineError;
pub use event::{AnsweredToken, Event, EventSender, Fault, FinishReason, Predicted, TokenLogprob, Usage};
pub use handle::{Engine, EventStream, Inbox, Submission};
pub use model_info::{AdapterInfo, ModelFiles, ModelInfo, ModelKind};
pub use prompt::PromptError;
pub use rank::{RankShard, RankWorker};
pub use request::{Output, Request, SubmitError};
pub use same_shard::Setting;
pub use sampling::Sampling;
pub use scheduler::{
    Awaiting, Decoding, Generation, Limits, NextStep, RequestId, RoutedExperts, RowResults, STEP_TIME,
    Scheduler, StepLoad, StepPart, TokenEvent, Wanted,
};
pub use step_watch::{StepTime, StepWatch};
pub use work::{RankWork, RequestWork, WorkTime};
