//! What a request's stream yields.

use std::time::Duration;

/// An event of a request. The last one is [`Event::Done`] or [`Event::Failed`]; nothing follows it.
#[derive(Debug, Clone)]
pub enum Event {
    /// More text: whole characters, at least one.
    Delta {
        /// The text to append.
        text: String,
        /// The tokens accepted since the last delta, if the request asks for log-probabilities.
        logprobs: Vec<TokenLogprob>,
    },
    /// The answer is complete.
    Done {
        /// Why the answer ended.
        reason: FinishReason,
        /// Tokens and time that the request took.
        usage: Usage,
    },
    /// The answer cannot go on: a rank was lost, or the engine stopped. The text so far is
    /// incomplete.
    Failed {
        /// For people: what happened and what to do.
        message: String,
    },
}

/// One token of an answer, reported when [`Request::logprobs`](crate::Request::logprobs) asks for
/// it.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// Token id.
    pub id: u32,
    /// The token's bytes, not necessarily whole characters.
    pub bytes: Vec<u8>,
    /// Natural logarithm of the token's probability under the model's unmodified distribution.
    pub logprob: f32,
    /// The likeliest tokens at this place, best first: id, bytes, logprob.
    pub top: Vec<(u32, Vec<u8>, f32)>,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-sequence token or a stop text.
    Stop,
    /// `max_tokens` or the context length was reached.
    Length,
}

/// Tokens and time that a request took.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Usage {
    /// Tokens in the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated, including the one that ended the answer.
    pub completion_tokens: usize,
    /// From submission until the first token was chosen.
    pub time_to_first_token: Duration,
    /// From the first token to the last.
    pub decode_time: Duration,
}
