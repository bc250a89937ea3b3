//! Replaces the parts of users' texts that could become special tokens while a chat template is
//! applied, so that these parts can be found in the prompt.
//!
//! Texts without such parts are given to the template as they are.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;

use serde_json::{Map, Value};

use crate::tokenizer::Tokenizer;

/// Hexadecimal digits of a stand-in's number.
const NUMBER_DIGITS: usize = 8;
/// The stand-ins of one prompt.
pub(super) struct Marks<'a> {
    tokenizer: &'a Tokenizer,
    /// Prefix of every stand-in. It is random, so that no user can write it.
    key: String,
    /// The text that each stand-in replaces.
    originals: Vec<String>,
}

impl<'a> Marks<'a> {
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        let random = || RandomState::new().build_hasher().finish();
        Self { tokenizer, key: format!("mark{:016x}{:016x}x", random(), random()), originals: Vec::new() }
    }

    /// Number of bytes that the stand-ins add to a prompt.
    pub fn added_bytes(&self) -> usize {
        self.originals.len() * (self.key.len() + NUMBER_DIGITS)
    }

    /// A value with stand-ins in its texts.
    pub fn value(&mut self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.text(text).into(),
            Value::Array(items) => items.iter().map(|item| self.value(item)).collect(),
            Value::Object(fields) => self.object(fields).into(),
            other => other.clone(),
        }
    }

    /// An object with stand-ins in its texts.
    pub fn object(&mut self, fields: &Map<String, Value>) -> Map<String, Value> {
        fields.iter().map(|(name, value)| (name.clone(), self.value(value))).collect()
    }

    /// A message with stand-ins in its texts. Its role is unchanged, because templates compare it.
    pub fn message(&mut self, message: &Value) -> Value {
        let mut marked = self.value(message);
        if let (Some(marked), Some(role)) = (marked.get_mut("role"), message.get("role")) {
            marked.clone_from(role);
        }
        marked
    }

    fn text(&mut self, text: &str) -> String {
        let mut marked = String::new();
        let mut done = 0;
        for part in self.tokenizer.special_parts(text) {
            marked.push_str(&text[done..part.start]);
            marked.push_str(&format!("{}{:0NUMBER_DIGITS$x}", self.key, self.originals.len()));
            done = part.end;
            self.originals.push(text[part].to_owned());
        }
        marked.push_str(&text[done..]);
        marked
    }

    /// The prompt with the original texts, and the positions of their parts in it.
    pub fn restore(&self, prompt: String) -> (String, Vec<Range<usize>>) {
        if self.originals.is_empty() {
            return (prompt, Vec::new());
        }
        let (mut text, mut users) = (String::with_capacity(prompt.len()), Vec::new());
        let mut rest = prompt.as_str();
        while let Some(at) = rest.find(&self.key) {
            let (before, mark) = rest.split_at(at);
            text.push_str(before);
            let number = mark.get(self.key.len()..self.key.len() + NUMBER_DIGITS);
            let number = number.and_then(|digits| usize::from_str_radix(digits, 16).ok());
            // A template may have cut a stand-in; the part is lost then.
            let original = number.and_then(|number| self.originals.get(number));
            if let Some(original) = original {
                users.push(text.len()..text.len() + original.len());
                text.push_str(original);
            }
            let digits = if original.is_some() { NUMBER_DIGITS } else { 0 };
            rest = &mark[self.key.len() + digits..];
        }
        text.push_str(rest);
        (text, users)
    }
}
