//! Arguments that a model writes as plain text, typed by their schema.

use std::collections::HashMap;

use serde_json::{Map, Value};

/// The parameters' schemas of a request's tools, by the tools' names.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolSchemas {
    tools: HashMap<String, Map<String, Value>>,
}

impl ToolSchemas {
    /// The schemas of these tools: name, and the JSON schema of the arguments.
    pub fn new<'a>(tools: impl Iterator<Item = (&'a str, &'a Value)>) -> Self {
        let properties = |schema: &Value| schema["properties"].as_object().cloned().unwrap_or_default();
        Self { tools: tools.map(|(name, schema)| (name.to_owned(), properties(schema))).collect() }
    }

    /// The JSON value of an argument that was written as `text`. It is a string if the schema says
    /// so, or if it is not JSON.
    pub(super) fn value(&self, tool: &str, argument: &str, text: &str) -> Value {
        let schema = self.tools.get(tool).and_then(|properties| properties.get(argument));
        let parsed = serde_json::from_str::<Value>(text.trim());
        match (parsed, schema) {
            (Ok(value), Some(schema)) if !value.is_string() && allows(schema, &value) => value,
            (Ok(value), None) if !value.is_string() => value,
            _ => Value::String(text.to_owned()),
        }
    }
}

/// True if the argument may be a value other than a string: the schema allows its type, or does not
/// allow a string.
fn allows(schema: &Value, value: &Value) -> bool {
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(several) => several.iter().filter_map(Value::as_str).collect(),
        _ => return allows_untyped(schema, value),
    };
    let own = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let is_own = |name: &&str| *name == own || own == "number" && *name == "integer";
    types.iter().any(is_own) || !types.contains(&"string")
}

/// As [`allows`], for a schema without a type.
fn allows_untyped(schema: &Value, value: &Value) -> bool {
    for list in ["enum", "anyOf", "oneOf"] {
        let Some(items) = schema[list].as_array() else { continue };
        return match list {
            "enum" => items.contains(value),
            _ => items.iter().any(|item| allows(item, value)),
        };
    }
    true
}
