//! OpenAI's Responses API: POST /v1/responses, GET and DELETE /v1/responses/{id}.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Value, json};
use thunder_access::Caller;
use thunder_engine::Sampling;
use thunder_model::chat::{Message, Role, Tool, ToolCall};

use super::Api;
use super::chat::thinking;
use super::response_items::{Items, call_item, reasoning_item, text_item};
use crate::app::App;
use crate::error::ApiError;
use crate::generate::choices::{Choice, Choices};
use crate::generate::frames::{Frames, StreamKind};
use crate::generate::reply::{Head, Presenter};
use crate::generate::{EndReason, Generation, Input, Update, What};
use crate::request::fields::{Fields, display_value, invalid_value};
use crate::request::messages::{arguments_object, check_count, text};
use crate::request::options::Options;
use crate::request::tools;

/// Fields that would change the output and are not implemented.
const UNSUPPORTED: &[&str] = &["background", "conversation", "prompt", "top_logprobs", "max_tool_calls"];

/// Writes responses.
#[derive(Debug, PartialEq)]
pub(crate) struct Responses {
    /// The response that this one continues.
    previous: Option<String>,
    /// Keeps the response for later ones.
    store: bool,
    /// What was said before the answer, but for the instructions: kept with the answer.
    said: Vec<Message>,
    /// What the response repeats of its request.
    echo: Value,
    items: Items,
    choices: Vec<Update>,
    sequence: u64,
}

impl Api for Responses {
    fn parse(body: Value, defaults: &Sampling) -> Result<(Generation, Self), ApiError> {
        let repeated = repeated(&body);
        let mut fields = Fields::new(body, "")?;
        let options = options(&mut fields, defaults)?;
        let instructions = fields.string("instructions")?;
        let said = input(&mut fields)?;
        let previous = fields.string("previous_response_id")?;
        let store = fields.boolean("store")?.unwrap_or(true);
        let mut messages: Vec<Message> =
            instructions.iter().map(|text| Message::new(Role::System, text.clone())).collect();
        messages.extend(said.iter().cloned());
        let mut echo = json!({
            "instructions": instructions, "previous_response_id": previous, "store": store,
            "temperature": as_written(options.sampling.temperature),
            "top_p": as_written(options.sampling.top_p),
            "max_output_tokens": options.max_tokens,
        });
        for (name, value) in repeated {
            echo[name] = value;
        }
        let mut generation = Generation::new(options, Input::Chat(messages), "input");
        let listed = match fields.value("tools") {
            None => Vec::new(),
            Some(Value::Array(list)) => tools::list(list, "tools", tool)?,
            Some(other) => return Err(invalid_value("tools", &other, "a list of tools")),
        };
        generation.tools = tools::take(&mut fields)?;
        generation.tools.tools = listed;
        if let Some(config) = fields.value("text") {
            let mut config = Fields::new(config, "text")?;
            if let Some(format) = config.value("format") {
                let name = "text.format";
                let format = tools::response_format(Fields::new(format, name)?, "schema")?;
                generation.grammar = format.map(|grammar| (name, grammar));
            }
            config.string("verbosity")?;
            config.finish(&[])?;
        }
        if let Some(config) = fields.value("reasoning") {
            let mut config = Fields::new(config, "reasoning")?;
            generation.thinking = thinking(config.string("effort")?, "reasoning.effort")?;
            // Thinking is given as it is, never as a summary.
            config.value("summary");
            config.value("generate_summary");
            config.finish(&[])?;
        }
        accept_without_effect(&mut fields)?;
        fields.finish(UNSUPPORTED)?;
        let items = Items::default();
        Ok((generation, Self { previous, store, said, echo, items, choices: Vec::new(), sequence: 0 }))
    }

    fn complete(
        &mut self,
        generation: &mut Generation,
        app: &App,
        owner: Option<&str>,
    ) -> Result<(), ApiError> {
        let Some(id) = &self.previous else { return Ok(()) };
        let Some(earlier) = app.stored.conversation(id, owner) else {
            return Err(not_found(id, "previous_response_id"));
        };
        if let Input::Chat(messages) = &mut generation.input {
            // Instructions of earlier responses do not go on.
            let at = messages.len() - self.said.len();
            messages.splice(at..at, earlier.iter().cloned());
            check_count(messages.len(), "input")?;
        }
        self.said.splice(0..0, earlier);
        Ok(())
    }
}

/// The number with the fewest digits that is this one in f32: 0.7 and not 0.699999988079071.
fn as_written(number: f32) -> f64 {
    number.to_string().parse().unwrap_or_else(|_| f64::from(number))
}

/// The fields of a request that its response repeats as they are.
fn repeated(body: &Value) -> [(&'static str, Value); 4] {
    let given = |name: &'static str, default: Value| {
        (name, body.get(name).filter(|value| !value.is_null()).cloned().unwrap_or(default))
    };
    [
        given("tools", json!([])),
        given("tool_choice", "auto".into()),
        given("parallel_tool_calls", true.into()),
        given("metadata", json!({})),
    ]
}

fn options(fields: &mut Fields, defaults: &Sampling) -> Result<Options, ApiError> {
    let model = fields.string("model")?.ok_or_else(|| fields.missing("model"))?;
    let mut options = Options { sampling: defaults.clone(), ..Options::new(model) };
    options.stream = fields.boolean("stream")?.unwrap_or(false);
    let sampling = &mut options.sampling;
    sampling.temperature = fields.number("temperature")?.unwrap_or(sampling.temperature);
    sampling.top_p = fields.number("top_p")?.unwrap_or(sampling.top_p);
    options.max_tokens = fields.integer("max_output_tokens", 1, usize::MAX, "an integer of at least 1")?;
    Ok(options)
}

fn not_found(id: &str, param: &str) -> ApiError {
    let id: String = id.chars().take(100).collect();
    let message =
        format!("no response \"{id}\" is kept: the oldest are forgotten, and all when the server ends");
    ApiError::field(param, message).status(StatusCode::NOT_FOUND).code("response_not_found")
}

/// Accepts fields that change nothing here.
fn accept_without_effect(fields: &mut Fields) -> Result<(), ApiError> {
    for text in ["user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"] {
        fields.string(text)?;
    }
    fields.object("metadata")?;
    // What may be added to a response: nothing here has any of it.
    fields.value("include");
    fields.object("stream_options")?;
    fields.accept_only("truncation", &[json!("disabled")])?;
    fields.accept_only("background", &[json!(false)])
}

fn tool(mut fields: Fields) -> Result<Tool, ApiError> {
    let kind = fields.string("type")?.ok_or_else(|| fields.missing("type"))?;
    if kind != "function" {
        let message = format!("tools of type \"{kind}\" are not supported: use \"function\"");
        return Err(ApiError::field(fields.name("type"), message).code("unsupported_value"));
    }
    tools::function_tool(fields)
}

/// Reads `input`: a text, or a list of items.
fn input(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    let items = match fields.value("input") {
        None => return Err(fields.missing("input")),
        Some(Value::String(text)) => return Ok(vec![Message::new(Role::User, text)]),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(invalid_value("input", &other, "a string or a list of items")),
    };
    check_count(items.len(), "input")?;
    let mut messages: Vec<Message> = Vec::new();
    for (index, item) in items.into_iter().enumerate() {
        one(Fields::new(item, format!("input[{index}]"))?, &mut messages)?;
    }
    Ok(messages)
}

/// Reads one item. Thinking, text and calls that follow each other are one message of the model.
fn one(mut fields: Fields, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let kind = fields.string("type")?.unwrap_or_else(|| "message".to_owned());
    fields.value("status");
    match kind.as_str() {
        "message" => {
            fields.value("id");
            let role = fields.string("role")?.ok_or_else(|| fields.missing("role"))?;
            let role = match role.as_str() {
                "system" | "developer" => Role::System,
                "user" => Role::User,
                "assistant" => Role::Assistant,
                _ => {
                    let must_be = "\"system\", \"developer\", \"user\" or \"assistant\"";
                    return Err(invalid_value(&fields.name("role"), &Value::String(role), must_be));
                }
            };
            let content = fields.value("content").ok_or_else(|| fields.missing("content"))?;
            let content = text(content, &fields.name("content"))?;
            match open_turn(role, messages) {
                Some(turn) if turn.content.is_empty() && turn.calls.is_empty() => turn.content = content,
                _ => messages.push(Message::new(role, content)),
            }
        }
        "reasoning" => {
            for extra in ["id", "summary", "encrypted_content"] {
                fields.value(extra);
            }
            let mut thought = String::new();
            for part in fields.value("content").as_ref().and_then(Value::as_array).into_iter().flatten() {
                thought.push_str(part["text"].as_str().unwrap_or_default());
            }
            messages.push(Message { reasoning: Some(thought), ..Message::new(Role::Assistant, "") });
        }
        "function_call" => {
            fields.value("id");
            let id = fields.string("call_id")?.ok_or_else(|| fields.missing("call_id"))?;
            let name = fields.string("name")?.ok_or_else(|| fields.missing("name"))?;
            let arguments = fields.string("arguments")?.unwrap_or_default();
            let arguments = arguments_object(&arguments, &fields.name("arguments"))?;
            let call = ToolCall { id, name, arguments };
            match open_turn(Role::Assistant, messages) {
                Some(turn) => turn.calls.push(call),
                None => messages.push(Message { calls: vec![call], ..Message::new(Role::Assistant, "") }),
            }
        }
        "function_call_output" => {
            fields.value("id");
            let id = fields.string("call_id")?.ok_or_else(|| fields.missing("call_id"))?;
            let output = fields.value("output").ok_or_else(|| fields.missing("output"))?;
            let output = text(output, &fields.name("output"))?;
            messages.push(Message { call_id: Some(id), ..Message::new(Role::Tool, output) });
        }
        _ => {
            let message = format!("items of type {} are not supported", display_value(&Value::String(kind)));
            return Err(ApiError::field(fields.name("type"), message).code("unsupported_value"));
        }
    }
    fields.finish(&[])
}

/// The model's message that the next item may belong to.
fn open_turn(role: Role, messages: &mut [Message]) -> Option<&mut Message> {
    messages.last_mut().filter(|last| role == Role::Assistant && last.role == Role::Assistant)
}

impl Responses {
    fn body(&self, head: &Head, status: &str, output: Vec<Value>, choice: Option<&Choice>) -> Value {
        let mut body = json!({
            "id": head.id, "object": "response", "created_at": head.created, "status": status, "error": null,
            "incomplete_details": null, "model": head.model(), "output": output,
            "usage": null, "truncation": "disabled",
        });
        if let (Some(body), Some(echo)) = (body.as_object_mut(), self.echo.as_object()) {
            body.extend(echo.clone());
        }
        if let Some((reason, usage)) = choice.and_then(|choice| choice.end) {
            let (input, output) = (head.prompt_tokens, usage.completion_tokens);
            let thought = choice.map_or("", |choice| choice.reasoning.as_str());
            // The engine does not count parts: their text is counted, which marks are no part of.
            let thought = head.app.engine.info().tokenizer.encode(thought, false).map_or(0, |ids| ids.len());
            body["usage"] = json!({
                "input_tokens": input, "output_tokens": output, "total_tokens": input + output,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens_details": {"reasoning_tokens": thought},
            });
            if reason == EndReason::Length {
                body["status"] = "incomplete".into();
                body["incomplete_details"] = json!({"reason": "max_output_tokens"});
            }
        }
        body
    }

    /// The response of a whole choice, which is kept if the request wants it.
    fn finish(&mut self, head: &Head, choice: &Choice) -> Value {
        let mut output = Vec::new();
        if !choice.reasoning.is_empty() {
            output.push(reasoning_item(head, output.len(), &choice.reasoning));
        }
        if !choice.text.is_empty() {
            output.push(text_item(head, output.len(), &choice.text));
        }
        for call in &choice.calls {
            output.push(call_item(head, output.len(), call));
        }
        let body = self.body(head, "completed", output, Some(choice));
        if self.store {
            let mut answer = Message::new(Role::Assistant, choice.text.clone());
            let call = |call: &crate::generate::choices::Call| {
                // A call that was cut off was never made.
                let arguments = arguments_object(&call.arguments, "arguments").ok()?;
                Some(ToolCall { id: call.id.clone(), name: call.name.clone(), arguments })
            };
            answer.calls = choice.calls.iter().filter_map(call).collect();
            answer.reasoning = Some(choice.reasoning.clone()).filter(|text| !text.is_empty());
            let mut said = std::mem::take(&mut self.said);
            said.push(answer);
            head.app.stored.keep(head.id.clone(), head.owner.clone(), &body, said);
        }
        body
    }

    fn event(&mut self, name: &str, mut event: Value, out: &mut Frames) {
        event["type"] = name.into();
        event["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        out.event(name, &event);
    }
}

impl Presenter for Responses {
    const ID_PREFIX: &'static str = "resp_";
    const STREAM: StreamKind = StreamKind::Events;

    fn whole(&mut self, head: &Head, choices: Choices) -> Value {
        choices.0.first().map_or(Value::Null, |choice| self.finish(head, choice))
    }

    fn begin(&mut self, head: &Head, out: &mut Frames) {
        let response = self.body(head, "in_progress", Vec::new(), None);
        self.event("response.created", json!({"response": response}), out);
        self.event("response.in_progress", json!({"response": response}), out);
    }

    fn update(&mut self, head: &Head, update: Update, out: &mut Frames) {
        for (name, event) in self.items.update(head, &update.what) {
            self.event(name, event, out);
        }
        if !matches!(update.what, What::CallEnd) {
            self.choices.push(update);
        }
    }

    fn end(&mut self, head: &Head, out: &mut Frames) {
        let mut choices = Choices::new(1);
        for update in std::mem::take(&mut self.choices) {
            // Failures do not come here.
            let _ = choices.absorb(update);
        }
        let Some(choice) = choices.0.first() else { return };
        let response = self.finish(head, choice);
        let name =
            if choice.reason() == EndReason::Length { "response.incomplete" } else { "response.completed" };
        self.event(name, json!({"response": response}), out);
    }

    fn failed(&mut self, head: &Head, error: &ApiError, out: &mut Frames) {
        let mut response = self.body(head, "failed", Vec::new(), None);
        let code = if error.status.is_client_error() { "invalid_prompt" } else { "server_error" };
        response["error"] = json!({"code": code, "message": error.message});
        self.event("response.failed", json!({"response": response}), out);
    }
}

/// The key that responses are kept for.
fn owner(caller: Option<&Extension<Caller>>) -> Option<&str> {
    caller.and_then(|Extension(caller)| caller.key()).map(|key| key.id.as_str())
}

/// GET /v1/responses/{id}. Another key's response is not found.
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    caller: Option<Extension<Caller>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let body = app.stored.body(&id, owner(caller.as_ref())).ok_or_else(|| not_found(&id, "response_id"))?;
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], body).into_response())
}

/// DELETE /v1/responses/{id}.
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    caller: Option<Extension<Caller>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if !app.stored.forget(&id, owner(caller.as_ref())) {
        return Err(not_found(&id, "response_id"));
    }
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}
