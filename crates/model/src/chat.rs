//! Chat templates: from messages to a prompt, by the Jinja template of a model folder.
//!
//! Output equals that of Hugging Face's `apply_chat_template`. Values that are not strings print in
//! Python's form (`True`, `None`, `{'a': 1}`).
//!
//! [`ChatTemplate::encode`] keeps users' texts apart from the template's: only the template makes
//! special tokens. Texts without special tokens in them get the same tokens as without this care,
//! across the borders between a text and the template too, because the prompt is encoded whole.

mod answer;
mod conversation;
mod environment;
mod format;
mod grammar;
mod marks;
mod python;

use std::{io, path::Path};

use minijinja::{Environment, value::Serde};
use serde_json::{Map, Value};

use crate::tokenizer::{Tokenizer, TokenizerError};
pub use answer::{AnswerParser, AnswerPart, Ending, Opening, ToolSchemas};
pub use conversation::{Message, Role, Tool, ToolCall};
pub use format::AnswerFormat;
pub use grammar::{CallRule, Otherwise};
use marks::Marks;

/// Longest prompt that a template may write, whatever the context.
const MAX_PROMPT_BYTES: usize = 64 << 20;

/// A model's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The templates' texts.
    sources: Vec<String>,
    /// Special tokens (`bos_token`, `eos_token`, …) by their names in tokenizer_config.json.
    tokens: Map<String, Value>,
}

/// Why a template could not be loaded or applied.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template or its file is malformed.
    #[error("chat template of {path}: {reason}")]
    Load {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The template refused the messages (`raise_exception`) or failed.
    #[error("the chat template refused the messages: {0}")]
    Render(String),
    /// The prompt is longer than the caller allows.
    #[error("the chat template makes a prompt of more than {limit} bytes of these messages")]
    TooLong {
        /// Maximum bytes.
        limit: usize,
    },
    /// The prompt cannot be tokenized.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Bytes at a prompt's end that show how its answer begins.
const TAIL_BYTES: usize = 64;

/// The tokens of a prompt.
#[derive(Debug)]
pub struct EncodedPrompt {
    /// The tokens.
    pub ids: Vec<u32>,
    /// The end of the prompt's text.
    pub tail: String,
}

/// Name of the usual template.
const DEFAULT: &str = "default";
/// Name of the template for requests with tools, which some folders have.
const TOOL_USE: &str = "tool_use";

impl ChatTemplate {
    /// Loads a folder's template: chat_template.jinja, chat_template.json, or `chat_template` in
    /// tokenizer_config.json. That is a string, or a list of named templates: `default`, and
    /// `tool_use` for requests with tools. `None` if the folder has none.
    ///
    /// # Errors
    /// When the template is malformed.
    pub fn load(folder: &Path) -> Result<Option<Self>, ChatError> {
        let config_path = folder.join("tokenizer_config.json");
        let config = read_json(&config_path)?.unwrap_or_default();
        let jinja_path = folder.join("chat_template.jinja");
        let json_path = folder.join("chat_template.json");
        let (path, template) = if let Some(text) = read_text(&jinja_path)? {
            (&jinja_path, Value::String(text))
        } else if let Some(mut file) = read_json(&json_path)? {
            // The file holds the template or an object with the template.
            let inner = file.get_mut("chat_template").map(Value::take);
            (&json_path, inner.unwrap_or(file))
        } else {
            (&config_path, config.get("chat_template").cloned().unwrap_or_default())
        };
        Self::new(&path.display().to_string(), &template, &config)
    }

    /// The template of a `chat_template` value. `config` holds the special tokens as
    /// tokenizer_config.json does; `path` is for error texts. `None` if the value is null.
    ///
    /// # Errors
    /// When the template is malformed.
    pub(crate) fn new(path: &str, template: &Value, config: &Value) -> Result<Option<Self>, ChatError> {
        let wrong = |reason: String| ChatError::Load { path: path.to_owned(), reason };
        let templates = named_templates(template).map_err(wrong)?;
        if templates.is_empty() {
            return Ok(None);
        }
        if !templates.iter().any(|(name, _)| *name == DEFAULT) {
            let names: Vec<&str> = templates.iter().map(|(name, _)| *name).collect();
            return Err(wrong(format!(
                "none of its templates is named \"default\"; it has {}",
                names.join(", ")
            )));
        }
        let mut environment = environment::new();
        environment.set_fuel(Some(environment::fuel(&templates)));
        let sources = templates.iter().map(|(_, source)| (*source).to_owned()).collect();
        for (name, source) in templates {
            environment
                .add_template_owned(name.to_owned(), environment::without_generation_blocks(source))
                .map_err(|error| wrong(environment::explain(&error)))?;
        }
        Ok(Some(Self { environment, sources, tokens: special_tokens(config) }))
    }

    /// The templates' texts.
    pub(crate) fn sources(&self) -> Vec<&str> {
        self.sources.iter().map(String::as_str).collect()
    }

    /// Renders messages (OpenAI's JSON objects: role, content, …) to a prompt that ends with the
    /// start of the assistant's turn. `extra` has further template variables (`tools`,
    /// `enable_thinking`, …). They override the variables set here: `add_generation_prompt: false`
    /// leaves out the start of the assistant's turn.
    ///
    /// # Errors
    /// When the template refuses or fails.
    pub fn render(&self, messages: &[Value], extra: &Map<String, Value>) -> Result<String, ChatError> {
        self.render_within(messages.into(), extra, MAX_PROMPT_BYTES)
    }

    /// The tokens of [`ChatTemplate::render`]'s prompt. Special tokens in the texts of `messages`
    /// and `extra` are encoded as ordinary text, so that a user cannot write another's turn. If a
    /// template removes text from the middle of a message, the remaining parts may still form a
    /// special token.
    ///
    /// # Errors
    /// When the template refuses or fails, or the prompt has more than `most_bytes`.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Value],
        extra: &Map<String, Value>,
        most_bytes: usize,
    ) -> Result<Vec<u32>, ChatError> {
        self.encode_prompt(tokenizer, messages, extra, most_bytes).map(|prompt| prompt.ids)
    }

    /// As [`ChatTemplate::encode`], with the prompt's end.
    ///
    /// # Errors
    /// When the template refuses or fails, or the prompt has more than `most_bytes`.
    pub fn encode_prompt(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Value],
        extra: &Map<String, Value>,
        most_bytes: usize,
    ) -> Result<EncodedPrompt, ChatError> {
        let mut marks = Marks::new(tokenizer);
        let messages = messages.iter().map(|message| marks.message(message)).collect();
        let extra = marks.object(extra);
        let limit = most_bytes.saturating_add(marks.added_bytes()).min(MAX_PROMPT_BYTES);
        let (text, users) = marks.restore(self.render_within(messages, &extra, limit)?);
        if text.len() > most_bytes {
            return Err(ChatError::TooLong { limit: most_bytes });
        }
        let mut tail = text.len().saturating_sub(TAIL_BYTES);
        while !text.is_char_boundary(tail) {
            tail += 1;
        }
        let ids = tokenizer.encode_around(&text, &users)?;
        Ok(EncodedPrompt { ids, tail: text[tail..].to_owned() })
    }

    fn render_within(
        &self,
        messages: Value,
        extra: &Map<String, Value>,
        limit: usize,
    ) -> Result<String, ChatError> {
        let mut variables = self.tokens.clone();
        variables.insert("messages".into(), messages);
        variables.insert("add_generation_prompt".into(), true.into());
        variables.insert("tools".into(), Value::Null);
        variables.insert("documents".into(), Value::Null);
        variables.extend(extra.clone());
        let name = match variables["tools"] {
            Value::Null => DEFAULT,
            _ if self.environment.get_template(TOOL_USE).is_ok() => TOOL_USE,
            _ => DEFAULT,
        };
        let mut prompt = BoundedText { bytes: Vec::new(), limit, is_full: false };
        environment::begin_rendering();
        let rendered = self
            .environment
            .get_template(name)
            .and_then(|template| template.render_captured_to(Serde(&variables), &mut prompt).map(drop));
        match rendered {
            Err(_) if prompt.is_full => Err(ChatError::TooLong { limit }),
            Err(error) => Err(ChatError::Render(environment::explain(&error))),
            Ok(()) => String::from_utf8(prompt.bytes).map_err(|error| ChatError::Render(error.to_string())),
        }
    }
}

/// Takes a template's output up to a limit.
struct BoundedText {
    bytes: Vec<u8>,
    limit: usize,
    /// More was written than the limit.
    is_full: bool,
}

impl io::Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.limit {
            self.is_full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The templates of a `chat_template` value with their names; none for null.
fn named_templates(template: &Value) -> Result<Vec<(&str, &str)>, String> {
    match template {
        Value::Null => Ok(Vec::new()),
        Value::String(source) => Ok(vec![(DEFAULT, source)]),
        Value::Array(entries) => entries
            .iter()
            .map(|entry| Some((entry["name"].as_str()?, entry["template"].as_str()?)))
            .collect::<Option<_>>()
            .ok_or_else(|| "a template in the list has no name or no template".into()),
        Value::Object(entries) => entries
            .iter()
            .map(|(name, source)| Some((name.as_str(), source.as_str()?)))
            .collect::<Option<_>>()
            .ok_or_else(|| "a named template is not a string".into()),
        other => Err(format!("it is neither a string nor a list: {other}")),
    }
}

/// The `…_token` entries of tokenizer_config.json: strings, or objects with `content`.
fn special_tokens(config: &Value) -> Map<String, Value> {
    let entries = config.as_object().into_iter().flatten();
    entries
        .filter(|(name, _)| name.ends_with("_token"))
        .filter_map(|(name, token)| {
            let content = token.as_str().or_else(|| token.get("content").and_then(Value::as_str))?;
            Some((name.clone(), content.into()))
        })
        .collect()
}

/// A file's text; `None` if the file does not exist.
fn read_text(path: &Path) -> Result<Option<String>, ChatError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ChatError::Load { path: path.display().to_string(), reason: error.to_string() }),
    }
}

fn read_json(path: &Path) -> Result<Option<Value>, ChatError> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    let value = serde_json::from_str(&text).map_err(|error| ChatError::Load {
        path: path.display().to_string(),
        reason: format!("not JSON: {error}"),
    })?;
    Ok(Some(value))
}
