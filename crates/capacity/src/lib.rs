//! Capacity planning: how many people machines can serve with a model, how fast, and at what cost.
//!
//! Nothing is started. [`simulate`] runs the engine's own scheduler with requests in simulated
//! time. The time of a step comes from [`thunder_cost`] for described machines, or from
//! measurements ([`measured`]). [`plan`] answers a whole question: what fits, which layout is
//! fastest, whether the goal is met, how many users are possible, and the cost.
//!
//! ```
//! use thunder_capacity::plan::{Question, plan};
//!
//! let question = r#"{
//!     "model": "llama-8b", "bits": 4, "machines": [{ "machine": "m4-pro-64", "count": 1 }],
//!     "users": 5, "requests_per_user_day": 20, "prompt_tokens": 500, "answer_tokens": 200
//! }"#;
//! let answer = plan(&Question::read(question.as_bytes())?)?;
//! assert!(answer.load.is_some_and(|load| load.simulated.throughput_tokens_s > 0.0));
//! # Ok::<(), thunder_capacity::PlanError>(())
//! ```

mod arrivals;
mod layouts;
pub mod machines;
pub mod measured;
pub mod money;
pub mod placement;
pub mod plan;
pub mod power;
mod question;
pub mod simulate;
mod trace;

use thunder_model::ModelError;

/// Why a question cannot be answered.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The question is not JSON of the expected form.
    #[error("the question is malformed: {0}")]
    Malformed(#[from] serde_json::Error),
    /// A field has an invalid value.
    #[error("{field} is {value}: {must_be}")]
    Field {
        /// Its name.
        field: &'static str,
        /// What was given.
        value: String,
        /// What is allowed.
        must_be: String,
    },
    /// A line of a trace is invalid.
    #[error("the trace's line {line}: {why}")]
    Trace {
        /// Its number, from 1.
        line: usize,
        /// What is wrong with it.
        why: String,
    },
    /// The model cannot be described.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// No temporary folder.
    #[error("cannot write the model's outline: {0}")]
    Io(#[from] std::io::Error),
}
