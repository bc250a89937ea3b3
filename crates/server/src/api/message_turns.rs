//! Anthropic's messages: blocks of content, and edits of the conversation.

use serde_json::{Value, json};
use thunder_model::chat::{Message, Role, ToolCall};

use crate::error::ApiError;
use crate::request::fields::{Fields, invalid_value};
use crate::request::messages::{marks, text};

/// The only edit of a context that this server supports.
const CLEAR_THINKING: &str = "clear_thinking_20251015";
/// Replaces a picture in the results of a tool. The agent's next requests repeat the picture, so
/// refusing it would end the session.
const NO_IMAGE: &str = "[an image was left out: this model reads text only]";

/// Applies `context_management`. Thinking of earlier turns can be cleared. Results of tools cannot,
/// because their clearing depends on a threshold in tokens.
pub(super) fn edit_context(mut management: Fields, messages: &mut [Message]) -> Result<(), ApiError> {
    let path = management.name("edits");
    for (index, edit) in management.list("edits")?.unwrap_or_default().into_iter().enumerate() {
        let mut edit = Fields::new(edit, format!("{path}[{index}]"))?;
        let kind = edit.string("type")?.ok_or_else(|| edit.missing("type"))?;
        if kind != CLEAR_THINKING {
            let remedy = format!("clear the context in the client, or use \"{CLEAR_THINKING}\"");
            return Err(edit.unsupported("type", &kind.into(), &remedy));
        }
        let kept = match edit.value("keep") {
            // The documented default.
            None => Some(1),
            Some(Value::String(all)) if all == "all" => None,
            Some(keep) => {
                let mut keep = Fields::new(keep, edit.name("keep"))?;
                let kind = keep.one_of("type", &["thinking_turns", "all"])?;
                let turns = keep.integer("value", 1, usize::MAX, "an integer of at least 1")?;
                let turns = match kind.as_deref() {
                    Some("all") => None,
                    _ => Some(turns.ok_or_else(|| keep.missing("value"))?),
                };
                keep.finish(&[])?;
                turns
            }
        };
        edit.finish(&[])?;
        if let Some(turns) = kept {
            clear_thinking(messages, turns);
        }
    }
    management.finish(&[])
}

/// Keeps the thinking of the last `turns` turns with thinking. A turn is everything that the model
/// writes between two messages of the user; results of tools do not end it.
fn clear_thinking(messages: &mut [Message], turns: usize) {
    let (mut seen, mut is_counted) = (0, false);
    for message in messages.iter_mut().rev() {
        match message.role {
            Role::User => is_counted = false,
            Role::Assistant if message.reasoning.is_some() => {
                seen += usize::from(!std::mem::replace(&mut is_counted, true));
                if seen > turns {
                    message.reasoning = None;
                }
            }
            _ => {}
        }
    }
}

/// Reads one message, which may hold several: results of calls, and text.
pub(super) fn turn(mut fields: Fields, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let role = fields.string("role")?.ok_or_else(|| fields.missing("role"))?;
    let role = match role.as_str() {
        "user" => Role::User,
        "assistant" => Role::Assistant,
        _ => {
            return Err(invalid_value(
                &fields.name("role"),
                &Value::String(role),
                "\"user\" or \"assistant\"",
            ));
        }
    };
    let name = fields.name("content");
    let content = fields.value("content").ok_or_else(|| fields.missing("content"))?;
    fields.finish(&[])?;
    let blocks = match content {
        Value::String(text) => {
            messages.push(Message::new(role, text));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        other => return Err(invalid_value(&name, &other, "a string or a list of content blocks")),
    };
    let mut said = Message::new(role, "");
    for (index, block) in blocks.into_iter().enumerate() {
        let mut block = Fields::new(block, format!("{name}[{index}]"))?;
        let kind = block.string("type")?.ok_or_else(|| block.missing("type"))?;
        marks(&mut block)?;
        match (kind.as_str(), role) {
            ("text", _) => {
                let text = block.string("text")?.ok_or_else(|| block.missing("text"))?;
                said.content.push_str(&text);
            }
            ("thinking", Role::Assistant) => {
                let text = block.string("thinking")?.ok_or_else(|| block.missing("thinking"))?;
                block.string("signature")?;
                said.reasoning.get_or_insert_default().push_str(&text);
            }
            ("redacted_thinking", Role::Assistant) => drop(block.string("data")?),
            ("tool_use", Role::Assistant) => said.calls.push(call(&mut block)?),
            ("tool_result", Role::User) => messages.push(result(&mut block)?),
            _ => {
                return Err(block.unsupported("type", &kind.into(), "use text"));
            }
        }
        block.finish(&[])?;
    }
    if !said.content.is_empty() || !said.calls.is_empty() || role == Role::Assistant {
        messages.push(said);
    }
    Ok(())
}

fn call(block: &mut Fields) -> Result<ToolCall, ApiError> {
    let id = block.string("id")?.ok_or_else(|| block.missing("id"))?;
    let name = block.string("name")?.ok_or_else(|| block.missing("name"))?;
    let arguments = block.object("input")?.unwrap_or_default();
    if let Some(mut caller) = block.nested("caller")? {
        caller.one_of("type", &["direct"])?;
        caller.finish(&[])?;
    }
    Ok(ToolCall { id, name, arguments })
}

fn result(block: &mut Fields) -> Result<Message, ApiError> {
    let id = block.string("tool_use_id")?.ok_or_else(|| block.missing("tool_use_id"))?;
    let is_error = block.boolean("is_error")?.unwrap_or(false);
    let content = match block.value("content") {
        None => String::new(),
        Some(Value::Array(parts)) if parts.is_empty() => String::new(),
        Some(content) => text(with_words_for_images(content), &block.name("content"))?,
    };
    let content = if is_error { format!("error: {content}") } else { content };
    Ok(Message { call_id: Some(id), ..Message::new(Role::Tool, content) })
}

/// The content of a tool's result, with a text in place of each picture.
fn with_words_for_images(mut content: Value) -> Value {
    for part in content.as_array_mut().into_iter().flatten() {
        if part.get("type").is_some_and(|kind| kind == "image") {
            *part = json!({"type": "text", "text": NO_IMAGE});
        }
    }
    content
}
