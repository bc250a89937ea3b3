//! Tools and output formats in OpenAI's form.

use serde_json::{Map, Value, json};
use thunder_engine::Grammar;
use thunder_model::chat::Tool;

use super::fields::{Fields, display_value, invalid_value};
use crate::error::ApiError;
use crate::generate::{ToolChoice, ToolUse};

/// Maximum number of tools of a request: more descriptions would fill the context.
const MAX_TOOLS: usize = 128;
/// Maximum length of a tool's name, as in Anthropic's API. OpenAI's limit of 64 is too short for
/// the names that agents make from a server and its tool.
const MAX_NAME_BYTES: usize = 128;
/// Maximum number of choices of `guided_choice`.
const MAX_CHOICES: usize = 1024;

/// Reads `tools`, `tool_choice` and `parallel_tool_calls`.
pub(crate) fn take(fields: &mut Fields) -> Result<ToolUse, ApiError> {
    let tools = match fields.value("tools") {
        None => Vec::new(),
        Some(Value::Array(tools)) => list(tools, "tools", openai_tool)?,
        Some(other) => return Err(invalid_value("tools", &other, "a list of tools")),
    };
    let choice = choice(fields)?;
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    Ok(ToolUse { tools, choice, parallel })
}

/// Reads a list of tools, each by `read`, which may leave one out, and checks their names.
pub(crate) fn list(
    tools: Vec<Value>,
    name: &str,
    read: impl Fn(Fields) -> Result<Option<Tool>, ApiError>,
) -> Result<Vec<Tool>, ApiError> {
    if tools.len() > MAX_TOOLS {
        let message = format!("`{name}` has {} tools, {MAX_TOOLS} are the most", tools.len());
        return Err(ApiError::field(name, message).code("invalid_value"));
    }
    let mut read_tools: Vec<Tool> = Vec::with_capacity(tools.len());
    for (index, tool) in tools.into_iter().enumerate() {
        let path = format!("{name}[{index}]");
        let Some(tool) = read(Fields::new(tool, path.clone())?)? else { continue };
        if read_tools.iter().any(|other| other.name == tool.name) {
            let message = format!("`{path}` has the name \"{}\" of another tool", tool.name);
            return Err(ApiError::field(path, message).code("invalid_value"));
        }
        read_tools.push(tool);
    }
    Ok(read_tools)
}

fn openai_tool(mut fields: Fields) -> Result<Option<Tool>, ApiError> {
    let kind = fields.string("type")?.ok_or_else(|| fields.missing("type"))?;
    if kind != "function" {
        return Err(fields.unsupported("type", &kind.into(), "use \"function\""));
    }
    let function = fields.value("function").ok_or_else(|| fields.missing("function"))?;
    let function = Fields::new(function, fields.name("function"))?;
    fields.finish(&[])?;
    function_tool(function).map(Some)
}

/// A function: `name`, `description`, `parameters`, `strict`.
pub(crate) fn function_tool(mut fields: Fields) -> Result<Tool, ApiError> {
    let name = tool_name(&mut fields)?;
    let description = fields.string("description")?;
    let parameters = fields.object("parameters")?.unwrap_or_default();
    let strict = fields.boolean("strict")?.unwrap_or(false);
    let parameters = parameters_schema(parameters, &fields.name("parameters"), &name)?;
    fields.finish(&[])?;
    Ok(Tool { name, description, parameters, strict })
}

/// A tool's name: letters, digits, `_`, `-` and `.`, so that every family's format can hold it.
pub(crate) fn tool_name(fields: &mut Fields) -> Result<String, ApiError> {
    let name = fields.string("name")?.ok_or_else(|| fields.missing("name"))?;
    let is_name = (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte));
    if is_name {
        return Ok(name);
    }
    let must_be = format!("1 to {MAX_NAME_BYTES} letters, digits, `_`, `-` or `.`");
    Err(invalid_value(&fields.name("name"), &Value::String(name), &must_be))
}

/// The schema of the arguments of the tool `tool`, which are an object. `field` holds it.
///
/// # Errors
/// When it is the schema of something else.
pub(crate) fn parameters_schema(
    mut schema: Map<String, Value>,
    field: &str,
    tool: &str,
) -> Result<Value, ApiError> {
    let kind = schema.entry("type").or_insert_with(|| "object".into());
    let is_object = match &*kind {
        Value::Array(kinds) => kinds.iter().any(|kind| kind == "object"),
        kind => kind == "object",
    };
    if !is_object {
        let message = format!(
            "`{field}.type` is {} but the arguments of the tool \"{tool}\" must be an object: set the type to \
             \"object\", and put the value into one of its `properties`",
            display_value(kind)
        );
        return Err(ApiError::field(format!("{field}.type"), message).code("invalid_value"));
    }
    schema.entry("properties").or_insert_with(|| json!({}));
    Ok(Value::Object(schema))
}

fn choice(fields: &mut Fields) -> Result<ToolChoice, ApiError> {
    let must_be = "\"auto\", \"none\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": …}}";
    let Some(value) = fields.value("tool_choice") else { return Ok(ToolChoice::Auto) };
    match &value {
        Value::String(word) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            _ => Err(invalid_value("tool_choice", &value, must_be)),
        },
        Value::Object(_) => named_choice(Fields::new(value, "tool_choice")?),
        _ => Err(invalid_value("tool_choice", &value, must_be)),
    }
}

/// A choice of one tool. Chat has its name in a separate object, Responses next to the type.
fn named_choice(mut choice: Fields) -> Result<ToolChoice, ApiError> {
    let kind = choice.string("type")?.ok_or_else(|| choice.missing("type"))?;
    if !["function", "custom"].contains(&kind.as_str()) {
        return Err(choice.unsupported("type", &kind.into(), "this server runs no tools of its own"));
    }
    let mut name = choice.string("name")?;
    if let Some(mut function) = choice.nested("function")? {
        name = function.string("name")?;
        function.finish(&[])?;
    }
    let name = name.ok_or_else(|| choice.missing("name"))?;
    choice.finish(&[])?;
    Ok(ToolChoice::Named(name))
}

/// Reads the format of the answer, with its field: `response_format`, or one of vLLM's fields
/// `guided_json`, `guided_regex`, `guided_grammar` and `guided_choice`.
pub(crate) fn grammar(fields: &mut Fields) -> Result<Option<(&'static str, Grammar)>, ApiError> {
    let mut found: Vec<(&'static str, Grammar)> = Vec::new();
    if let Some(format) = fields.value("response_format") {
        let format = Fields::new(format, "response_format")?;
        found.extend(
            response_format(format, "json_schema.schema")?.map(|grammar| ("response_format", grammar)),
        );
    }
    match fields.value("guided_json") {
        None => {}
        Some(schema @ Value::Object(_)) => found.push(("guided_json", Grammar::JsonSchema(schema))),
        Some(Value::String(text)) => match serde_json::from_str::<Value>(&text) {
            Ok(schema @ Value::Object(_)) => found.push(("guided_json", Grammar::JsonSchema(schema))),
            _ => return Err(invalid_value("guided_json", &Value::String(text), "a JSON schema")),
        },
        Some(other) => return Err(invalid_value("guided_json", &other, "a JSON schema")),
    }
    if let Some(regex) = fields.string("guided_regex")? {
        found.push(("guided_regex", Grammar::Regex(regex)));
    }
    if let Some(lark) = fields.string("guided_grammar")? {
        found.push(("guided_grammar", Grammar::Lark(lark)));
    }
    if let Some(choices) = fields.value("guided_choice") {
        found.push(("guided_choice", choice_grammar(&choices)?));
    }
    if let [(first, _), (second, _), ..] = found.as_slice() {
        let message = format!("`{second}` and `{first}` both say what the answer must follow: send one");
        return Err(ApiError::field(*second, message).code("invalid_value"));
    }
    Ok(found.pop())
}

fn choice_grammar(choices: &Value) -> Result<Grammar, ApiError> {
    let must_be = "a list of 1 to 1024 texts that are not empty";
    let texts: Option<Vec<&str>> =
        choices.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
    let texts =
        texts.filter(|texts| (1..=MAX_CHOICES).contains(&texts.len()) && texts.iter().all(|t| !t.is_empty()));
    let texts = texts.ok_or_else(|| invalid_value("guided_choice", choices, must_be))?;
    let quoted: Vec<String> = texts.iter().map(|text| Value::from(*text).to_string()).collect();
    Ok(Grammar::Lark(format!("start: {}", quoted.join(" | "))))
}

/// Reads `response_format`, or its counterpart in other APIs; `place` is the schema's field.
pub(crate) fn response_format(mut fields: Fields, place: &str) -> Result<Option<Grammar>, ApiError> {
    let kind = fields.value("type").ok_or_else(|| fields.missing("type"))?;
    let grammar = match kind.as_str() {
        Some("text") => None,
        Some("json_object") => Some(Grammar::JsonSchema(json!({"type": "object"}))),
        Some("json_schema") => {
            // Chat has the schema in a separate object, Responses next to the type.
            let inner = fields.value("json_schema");
            let mut nested = inner.map(|inner| Fields::new(inner, fields.name("json_schema"))).transpose()?;
            let place = if nested.is_some() { "schema" } else { place };
            let holder = nested.as_mut().unwrap_or(&mut fields);
            holder.string("name")?;
            holder.string("description")?;
            // A schema is always enforced, because this costs nothing.
            holder.boolean("strict")?;
            let schema = holder.object("schema")?.ok_or_else(|| holder.missing(place))?;
            if let Some(nested) = nested {
                nested.finish(&[])?;
            }
            Some(Grammar::JsonSchema(Value::Object(schema)))
        }
        _ => {
            let remedy = "use \"text\", \"json_object\" or \"json_schema\"";
            return Err(fields.unsupported("type", &kind, remedy));
        }
    };
    fields.finish(&[])?;
    Ok(grammar)
}
