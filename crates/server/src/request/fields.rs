//! The fields of a JSON object. Reading a field removes it, so that the rest can be refused by
//! name.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// Maximum characters of a wrong value in an error message.
const SHOWN_CHARS: usize = 60;

/// A JSON object in a request. `null` counts as absent.
#[derive(Debug)]
pub(crate) struct Fields {
    object: Map<String, Value>,
    /// Path of the object in the body, such as `messages[2]`; empty for the body itself.
    path: String,
}

impl Fields {
    /// The fields of `value`, found at `path` in the body.
    pub fn new(value: Value, path: impl Into<String>) -> Result<Self, ApiError> {
        let path = path.into();
        match value {
            Value::Object(object) => Ok(Self { object, path }),
            other if path.is_empty() => Err(ApiError::invalid(format!(
                "the body is {} but must be a JSON object",
                display_value(&other)
            ))),
            other => Err(invalid_value(&path, &other, "an object")),
        }
    }

    /// A field's full path, for errors.
    pub fn name(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) }
    }

    /// Removes and returns a field of any type.
    ///
    /// The trace event lets a test compare the fields that are read with those that
    /// `openapi.json` lists.
    pub fn value(&mut self, field: &str) -> Option<Value> {
        tracing::trace!(target: "thunder_server::fields", path = self.path, field);
        self.object.remove(field).filter(|value| !value.is_null())
    }

    /// The error for a required field that is absent.
    pub fn missing(&self, field: &str) -> ApiError {
        let name = self.name(field);
        let message = format!("the required field `{name}` is missing");
        ApiError::field(name, message).code("missing_required_parameter")
    }

    /// The error for a field with an unsupported value; `remedy` says what to do.
    pub fn unsupported(&self, field: &str, value: &Value, remedy: &str) -> ApiError {
        let name = self.name(field);
        let message = format!("`{name}` is {}, which is not supported: {remedy}", display_value(value));
        ApiError::field(name, message).code("unsupported_value")
    }

    fn typed<T>(
        &mut self,
        field: &str,
        must_be: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        read(&value).map(Some).ok_or_else(|| invalid_value(&self.name(field), &value, must_be))
    }

    /// A string.
    pub fn string(&mut self, field: &str) -> Result<Option<String>, ApiError> {
        self.typed(field, "a string", |value| value.as_str().map(str::to_owned))
    }

    /// One of these strings.
    pub fn one_of(&mut self, field: &str, known: &[&str]) -> Result<Option<String>, ApiError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_str().filter(|text| known.contains(text)) {
            Some(text) => Ok(Some(text.to_owned())),
            None => {
                let known: Vec<String> = known.iter().map(|text| format!("\"{text}\"")).collect();
                Err(invalid_value(&self.name(field), &value, &known.join(" or ")))
            }
        }
    }

    /// A list.
    pub fn list(&mut self, field: &str) -> Result<Option<Vec<Value>>, ApiError> {
        self.typed(field, "a list", |value| value.as_array().cloned())
    }

    /// An object whose fields are read one by one.
    pub fn nested(&mut self, field: &str) -> Result<Option<Self>, ApiError> {
        self.value(field).map(|value| Self::new(value, self.name(field))).transpose()
    }

    /// A boolean.
    pub fn boolean(&mut self, field: &str) -> Result<Option<bool>, ApiError> {
        self.typed(field, "true or false", Value::as_bool)
    }

    /// Any number.
    pub fn number(&mut self, field: &str) -> Result<Option<f32>, ApiError> {
        self.typed(field, "a number", |value| value.as_f64().map(|number| number as f32))
    }

    /// An integer from `min` to `max`; `must_be` describes that range in an error message.
    pub fn integer(
        &mut self,
        field: &str,
        min: usize,
        max: usize,
        must_be: &str,
    ) -> Result<Option<usize>, ApiError> {
        self.typed(field, must_be, |value| {
            let number = usize::try_from(value.as_u64()?).ok()?;
            (min..=max).contains(&number).then_some(number)
        })
    }

    /// A signed or unsigned 64-bit integer, as its bits.
    pub fn seed(&mut self, field: &str) -> Result<Option<u64>, ApiError> {
        self.typed(field, "a 64-bit integer", |value| {
            value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned))
        })
    }

    /// An object.
    pub fn object(&mut self, field: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        self.typed(field, "an object", |value| value.as_object().cloned())
    }

    /// Accepts a list if it is empty, which asks for nothing.
    pub fn accept_empty(&mut self, field: &str) {
        if self.object.get(field).and_then(Value::as_array).is_some_and(Vec::is_empty) {
            self.value(field);
        }
    }

    /// Accepts a field only with a value in `neutral`, which asks for the default behaviour.
    pub fn accept_only(&mut self, field: &str, neutral: &[Value]) -> Result<(), ApiError> {
        let Some(value) = self.value(field) else { return Ok(()) };
        if neutral.contains(&value) {
            return Ok(());
        }
        let name = self.name(field);
        let allowed: Vec<_> = neutral.iter().map(display_value).collect();
        let message = format!(
            "`{name}` = {} is not supported: remove it, or set it to {}",
            display_value(&value),
            allowed.join(" or ")
        );
        Err(ApiError::field(name, message).code("unsupported_value"))
    }

    /// Refuses fields that were not read: first those of OpenAI's API (`unsupported`), then unknown
    /// fields.
    pub fn finish(mut self, unsupported: &[&str]) -> Result<(), ApiError> {
        self.object.retain(|_, value| !value.is_null());
        if let Some(field) = unsupported.iter().find(|field| self.object.contains_key(**field)) {
            let name = self.name(field);
            let message = format!("`{name}` is not supported: remove it");
            return Err(ApiError::field(name, message).code("unsupported_parameter"));
        }
        let mut unknown = self.object.keys().map(|field| clipped(&self.name(field)));
        let Some(first) = unknown.next() else { return Ok(()) };
        let others: String = unknown.map(|name| format!(", `{name}`")).collect();
        let noun = if others.is_empty() { "field" } else { "fields" };
        let message = format!("unknown {noun} `{first}`{}", clipped(&others));
        Err(ApiError::field(first, message).code("unknown_parameter"))
    }
}

/// The error for a value of the wrong type or outside its range.
pub(crate) fn invalid_value(name: &str, value: &Value, must_be: &str) -> ApiError {
    ApiError::field(name, format!("`{name}` is {} but must be {must_be}", display_value(value)))
        .code("invalid_value")
}

/// A value for an error message.
pub(crate) fn display_value(value: &Value) -> String {
    match value {
        Value::Array(items) if !items.is_empty() => format!("a list of length {}", items.len()),
        Value::Object(fields) if fields.len() > 1 => "an object".to_owned(),
        other => clipped(&other.to_string()),
    }
}

fn clipped(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
