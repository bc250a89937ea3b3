//! Chat messages: checked, and brought to the plain form that chat templates expect.

use serde_json::{Map, Value};

use super::fields::{Fields, shown, wrong};
use crate::error::ApiError;

/// The `messages` of a chat request as templates take them: a role and one text (and a name, where one is given).
pub(crate) fn take(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    match fields.value("messages") {
        None => Err(fields.missing("messages")),
        Some(Value::Array(messages)) if !messages.is_empty() => {
            messages.into_iter().enumerate().map(|(index, message)| one(message, index)).collect()
        }
        Some(other) => Err(wrong("messages", &other, "a list of at least one message")),
    }
}

fn one(message: Value, index: usize) -> Result<Value, ApiError> {
    let mut fields = Fields::new(message, format!("messages[{index}]"))?;
    let role = fields.string("role")?.ok_or_else(|| fields.missing("role"))?;
    let role = match role.as_str() {
        // OpenAI's newer name of the same thing; templates know the older one.
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        "tool" | "function" => {
            let message =
                format!("messages of role \"{role}\" are not supported here: tools cannot be called");
            return Err(ApiError::field(fields.name("role"), message).code("unsupported_value"));
        }
        _ => {
            let must_be = "\"system\", \"developer\", \"user\" or \"assistant\"";
            return Err(wrong(&fields.name("role"), &Value::String(role), must_be));
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
    fields.finish(&[
        "tool_calls",
        "tool_call_id",
        "function_call",
        "audio",
        "refusal",
        "reasoning_content",
    ])?;
    Ok(Value::Object(plain))
}

/// A content's text. Parts are joined as they are: nothing is added that the caller has not written.
fn text(content: Value, name: &str) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) if !parts.is_empty() => parts,
        other => return Err(wrong(name, &other, "a string or a list of text parts")),
    };
    let mut joined = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let mut part = Fields::new(part, format!("{name}[{index}]"))?;
        let kind = part.value("type").ok_or_else(|| part.missing("type"))?;
        if kind != "text" {
            let message = format!("parts of type {} are not supported here: only text is", shown(&kind));
            return Err(ApiError::field(part.name("type"), message).code("unsupported_value"));
        }
        joined.push_str(&part.string("text")?.ok_or_else(|| part.missing("text"))?);
        part.finish(&[])?;
    }
    Ok(joined)
}
