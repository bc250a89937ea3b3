//! Values as Python prints them.

use std::fmt::Write as _;

use minijinja::{Value, value::ValueKind};
use serde_json::Value as Json;

/// Python's `str(value)`.
pub(super) fn str(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None => repr(value),
    }
}

/// Python's `repr(value)`.
fn repr(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Number if !value.is_integer() => {
            f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
        }
        ValueKind::Seq => match value.try_iter() {
            Ok(items) => format!("[{}]", items.map(|item| repr(&item)).collect::<Vec<_>>().join(", ")),
            Err(_) => value.to_string(),
        },
        ValueKind::Map => match value.try_iter() {
            Ok(keys) => {
                let entry = |key: Value| {
                    let item = value.get_item(&key).unwrap_or_default();
                    format!("{}: {}", repr(&key), repr(&item))
                };
                format!("{{{}}}", keys.map(entry).collect::<Vec<_>>().join(", "))
            }
            Err(_) => value.to_string(),
        },
        _ => value.to_string(),
    }
}

/// A string in Python's quotes: single quotes, unless double quotes avoid an escape.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_ascii_control() => {
                let _ = write!(out, "\\x{:02x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// A float as Python writes it: Rust's shortest digits, with Python's exponent.
fn float(number: f64) -> String {
    let text = format!("{number:?}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
            format!("{digits}e{sign}{exponent:0>2}")
        }
        None => text,
    }
}

/// The options of Python's `json.dumps`.
pub(super) struct JsonStyle {
    pub(super) indent: Option<usize>,
    /// Separators between items, and after a key.
    pub(super) separators: Option<(String, String)>,
    pub(super) sort_keys: bool,
    pub(super) ensure_ascii: bool,
}

impl JsonStyle {
    /// Python's `json.dumps(value, …)`.
    pub(super) fn dumps(&self, value: &Json) -> String {
        let mut out = String::new();
        self.write(value, 0, &mut out);
        out
    }

    fn write(&self, value: &Json, depth: usize, out: &mut String) {
        match value {
            Json::Null => out.push_str("null"),
            Json::Bool(yes) => out.push_str(if *yes { "true" } else { "false" }),
            Json::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(number) => out.push_str(&float(number)),
                None => out.push_str(&number.to_string()),
            },
            Json::String(text) => self.write_string(text, out),
            Json::Array(items) => self.write_items(items.iter(), ['[', ']'], depth, out, |item, out| {
                self.write(item, depth + 1, out);
            }),
            Json::Object(entries) => {
                let mut entries: Vec<_> = entries.iter().collect();
                if self.sort_keys {
                    entries.sort_by_key(|(key, _)| *key);
                }
                let key_separator = self.separators.as_ref().map_or(": ", |(_, key)| key);
                self.write_items(entries.into_iter(), ['{', '}'], depth, out, |(key, item), out| {
                    self.write_string(key, out);
                    out.push_str(key_separator);
                    self.write(item, depth + 1, out);
                });
            }
        }
    }

    fn write_items<T>(
        &self,
        items: impl ExactSizeIterator<Item = T>,
        [open, close]: [char; 2],
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(T, &mut String),
    ) {
        let empty = items.len() == 0;
        let new_line = |depth: usize, out: &mut String| {
            if let Some(indent) = self.indent.filter(|_| !empty) {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent * depth));
            }
        };
        // With an indent, Python has no space at the end of a line.
        let default = if self.indent.is_some() { "," } else { ", " };
        let separator = self.separators.as_ref().map_or(default, |(item, _)| item);
        out.push(open);
        for (index, item) in items.enumerate() {
            if index > 0 {
                out.push_str(separator);
            }
            new_line(depth + 1, out);
            write(item, out);
        }
        new_line(depth, out);
        out.push(close);
    }

    fn write_string(&self, text: &str, out: &mut String) {
        let quoted = Json::from(text).to_string();
        if !self.ensure_ascii {
            out.push_str(&quoted);
            return;
        }
        for c in quoted.chars() {
            if c.is_ascii() {
                out.push(c);
                continue;
            }
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(out, "\\u{unit:04x}");
            }
        }
    }
}
