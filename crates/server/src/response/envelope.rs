//! What both APIs have around their choices.

use std::sync::Arc;

use serde::Serialize;

use crate::app::App;

/// What all answers and chunks of both APIs have around their choices.
#[derive(Debug, Serialize)]
pub(crate) struct Envelope<'a, C> {
    pub id: &'a str,
    pub object: &'a str,
    pub created: u64,
    pub model: &'a str,
    pub system_fingerprint: &'a str,
    pub choices: Vec<C>,
    /// Absent in chunks of a stream without usage, `null` in all but the last chunk of one with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<UsageBody>>,
}

/// Tokens that a request took; a prompt counts once, however many answers it got.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct UsageBody {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
}

/// What stays the same over an answer's chunks.
#[derive(Debug)]
pub(crate) struct Head {
    pub app: Arc<App>,
    pub id: String,
    pub created: u64,
    pub prompt_tokens: usize,
}

impl Head {
    /// A body around some choices.
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

    /// The usage body, given the tokens generated.
    pub fn usage(&self, completion_tokens: usize) -> UsageBody {
        let prompt_tokens = self.prompt_tokens;
        UsageBody { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
}
