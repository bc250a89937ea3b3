//! The bodies of answers, with OpenAI's names.

use serde::Serialize;
use thunder_engine::{FinishReason, TokenLogprob};

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

/// How one of the two APIs writes a choice, whole and in pieces.
pub(crate) trait Shape: Send + 'static {
    /// Before the number of an answer.
    const ID_PREFIX: &'static str;
    /// `object` of a whole answer.
    const WHOLE: &'static str;
    /// `object` of a chunk.
    const CHUNK: &'static str;
    /// A choice in a chunk.
    type Piece: Serialize + Send;
    /// A choice in a whole answer.
    type Choice: Serialize;

    /// What a choice's stream begins with, if anything.
    fn opening(&self, index: usize) -> Option<Self::Piece>;
    /// More text.
    fn piece(&mut self, index: usize, text: String, logprobs: &[TokenLogprob]) -> Self::Piece;
    /// The end of a choice's stream.
    fn ending(&self, index: usize, reason: FinishReason) -> Self::Piece;
    /// A whole choice.
    fn choice(
        &mut self,
        index: usize,
        text: String,
        logprobs: &[TokenLogprob],
        reason: FinishReason,
    ) -> Self::Choice;
}

/// OpenAI's word for why an answer ended.
pub(crate) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}
