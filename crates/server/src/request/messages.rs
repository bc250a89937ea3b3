//! OpenAI's chat messages.

use serde_json::{Map, Value};
use thunder_model::chat::{Message, Role, ToolCall};

use super::fields::{Fields, invalid_value};
use crate::error::ApiError;

/// Maximum number of messages of a request. A template takes many steps for each.
pub(crate) const MAX_MESSAGES: usize = 4096;
/// Maximum number of calls in one message.
const MAX_CALLS: usize = 128;

/// Reads `messages`.
pub(crate) fn take(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    list(fields, "messages", one)
}

/// Reads a list of at least one message, each by `read`.
pub(crate) fn list(
    fields: &mut Fields,
    name: &str,
    read: impl Fn(Fields) -> Result<Message, ApiError>,
) -> Result<Vec<Message>, ApiError> {
    match fields.value(name) {
        None => Err(fields.missing(name)),
        Some(Value::Array(messages)) => {
            check_count(messages.len(), name)?;
            let numbered = messages.into_iter().enumerate();
            numbered.map(|(index, message)| read(Fields::new(message, format!("{name}[{index}]"))?)).collect()
        }
        Some(other) => Err(invalid_value(name, &other, "a list of at least one message")),
    }
}

/// Checks the number of messages.
pub(crate) fn check_count(count: usize, name: &str) -> Result<(), ApiError> {
    if (1..=MAX_MESSAGES).contains(&count) {
        return Ok(());
    }
    let message = format!("`{name}` has {count} messages but must have 1 to {MAX_MESSAGES}");
    Err(ApiError::field(name, message).code("invalid_value"))
}

fn one(mut fields: Fields) -> Result<Message, ApiError> {
    let role = fields.string("role")?.ok_or_else(|| fields.missing("role"))?;
    let role = match role.as_str() {
        // "developer" is OpenAI's newer name for "system"; templates know the older one.
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" => Role::Tool,
        _ => {
            let must_be = "\"system\", \"developer\", \"user\", \"assistant\" or \"tool\"";
            return Err(invalid_value(&fields.name("role"), &Value::String(role), must_be));
        }
    };
    let calls = if role == Role::Assistant { calls(&mut fields)? } else { Vec::new() };
    let content = match fields.value("content") {
        // A message may have only calls.
        None if !calls.is_empty() => String::new(),
        None => return Err(fields.missing("content")),
        Some(content) => text(content, &fields.name("content"))?,
    };
    let mut message = Message { calls, ..Message::new(role, content) };
    message.name = fields.string("name")?;
    if role == Role::Tool {
        let id = fields.string("tool_call_id")?;
        message.call_id = Some(id.ok_or_else(|| fields.missing("tool_call_id"))?);
    }
    if role == Role::Assistant {
        message.reasoning = fields.string("reasoning_content")?;
        // OpenAI's own client sends a message back with all its fields.
        fields.accept_empty("tool_calls");
        fields.accept_empty("annotations");
    }
    fields.finish(&[
        "annotations",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "audio",
        "refusal",
        "reasoning_content",
    ])?;
    Ok(message)
}

fn calls(fields: &mut Fields) -> Result<Vec<ToolCall>, ApiError> {
    let name = fields.name("tool_calls");
    match fields.value("tool_calls") {
        None => Ok(Vec::new()),
        Some(Value::Array(calls)) if calls.len() <= MAX_CALLS => {
            let call = |(index, call)| one_call(Fields::new(call, format!("{name}[{index}]"))?);
            calls.into_iter().enumerate().map(call).collect()
        }
        Some(other) => Err(invalid_value(&name, &other, "a list of at most 128 calls")),
    }
}

fn one_call(mut fields: Fields) -> Result<ToolCall, ApiError> {
    fields.accept_only("type", &["function".into()])?;
    // Streamed calls have it, and some clients send it back.
    fields.integer("index", 0, usize::MAX, "an integer of at least 0")?;
    let id = fields.string("id")?.ok_or_else(|| fields.missing("id"))?;
    let function = fields.value("function").ok_or_else(|| fields.missing("function"))?;
    let mut function = Fields::new(function, fields.name("function"))?;
    let name = function.string("name")?.ok_or_else(|| function.missing("name"))?;
    let arguments = function.string("arguments")?.unwrap_or_default();
    let arguments = arguments_object(&arguments, &function.name("arguments"))?;
    function.finish(&[])?;
    fields.finish(&[])?;
    Ok(ToolCall { id, name, arguments })
}

/// The object in the text of a call's arguments.
pub(crate) fn arguments_object(text: &str, name: &str) -> Result<Map<String, Value>, ApiError> {
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    match super::json::parse(text.as_bytes()) {
        Ok(Value::Object(arguments)) => Ok(arguments),
        _ => Err(invalid_value(name, &Value::String(text.to_owned()), "a JSON object as text")),
    }
}

/// The text of a message's content. Parts are joined without a separator.
pub(crate) fn text(content: Value, name: &str) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) if !parts.is_empty() => parts,
        other => return Err(invalid_value(name, &other, "a string or a list of text parts")),
    };
    let mut joined = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let mut part = Fields::new(part, format!("{name}[{index}]"))?;
        let part_type = part.value("type").ok_or_else(|| part.missing("type"))?;
        if !["text", "input_text", "output_text"].iter().any(|known| part_type == *known) {
            return Err(part.unsupported("type", &part_type, "use text"));
        }
        joined.push_str(&part.string("text")?.ok_or_else(|| part.missing("text"))?);
        marks(&mut part)?;
        for extra in ["annotations", "logprobs"] {
            part.list(extra)?;
        }
        part.finish(&[])?;
    }
    Ok(joined)
}

/// Reads a part's marks for caches and its citations, which change nothing here.
pub(crate) fn marks(part: &mut Fields) -> Result<(), ApiError> {
    cache_control(part)?;
    part.list("citations").map(drop)
}

/// Reads a mark for caches. The prefix cache needs none.
pub(crate) fn cache_control(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(mut mark) = fields.nested("cache_control")? else { return Ok(()) };
    mark.one_of("type", &["ephemeral"])?;
    mark.one_of("ttl", &["5m", "1h"])?;
    mark.string("scope")?;
    mark.finish(&[])
}
