//! Chat messages: checked and converted to the form that chat templates expect.

use serde_json::{Map, Value};

use super::fields::{Fields, display_value, invalid_value};
use crate::error::ApiError;

/// Most messages of a request. A template takes many steps for each.
const MAX_MESSAGES: usize = 4096;

/// Reads `messages` into objects with a role, one text, and a name if given, as chat templates
/// expect.
pub(crate) fn take(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    match fields.value("messages") {
        None => Err(fields.missing("messages")),
        Some(Value::Array(messages)) if messages.len() > MAX_MESSAGES => {
            let message = format!("`messages` has {} messages, {MAX_MESSAGES} are the most", messages.len());
            Err(ApiError::field("messages", message).code("invalid_value"))
        }
        Some(Value::Array(messages)) if !messages.is_empty() => {
            messages.into_iter().enumerate().map(|(index, message)| one(message, index)).collect()
        }
        Some(other) => Err(invalid_value("messages", &other, "a list of at least one message")),
    }
}

fn one(message: Value, index: usize) -> Result<Value, ApiError> {
    let mut fields = Fields::new(message, format!("messages[{index}]"))?;
    let role = fields.string("role")?.ok_or_else(|| fields.missing("role"))?;
    let role = match role.as_str() {
        // "developer" is OpenAI's newer name for "system"; templates know the older one.
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" | "function" => {
            let message =
                format!("messages of role \"{role}\" are not supported: this server cannot call tools");
            return Err(ApiError::field(fields.name("role"), message).code("unsupported_value"));
        }
        _ => {
            let must_be = "\"system\", \"developer\", \"user\" or \"assistant\"";
            return Err(invalid_value(&fields.name("role"), &Value::String(role), must_be));
        }
    };
    let content = fields.value("content").ok_or_else(|| fields.missing("content"))?;
    let content = text(content, &fields.name("content"))?;
    let mut plain = Map::new();
    plain.insert("role".into(), role.into());
    plain.insert("content".into(), content.into());
    if let Some(name) = fields.string("name")? {
        plain.insert("name".into(), name.into());
    }
    // OpenAI's own client sends a message back with all its fields.
    fields.accept_empty("tool_calls");
    fields.accept_empty("annotations");
    fields.finish(&[
        "annotations",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "audio",
        "refusal",
        "reasoning_content",
    ])?;
    Ok(Value::Object(plain))
}

/// The text of a message's content. Parts are joined without a separator.
fn text(content: Value, name: &str) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) if !parts.is_empty() => parts,
        other => return Err(invalid_value(name, &other, "a string or a list of text parts")),
    };
    let mut joined = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let mut part = Fields::new(part, format!("{name}[{index}]"))?;
        let part_type = part.value("type").ok_or_else(|| part.missing("type"))?;
        if part_type != "text" {
            let message =
                format!("content parts of type {} are not supported: use text", display_value(&part_type));
            return Err(ApiError::field(part.name("type"), message).code("unsupported_value"));
        }
        joined.push_str(&part.string("text")?.ok_or_else(|| part.missing("text"))?);
        part.finish(&[])?;
    }
    Ok(joined)
}
