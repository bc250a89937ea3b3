//! POST /v1/chat/completions.

use serde::Serialize;
use serde_json::{Map, Value, json};
use thunder_engine::{Engine, FinishReason, Sampling, TokenLogprob};

use super::GenerateRequest;
use crate::error::ApiError;
use crate::request::fields::Fields;
use crate::request::messages;
use crate::request::options::{MAX_TOP_LOGPROBS, Options};
use crate::response::format::{ChoiceFormat, finish_reason};
use crate::response::logprobs::ChatLogprobs;
use crate::response::reply::PreparedRequest;

/// Fields of OpenAI's chat API that would change the output and are not implemented.
const UNSUPPORTED: &[&str] = &[
    "tools",
    "functions",
    "audio",
    "web_search_options",
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

impl GenerateRequest for ChatRequest {
    type Format = ChatFormat;

    fn parse(body: Value, defaults: &Sampling) -> Result<Self, ApiError> {
        let mut fields = Fields::new(body, "")?;
        let mut options = Options::take(&mut fields, defaults)?;
        let newer = fields.integer("max_completion_tokens", 1, usize::MAX, "an integer of at least 1")?;
        // Clients that send the newer and the older field mean the same with both.
        options.max_tokens = options.max_tokens.into_iter().chain(newer).min();
        let logprobs = logprobs(&mut fields)?;
        let messages = messages::take(&mut fields)?;
        let template_kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
        if let Some(name) = RESERVED.iter().find(|name| template_kwargs.contains_key(**name)) {
            let param = format!("chat_template_kwargs.{name}");
            let message = format!("`{param}` is set by the server: remove it");
            return Err(ApiError::field(param, message));
        }
        accept_without_effect(&mut fields)?;
        fields.finish(UNSUPPORTED)?;
        Ok(Self { options, messages, template_kwargs, logprobs })
    }

    fn options(&self) -> &Options {
        &self.options
    }

    fn prepare(self, engine: &Engine) -> Result<(PreparedRequest, ChatFormat), ApiError> {
        let prompt = engine.info().chat_prompt(&self.messages, &self.template_kwargs);
        let request = PreparedRequest {
            options: self.options,
            prompts: vec![prompt.map_err(|error| ApiError::no_prompt(&error, "messages"))?],
            field: "messages",
            logprobs: self.logprobs,
        };
        Ok((request, ChatFormat { engine: engine.clone(), logprobs: self.logprobs.is_some() }))
    }
}

/// Accepts fields that change nothing here: with these values, or for a model that is given no
/// tools and has no levels of effort.
fn accept_without_effect(fields: &mut Fields) -> Result<(), ApiError> {
    for list in ["tools", "functions"] {
        fields.accept_empty(list);
    }
    fields.accept_only("tool_choice", &[json!("none"), json!("auto")])?;
    fields.accept_only("function_call", &[json!("none"), json!("auto")])?;
    fields.boolean("parallel_tool_calls")?;
    fields.string("reasoning_effort")?;
    fields.string("verbosity")?;
    fields.object("prediction")?;
    fields.accept_only("response_format", &[json!({"type": "text"})])?;
    fields.accept_only("modalities", &[json!(["text"])])?;
    fields.accept_only("add_generation_prompt", &[json!(true)])
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

/// Formats the chat API's choices.
#[derive(Debug)]
pub(crate) struct ChatFormat {
    engine: Engine,
    logprobs: bool,
}

impl ChatFormat {
    fn logprobs(&self, tokens: &[TokenLogprob]) -> Option<ChatLogprobs> {
        self.logprobs.then(|| ChatLogprobs::new(tokens, &self.engine.info().tokenizer))
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatChoice {
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
pub(crate) struct ChatChunkChoice {
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
