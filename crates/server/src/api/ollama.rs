//! Ollama's API: POST /api/chat and /api/generate.

use serde_json::{Map, Value, json};
use thunder_engine::{Grammar, Sampling, TokenLogprob, Usage};
use thunder_model::chat::{Message, Role, ToolCall};

use super::{Api, ollama_options};
use crate::app::App;
use crate::error::ApiError;
use crate::generate::choices::{Call, Choices};
use crate::generate::frames::{Frames, StreamKind};
use crate::generate::reply::{Head, Presenter, unix_s};
use crate::generate::{EndReason, Generation, Input, Prompt, Thinking, Update, What};
use crate::request::fields::{Fields, invalid_value};
use crate::request::messages::check_count;
use crate::request::options::{Options, keep_alive};
use crate::request::tools;
use crate::response::logprobs::ChatLogprobs;

/// No text.
const NOTHING: (&str, &[TokenLogprob]) = ("", &[]);

/// Writes the responses of both endpoints.
#[derive(Debug, PartialEq)]
struct Writer {
    /// The text is in a message, not in `response`.
    is_chat: bool,
    /// There is nothing to answer: the client wants the model to be loaded, or unloaded.
    only_loads: Option<Loading>,
    /// Tokens of context that the client wants at least.
    context: Option<usize>,
    logprobs: bool,
    /// The call that is being written.
    call: Call,
    /// Ended calls whose arguments are not a complete object.
    open: Vec<Call>,
    end: Option<(EndReason, Usage)>,
}

/// The meaning of a request without a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loading {
    Load,
    Unload,
}

/// Fields of both endpoints.
struct Shared {
    generation: Generation,
    loading: Loading,
    context: Option<usize>,
}

/// POST /api/chat.
#[derive(Debug, PartialEq)]
pub(crate) struct OllamaChat(Writer);

/// POST /api/generate.
#[derive(Debug, PartialEq)]
pub(crate) struct OllamaGenerate(Writer);

impl Writer {
    fn new(is_chat: bool) -> Self {
        Self {
            is_chat,
            only_loads: None,
            context: None,
            logprobs: false,
            call: Call::default(),
            open: Vec::new(),
            end: None,
        }
    }

    /// The writer of an answer to `shared`, which may ask for no text.
    fn of(shared: Shared, is_chat: bool, has_prompt: bool) -> (Generation, Self) {
        let Shared { generation, loading, context } = shared;
        let only_loads = (!has_prompt).then_some(loading);
        let logprobs = generation.logprobs.is_some();
        (generation, Self { only_loads, context, logprobs, ..Self::new(is_chat) })
    }

    /// Refuses a context larger than the server's; otherwise the prompt would be refused later.
    fn check_context(&self, app: &App) -> Result<(), ApiError> {
        let most = app.engine.info().context_length;
        match self.context {
            Some(wanted) if wanted > most => {
                let message = format!(
                    "`options.num_ctx` is {wanted}, but this server's context holds {most} tokens: \
                     ask for less, or start it with a larger --context"
                );
                Err(ApiError::field("options.num_ctx", message).code("invalid_value"))
            }
            _ => Ok(()),
        }
    }
}

impl Api for OllamaChat {
    fn parse(body: Value, defaults: &Sampling) -> Result<(Generation, Self), ApiError> {
        let mut fields = Fields::new(body, "")?;
        let messages = match fields.value("messages") {
            // Clients load a model so.
            None => Vec::new(),
            Some(Value::Array(list)) => {
                if !list.is_empty() {
                    check_count(list.len(), "messages")?;
                }
                let numbered = list.into_iter().enumerate();
                let read = |(index, message)| one(Fields::new(message, format!("messages[{index}]"))?);
                numbered.map(read).collect::<Result<_, _>>()?
            }
            Some(other) => return Err(invalid_value("messages", &other, "a list of messages")),
        };
        let tools = tools::take(&mut fields)?;
        let has_prompt = !messages.is_empty();
        let mut shared = shared(&mut fields, defaults, Input::Chat(messages), "messages")?;
        shared.generation.tools = tools;
        fields.finish(&[])?;
        let (generation, writer) = Writer::of(shared, true, has_prompt);
        Ok((generation, Self(writer)))
    }

    fn complete(&mut self, _: &mut Generation, app: &App, _: Option<&str>) -> Result<(), ApiError> {
        self.0.check_context(app)
    }

    fn at_once(&self, model: &str) -> Option<Value> {
        let message = json!({"message": {"role": "assistant", "content": ""}});
        self.0.only_loads.map(|loading| loaded(model, loading, message))
    }
}

impl Api for OllamaGenerate {
    fn parse(body: Value, defaults: &Sampling) -> Result<(Generation, Self), ApiError> {
        let mut fields = Fields::new(body, "")?;
        let prompt = fields.string("prompt")?.unwrap_or_default();
        let has_prompt = !prompt.is_empty();
        let system = fields.string("system")?.filter(|system| !system.is_empty());
        let is_raw = fields.boolean("raw")?.unwrap_or(false);
        for name in ["suffix", "template"] {
            fields.accept_only(name, &["".into()])?;
        }
        for list in ["images", "context"] {
            fields.accept_empty(list);
        }
        if is_raw && system.is_some() {
            let message = "`system` is of no use with \"raw\": true, which leaves out the template: \
                           write it into `prompt`";
            return Err(ApiError::field("system", message).code("invalid_value"));
        }
        let input = if is_raw {
            Input::Prompts(vec![Prompt::Text(prompt)])
        } else {
            let system = system.map(|system| Message::new(Role::System, system));
            Input::Chat(system.into_iter().chain([Message::new(Role::User, prompt)]).collect())
        };
        let shared = shared(&mut fields, defaults, input, "prompt")?;
        fields.finish(&["images", "context"])?;
        let (generation, writer) = Writer::of(shared, false, has_prompt);
        Ok((generation, Self(writer)))
    }

    fn complete(&mut self, _: &mut Generation, app: &App, _: Option<&str>) -> Result<(), ApiError> {
        self.0.check_context(app)
    }

    fn at_once(&self, model: &str) -> Option<Value> {
        self.0.only_loads.map(|loading| loaded(model, loading, json!({"response": ""})))
    }
}

/// Reads the fields that both endpoints have.
fn shared(
    fields: &mut Fields,
    defaults: &Sampling,
    input: Input,
    prompt_field: &'static str,
) -> Result<Shared, ApiError> {
    let model = fields.string("model")?.ok_or_else(|| fields.missing("model"))?;
    let model = model.strip_suffix(":latest").unwrap_or(&model).to_owned();
    let mut options = Options { stream: true, sampling: defaults.clone(), ..Options::new(model) };
    if let Some(stream) = fields.boolean("stream")? {
        options.stream = stream;
    }
    let context = match fields.nested("options")? {
        Some(given) => ollama_options::take(given, &mut options)?,
        None => None,
    };
    let mut generation = Generation::new(options, input, prompt_field);
    let form = match fields.value("format") {
        None => None,
        Some(Value::String(word)) if word.is_empty() => None,
        Some(Value::String(word)) if word == "json" => Some(Grammar::JsonSchema(json!({"type": "object"}))),
        Some(schema @ Value::Object(_)) => Some(Grammar::JsonSchema(schema)),
        Some(other) => return Err(invalid_value("format", &other, "\"json\" or a JSON schema")),
    };
    generation.grammar = form.map(|grammar| ("format", grammar));
    generation.thinking = match fields.value("think") {
        None => Thinking::default(),
        Some(Value::Bool(enabled)) => Thinking { enabled: Some(enabled), effort: None },
        Some(Value::String(level)) => super::chat::thinking(Some(level), "think")?,
        Some(other) => return Err(invalid_value("think", &other, "true, false or a level")),
    };
    generation.logprobs = super::chat::logprobs(fields)?;
    let loading = if keep_alive(fields)? { Loading::Unload } else { Loading::Load };
    Ok(Shared { generation, loading, context })
}

fn one(mut fields: Fields) -> Result<Message, ApiError> {
    let role = fields.string("role")?.ok_or_else(|| fields.missing("role"))?;
    let role = match role.as_str() {
        "system" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" => Role::Tool,
        _ => {
            let must_be = "\"system\", \"user\", \"assistant\" or \"tool\"";
            return Err(invalid_value(&fields.name("role"), &Value::String(role), must_be));
        }
    };
    let mut message = Message::new(role, fields.string("content")?.unwrap_or_default());
    message.reasoning = fields.string("thinking")?;
    message.name = fields.string("tool_name")?.or(fields.string("name")?);
    message.call_id = fields.string("tool_call_id")?;
    let name = fields.name("tool_calls");
    match fields.value("tool_calls") {
        None => {}
        Some(Value::Array(calls)) => {
            for (index, call) in calls.into_iter().enumerate() {
                message.calls.push(one_call(Fields::new(call, format!("{name}[{index}]"))?, index)?);
            }
        }
        Some(other) => return Err(invalid_value(&name, &other, "a list of calls")),
    }
    fields.accept_empty("images");
    fields.finish(&["images"])?;
    Ok(message)
}

fn one_call(mut fields: Fields, index: usize) -> Result<ToolCall, ApiError> {
    let id = fields.string("id")?.unwrap_or_else(|| format!("call_{index}"));
    fields.accept_only("type", &["function".into()])?;
    let function = fields.value("function").ok_or_else(|| fields.missing("function"))?;
    let mut function = Fields::new(function, fields.name("function"))?;
    let name = function.string("name")?.ok_or_else(|| function.missing("name"))?;
    let arguments = function.object("arguments")?.unwrap_or_default();
    function.integer("index", 0, usize::MAX, "an integer of at least 0")?;
    function.finish(&[])?;
    fields.finish(&[])?;
    Ok(ToolCall { id, name, arguments })
}

/// Ollama's error body.
pub(crate) fn error_body(error: &ApiError) -> Value {
    json!({"error": error.message})
}

/// A moment as Ollama writes it.
pub(crate) fn moment(seconds: u64) -> String {
    jiff::Timestamp::from_second(i64::try_from(seconds).unwrap_or(0)).unwrap_or_default().to_string()
}

impl Writer {
    /// A body with more of the answer.
    fn piece(
        &self,
        head: &Head,
        (text, logprobs): (&str, &[TokenLogprob]),
        thinking: &str,
        calls: &[Value],
    ) -> Map<String, Value> {
        let mut body = Map::new();
        body.insert("model".into(), head.model().into());
        body.insert("created_at".into(), moment(head.created).into());
        let mut message = Map::new();
        if self.is_chat {
            message.insert("role".into(), "assistant".into());
        }
        message.insert(if self.is_chat { "content" } else { "response" }.into(), text.into());
        if !thinking.is_empty() {
            message.insert("thinking".into(), thinking.into());
        }
        if !calls.is_empty() {
            message.insert("tool_calls".into(), calls.into());
        }
        if self.is_chat {
            body.insert("message".into(), message.into());
        } else {
            body.extend(message);
        }
        if self.logprobs && !logprobs.is_empty() {
            let tokens = ChatLogprobs::new(logprobs, &head.app.engine.info().tokenizer).content;
            body.insert("logprobs".into(), json!(tokens));
        }
        body.insert("done".into(), false.into());
        body
    }

    /// Adds the contents of the last body.
    fn done(&self, mut body: Map<String, Value>) -> Value {
        let (reason, usage) = self.end.unwrap_or((EndReason::Stop, Usage::default()));
        let reason = if reason == EndReason::Length { "length" } else { "stop" };
        let nanoseconds = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let (prefill, decode) = (nanoseconds(usage.time_to_first_token), nanoseconds(usage.decode_time));
        let Value::Object(last) = json!({
            "done": true, "done_reason": reason, "total_duration": prefill + decode, "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens, "prompt_eval_duration": prefill,
            "eval_count": usage.completion_tokens, "eval_duration": decode,
        }) else {
            return body.into();
        };
        body.extend(last);
        body.into()
    }

    fn whole(&mut self, head: &Head, choices: Choices) -> Value {
        let Some(choice) = choices.0.into_iter().next() else { return Value::Null };
        self.end = choice.end;
        let reason = choice.reason();
        let calls: Vec<Value> = choice.calls.iter().filter_map(|call| call_body(call, reason)).collect();
        self.done(self.piece(head, (&choice.text, &choice.logprobs), &choice.reasoning, &calls))
    }

    fn update(&mut self, head: &Head, update: Update, out: &mut Frames) {
        let body = match update.what {
            What::Text { text, logprobs } => self.piece(head, (&text, &logprobs), "", &[]),
            What::Reasoning(text) => self.piece(head, NOTHING, &text, &[]),
            What::CallBegin { id, name } => {
                self.call = Call { id, name, arguments: String::new() };
                return;
            }
            What::Arguments(text) => {
                self.call.arguments.push_str(&text);
                return;
            }
            // Arguments are an object here, so a call is written as a whole.
            What::CallEnd => match call_body(&self.call, EndReason::Length) {
                Some(call) => self.piece(head, NOTHING, "", &[call]),
                // The end of the answer shows whether the call was cut off.
                None => {
                    self.open.push(std::mem::take(&mut self.call));
                    return;
                }
            },
            What::End { reason, usage } => {
                self.end = Some((reason, usage));
                let open = std::mem::take(&mut self.open);
                let calls: Vec<Value> = open.iter().filter_map(|call| call_body(call, reason)).collect();
                if calls.is_empty() {
                    return;
                }
                self.piece(head, NOTHING, "", &calls)
            }
            What::Failed(_) => return,
        };
        out.json(&body.into());
    }
}

/// A call of an answer with this end; `None` if the call was cut off.
fn call_body(call: &Call, reason: EndReason) -> Option<Value> {
    let arguments = call.object_after(reason)?;
    Some(json!({"id": call.id, "function": {"name": call.name, "arguments": arguments}}))
}

/// The response to a request that only loads or unloads the model. The model is always loaded, and
/// is unloaded when the server ends.
fn loaded(model: &str, loading: Loading, more: Value) -> Value {
    let reason = if loading == Loading::Unload { "unload" } else { "load" };
    let mut body =
        json!({"model": model, "created_at": moment(unix_s()), "done": true, "done_reason": reason});
    if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
    body
}

macro_rules! presenter {
    ($name:ident) => {
        impl Presenter for $name {
            const ID_PREFIX: &'static str = "ollama-";
            const STREAM: StreamKind = StreamKind::Lines;

            fn whole(&mut self, head: &Head, choices: Choices) -> Value {
                self.0.whole(head, choices)
            }

            fn begin(&mut self, _head: &Head, _out: &mut Frames) {}

            fn update(&mut self, head: &Head, update: Update, out: &mut Frames) {
                self.0.update(head, update, out);
            }

            fn end(&mut self, head: &Head, out: &mut Frames) {
                let body = self.0.piece(head, NOTHING, "", &[]);
                out.json(&self.0.done(body));
            }

            fn failed(&mut self, _head: &Head, error: &ApiError, out: &mut Frames) {
                out.json(&error_body(error));
            }
        }
    };
}
presenter!(OllamaChat);
presenter!(OllamaGenerate);
