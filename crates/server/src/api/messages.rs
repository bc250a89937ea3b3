//! Anthropic's API: POST /v1/messages and /v1/messages/count_tokens.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::{Extension, Json};
use serde_json::{Value, json};
use thunder_access::Caller;
use thunder_engine::Sampling;
use thunder_model::chat::{Message, Role, Tool};

use super::Api;
use super::message_turns::{edit_context, turn};
use crate::app::App;
use crate::error::ApiError;
use crate::generate::choices::{Call, Choices, Tally};
use crate::generate::frames::{Frames, StreamKind};
use crate::generate::prepare::prompt_tokens;
use crate::generate::reply::{Head, Presenter};
use crate::generate::{EndReason, Generation, Input, Thinking, ToolChoice, ToolUse, Update, What};
use crate::request::fields::{Fields, invalid_value};
use crate::request::messages::{cache_control, check_count, text};
use crate::request::options::{Options, top_k};
use crate::request::{json, tools};

/// Fields of Anthropic's API that would change the output and are not implemented.
const UNSUPPORTED: &[&str] = &["container", "mcp_servers"];

/// Minimum `budget_tokens` of thinking, as in Anthropic's API.
const LEAST_BUDGET: usize = 1024;
/// Levels of `output_config.effort`.
const EFFORTS: &[&str] = &["low", "medium", "high", "xhigh", "max"];

/// Writes Anthropic's messages.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Messages {
    /// The block that is open: its number and kind.
    open: Option<Block>,
    /// Blocks so far.
    blocks: usize,
    used: Tally,
    reason: Option<EndReason>,
    /// The request's stop texts.
    stop: Vec<String>,
    /// Thinking blocks are sent without their text.
    omits_thinking: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
    Call,
}

impl Api for Messages {
    fn parse(body: Value, defaults: &Sampling) -> Result<(Generation, Self), ApiError> {
        let mut fields = Fields::new(body, "")?;
        let max_tokens = fields.integer("max_tokens", 1, usize::MAX, "an integer of at least 1")?;
        let max_tokens = max_tokens.ok_or_else(|| fields.missing("max_tokens"))?;
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let temperature = fields.number("temperature")?;
        if let Some(number) = temperature.filter(|number| !(0.0..=1.0).contains(number)) {
            return Err(invalid_value("temperature", &json!(number), "from 0 to 1"));
        }
        let sampling = Sampling {
            temperature: temperature.unwrap_or(defaults.temperature),
            top_p: fields.number("top_p")?.unwrap_or(defaults.top_p),
            top_k: top_k(&mut fields)?.unwrap_or(defaults.top_k),
            ..defaults.clone()
        };
        let stop = Options::stop_list(&mut fields, "stop_sequences")?;
        let (mut generation, omits_thinking) = conversation(&mut fields, Some(max_tokens))?;
        let api = Self { stop: stop.clone(), omits_thinking, ..Self::default() };
        let options = Options { sampling, stop, stream, ..Options::new(generation.options.model) };
        generation.options = Options { max_tokens: Some(max_tokens), ..options };
        fields.finish(UNSUPPORTED)?;
        Ok((generation, api))
    }
}

/// Handles POST /v1/messages/count_tokens.
pub(crate) async fn count_tokens(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let body = app.receive(request).await?;
    let shared = app.clone();
    let count = move |bytes: &[u8]| {
        let mut fields = Fields::new(json::parse(bytes)?, "")?;
        let (generation, _) = conversation(&mut fields, None)?;
        fields.finish(UNSUPPORTED)?;
        shared.check_model_for(&caller, &generation.options.model)?;
        prompt_tokens(generation, &shared.engine, &shared.format)
    };
    let (tokens, _) = app.admission.prepare(body, count).await?;
    Ok(Json(json!({"input_tokens": tokens})))
}

/// Reads the parts of the prompt, and whether thinking is sent without its text.
fn conversation(fields: &mut Fields, max_tokens: Option<usize>) -> Result<(Generation, bool), ApiError> {
    let model = fields.string("model")?.ok_or_else(|| fields.missing("model"))?;
    let mut messages = Vec::new();
    if let Some(system) = fields.value("system") {
        messages.push(Message::new(Role::System, text(system, "system")?));
    }
    match fields.value("messages") {
        None => return Err(fields.missing("messages")),
        Some(Value::Array(list)) => {
            check_count(list.len(), "messages")?;
            for (index, message) in list.into_iter().enumerate() {
                turn(Fields::new(message, format!("messages[{index}]"))?, &mut messages)?;
            }
        }
        Some(other) => return Err(invalid_value("messages", &other, "a list of messages")),
    }
    if let Some(management) = fields.nested("context_management")? {
        edit_context(management, &mut messages)?;
    }
    let mut generation = Generation::new(Options::new(model), Input::Chat(messages), "messages");
    generation.tools = tool_use(fields)?;
    let (thinking, omits_thinking) = thinking(fields, max_tokens)?;
    generation.thinking = thinking;
    if let Some(mut config) = fields.nested("output_config")? {
        generation.thinking.effort = config.one_of("effort", EFFORTS)?;
        if let Some(format) = config.value("format") {
            let name = "output_config.format";
            let format = tools::response_format(Fields::new(format, name)?, "schema")?;
            generation.grammar = format.map(|grammar| (name, grammar));
        }
        config.finish(&[])?;
    }
    // These identify the user, and help other servers to bill and to cache.
    if let Some(mut metadata) = fields.nested("metadata")? {
        metadata.string("user_id")?;
        metadata.finish(&[])?;
    }
    fields.one_of("service_tier", &["auto", "standard_only"])?;
    cache_control(fields)?;
    if let Some(betas) = fields.list("betas")?
        && let Some(wrong) = betas.iter().find(|beta| !beta.is_string())
    {
        return Err(invalid_value("betas", wrong, "a list of names"));
    }
    Ok((generation, omits_thinking))
}

/// Reads how much to think, and whether thinking is sent without its text.
fn thinking(fields: &mut Fields, max_tokens: Option<usize>) -> Result<(Thinking, bool), ApiError> {
    let Some(mut config) = fields.nested("thinking")? else { return Ok((Thinking::default(), false)) };
    let kind = config.string("type")?.ok_or_else(|| config.missing("type"))?;
    // A local model's thinking has no separate budget: `max_tokens` limits the whole answer.
    let most = max_tokens.map_or(usize::MAX, |most| most.saturating_sub(1));
    let must_be = "an integer of at least 1024 and below `max_tokens`";
    config.integer("budget_tokens", LEAST_BUDGET, most, must_be)?;
    let display = config.one_of("display", &["summarized", "omitted"])?;
    config.finish(&[])?;
    let enabled = match kind.as_str() {
        "enabled" => Some(true),
        "disabled" => Some(false),
        "adaptive" => None,
        _ => {
            let must_be = "\"enabled\", \"disabled\" or \"adaptive\"";
            return Err(invalid_value("thinking.type", &Value::String(kind), must_be));
        }
    };
    Ok((Thinking { enabled, effort: None }, display.as_deref() == Some("omitted")))
}

fn tool_use(fields: &mut Fields) -> Result<ToolUse, ApiError> {
    let tools = match fields.value("tools") {
        None => Vec::new(),
        Some(Value::Array(list)) => tools::list(list, "tools", tool)?,
        Some(other) => return Err(invalid_value("tools", &other, "a list of tools")),
    };
    let Some(choice) = fields.value("tool_choice") else {
        return Ok(ToolUse { tools, ..ToolUse::default() });
    };
    let mut choice = Fields::new(choice, "tool_choice")?;
    let kind = choice.string("type")?.ok_or_else(|| choice.missing("type"))?;
    let parallel = !choice.boolean("disable_parallel_tool_use")?.unwrap_or(false);
    let name = choice.string("name")?;
    choice.finish(&[])?;
    let choice = match (kind.as_str(), name) {
        ("auto", None) => ToolChoice::Auto,
        ("any", None) => ToolChoice::Required,
        ("none", None) => ToolChoice::None,
        ("tool", Some(name)) => ToolChoice::Named(name),
        _ => {
            let must_be = "\"auto\", \"any\", \"none\", or \"tool\" with a `name`";
            return Err(invalid_value("tool_choice.type", &Value::String(kind), must_be));
        }
    };
    Ok(ToolUse { tools, choice, parallel })
}

fn tool(mut fields: Fields) -> Result<Option<Tool>, ApiError> {
    if let Some(kind) = fields.string("type")?.filter(|kind| kind != "custom") {
        return Err(fields.unsupported("type", &kind.into(), "describe the tool by its input_schema"));
    }
    let name = tools::tool_name(&mut fields)?;
    let mut description = fields.string("description")?;
    for example in fields.list("input_examples")?.unwrap_or_default() {
        let text = description.get_or_insert_default();
        text.push_str(&format!("\nExample of its input: {example}"));
    }
    let schema = fields.object("input_schema")?.ok_or_else(|| fields.missing("input_schema"))?;
    let strict = fields.boolean("strict")?.unwrap_or(false);
    cache_control(&mut fields)?;
    for hint in ["eager_input_streaming", "defer_loading"] {
        // A tool that may be loaded later is described at once.
        fields.boolean(hint)?;
    }
    fields.accept_only("allowed_callers", &[json!(["direct"])])?;
    let parameters = tools::parameters_schema(schema, &fields.name("input_schema"), &name)?;
    fields.finish(&[])?;
    Ok(Some(Tool { name, description, parameters, strict }))
}

fn stop_reason(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Stop => "end_turn",
        EndReason::StopText(_) => "stop_sequence",
        EndReason::Length => "max_tokens",
        EndReason::Calls => "tool_use",
    }
}

/// Anthropic's error object.
pub(crate) fn error_body(error: &ApiError) -> Value {
    let kind = match error.status.as_u16() {
        400 | 408 | 415 | 405 => "invalid_request_error",
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message}})
}

fn message(
    head: &Head,
    content: Vec<Value>,
    (reason, stop): (Option<EndReason>, &[String]),
    used: &Tally,
) -> Value {
    json!({
        "id": head.id, "type": "message", "role": "assistant", "model": head.model(), "content": content,
        "stop_reason": reason.map(stop_reason), "stop_sequence": stop_text(reason, stop),
        "usage": usage(head, used),
    })
}

/// The stop text that ended the answer, if one did.
fn stop_text(reason: Option<EndReason>, stop: &[String]) -> Option<&str> {
    let Some(EndReason::StopText(number)) = reason else { return None };
    stop.get(number).map(String::as_str)
}

/// Anthropic counts cached tokens separately from the other input tokens.
fn usage(head: &Head, used: &Tally) -> Value {
    let cached = used.cached();
    json!({
        "input_tokens": head.prompt_tokens - cached, "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0, "output_tokens": used.generated,
    })
}

impl Messages {
    fn open(&mut self, kind: Block, block: &Value, out: &mut Frames) {
        self.close(out);
        self.open = Some(kind);
        let event = json!({"type": "content_block_start", "index": self.blocks, "content_block": block});
        out.event("content_block_start", &event);
    }

    fn delta(&self, delta: &Value, out: &mut Frames) {
        let event = json!({"type": "content_block_delta", "index": self.blocks, "delta": delta});
        out.event("content_block_delta", &event);
    }

    fn close(&mut self, out: &mut Frames) {
        let Some(kind) = self.open.take() else { return };
        if kind == Block::Thinking {
            // Clients send it back; a local model's thinking needs none.
            self.delta(&json!({"type": "signature_delta", "signature": ""}), out);
        }
        let event = json!({"type": "content_block_stop", "index": self.blocks});
        out.event("content_block_stop", &event);
        self.blocks += 1;
    }
}

impl Presenter for Messages {
    const ID_PREFIX: &'static str = "msg_";
    const STREAM: StreamKind = StreamKind::Events;

    fn whole(&mut self, head: &Head, choices: Choices) -> Value {
        let used = choices.used();
        let Some(choice) = choices.0.into_iter().next() else { return Value::Null };
        let reason = choice.reason();
        let mut content = Vec::new();
        if !choice.reasoning.is_empty() {
            let thinking = if self.omits_thinking { "" } else { choice.reasoning.as_str() };
            content.push(json!({"type": "thinking", "thinking": thinking, "signature": ""}));
        }
        if !choice.text.is_empty() {
            content.push(json!({"type": "text", "text": choice.text}));
        }
        let with_input = |call| Some((call, Call::object_after(call, reason)?));
        for (call, input) in choice.calls.iter().filter_map(with_input) {
            content.push(json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input}));
        }
        message(head, content, (Some(reason), &self.stop), &used)
    }

    fn begin(&mut self, head: &Head, out: &mut Frames) {
        let message = message(head, Vec::new(), (None, &[]), &Tally::default());
        out.event("message_start", &json!({"type": "message_start", "message": message}));
    }

    fn update(&mut self, _head: &Head, update: Update, out: &mut Frames) {
        match update.what {
            What::Text { text, .. } => {
                if self.open != Some(Block::Text) {
                    self.open(Block::Text, &json!({"type": "text", "text": ""}), out);
                }
                self.delta(&json!({"type": "text_delta", "text": text}), out);
            }
            What::Reasoning(text) => {
                if self.open != Some(Block::Thinking) {
                    let block = json!({"type": "thinking", "thinking": "", "signature": ""});
                    self.open(Block::Thinking, &block, out);
                }
                if !self.omits_thinking {
                    self.delta(&json!({"type": "thinking_delta", "thinking": text}), out);
                }
            }
            What::CallBegin { id, name } => {
                let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                self.open(Block::Call, &block, out);
            }
            What::Arguments(text) => {
                self.delta(&json!({"type": "input_json_delta", "partial_json": text}), out);
            }
            What::CallEnd => self.close(out),
            What::End { reason, usage } => {
                self.close(out);
                self.used.add(&usage);
                self.reason = Some(reason);
            }
            What::Failed(_) => {}
        }
    }

    fn end(&mut self, head: &Head, out: &mut Frames) {
        let stop = stop_text(self.reason, &self.stop);
        let delta = json!({"stop_reason": self.reason.map(stop_reason), "stop_sequence": stop});
        let usage = usage(head, &self.used);
        out.event("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage}));
        out.event("message_stop", &json!({"type": "message_stop"}));
    }

    fn failed(&mut self, _head: &Head, error: &ApiError, out: &mut Frames) {
        out.event("error", &error_body(error));
    }
}
