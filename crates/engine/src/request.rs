//! What a caller asks of the engine, and what it gets back.

use std::time::Duration;

/// A prompt and how to continue it.
#[derive(Debug, Clone)]
pub struct Request {
    /// Token ids, special tokens included. Must not be empty.
    pub prompt: Vec<u32>,
    /// How to choose the tokens that follow.
    pub sampling: Sampling,
    /// Most tokens to generate; `None`: until the context is full.
    pub max_tokens: Option<usize>,
    /// Generation ends before the first of these texts; no part of it is ever emitted.
    pub stop: Vec<String>,
    /// Go on past the model's end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Report the log-probability of each token and of this many alternatives (0 to 20).
    pub logprobs: Option<usize>,
}

/// How a token is chosen from the logits. Applied in this order: penalties and bias, temperature, top-k, top-p, min-p.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; else logits are divided by it.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probabilities sum to this. 1 keeps all.
    pub top_p: f32,
    /// Keep this many of the likeliest tokens. 0 keeps all.
    pub top_k: usize,
    /// Keep tokens at least this fraction as likely as the likeliest. 0 keeps all.
    pub min_p: f32,
    /// Divide positive logits (multiply negative ones) of tokens seen in prompt or answer. 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens seen in the answer. 0 is off.
    pub presence_penalty: f32,
    /// Subtracted for each time that a token was seen in the answer. 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Same seed, same request: same text, whatever else runs. `None` draws a seed.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

/// One token of the answer, reported when [`Request::logprobs`] asks for it.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// Token id.
    pub id: u32,
    /// The bytes that the token stands for, not necessarily whole characters.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability under the model's unmodified distribution.
    pub logprob: f32,
    /// The likeliest tokens at this place, best first: id, bytes, logprob.
    pub top: Vec<(u32, Vec<u8>, f32)>,
}

/// What a request's stream yields. The last event is [`Event::Done`] or [`Event::Failed`]; nothing follows it.
#[derive(Debug, Clone)]
pub enum Event {
    /// More text: whole characters, at least one.
    Delta {
        /// The text to append.
        text: String,
        /// The tokens accepted since the last delta, when asked for.
        logprobs: Vec<TokenLogprob>,
    },
    /// The answer is complete.
    Done {
        /// Why it ended.
        reason: FinishReason,
        /// What it took.
        usage: Usage,
    },
    /// The answer cannot go on (a rank was lost, the engine stopped). What was emitted is incomplete.
    Failed {
        /// For people: what happened and what to do.
        message: String,
    },
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-sequence token or a stop text.
    Stop,
    /// `max_tokens` or the context length was reached.
    Length,
}

/// What a request took.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Usage {
    /// Tokens in the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated, the one that ended the answer included.
    pub completion_tokens: usize,
    /// From submission until the first token was chosen.
    pub time_to_first_token: Duration,
    /// From the first token to the last.
    pub decode_time: Duration,
}

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// The prompt has no tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt fills the context, so that nothing can follow it.
    #[error("the prompt has {tokens} tokens, but the context holds {context}: shorten it")]
    PromptTooLong {
        /// Tokens in the prompt.
        tokens: usize,
        /// Tokens that prompt and answer may have together.
        context: usize,
    },
    /// A parameter is outside of its range.
    #[error("{name} is {value}, but must be {must_be}")]
    BadParameter {
        /// OpenAI's field name.
        name: &'static str,
        /// The value given.
        value: String,
        /// The permitted range, in words.
        must_be: &'static str,
    },
    /// Too many requests wait already.
    #[error("{waiting} requests are waiting already, the most that is allowed: try again later")]
    Busy {
        /// Requests that wait.
        waiting: usize,
    },
    /// The engine has stopped; the text says why.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}

impl Request {
    /// Checks ranges against the model.
    ///
    /// # Errors
    /// Names the first parameter that is outside of its range.
    pub fn check(&self, info: &crate::handle::ModelInfo) -> Result<(), SubmitError> {
        let bad = |name, value: &dyn std::fmt::Display, must_be| {
            Err(SubmitError::BadParameter { name, value: value.to_string(), must_be })
        };
        let s = &self.sampling;
        if self.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        if self.prompt.len() >= info.context_length {
            return Err(SubmitError::PromptTooLong {
                tokens: self.prompt.len(),
                context: info.context_length,
            });
        }
        if let Some(id) = self.prompt.iter().find(|&&id| id as usize >= info.vocab_size) {
            return bad("prompt", id, "made of token ids below the vocabulary size");
        }
        if !(0.0..=2.0).contains(&s.temperature) {
            return bad("temperature", &s.temperature, "between 0 and 2");
        }
        if !(s.top_p > 0.0 && s.top_p <= 1.0) {
            return bad("top_p", &s.top_p, "above 0 and at most 1");
        }
        if !(0.0..=1.0).contains(&s.min_p) {
            return bad("min_p", &s.min_p, "between 0 and 1");
        }
        if !(s.repetition_penalty > 0.0 && s.repetition_penalty <= 10.0) {
            return bad("repetition_penalty", &s.repetition_penalty, "above 0 and at most 10");
        }
        if !(-2.0..=2.0).contains(&s.presence_penalty) {
            return bad("presence_penalty", &s.presence_penalty, "between -2 and 2");
        }
        if !(-2.0..=2.0).contains(&s.frequency_penalty) {
            return bad("frequency_penalty", &s.frequency_penalty, "between -2 and 2");
        }
        for (id, bias) in &s.logit_bias {
            if *id as usize >= info.vocab_size {
                return bad("logit_bias", id, "keyed by token ids below the vocabulary size");
            }
            if !(-100.0..=100.0).contains(bias) {
                return bad("logit_bias", bias, "between -100 and 100");
            }
        }
        if self.max_tokens == Some(0) {
            return bad("max_tokens", &0, "at least 1");
        }
        if self.stop.iter().any(String::is_empty) {
            return bad("stop", &"\"\"", "made of texts that are not empty");
        }
        if self.logprobs.is_some_and(|n| n > 20) {
            return bad("top_logprobs", &self.logprobs.unwrap_or(0), "between 0 and 20");
        }
        Ok(())
    }
}
