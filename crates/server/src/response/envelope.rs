//! The body around the choices, which OpenAI's two older APIs share.

use serde::Serialize;
use serde_json::Value;
use thunder_engine::Predicted;

use crate::error::ApiError;
use crate::generate::choices::Tally;
use crate::generate::reply::Head;

/// The last event of a complete stream. A failed stream does not have it.
pub(crate) const DONE: &str = "[DONE]";

/// The body of a response or chunk, around its choices.
#[derive(Debug, Serialize)]
pub(crate) struct Envelope<'a, C> {
    id: &'a str,
    object: &'a str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: Vec<C>,
    /// Absent in a stream without usage. In a stream with usage, `null` in all chunks except the
    /// last.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
}

/// Tokens that a request used. A prompt counts once, with any number of completions.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct UsageBody {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    /// Of requests with a prediction.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionDetails>,
}

/// Accepted and rejected tokens of a prediction.
#[derive(Debug, Clone, Copy, Serialize)]
struct CompletionDetails {
    accepted_prediction_tokens: usize,
    rejected_prediction_tokens: usize,
}

#[derive(Debug, Clone, Copy, Default, Serialize)]
struct PromptDetails {
    cached_tokens: usize,
}

impl UsageBody {
    pub fn new(prompt_tokens: usize, used: &Tally) -> Self {
        Self {
            prompt_tokens,
            completion_tokens: used.generated,
            total_tokens: prompt_tokens + used.generated,
            prompt_tokens_details: PromptDetails { cached_tokens: used.cached() },
            completion_tokens_details: used.predicted.map(|Predicted { right, wrong }| CompletionDetails {
                accepted_prediction_tokens: right,
                rejected_prediction_tokens: wrong,
            }),
        }
    }
}

impl<'a, C: Serialize> Envelope<'a, C> {
    /// A body of the response `head` with these choices.
    pub fn of(head: &'a Head, object: &'a str, choices: Vec<C>, usage: Option<Option<UsageBody>>) -> Self {
        let (created, model) = (head.created, head.model());
        let system_fingerprint = &head.app.fingerprint;
        Self { id: &head.id, object, created, model, system_fingerprint, choices, usage }
    }

    /// The body as JSON.
    pub fn into_json(self) -> Value {
        // Serialization of strings and numbers cannot fail.
        serde_json::to_value(self).unwrap_or_else(|error| ApiError::engine_failed(error.to_string()).body())
    }
}
