//! How the two APIs differ in the form of a choice.

use serde::Serialize;
use thunder_engine::{FinishReason, TokenLogprob};

/// How one of the two APIs writes a choice, whole and in chunks.
pub(crate) trait ChoiceFormat: Send + 'static {
    /// The prefix of a response's id.
    const ID_PREFIX: &'static str;
    /// `object` of a whole response.
    const OBJECT: &'static str;
    /// `object` of a chunk.
    const CHUNK_OBJECT: &'static str;
    /// A choice in a chunk.
    type ChunkChoice: Serialize + Send;
    /// A choice in a whole response.
    type Choice: Serialize;

    /// The chunk before the first text, if the API has one.
    fn first_chunk(&self, index: usize) -> Option<Self::ChunkChoice>;
    /// A chunk with more text.
    fn text_chunk(&mut self, index: usize, text: String, logprobs: &[TokenLogprob]) -> Self::ChunkChoice;
    /// The chunk with the finish reason.
    fn last_chunk(&self, index: usize, reason: FinishReason) -> Self::ChunkChoice;
    /// A whole choice.
    fn choice(
        &mut self,
        index: usize,
        text: String,
        logprobs: &[TokenLogprob],
        reason: FinishReason,
    ) -> Self::Choice;
}

/// OpenAI's name for a finish reason.
pub(crate) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}
