//! A Jinja environment with Hugging Face's filters, functions and settings.

use std::{cell::Cell, error::Error as _, fmt};

use minijinja::{
    Environment, Error, ErrorKind, State, Value,
    syntax::SyntaxConfig,
    value::{Kwargs, ValueKind},
};

use super::python;

/// Maximum steps of a rendering (a few seconds), so that no template runs forever. A one-page
/// template takes about 100 steps per message.
const FUEL: u64 = 20_000_000;
/// Maximum bytes that a rendering may write to variables and macros, which the library does not
/// limit: for the template's literals, and for values.
const CAPTURED_BYTES: usize = 512 << 20;

thread_local! {
    /// Bytes of values that the rendering on this thread has written.
    static WRITTEN_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// The maximum number of steps for these templates. Each step writes at most their longest literal.
pub(super) fn fuel(templates: &[(&str, &str)]) -> u64 {
    let longest = |source: &str| match source.contains("endraw") {
        // A raw block's literal may hold what begins a tag.
        true => source.len(),
        false => source.split("{%").flat_map(|part| part.split("{{")).map(str::len).max().unwrap_or(0),
    };
    let longest = templates.iter().map(|(_, source)| longest(source)).max().unwrap_or(0);
    FUEL.min((CAPTURED_BYTES / longest.max(1)) as u64)
}

/// Begins the count of a rendering's bytes.
pub(super) fn begin_rendering() {
    WRITTEN_BYTES.set(0);
}

/// An environment without templates.
pub(super) fn new() -> Environment<'static> {
    let mut environment = Environment::new();
    // Cannot fail: the delimiters are the default ones.
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        environment.set_syntax(syntax);
    }
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, _, value| {
        if value.is_undefined() {
            return Ok(());
        }
        let text = python::str(value);
        WRITTEN_BYTES.set(WRITTEN_BYTES.get() + text.len());
        if WRITTEN_BYTES.get() > CAPTURED_BYTES {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("it writes more than {CAPTURED_BYTES} bytes"),
            ));
        }
        out.write_str(&text).map_err(Error::from)
    });
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: &Value| python::str(value));
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    // In Python a string is a sequence too.
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
    });
    environment.add_test("iterable", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Iterable | ValueKind::Undefined
        )
    });
    environment
}

/// The message of `raise_exception`, as the cause of the rendering's error.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let message = python::str(message);
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

/// An error's text for users: the template's own message, or what failed and in which line.
pub(super) fn explain(error: &Error) -> String {
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return message.clone();
        }
        cause = inner.source();
    }
    let mut text = match error.kind() {
        ErrorKind::OutOfFuel => "it takes too many steps".to_owned(),
        kind => kind.to_string(),
    };
    if let Some(detail) = error.detail() {
        text += &format!(": {detail}");
    }
    if let Some(line) = error.line() {
        text += &format!(" (line {line} of the template)");
    }
    text
}

/// `datetime.now().strftime(format)`.
fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now()).map_err(|error| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {error}"))
    })
}

/// Python's `json.dumps` with Hugging Face's defaults: no HTML escapes, no escapes of non-ASCII
/// text.
fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = match indent {
        Some(indent) if !indent.is_none() => Some(usize::try_from(indent)?),
        _ => None,
    };
    let separators: Option<Vec<String>> = options.get("separators")?;
    let separators = match separators.as_deref() {
        None => None,
        Some([item, key]) => Some((item.clone(), key.clone())),
        Some(other) => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("tojson: separators are two strings, not {}", other.len()),
            ));
        }
    };
    let style = python::JsonStyle {
        indent,
        separators,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "tojson of an undefined value"));
    }
    let json = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, format!("tojson: {error}")))?;
    Ok(style.dumps(&json))
}

/// Methods of Python's types: the library's, and two newer ones that templates use.
fn method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let (Some(text), "removeprefix" | "removesuffix", [affix]) = (value.as_str(), name, args) {
        let affix = affix.as_str().ok_or_else(|| {
            Error::new(ErrorKind::InvalidOperation, format!("{name} takes a string, not {}", affix.kind()))
        })?;
        let stripped =
            if name == "removeprefix" { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
        return Ok(Value::from(stripped.unwrap_or(text)));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// Replaces `{% generation %}` and `{% endgeneration %}`, which only training needs, by blocks
/// without effect, so that white space around them is handled in the same way.
pub(super) fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let body = tag.trim_start_matches(['-', '+']).trim_start();
        let block =
            [("generation", "if true"), ("endgeneration", "endif")].into_iter().find_map(|(word, block)| {
                let end = body.strip_prefix(word)?;
                end.trim_start().trim_start_matches(['-', '+']).starts_with("%}").then_some((block, end))
            });
        rest = match block {
            Some((block, end)) => {
                let opening = &tag[..tag.len() - body.len()];
                out.push_str(opening);
                if opening.is_empty() {
                    out.push(' ');
                }
                out.push_str(block);
                out.push(' ');
                end
            }
            None => tag,
        };
    }
    out.push_str(rest);
    out
}
