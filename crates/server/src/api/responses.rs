//! OpenAI's Responses API: POST /v1/responses, GET and DELETE /v1/responses/{id}.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Value, json};
use thunder_access::Caller;
use thunder_engine::Sampling;
use thunder_model::chat::{Message, Role, ToolCall};

use super::Api;
use super::chat::{VERBOSITY, thinking};
use super::response_input::input;
use super::response_items::{Form, Items, reasoning_item};
use super::response_tools;
use crate::app::App;
use crate::error::ApiError;
use crate::generate::choices::{Choice, Choices};
use crate::generate::frames::{Frames, StreamKind};
use crate::generate::reply::{Head, Presenter};
use crate::generate::{EndReason, Generation, Input, Update, What};
use crate::request::fields::{Fields, invalid_value};
use crate::request::messages::{arguments_object, check_count};
use crate::request::options::{MAX_TOP_LOGPROBS, Options, accept_labels, stream_options_of};
use crate::request::path::PathPart;
use crate::request::tools;

/// Fields that would change the output and are not implemented.
const UNSUPPORTED: &[&str] = &["background", "conversation", "prompt", "max_tool_calls"];
/// Values of `include`. All except log-probabilities are about tools that are not run here, or
/// about a form of thinking that is not used here, so a response has nothing to add for them.
const INCLUDABLE: &[&str] = &[
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
];
const LOGPROBS: &str = "message.output_text.logprobs";
/// Forms of a summary of the thinking.
const SUMMARIES: &[&str] = &["auto", "concise", "detailed"];

/// Writes responses.
#[derive(Debug, PartialEq)]
pub(crate) struct Responses {
    /// The response that this one continues.
    previous: Option<String>,
    /// Keeps the response for later ones.
    store: bool,
    /// The conversation before the answer, without the instructions; kept with the answer.
    said: Vec<Message>,
    /// Fields of the request that the response repeats.
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
        let logprobs = logprobs(&mut fields)?;
        stream_options(&mut fields, options.stream)?;
        let mut generation = Generation::new(options, Input::Chat(messages), "input");
        generation.logprobs = logprobs;
        let (listed, custom) = response_tools::take(&mut fields)?;
        generation.tools = tools::take(&mut fields)?;
        generation.tools.tools = listed;
        if let Some(mut config) = fields.nested("text")? {
            if let Some(format) = config.value("format") {
                let name = "text.format";
                let format = tools::response_format(Fields::new(format, name)?, "schema")?;
                generation.grammar = format.map(|grammar| (name, grammar));
            }
            config.one_of("verbosity", VERBOSITY)?;
            config.finish(&[])?;
        }
        if let Some(mut config) = fields.nested("reasoning")? {
            generation.thinking = thinking(config.string("effort")?, "reasoning.effort")?;
            // Thinking is returned unchanged, never as a summary.
            config.one_of("summary", SUMMARIES)?;
            config.one_of("generate_summary", SUMMARIES)?;
            config.finish(&[])?;
        }
        accept_without_effect(&mut fields)?;
        fields.finish(UNSUPPORTED)?;
        let items = Items::new(Form { custom, logprobs: logprobs.is_some() });
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
            // Instructions of earlier responses do not apply to later ones.
            let at = messages.len() - self.said.len();
            messages.splice(at..at, earlier.iter().cloned());
            check_count(messages.len(), "input")?;
        }
        self.said.splice(0..0, earlier);
        Ok(())
    }
}

/// The shortest decimal number that is the same f32: 0.7 instead of 0.699999988079071.
fn as_written(number: f32) -> f64 {
    number.to_string().parse().unwrap_or_else(|_| f64::from(number))
}

/// The fields of a request that its response repeats unchanged.
fn repeated(body: &Value) -> [(&'static str, Value); 4] {
    let given = |name: &'static str, default: Value| {
        (name, body.get(name).filter(|value| !value.is_null()).cloned().unwrap_or(default))
    };
    let (name, mut tools) = given("tools", json!([]));
    if let Some(list) = tools.as_array_mut() {
        // This shows a client which of its tools the model does not have.
        list.retain(|tool| !response_tools::is_built_in(&tool["type"]));
    }
    [
        (name, tools),
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
    accept_labels(fields)?;
    // Codex names itself here.
    fields.object("client_metadata")?;
    fields.accept_only("truncation", &[json!("disabled")])?;
    fields.accept_only("background", &[json!(false)])
}

/// Reads `stream_options`, whose fields change nothing here.
fn stream_options(fields: &mut Fields, stream: bool) -> Result<(), ApiError> {
    stream_options_of(fields, stream)?.map_or(Ok(()), |options| options.finish(&[]))
}

/// Reads `include` and `top_logprobs`: how many alternatives to report of each token, if any.
fn logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let mut wanted = false;
    for value in fields.list("include")?.unwrap_or_default() {
        match value.as_str().filter(|name| INCLUDABLE.contains(name)) {
            Some(name) => wanted |= name == LOGPROBS,
            None => return Err(invalid_value("include", &value, &INCLUDABLE.join(", "))),
        }
    }
    let top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS, "an integer from 0 to 20")?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            let message = format!("`top_logprobs` needs \"include\": [\"{LOGPROBS}\"]");
            Err(ApiError::field("top_logprobs", message))
        }
    }
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
            // The engine does not count parts. Their text is counted here, without the marks.
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

    /// The response for a complete choice. It is stored if the request wants it.
    fn finish(&mut self, head: &Head, choice: &Choice) -> Value {
        let mut output = Vec::new();
        if !choice.reasoning.is_empty() {
            output.push(reasoning_item(head, output.len(), &choice.reasoning));
        }
        if !choice.text.is_empty() {
            output.push(self.items.form.text_item(head, output.len(), (&choice.text, &choice.logprobs)));
        }
        for call in &choice.calls {
            output.push(self.items.form.call_item(head, output.len(), call));
        }
        let body = self.body(head, "completed", output, Some(choice));
        if self.store {
            let mut answer = Message::new(Role::Assistant, choice.text.clone());
            let call = |call: &crate::generate::choices::Call| {
                // A call that was cut off does not count as a call.
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
            // Never called for failures.
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

/// The key for which responses are stored.
fn owner(caller: Option<&Extension<Caller>>) -> Option<&str> {
    caller.and_then(|Extension(caller)| caller.key()).map(|key| key.id.as_str())
}

/// GET /v1/responses/{id}. Another key's response is not found.
pub(crate) async fn get(
    State(app): State<Arc<App>>,
    caller: Option<Extension<Caller>>,
    PathPart(id): PathPart,
) -> Result<Response, ApiError> {
    let body = app.stored.body(&id, owner(caller.as_ref())).ok_or_else(|| not_found(&id, "response_id"))?;
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], body).into_response())
}

/// DELETE /v1/responses/{id}.
pub(crate) async fn delete(
    State(app): State<Arc<App>>,
    caller: Option<Extension<Caller>>,
    PathPart(id): PathPart,
) -> Result<Json<Value>, ApiError> {
    if !app.stored.forget(&id, owner(caller.as_ref())) {
        return Err(not_found(&id, "response_id"));
    }
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}
