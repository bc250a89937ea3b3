//! POST /v1/completions.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;
use serde_json::{Value, json};
use thunder_engine::{Engine, FinishReason, ModelInfo, Sampling, TokenLogprob};

use crate::app::App;
use crate::error::ApiError;
use crate::request::fields::{Fields, wrong};
use crate::request::options::{MAX_CHOICES, MAX_TOP_LOGPROBS, Options};
use crate::response::logprobs::TextLogprobs;
use crate::response::reply::{Asked, reply};
use crate::response::types::{Shape, finish_reason};

/// Tokens of an answer whose request names no number: OpenAI's default for this API.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Fields of OpenAI's API that would change the answer in ways that are not there yet.
const UNSUPPORTED: &[&str] =
    &["suffix", "tools", "tool_choice", "response_format", "top_logprobs", "min_tokens"];

/// A prompt as it was given.
#[derive(Debug, PartialEq)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// A request's body, checked.
#[derive(Debug, PartialEq)]
pub(crate) struct CompletionRequest {
    pub options: Options,
    pub prompts: Vec<Prompt>,
    /// How many alternatives to report.
    pub logprobs: Option<usize>,
}

impl CompletionRequest {
    pub fn parse(body: Value, defaults: &Sampling) -> Result<Self, ApiError> {
        let mut fields = Fields::new(body, "")?;
        let mut options = Options::take(&mut fields, defaults)?;
        options.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS);
        let logprobs = fields.whole("logprobs", 0, MAX_TOP_LOGPROBS, "a whole number from 0 to 20")?;
        let prompts = prompts(&mut fields)?;
        if prompts.len() * options.n > MAX_CHOICES {
            let message = format!(
                "{} prompts with n = {} make more than {MAX_CHOICES} answers: send several requests",
                prompts.len(),
                options.n
            );
            return Err(ApiError::field("n", message));
        }
        fields.only("echo", &[json!(false)])?;
        // The best of as many as are returned is all of them.
        fields.only("best_of", &[json!(options.n)])?;
        fields.finish(UNSUPPORTED)?;
        Ok(Self { options, prompts, logprobs })
    }
}

/// A text, token ids, or a list of either.
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
                other => Err(wrong(&format!("prompt[{index}]"), &other, "a string or a list of token ids")),
            };
            items.into_iter().enumerate().map(prompt).collect()
        }
        Some(other) => Err(wrong("prompt", &other, must_be)),
    }
}

fn ids(items: Vec<Value>, name: &str) -> Result<Vec<u32>, ApiError> {
    let id = |(index, item): (usize, &Value)| {
        let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| wrong(&format!("{name}[{index}]"), item, "a token id, as all before it are"))
    };
    items.iter().enumerate().map(id).collect()
}

fn tokens(prompt: Prompt, info: &ModelInfo) -> Result<Vec<u32>, ApiError> {
    match prompt {
        Prompt::Ids(ids) => Ok(ids),
        Prompt::Text(text) => {
            info.tokenizer.encode(&text, true).map_err(|error| ApiError::field("prompt", error.to_string()))
        }
    }
}

/// The handler.
pub(crate) async fn create(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let body = app.read_json(request).await?;
    let asked = CompletionRequest::parse(body, &app.engine.info().default_sampling)?;
    app.check_model(&asked.options.model)?;
    let CompletionRequest { options, prompts, logprobs } = asked;
    let engine = app.engine.clone();
    let prompts: Vec<_> = app
        .blocking(move || prompts.into_iter().map(|prompt| tokens(prompt, engine.info())).collect())
        .await?;
    let offsets = vec![0; prompts.len() * options.n];
    let shape = TextShape { engine: app.engine.clone(), offsets, logprobs: logprobs.is_some() };
    reply(&app, Asked { options, prompts, field: "prompt", logprobs }, shape).await
}

/// Choices of the completions API.
#[derive(Debug)]
struct TextShape {
    engine: Engine,
    /// For each choice, the characters so far.
    offsets: Vec<usize>,
    logprobs: bool,
}

/// The same in chunks and whole answers, but for the finish reason.
#[derive(Debug, Serialize)]
struct TextChoice {
    text: String,
    index: usize,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<&'static str>,
}

impl Shape for TextShape {
    const ID_PREFIX: &'static str = "cmpl";
    const WHOLE: &'static str = "text_completion";
    const CHUNK: &'static str = "text_completion";
    type Piece = TextChoice;
    type Choice = TextChoice;

    fn opening(&self, _index: usize) -> Option<TextChoice> {
        None
    }

    fn piece(&mut self, index: usize, text: String, logprobs: &[TokenLogprob]) -> TextChoice {
        let logprobs = self
            .logprobs
            .then(|| TextLogprobs::new(logprobs, &self.engine.info().tokenizer, &mut self.offsets[index]));
        TextChoice { text, index, logprobs, finish_reason: None }
    }

    fn ending(&self, index: usize, reason: FinishReason) -> TextChoice {
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
        TextChoice { finish_reason: Some(finish_reason(reason)), ..self.piece(index, text, logprobs) }
    }
}
