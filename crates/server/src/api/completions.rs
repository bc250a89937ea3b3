//! POST /v1/completions.

use serde::Serialize;
use serde_json::{Value, json};
use thunder_engine::{Engine, FinishReason, ModelInfo, Sampling, TokenLogprob};

use super::GenerateRequest;
use crate::error::ApiError;
use crate::request::fields::{Fields, invalid_value};
use crate::request::options::{MAX_CHOICES, MAX_TOP_LOGPROBS, Options};
use crate::response::format::{ChoiceFormat, finish_reason};
use crate::response::logprobs::CompletionLogprobs;
use crate::response::reply::PreparedRequest;

/// Limit when a request has no `max_tokens`: OpenAI's default for this API.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Fields of OpenAI's API that would change the output and are not implemented.
const UNSUPPORTED: &[&str] =
    &["suffix", "tools", "tool_choice", "response_format", "top_logprobs", "min_tokens"];

/// A prompt as the request has it.
#[derive(Debug, PartialEq)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// A checked request body.
#[derive(Debug, PartialEq)]
pub(crate) struct CompletionRequest {
    pub options: Options,
    pub prompts: Vec<Prompt>,
    /// Alternatives to report per token; `None` for no logprobs.
    pub logprobs: Option<usize>,
}

impl GenerateRequest for CompletionRequest {
    type Format = CompletionFormat;

    fn parse(body: Value, defaults: &Sampling) -> Result<Self, ApiError> {
        let mut fields = Fields::new(body, "")?;
        let mut options = Options::take(&mut fields, defaults)?;
        options.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS);
        let logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS, "an integer from 0 to 20")?;
        let prompts = prompts(&mut fields)?;
        if prompts.len() * options.n > MAX_CHOICES {
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
        fields.finish(UNSUPPORTED)?;
        Ok(Self { options, prompts, logprobs })
    }

    fn options(&self) -> &Options {
        &self.options
    }

    fn prepare(self, engine: &Engine) -> Result<(PreparedRequest, CompletionFormat), ApiError> {
        let Self { options, prompts, logprobs } = self;
        let prompts: Vec<_> =
            prompts.into_iter().map(|prompt| tokens(prompt, engine.info())).collect::<Result<_, _>>()?;
        let offsets = vec![0; prompts.len() * options.n];
        let format = CompletionFormat { engine: engine.clone(), offsets, logprobs: logprobs.is_some() };
        Ok((PreparedRequest { options, prompts, field: "prompt", logprobs }, format))
    }
}

/// Reads `prompt`: a string, token ids, or a list of either.
fn prompts(fields: &mut Fields) -> Result<Vec<Prompt>, ApiError> {
    let must_be = "a string, a list of token ids, or a list of strings or of lists of token ids";
    match fields.value("prompt") {
        None => Err(fields.missing("prompt")),
        Some(Value::String(text)) => Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(items)) if items.first().is_some_and(Value::is_number) => {
            Ok(vec![Prompt::Ids(ids(items, "prompt")?)])
        }
        Some(Value::Array(items)) if !items.is_empty() => {
            let prompt = |(index, item)| match item {
                Value::String(text) => Ok(Prompt::Text(text)),
                Value::Array(items) => Ok(Prompt::Ids(ids(items, &format!("prompt[{index}]"))?)),
                other => {
                    Err(invalid_value(&format!("prompt[{index}]"), &other, "a string or a list of token ids"))
                }
            };
            items.into_iter().enumerate().map(prompt).collect()
        }
        Some(other) => Err(invalid_value("prompt", &other, must_be)),
    }
}

fn ids(items: Vec<Value>, name: &str) -> Result<Vec<u32>, ApiError> {
    let id = |(index, item): (usize, &Value)| {
        let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| {
            invalid_value(&format!("{name}[{index}]"), item, "a token id, like the items before it")
        })
    };
    items.iter().enumerate().map(id).collect()
}

fn tokens(prompt: Prompt, info: &ModelInfo) -> Result<Vec<u32>, ApiError> {
    match prompt {
        Prompt::Ids(ids) => Ok(ids),
        Prompt::Text(text) => info.text_prompt(&text).map_err(|error| ApiError::no_prompt(&error, "prompt")),
    }
}

/// Formats the completions API's choices.
#[derive(Debug)]
pub(crate) struct CompletionFormat {
    engine: Engine,
    /// Characters so far, per choice.
    offsets: Vec<usize>,
    logprobs: bool,
}

/// A choice. Chunks and whole responses use the same form, except that `finish_reason` is null
/// until the last chunk.
#[derive(Debug, Serialize)]
pub(crate) struct TextChoice {
    text: String,
    index: usize,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
}

impl ChoiceFormat for CompletionFormat {
    const ID_PREFIX: &'static str = "cmpl";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";
    type ChunkChoice = TextChoice;
    type Choice = TextChoice;

    fn first_chunk(&self, _index: usize) -> Option<TextChoice> {
        None
    }

    fn text_chunk(&mut self, index: usize, text: String, logprobs: &[TokenLogprob]) -> TextChoice {
        let logprobs = self.logprobs.then(|| {
            CompletionLogprobs::new(logprobs, &self.engine.info().tokenizer, &mut self.offsets[index])
        });
        TextChoice { text, index, logprobs, finish_reason: None }
    }

    fn last_chunk(&self, index: usize, reason: FinishReason) -> TextChoice {
        let finish_reason = Some(finish_reason(reason));
        TextChoice { text: String::new(), index, logprobs: None, finish_reason }
    }

    fn choice(
        &mut self,
        index: usize,
        text: String,
        logprobs: &[TokenLogprob],
        reason: FinishReason,
    ) -> TextChoice {
        TextChoice { finish_reason: Some(finish_reason(reason)), ..self.text_chunk(index, text, logprobs) }
    }
}
