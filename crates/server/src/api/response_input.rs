//! The items that a request of the Responses API continues.

use serde_json::{Map, Value};
use thunder_model::chat::{Message, Role, ToolCall};

use super::response_tools::INPUT;
use crate::error::ApiError;
use crate::request::fields::{Fields, invalid_value};
use crate::request::messages::{arguments_object, check_count, text};

/// Reads `input`: a text, or a list of items.
pub(super) fn input(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
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
    for extra in ["id", "status"] {
        fields.string(extra)?;
    }
    match kind.as_str() {
        "message" => {
            // Codex marks remarks between calls with it.
            fields.string("phase")?;
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
            fields.list("summary")?;
            fields.string("encrypted_content")?;
            let (path, mut thought) = (fields.name("content"), String::new());
            for (index, part) in fields.list("content")?.unwrap_or_default().into_iter().enumerate() {
                let mut part = Fields::new(part, format!("{path}[{index}]"))?;
                part.one_of("type", &["reasoning_text", "text"])?;
                thought.push_str(&part.string("text")?.unwrap_or_default());
                part.finish(&[])?;
            }
            messages.push(Message { reasoning: Some(thought), ..Message::new(Role::Assistant, "") });
        }
        "function_call" | "custom_tool_call" => {
            let id = fields.string("call_id")?.ok_or_else(|| fields.missing("call_id"))?;
            let name = fields.string("name")?.ok_or_else(|| fields.missing("name"))?;
            let arguments = if kind == "custom_tool_call" {
                let input = fields.string(INPUT)?.ok_or_else(|| fields.missing(INPUT))?;
                Map::from_iter([(INPUT.to_owned(), input.into())])
            } else {
                let arguments = fields.string("arguments")?.unwrap_or_default();
                arguments_object(&arguments, &fields.name("arguments"))?
            };
            let call = ToolCall { id, name, arguments };
            match open_turn(Role::Assistant, messages) {
                Some(turn) => turn.calls.push(call),
                None => messages.push(Message { calls: vec![call], ..Message::new(Role::Assistant, "") }),
            }
        }
        "function_call_output" | "custom_tool_call_output" => {
            fields.string("name")?;
            let id = fields.string("call_id")?.ok_or_else(|| fields.missing("call_id"))?;
            let output = fields.value("output").ok_or_else(|| fields.missing("output"))?;
            let output = text(output, &fields.name("output"))?;
            messages.push(Message { call_id: Some(id), ..Message::new(Role::Tool, output) });
        }
        _ => {
            return Err(fields.unsupported("type", &kind.into(), "send messages, reasoning and calls"));
        }
    }
    fields.finish(&[])
}

/// The model's message that the next item may belong to.
fn open_turn(role: Role, messages: &mut [Message]) -> Option<&mut Message> {
    messages.last_mut().filter(|last| role == Role::Assistant && last.role == Role::Assistant)
}
