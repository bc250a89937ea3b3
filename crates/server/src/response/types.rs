//! The bodies of answers, with OpenAI's names.

use serde::Serialize;
use thunder_engine::{FinishReason, TokenLogprob};

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
