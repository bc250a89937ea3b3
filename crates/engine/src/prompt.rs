//! Turns text into the tokens of a prompt. Text that cannot fit into the context is refused before
//! it is encoded, because encoding takes a hundred times its bytes of memory.

use serde_json::{Map, Value};
use thunder_model::chat::{ChatError, EncodedPrompt};
use thunder_model::tokenizer::TokenizerError;

use crate::model_info::ModelInfo;

/// Why a text cannot be a prompt.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The model has no chat template.
    #[error("the model \"{0}\" has no chat template")]
    NoTemplate(String),
    /// The chat template refused the messages.
    #[error(transparent)]
    Chat(ChatError),
    /// The text cannot be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The text has more bytes than the context can hold.
    #[error("the prompt has more than {most_bytes} bytes, the most that {context} tokens hold: shorten it")]
    TooLong {
        /// Maximum bytes.
        most_bytes: usize,
        /// Tokens of the context.
        context: usize,
    },
}

impl ModelInfo {
    /// The prompt of a conversation (OpenAI's messages), by the model's chat template, which also
    /// gets `variables`. Special tokens in all these texts are ordinary text.
    ///
    /// # Errors
    /// If the model has no template, the template refuses, or the prompt cannot fit.
    pub fn chat_prompt(
        &self,
        messages: &[Value],
        variables: &Map<String, Value>,
    ) -> Result<Vec<u32>, PromptError> {
        self.conversation_prompt(messages, variables).map(|prompt| prompt.ids)
    }

    /// Like [`ModelInfo::chat_prompt`], and also returns the end of the prompt's text, which says
    /// how the answer begins.
    ///
    /// # Errors
    /// As [`ModelInfo::chat_prompt`].
    pub fn conversation_prompt(
        &self,
        messages: &[Value],
        variables: &Map<String, Value>,
    ) -> Result<EncodedPrompt, PromptError> {
        let Some(template) = &self.chat_template else {
            return Err(PromptError::NoTemplate(self.name.clone()));
        };
        // Each message has at least one token.
        if messages.len() > self.context_length {
            return Err(self.too_long());
        }
        let encoded = template.encode_prompt(&self.tokenizer, messages, variables, self.most_prompt_bytes());
        encoded.map_err(|error| match error {
            ChatError::TooLong { .. } => self.too_long(),
            ChatError::Tokenizer(error) => error.into(),
            other => PromptError::Chat(other),
        })
    }

    /// The prompt with exactly this text. Special tokens in it are special, because its author
    /// writes what a chat template would.
    ///
    /// # Errors
    /// If the text cannot be encoded or cannot fit.
    pub fn text_prompt(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        if text.len() > self.most_prompt_bytes() {
            return Err(self.too_long());
        }
        Ok(self.tokenizer.encode(text, true)?)
    }

    /// Like [`ModelInfo::text_prompt`], for an encoder. A text that is too long is cut at its end.
    ///
    /// # Errors
    /// If the text cannot be encoded.
    pub fn cut_prompt(&self, text: &str) -> Result<Vec<u32>, PromptError> {
        Ok(self.tokenizer.encode_cut(self.beginning(text), self.context_length)?)
    }

    /// The prompt of a reranker: two texts, in which special tokens are ordinary text. If they are
    /// too long, the second is cut at its end.
    ///
    /// # Errors
    /// If a text cannot be encoded.
    pub fn pair_prompt(&self, first: &str, second: &str) -> Result<Vec<u32>, PromptError> {
        let (first, second) = (self.beginning(first), self.beginning(second));
        let pair = self.tokenizer.encode_pair(first, second, self.context_length)?;
        let last_type = self.token_types as u32 - 1;
        let typed = |(id, kind): (u32, u32)| kind.min(last_type) * self.vocab_size as u32 + id;
        Ok(pair.ids.into_iter().zip(pair.types).map(typed).collect())
    }

    /// As much of a text as may fit.
    fn beginning<'a>(&self, text: &'a str) -> &'a str {
        &text[..text.floor_char_boundary(self.most_prompt_bytes())]
    }

    fn most_prompt_bytes(&self) -> usize {
        self.tokenizer.most_text_bytes(self.context_length)
    }

    fn too_long(&self) -> PromptError {
        PromptError::TooLong { most_bytes: self.most_prompt_bytes(), context: self.context_length }
    }
}
