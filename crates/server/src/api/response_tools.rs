//! The tools of the Responses API: functions, and custom tools, whose input is a text.
//!
//! A custom tool is a function with one text for the model, and a `custom_tool_call` for the
//! client.

use serde_json::{Value, json};
use thunder_model::chat::Tool;

use crate::error::ApiError;
use crate::generate::choices::Call;
use crate::request::fields::Fields;
use crate::request::tools::{self, function_tool, tool_name};

/// The field of a custom tool's text.
pub(super) const INPUT: &str = "input";

/// Tools that OpenAI's servers or certain clients run. They are left out, so the model does not
/// call them. Codex sends some with every request.
const BUILT_IN: [&str; 11] = [
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "local_shell",
    "shell",
    "apply_patch",
    "file_search",
    "code_interpreter",
    "image_generation",
    "computer_use_preview",
];

/// True if tools of this type are left out.
pub(super) fn is_built_in(kind: &Value) -> bool {
    kind.as_str().is_some_and(|kind| BUILT_IN.contains(&kind))
}

/// Reads `tools`. Returns the names of the custom ones too.
pub(super) fn take(fields: &mut Fields) -> Result<(Vec<Tool>, Vec<String>), ApiError> {
    let listed = fields.list("tools")?.unwrap_or_default();
    let is_custom = |tool: &&Value| tool["type"] == "custom";
    let name = |tool: &Value| tool["name"].as_str().map(str::to_owned);
    let custom = listed.iter().filter(is_custom).filter_map(name).collect();
    Ok((tools::list(listed, "tools", one)?, custom))
}

fn one(mut fields: Fields) -> Result<Option<Tool>, ApiError> {
    let kind = fields.string("type")?.ok_or_else(|| fields.missing("type"))?;
    match kind.as_str() {
        "function" => function_tool(fields).map(Some),
        "custom" => custom_tool(fields).map(Some),
        other if BUILT_IN.contains(&other) => Ok(None),
        _ => Err(fields.unsupported("type", &kind.into(), "use \"function\" or \"custom\"")),
    }
}

fn custom_tool(mut fields: Fields) -> Result<Tool, ApiError> {
    let name = tool_name(&mut fields)?;
    let mut description = fields.string("description")?;
    let mut input = json!({"type": "string"});
    let mut strict = false;
    if let Some(mut format) = fields.nested("format")? {
        if format.one_of("type", &["text", "grammar"])?.as_deref() == Some("grammar") {
            let syntax = format.one_of("syntax", &["lark", "regex"])?;
            let syntax = syntax.ok_or_else(|| format.missing("syntax"))?;
            let definition = format.string("definition")?.ok_or_else(|| format.missing("definition"))?;
            let text = description.get_or_insert_default();
            text.push_str(&format!("\nThe input must follow this {syntax} grammar:\n{definition}"));
            if syntax == "regex" {
                input["pattern"] = format!("^(?:{definition})$").into();
                strict = true;
            }
        }
        format.finish(&[])?;
    }
    fields.finish(&[])?;
    let parameters = json!({
        "type": "object", "properties": {INPUT: input}, "required": [INPUT], "additionalProperties": false,
    });
    Ok(Tool { name, description, parameters, strict })
}

/// The text of a call of a custom tool; `None` if the call was cut off.
pub(super) fn custom_input(call: &Call) -> Option<String> {
    call.object()?.get(INPUT)?.as_str().map(str::to_owned)
}
