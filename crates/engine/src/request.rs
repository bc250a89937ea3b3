//! A request to the engine, and the check of its parameters.

use std::fmt::Display;

use crate::constraint::Constraint;
use crate::event::AnsweredToken;
use crate::model_info::{ModelInfo, ModelKind};
use crate::sampling::Sampling;

/// A prompt and how to continue it.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Token ids, special tokens included. Must not be empty.
    pub prompt: Vec<u32>,
    /// How to choose the tokens that follow.
    pub sampling: Sampling,
    /// Maximum tokens to generate; `None`: until the context is full.
    pub max_tokens: Option<usize>,
    /// Generation ends before the first of these texts; no part of it is ever emitted.
    pub stop: Vec<String>,
    /// Continue after the model's end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Report the log-probability of each token and of this many alternatives (0 to 20).
    pub logprobs: Option<usize>,
    /// Special tokens to report as [`Event::Mark`](crate::Event::Mark), in ascending order. Other
    /// special tokens have no effect on the answer.
    pub marks: Vec<u32>,
    /// The grammar of the answer, already advanced over `answered`.
    pub constraint: Option<Constraint>,
    /// The answer's first tokens, if another engine has chosen them. The answer continues after
    /// them with the numbers and random draws that it would have had without the change. Their
    /// events are sent again.
    pub answered: Vec<AnsweredToken>,
    /// The expected answer, for guesses. It makes the answer faster, and never changes it.
    pub predicted: Vec<u32>,
    /// Report the tokens of the answer as [`Event::Accepted`](crate::Event::Accepted).
    pub reports_tokens: bool,
    /// Report the ranks' work as [`Event::Work`](crate::Event::Work).
    pub reports_work: bool,
    /// The requested result.
    pub output: Output,
    /// The low-rank adapter that changes the model: its index in [`ModelInfo::adapters`].
    pub adapter: Option<usize>,
}

/// The result of a request. All except text end after the prompt, and sample nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Output {
    /// A continuation of the prompt.
    #[default]
    Text,
    /// The hidden state at the prompt's last token, after the last norm
    /// ([`Event::Hidden`](crate::Event::Hidden)).
    Hidden,
    /// How likely each of these tokens is to follow the prompt
    /// ([`Event::Likelihoods`](crate::Event::Likelihoods)).
    Likelihoods(Vec<u32>),
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// The prompt has no tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt fills the context and leaves no space for an answer.
    #[error("the prompt has {tokens} tokens, but the context holds {context}: shorten it")]
    PromptTooLong {
        /// Tokens in the prompt.
        tokens: usize,
        /// Maximum tokens of a prompt and its answer together.
        context: usize,
    },
    /// The model is an encoder, but the request wants text or tokens.
    #[error("\"{model}\" is {what}: ask for embeddings or a reranking")]
    NoText {
        /// The model's name.
        model: String,
        /// What it is.
        what: &'static str,
    },
    /// A parameter is out of range.
    #[error("{name} is {value}, but must be {must_be}")]
    BadParameter {
        /// OpenAI's field name.
        name: &'static str,
        /// The value given.
        value: String,
        /// The permitted range, in words.
        must_be: &'static str,
    },
    /// Too many requests are waiting.
    #[error("{waiting} requests are waiting already, the most that is allowed: try again later")]
    Busy {
        /// Requests that wait.
        waiting: usize,
    },
    /// The engine has stopped, for this reason.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}

impl Request {
    /// Checks the parameters against the model.
    ///
    /// # Errors
    /// Names the first parameter that is out of range.
    pub fn check(&self, info: &ModelInfo) -> Result<(), SubmitError> {
        if self.output != Output::Hidden
            && let Some(what) = info.kind.no_text()
        {
            return Err(SubmitError::NoText { model: info.name.clone(), what });
        }
        self.check_prompt(info)?;
        if let Some(adapter) = self.adapter.filter(|adapter| *adapter >= info.adapters.len()) {
            return bad("adapter", &adapter, "one of those that the engine has loaded");
        }
        if let Output::Likelihoods(ids) = &self.output
            && let Some(id) = ids.iter().find(|&&id| id as usize >= info.vocab_size)
        {
            return bad("tokens", id, "below the vocabulary size");
        }
        self.sampling.check(info.vocab_size)?;
        if self.max_tokens == Some(0) {
            return bad("max_tokens", &0, "at least 1");
        }
        if self.stop.iter().any(String::is_empty) {
            return bad("stop", &"\"\"", "made of texts that are not empty");
        }
        if let Some(count) = self.logprobs.filter(|count| *count > 20) {
            return bad("top_logprobs", &count, "between 0 and 20");
        }
        Ok(())
    }

    fn check_prompt(&self, info: &ModelInfo) -> Result<(), SubmitError> {
        if self.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        // An encoder's texts have no answer that needs space.
        let answer = usize::from(info.kind == ModelKind::Decoder);
        if self.prompt.len() + answer > info.context_length {
            return Err(SubmitError::PromptTooLong {
                tokens: self.prompt.len(),
                context: info.context_length,
            });
        }
        let answered = self.answered.iter().map(|token| &token.id);
        let ids = info.vocab_size * info.token_types;
        if let Some(id) = self.prompt.iter().chain(answered).find(|&&id| id as usize >= ids) {
            return bad("prompt", id, "made of token ids below the vocabulary size");
        }
        let tokens = self.prompt.len() + self.answered.len();
        if tokens > info.context_length {
            return Err(SubmitError::PromptTooLong { tokens, context: info.context_length });
        }
        Ok(())
    }
}

impl Sampling {
    fn check(&self, vocab_size: usize) -> Result<(), SubmitError> {
        if !(0.0..=2.0).contains(&self.temperature) {
            return bad("temperature", &self.temperature, "between 0 and 2");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return bad("top_p", &self.top_p, "above 0 and at most 1");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return bad("min_p", &self.min_p, "between 0 and 1");
        }
        // With less, logits may no longer be finite.
        if !(0.01..=10.0).contains(&self.repetition_penalty) {
            return bad("repetition_penalty", &self.repetition_penalty, "between 0.01 and 10");
        }
        if !(-2.0..=2.0).contains(&self.presence_penalty) {
            return bad("presence_penalty", &self.presence_penalty, "between -2 and 2");
        }
        if !(-2.0..=2.0).contains(&self.frequency_penalty) {
            return bad("frequency_penalty", &self.frequency_penalty, "between -2 and 2");
        }
        for (id, bias) in &self.logit_bias {
            if *id as usize >= vocab_size {
                return bad("logit_bias", id, "keyed by token ids below the vocabulary size");
            }
            if !(-100.0..=100.0).contains(bias) {
                return bad("logit_bias", bias, "between -100 and 100");
            }
        }
        Ok(())
    }
}

fn bad(name: &'static str, value: &dyn Display, must_be: &'static str) -> Result<(), SubmitError> {
    Err(SubmitError::BadParameter { name, value: value.to_string(), must_be })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn penalties_that_would_make_logits_infinite_are_refused() {
        let refusal = |repetition_penalty| {
            let sampling = Sampling { repetition_penalty, ..Sampling::default() };
            sampling.check(10).err().map(|error| error.to_string())
        };
        assert_eq!([0.01, 1.0, 10.0].map(refusal), [const { None }; 3]);
        for wrong in [0.0, 1e-38, f32::NAN, 11.0] {
            let refusal = refusal(wrong).unwrap_or_default();
            assert!(refusal.contains("between 0.01 and 10"), "{wrong}: {refusal}");
        }
    }
}
