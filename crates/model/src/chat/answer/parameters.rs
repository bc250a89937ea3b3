//! Reads arguments that are written one by one, between marks.

use serde_json::Value;

use super::buffer::{Buffer, Found, Match};
use super::calls::push_arguments;
use super::parser::{AnswerPart, Progress};
use super::values::ToolSchemas;
use crate::chat::format::ParameterCalls;

/// Reads a call's arguments, each between marks.
#[derive(Debug)]
pub(super) struct Parameters {
    calls: ParameterCalls,
    /// The key of the following value.
    key: Option<String>,
    /// Arguments so far.
    count: usize,
    /// Bytes of the value that were searched for its end, so that a long value is searched once.
    searched: usize,
}

impl Parameters {
    pub fn new(calls: &ParameterCalls) -> Self {
        Self { calls: calls.clone(), key: None, count: 0, searched: 0 }
    }

    /// The progress, and whether the call is over.
    pub fn step(
        &mut self,
        tool: &str,
        buffer: &mut Buffer,
        schemas: &ToolSchemas,
        parts: &mut Vec<AnswerPart>,
        last: bool,
    ) -> (Progress, bool) {
        if let Some(key) = &self.key {
            let at = match buffer.find(self.searched, &[&self.calls.value_close], last) {
                Found::At { at, .. } => at,
                Found::NotBefore(at) => {
                    self.searched = at;
                    return (Progress::NeedsMore, false);
                }
            };
            self.searched = 0;
            let text = buffer.take(at);
            buffer.take(self.calls.value_close.text.len());
            let (key, value) = self.typed(tool, key, &text, schemas);
            let before = if self.count == 0 { "{" } else { ", " };
            push_arguments(parts, format!("{before}{}: {value}", Value::String(key)));
            (self.key, self.count) = (None, self.count + 1);
            return (Progress::Some, false);
        }
        let calls = &self.calls;
        let mut marks = vec![&calls.key_open, &calls.call_close];
        marks.extend(&calls.close);
        let found = match buffer.find(0, &marks, last) {
            Found::At { at, which } => {
                buffer.take(at);
                which
            }
            Found::NotBefore(at) => {
                buffer.take(at);
                return (Progress::NeedsMore, false);
            }
        };
        if found == 0 {
            return (self.read_key(buffer, last), false);
        }
        // The end of the section also ends a call that lacks its own end.
        if found == 1 {
            buffer.take(calls.call_close.text.len());
        }
        push_arguments(parts, if self.count == 0 { "{}" } else { "}" }.to_owned());
        (Progress::Some, true)
    }

    /// Reads a key up to its value.
    fn read_key(&mut self, buffer: &mut Buffer, last: bool) -> Progress {
        let calls = &self.calls;
        let from = calls.key_open.text.len();
        let Found::At { at: end, .. } = buffer.find(from, &[&calls.key_end], last) else {
            return Progress::NeedsMore;
        };
        let key = buffer.text()[from..end].trim().to_owned();
        let mut next = end + calls.key_end.text.len();
        if let Some(open) = &calls.value_open {
            let rest = &buffer.text()[next..];
            let at = next + rest.len() - rest.trim_start().len();
            match buffer.matches(at, open) {
                Match::Yes => next = at + open.text.len(),
                Match::Maybe if !last => return Progress::NeedsMore,
                _ => {}
            }
        }
        buffer.take(next);
        self.key = Some(key);
        Progress::Some
    }

    fn typed(&self, tool: &str, key: &str, text: &str, schemas: &ToolSchemas) -> (String, Value) {
        let layout = &self.calls.layout;
        let text = if layout.before_value == "\n" {
            let text = text.strip_prefix('\n').unwrap_or(text);
            text.strip_suffix('\n').unwrap_or(text)
        } else {
            text
        };
        let [is_string, other] = layout.string_flag;
        if !is_string.is_empty() {
            if let Some(key) = key.strip_suffix(is_string) {
                return (key.to_owned(), text.into());
            }
            if let Some(key) = key.strip_suffix(other) {
                return (key.to_owned(), serde_json::from_str(text).unwrap_or_else(|_| text.into()));
            }
        }
        (key.to_owned(), schemas.value(tool, key, text))
    }
}
