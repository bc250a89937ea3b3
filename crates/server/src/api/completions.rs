//! POST /v1/completions.

use serde::Serialize;
use serde_json::{Value, json};
use thunder_engine::{Sampling, TokenLogprob};

use super::Api;
use crate::error::ApiError;
use crate::generate::choices::{Choices, Tally};
use crate::generate::frames::{Frames, StreamKind};
use crate::generate::reply::{Head, Presenter};
use crate::generate::{Generation, Input, Update, What};
use crate::request::fields::Fields;
use crate::request::options::{MAX_CHOICES, MAX_TOP_LOGPROBS, Options};
use crate::request::{prompts, tools};
use crate::response::envelope::{DONE, Envelope, UsageBody};
use crate::response::logprobs::CompletionLogprobs;

/// Limit when a request has no `max_tokens`: OpenAI's default for this API.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Fields of OpenAI's API that would change the output and are not implemented.
const UNSUPPORTED: &[&str] = &["suffix", "tools", "tool_choice", "top_logprobs", "min_tokens"];

/// Formats the completions API's choices.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Completions {
    logprobs: bool,
    include_usage: bool,
    /// Characters so far, per choice.
    offsets: Vec<usize>,
    used: Tally,
}

impl Api for Completions {
    fn parse(body: Value, defaults: &Sampling) -> Result<(Generation, Self), ApiError> {
        let mut fields = Fields::new(body, "")?;
        let mut options = Options::take(&mut fields, defaults)?;
        options.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS);
        let logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS, "an integer from 0 to 20")?;
        let prompts = prompts::take(&mut fields, "prompt")?;
        let choices = prompts.len() * options.n;
        if choices > MAX_CHOICES {
            let message = format!(
                "{} prompts with n = {} make more than {MAX_CHOICES} completions: send several requests",
                prompts.len(),
                options.n
            );
            return Err(ApiError::field("n", message));
        }
        fields.accept_only("echo", &[json!(false)])?;
        // With `best_of` = `n`, all completions are returned, which is the default behaviour.
        fields.accept_only("best_of", &[json!(options.n)])?;
        let grammar = tools::grammar(&mut fields)?;
        fields.finish(UNSUPPORTED)?;
        let api = Self {
            logprobs: logprobs.is_some(),
            include_usage: options.include_usage,
            offsets: vec![0; choices],
            used: Tally::default(),
        };
        let generation = Generation::new(options, Input::Prompts(prompts), "prompt");
        Ok((Generation { grammar, logprobs, ..generation }, api))
    }
}

/// A choice. Chunks and whole responses use the same form, except that `finish_reason` is null
/// until the last chunk.
#[derive(Debug, Serialize)]
struct TextChoice {
    text: String,
    index: usize,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
}

impl Completions {
    fn choice(
        &mut self,
        head: &Head,
        index: usize,
        (text, tokens): (String, &[TokenLogprob]),
        finish_reason: Option<&'static str>,
    ) -> TextChoice {
        let tokenizer = &head.app.engine.info().tokenizer;
        let is_last_chunk = finish_reason.is_some() && text.is_empty() && tokens.is_empty();
        let logprobs = (self.logprobs && !is_last_chunk)
            .then(|| CompletionLogprobs::new(tokens, tokenizer, &mut self.offsets[index]));
        TextChoice { text, index, logprobs, finish_reason }
    }
}

impl Presenter for Completions {
    const ID_PREFIX: &'static str = "cmpl-";
    const STREAM: StreamKind = StreamKind::Events;

    fn whole(&mut self, head: &Head, choices: Choices) -> Value {
        let usage = UsageBody::new(head.prompt_tokens, &choices.used());
        let numbered = choices.0.into_iter().enumerate();
        let choices = numbered
            .map(|(index, choice)| {
                let reason = choice.reason().openai();
                self.choice(head, index, (choice.text, &choice.logprobs), Some(reason))
            })
            .collect();
        Envelope::of(head, "text_completion", choices, Some(Some(usage))).into_json()
    }

    fn begin(&mut self, _head: &Head, _out: &mut Frames) {}

    fn update(&mut self, head: &Head, update: Update, out: &mut Frames) {
        let choice = match update.what {
            What::Text { text, logprobs } => self.choice(head, update.choice, (text, &logprobs), None),
            What::End { reason, usage } => {
                self.used.add(&usage);
                self.choice(head, update.choice, (String::new(), &[]), Some(reason.openai()))
            }
            // Prompts without a template have neither thinking nor calls.
            _ => return,
        };
        let usage = self.include_usage.then_some(None);
        out.body(&Envelope::of(head, "text_completion", vec![choice], usage));
    }

    fn end(&mut self, head: &Head, out: &mut Frames) {
        if self.include_usage {
            let usage = UsageBody::new(head.prompt_tokens, &self.used);
            let none: Vec<TextChoice> = Vec::new();
            out.body(&Envelope::of(head, "text_completion", none, Some(Some(usage))));
        }
        out.text(DONE);
    }

    fn failed(&mut self, _head: &Head, error: &ApiError, out: &mut Frames) {
        out.json(&error.body());
    }
}
