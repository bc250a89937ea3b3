//! POST /v1/chat/completions.

use std::sync::Arc;

use serde::Serialize;
use serde_json::{Value, json};
use thunder_engine::{Sampling, TokenLogprob};
use thunder_model::tokenizer::Tokenizer;

use super::Api;
use crate::error::ApiError;
use crate::generate::choices::{Call, Choice, Choices, Tally};
use crate::generate::frames::{Frames, StreamKind};
use crate::generate::reply::{Head, Presenter};
use crate::generate::{Generation, Input, Thinking, Update, What};
use crate::request::fields::{Fields, invalid_value};
use crate::request::options::{MAX_TOP_LOGPROBS, Options};
use crate::request::{messages, tools};
use crate::response::envelope::{DONE, Envelope, UsageBody};
use crate::response::logprobs::ChatLogprobs;

/// Fields of OpenAI's chat API that would change the output and are not implemented.
const UNSUPPORTED: &[&str] =
    &["functions", "audio", "web_search_options", "moderation", "best_of", "echo", "suffix", "min_tokens"];

/// The desired length of an answer, for models that were trained for this field.
pub(super) const VERBOSITY: &[&str] = &["low", "medium", "high"];

/// Template variables that the server sets.
const RESERVED: &[&str] = &["messages", "tools", "add_generation_prompt"];

/// Formats the chat API's choices.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Chat {
    logprobs: bool,
    include_usage: bool,
    /// For each choice: whether its first chunk was sent, and its calls so far.
    progress: Vec<(bool, usize)>,
    used: Tally,
}

impl Api for Chat {
    fn parse(body: Value, defaults: &Sampling) -> Result<(Generation, Self), ApiError> {
        let mut fields = Fields::new(body, "")?;
        let mut options = Options::take(&mut fields, defaults)?;
        let newer = fields.integer("max_completion_tokens", 1, usize::MAX, "an integer of at least 1")?;
        // If a client sends both the newer and the older field, both must mean the same.
        options.max_tokens = options.max_tokens.into_iter().chain(newer).min();
        let include_usage = options.include_usage;
        let logprobs = logprobs(&mut fields)?;
        let messages = messages::take(&mut fields)?;
        let mut generation = Generation::new(options, Input::Chat(messages), "messages");
        generation.logprobs = logprobs;
        generation.predicted = prediction(&mut fields)?;
        generation.tools = tools::take(&mut fields)?;
        generation.grammar = tools::grammar(&mut fields)?;
        generation.thinking = thinking(fields.string("reasoning_effort")?, "reasoning_effort")?;
        generation.template_kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
        if let Some(name) = RESERVED.iter().find(|name| generation.template_kwargs.contains_key(**name)) {
            let param = format!("chat_template_kwargs.{name}");
            let message = format!("`{param}` is set by the server: remove it");
            return Err(ApiError::field(param, message));
        }
        accept_without_effect(&mut fields)?;
        fields.finish(UNSUPPORTED)?;
        Ok((generation, Self { logprobs: logprobs.is_some(), include_usage, ..Self::default() }))
    }
}

/// The meaning of a level of effort: `none` turns thinking off.
pub(crate) fn thinking(effort: Option<String>, name: &str) -> Result<Thinking, ApiError> {
    const LEVELS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];
    match effort {
        None => Ok(Thinking::default()),
        Some(level) if level == "none" => Ok(Thinking { enabled: Some(false), effort: None }),
        Some(level) if LEVELS.contains(&level.as_str()) => {
            Ok(Thinking { enabled: Some(true), effort: Some(level) })
        }
        Some(other) => {
            let must_be = "\"none\", \"minimal\", \"low\", \"medium\", \"high\" or \"xhigh\"";
            Err(invalid_value(name, &Value::String(other), must_be))
        }
    }
}

/// A text similar to the expected answer. It makes the answer faster and does not change it.
fn prediction(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let Some(mut prediction) = fields.nested("prediction")? else { return Ok(None) };
    if prediction.one_of("type", &["content"])?.is_none() {
        return Err(prediction.missing("type"));
    }
    let content = prediction.value("content").ok_or_else(|| prediction.missing("content"))?;
    let text = messages::text(content, &prediction.name("content"))?;
    prediction.finish(&[])?;
    Ok(Some(text))
}

/// Accepts fields that change nothing here, with these values.
fn accept_without_effect(fields: &mut Fields) -> Result<(), ApiError> {
    fields.accept_empty("functions");
    fields.accept_only("function_call", &[json!("none"), json!("auto")])?;
    fields.one_of("verbosity", VERBOSITY)?;
    fields.accept_only("modalities", &[json!(["text"])])?;
    fields.accept_only("add_generation_prompt", &[json!(true)])
}

/// `logprobs` turns log-probabilities on; `top_logprobs` is the number of alternatives.
pub(super) fn logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
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
    /// `null` if the message has only calls.
    content: Option<String>,
    /// Always `null`; OpenAI's clients expect the field.
    refusal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Value>,
}

#[derive(Debug, Serialize)]
struct ChunkChoice {
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
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Value>,
}

impl Chat {
    fn logprobs(&self, tokens: &[TokenLogprob], tokenizer: &Arc<Tokenizer>) -> Option<ChatLogprobs> {
        self.logprobs.then(|| ChatLogprobs::new(tokens, tokenizer))
    }

    fn choice(&self, index: usize, choice: Choice, head: &Head) -> ChatChoice {
        let finish_reason = choice.reason().openai();
        let logprobs = self.logprobs(&choice.logprobs, &head.app.engine.info().tokenizer);
        let Choice { text, reasoning, calls, .. } = choice;
        let content = Some(text).filter(|text| calls.is_empty() || !text.is_empty());
        let reasoning_content = Some(reasoning).filter(|text| !text.is_empty());
        let tool_calls = calls.into_iter().map(whole_call).collect();
        let message = Message { role: "assistant", content, refusal: None, reasoning_content, tool_calls };
        ChatChoice { index, message, logprobs, finish_reason }
    }

    fn send(&self, head: &Head, choice: ChunkChoice, out: &mut Frames) {
        let usage = self.include_usage.then_some(None);
        out.body(&Envelope::of(head, "chat.completion.chunk", vec![choice], usage));
    }

    /// The delta of an update.
    fn delta(&mut self, choice: usize, what: &mut What) -> Delta {
        let calls = &mut self.progress[choice].1;
        match what {
            What::Text { text, .. } => Delta { content: Some(std::mem::take(text)), ..Delta::default() },
            What::Reasoning(text) => {
                Delta { reasoning_content: Some(std::mem::take(text)), ..Delta::default() }
            }
            What::CallBegin { id, name } => {
                *calls += 1;
                let function = json!({"name": name, "arguments": ""});
                let call = json!({"index": *calls - 1, "id": id, "type": "function", "function": function});
                Delta { tool_calls: vec![call], ..Delta::default() }
            }
            What::Arguments(text) => {
                let index = calls.saturating_sub(1);
                let call = json!({"index": index, "function": {"arguments": text}});
                Delta { tool_calls: vec![call], ..Delta::default() }
            }
            What::CallEnd | What::End { .. } | What::Failed(_) => Delta::default(),
        }
    }
}

fn whole_call(call: Call) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments});
    json!({"id": call.id, "type": "function", "function": function})
}

impl Presenter for Chat {
    const ID_PREFIX: &'static str = "chatcmpl-";
    const STREAM: StreamKind = StreamKind::Events;

    fn whole(&mut self, head: &Head, choices: Choices) -> Value {
        let usage = UsageBody::new(head.prompt_tokens, &choices.used());
        let numbered = choices.0.into_iter().enumerate();
        let choices = numbered.map(|(index, choice)| self.choice(index, choice, head)).collect();
        Envelope::of(head, "chat.completion", choices, Some(Some(usage))).into_json()
    }

    fn begin(&mut self, _head: &Head, _out: &mut Frames) {}

    fn update(&mut self, head: &Head, update: Update, out: &mut Frames) {
        let Update { choice: index, mut what } = update;
        if self.progress.len() <= index {
            self.progress.resize(index + 1, (false, 0));
        }
        if !std::mem::replace(&mut self.progress[index].0, true) {
            let delta = Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
            self.send(head, ChunkChoice { index, delta, logprobs: None, finish_reason: None }, out);
        }
        if what == What::CallEnd {
            return;
        }
        let delta = self.delta(index, &mut what);
        let (mut logprobs, mut finish_reason) = (None, None);
        match what {
            What::Text { logprobs: tokens, .. } => {
                logprobs = self.logprobs(&tokens, &head.app.engine.info().tokenizer);
            }
            What::End { reason, usage } => {
                self.used.add(&usage);
                finish_reason = Some(reason.openai());
            }
            _ => {}
        }
        self.send(head, ChunkChoice { index, delta, logprobs, finish_reason }, out);
    }

    fn end(&mut self, head: &Head, out: &mut Frames) {
        if self.include_usage {
            let usage = UsageBody::new(head.prompt_tokens, &self.used);
            let none: Vec<ChunkChoice> = Vec::new();
            out.body(&Envelope::of(head, "chat.completion.chunk", none, Some(Some(usage))));
        }
        out.text(DONE);
    }

    fn failed(&mut self, _head: &Head, error: &ApiError, out: &mut Frames) {
        out.json(&error.body());
    }
}
