//! Ollama's API: POST /api/chat and /api/generate.

use serde_json::{Map, Value, json};
use thunder_engine::{Grammar, Sampling, Usage};
use thunder_model::chat::{Message, Role, ToolCall};

use super::Api;
use crate::error::ApiError;
use crate::generate::choices::{Call, Choices};
use crate::generate::frames::{Frames, StreamKind};
use crate::generate::reply::{Head, Presenter, unix_s};
use crate::generate::{EndReason, Generation, Input, Prompt, Thinking, Update, What};
use crate::request::fields::{Fields, invalid_value};
use crate::request::messages::check_count;
use crate::request::options::{Options, top_k};
use crate::request::tools;

/// Options that say how to load and compute a model. The command that starts the server says that.
const LOAD_OPTIONS: &[&str] = &[
    "num_ctx",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "num_keep",
    "use_mmap",
    "use_mlock",
    "numa",
    "low_vram",
    "f16_kv",
];

/// Writes the responses of both endpoints.
#[derive(Debug, PartialEq)]
struct Writer {
    /// The text is in a message, not in `response`.
    is_chat: bool,
    /// There is nothing to answer: the client wants the model to be loaded.
    only_loads: bool,
    /// The call that is being written.
    call: Call,
    /// Ended calls whose arguments are no whole object.
    open: Vec<Call>,
    end: Option<(EndReason, Usage)>,
}

/// POST /api/chat.
#[derive(Debug, PartialEq)]
pub(crate) struct OllamaChat(Writer);

/// POST /api/generate.
#[derive(Debug, PartialEq)]
pub(crate) struct OllamaGenerate(Writer);

impl Writer {
    fn new(is_chat: bool) -> Self {
        Self { is_chat, only_loads: false, call: Call::default(), open: Vec::new(), end: None }
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
        let mut generation = shared(&mut fields, defaults, Input::Chat(messages), "messages")?;
        generation.tools = tools;
        fields.finish(&[])?;
        let only_loads = matches!(&generation.input, Input::Chat(messages) if messages.is_empty());
        Ok((generation, Self(Writer { only_loads, ..Writer::new(true) })))
    }

    fn at_once(&self, model: &str) -> Option<Value> {
        let message = json!({"message": {"role": "assistant", "content": ""}});
        self.0.only_loads.then(|| loaded(model, message))
    }
}

impl Api for OllamaGenerate {
    fn parse(body: Value, defaults: &Sampling) -> Result<(Generation, Self), ApiError> {
        let mut fields = Fields::new(body, "")?;
        let prompt = fields.string("prompt")?.unwrap_or_default();
        let only_loads = prompt.is_empty();
        let system = fields.string("system")?.filter(|system| !system.is_empty());
        let is_raw = fields.boolean("raw")?.unwrap_or(false);
        for name in ["suffix", "template"] {
            fields.accept_only(name, &["".into()])?;
        }
        for list in ["images", "context"] {
            fields.accept_empty(list);
        }
        let input = if is_raw {
            Input::Prompts(vec![Prompt::Text(prompt)])
        } else {
            let system = system.map(|system| Message::new(Role::System, system));
            Input::Chat(system.into_iter().chain([Message::new(Role::User, prompt)]).collect())
        };
        let generation = shared(&mut fields, defaults, input, "prompt")?;
        fields.finish(&["images", "context"])?;
        Ok((generation, Self(Writer { only_loads, ..Writer::new(false) })))
    }

    fn at_once(&self, model: &str) -> Option<Value> {
        self.0.only_loads.then(|| loaded(model, json!({"response": ""})))
    }
}

/// Reads the fields that both endpoints have.
fn shared(
    fields: &mut Fields,
    defaults: &Sampling,
    input: Input,
    prompt_field: &'static str,
) -> Result<Generation, ApiError> {
    let model = fields.string("model")?.ok_or_else(|| fields.missing("model"))?;
    let model = model.strip_suffix(":latest").unwrap_or(&model).to_owned();
    let mut options = Options { stream: true, sampling: defaults.clone(), ..Options::new(model) };
    if let Some(stream) = fields.boolean("stream")? {
        options.stream = stream;
    }
    if let Some(given) = fields.value("options") {
        sampling(Fields::new(given, "options")?, &mut options)?;
    }
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
    fields.value("keep_alive");
    fields.accept_only("logprobs", &[json!(false)])?;
    Ok(generation)
}

fn sampling(mut fields: Fields, options: &mut Options) -> Result<(), ApiError> {
    let sampling = &mut options.sampling;
    for (name, target) in [
        ("temperature", &mut sampling.temperature),
        ("top_p", &mut sampling.top_p),
        ("min_p", &mut sampling.min_p),
        ("repeat_penalty", &mut sampling.repetition_penalty),
        ("presence_penalty", &mut sampling.presence_penalty),
        ("frequency_penalty", &mut sampling.frequency_penalty),
    ] {
        if let Some(number) = fields.number(name)? {
            *target = number;
        }
    }
    sampling.top_k = top_k(&mut fields)?.unwrap_or(sampling.top_k);
    sampling.seed = fields.seed("seed")?.or(sampling.seed);
    // -1 and -2 mean as much as there is room for.
    options.max_tokens = match fields.value("num_predict") {
        None => None,
        Some(value) if value.as_i64().is_some_and(|number| number < 0) => None,
        Some(value) => {
            let number = value.as_u64().and_then(|number| usize::try_from(number).ok()).filter(|n| *n > 0);
            let must_be = "an integer of at least 1, or -1 for no limit";
            Some(number.ok_or_else(|| invalid_value("options.num_predict", &value, must_be))?)
        }
    };
    options.stop = Options::stop_list(&mut fields, "stop")?;
    for name in LOAD_OPTIONS {
        fields.value(name);
    }
    fields.accept_only("typical_p", &[json!(1), json!(1.0)])?;
    fields.accept_only("mirostat", &[json!(0)])?;
    fields.finish(&[])
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
    function.value("index");
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
    fn piece(&self, head: &Head, text: &str, thinking: &str, calls: &[Value]) -> Map<String, Value> {
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
        body.insert("done".into(), false.into());
        body
    }

    /// Adds what the last body says.
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
        self.done(self.piece(head, &choice.text, &choice.reasoning, &calls))
    }

    fn update(&mut self, head: &Head, update: Update, out: &mut Frames) {
        let body = match update.what {
            What::Text { text, .. } => self.piece(head, &text, "", &[]),
            What::Reasoning(text) => self.piece(head, "", &text, &[]),
            What::CallBegin { id, name } => {
                self.call = Call { id, name, arguments: String::new() };
                return;
            }
            What::Arguments(text) => {
                self.call.arguments.push_str(&text);
                return;
            }
            // Arguments are an object here, so a call is written whole.
            What::CallEnd => match call_body(&self.call, EndReason::Length) {
                Some(call) => self.piece(head, "", "", &[call]),
                // How the answer ends says whether the call was cut off.
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
                self.piece(head, "", "", &calls)
            }
            What::Failed(_) => return,
        };
        out.json(&body.into());
    }
}

/// A call of an answer that ended so; `None` for one that was cut off.
fn call_body(call: &Call, reason: EndReason) -> Option<Value> {
    let arguments = call.object_after(reason)?;
    Some(json!({"id": call.id, "function": {"name": call.name, "arguments": arguments}}))
}

/// The answer to a request that only wants the model to be loaded, which it is.
fn loaded(model: &str, more: Value) -> Value {
    let mut body =
        json!({"model": model, "created_at": moment(unix_s()), "done": true, "done_reason": "load"});
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
                let body = self.0.piece(head, "", "", &[]);
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
