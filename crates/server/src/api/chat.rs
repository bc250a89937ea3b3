//! POST /v1/chat/completions.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;
use serde_json::{Map, Value, json};
use thunder_engine::{Engine, FinishReason, ModelInfo, Sampling, TokenLogprob};

use crate::app::App;
use crate::error::ApiError;
use crate::request::fields::Fields;
use crate::request::messages;
use crate::request::options::{MAX_TOP_LOGPROBS, Options};
use crate::response::format::{ChoiceFormat, finish_reason};
use crate::response::logprobs::ChatLogprobs;
use crate::response::reply::{PreparedRequest, reply};

/// Fields of OpenAI's chat API that would change the output and are not implemented.
const UNSUPPORTED: &[&str] = &[
    "tools",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "audio",
    "prediction",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
    "prompt_cache_retention",
    "moderation",
    "best_of",
    "echo",
    "suffix",
    "min_tokens",
];

/// Template variables that the server sets.
const RESERVED: &[&str] = &["messages", "tools", "add_generation_prompt"];

/// A checked request body.
#[derive(Debug, PartialEq)]
pub(crate) struct ChatRequest {
    pub options: Options,
    pub messages: Vec<Value>,
    /// Variables for the chat template.
    template_kwargs: Map<String, Value>,
    /// Alternatives to report per token; `None` for no logprobs.
    pub logprobs: Option<usize>,
}

impl ChatRequest {
    pub fn parse(body: Value, defaults: &Sampling) -> Result<Self, ApiError> {
        let mut fields = Fields::new(body, "")?;
        let mut options = Options::take(&mut fields, defaults)?;
        let max_completion_tokens =
            fields.integer("max_completion_tokens", 1, usize::MAX, "an integer of at least 1")?;
        if max_completion_tokens.is_some() && options.max_tokens.is_some() {
            let message = "set `max_completion_tokens` or the older `max_tokens`, not both";
            return Err(ApiError::field("max_tokens", message));
        }
        options.max_tokens = options.max_tokens.or(max_completion_tokens);
        let logprobs = logprobs(&mut fields)?;
        let messages = messages::take(&mut fields)?;
        let template_kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
        if let Some(name) = RESERVED.iter().find(|name| template_kwargs.contains_key(**name)) {
            let param = format!("chat_template_kwargs.{name}");
            let message = format!("`{param}` is set by the server: remove it");
            return Err(ApiError::field(param, message));
        }
        fields.accept_only("response_format", &[json!({"type": "text"})])?;
        fields.accept_only("modalities", &[json!(["text"])])?;
        fields.accept_only("tool_choice", &[json!("none")])?;
        fields.accept_only("store", &[json!(false)])?;
        fields.accept_only("add_generation_prompt", &[json!(true)])?;
        fields.finish(UNSUPPORTED)?;
        Ok(Self { options, messages, template_kwargs, logprobs })
    }

    /// Applies the chat template and tokenizes.
    fn prompt(&self, info: &ModelInfo) -> Result<Vec<u32>, ApiError> {
        let Some(template) = &info.chat_template else {
            let message = format!("the model \"{}\" has no chat template: use /v1/completions", info.name);
            return Err(ApiError::field("messages", message));
        };
        let refused = |message| ApiError::field("messages", message);
        let text = template
            .render(&self.messages, &self.template_kwargs)
            .map_err(|error| refused(error.to_string()))?;
        info.tokenizer.encode(&text, false).map_err(|error| refused(error.to_string()))
    }
}

/// `logprobs` turns log-probabilities on; `top_logprobs` is the number of alternatives.
fn logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS, "an integer from 0 to 20")?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            let message = "`top_logprobs` needs \"logprobs\": true";
            Err(ApiError::field("top_logprobs", message))
        }
    }
}

/// Handles POST /v1/chat/completions.
pub(crate) async fn create(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let body = app.read_json(request).await?;
    let request = ChatRequest::parse(body, &app.engine.info().default_sampling)?;
    app.check_model(&request.options.model)?;
    let engine = app.engine.clone();
    let (request, prompt) = app
        .blocking(move || {
            let prompt = request.prompt(engine.info())?;
            Ok((request, prompt))
        })
        .await?;
    let format = ChatFormat { engine: app.engine.clone(), logprobs: request.logprobs.is_some() };
    let request = PreparedRequest {
        options: request.options,
        prompts: vec![prompt],
        field: "messages",
        logprobs: request.logprobs,
    };
    reply(&app, request, format).await
}

/// Formats the chat API's choices.
#[derive(Debug)]
struct ChatFormat {
    engine: Engine,
    logprobs: bool,
}

impl ChatFormat {
    fn logprobs(&self, tokens: &[TokenLogprob]) -> Option<ChatLogprobs> {
        self.logprobs.then(|| ChatLogprobs::new(tokens, &self.engine.info().tokenizer))
    }
}

#[derive(Debug, Serialize)]
struct ChatChoice {
    index: usize,
    message: Message,
    logprobs: Option<ChatLogprobs>,
    finish_reason: &'static str,
}

#[derive(Debug, Serialize)]
struct Message {
    role: &'static str,
    content: String,
    /// Always `null`; OpenAI's clients expect the field.
    refusal: Option<String>,
}

#[derive(Debug, Serialize)]
struct ChatChunkChoice {
    index: usize,
    delta: Delta,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

impl ChoiceFormat for ChatFormat {
    const ID_PREFIX: &'static str = "chatcmpl";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";
    type ChunkChoice = ChatChunkChoice;
    type Choice = ChatChoice;

    fn first_chunk(&self, index: usize) -> Option<ChatChunkChoice> {
        let delta = Delta { role: Some("assistant"), content: Some(String::new()) };
        Some(ChatChunkChoice { index, delta, logprobs: None, finish_reason: None })
    }

    fn text_chunk(&mut self, index: usize, text: String, logprobs: &[TokenLogprob]) -> ChatChunkChoice {
        let delta = Delta { role: None, content: Some(text) };
        ChatChunkChoice { index, delta, logprobs: self.logprobs(logprobs), finish_reason: None }
    }

    fn last_chunk(&self, index: usize, reason: FinishReason) -> ChatChunkChoice {
        let finish_reason = Some(finish_reason(reason));
        ChatChunkChoice { index, delta: Delta::default(), logprobs: None, finish_reason }
    }

    fn choice(
        &mut self,
        index: usize,
        text: String,
        logprobs: &[TokenLogprob],
        reason: FinishReason,
    ) -> ChatChoice {
        ChatChoice {
            index,
            message: Message { role: "assistant", content: text, refusal: None },
            logprobs: self.logprobs(logprobs),
            finish_reason: finish_reason(reason),
        }
    }
}
