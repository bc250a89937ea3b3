//! The body around the choices, which both APIs share.

use std::sync::Arc;

use serde::Serialize;

use crate::app::App;

/// The body of a response or chunk of both APIs, around its choices.
#[derive(Debug, Serialize)]
pub(crate) struct Envelope<'a, C> {
    pub id: &'a str,
    pub object: &'a str,
    pub created: u64,
    pub model: &'a str,
    pub system_fingerprint: &'a str,
    pub choices: Vec<C>,
    /// Absent in a stream without usage. In a stream with usage, `null` in all chunks except the
    /// last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<UsageBody>>,
}

/// Tokens that a request used. A prompt counts once, whatever its number of completions.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct UsageBody {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
}

/// The fields that all chunks of a response share.
#[derive(Debug)]
pub(crate) struct ResponseHead {
    pub app: Arc<App>,
    pub id: String,
    pub created: u64,
    pub prompt_tokens: usize,
}

impl ResponseHead {
    /// A body with these choices.
    pub fn envelope<'a, C>(
        &'a self,
        object: &'a str,
        choices: Vec<C>,
        usage: Option<Option<UsageBody>>,
    ) -> Envelope<'a, C> {
        Envelope {
            id: &self.id,
            object,
            created: self.created,
            model: &self.app.engine.info().name,
            system_fingerprint: &self.app.fingerprint,
            choices,
            usage,
        }
    }

    /// The usage, given the number of generated tokens.
    pub fn usage(&self, completion_tokens: usize) -> UsageBody {
        let prompt_tokens = self.prompt_tokens;
        UsageBody { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
}
