//! Messages to a prompt, by the Jinja template that a model folder carries.

use std::path::Path;

/// A model's chat template.
#[derive(Debug)]
pub struct ChatTemplate {}

/// Why a template could not be loaded or applied.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template or its file is malformed.
    #[error("chat template of {path}: {reason}")]
    Load {
        /// Where it came from.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The template refused these messages (`raise_exception`) or failed on them.
    #[error("the chat template refused the messages: {0}")]
    Render(String),
}

impl ChatTemplate {
    /// The template of a folder: chat_template.jinja, chat_template.json, or tokenizer_config.json's `chat_template`
    /// (a string, or a list of named ones of which `default` is taken). `None` if the folder has none.
    ///
    /// # Errors
    /// When there is one and it is malformed.
    pub fn load(folder: &Path) -> Result<Option<Self>, ChatError> {
        let _ = folder;
        Ok(None)
    }

    /// Renders messages (OpenAI's JSON objects: role, content, …) to the prompt's text, with the opening of the
    /// assistant's turn at the end. `extra` are further template variables (`tools`, `enable_thinking`, …).
    ///
    /// # Errors
    /// When the template refuses or fails.
    pub fn render(
        &self,
        messages: &[serde_json::Value],
        extra: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, ChatError> {
        let _ = (messages, extra);
        Ok(String::new())
    }
}
