//! Prompts without a chat template.

use serde_json::Value;

use super::fields::{Fields, invalid_value};
use crate::error::ApiError;
use crate::generate::Prompt;

/// Reads a field that is a string, token ids, or a list of either.
pub(crate) fn take(fields: &mut Fields, name: &str) -> Result<Vec<Prompt>, ApiError> {
    let must_be = "a string, a list of token ids, or a list of strings or of lists of token ids";
    match fields.value(name) {
        None => Err(fields.missing(name)),
        Some(Value::String(text)) => Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(items)) if items.first().is_some_and(Value::is_number) => {
            Ok(vec![Prompt::Ids(ids(items, name)?)])
        }
        Some(Value::Array(items)) if !items.is_empty() => {
            let prompt = |(index, item)| match item {
                Value::String(text) => Ok(Prompt::Text(text)),
                Value::Array(items) => Ok(Prompt::Ids(ids(items, &format!("{name}[{index}]"))?)),
                other => {
                    Err(invalid_value(&format!("{name}[{index}]"), &other, "a string or a list of token ids"))
                }
            };
            items.into_iter().enumerate().map(prompt).collect()
        }
        Some(other) => Err(invalid_value(name, &other, must_be)),
    }
}

fn ids(items: Vec<Value>, name: &str) -> Result<Vec<u32>, ApiError> {
    let id = |(index, item): (usize, &Value)| {
        let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| {
            invalid_value(&format!("{name}[{index}]"), item, "a token id, like the items before it")
        })
    };
    items.iter().enumerate().map(id).collect()
}
