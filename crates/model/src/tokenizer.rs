//! Text to token ids and back, from a folder's tokenizer.json.

use std::path::Path;

/// A tokenizer of Hugging Face's format.
#[derive(Debug)]
pub struct Tokenizer {}

/// Why text could not be tokenized or a tokenizer not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file is missing or not a tokenizer.
    #[error("{path}: {reason}")]
    Load {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The library refused the text.
    #[error("cannot tokenize: {0}")]
    Encode(String),
}

impl Tokenizer {
    /// Loads tokenizer.json (and tokenizer_config.json, where there is one) of a model folder.
    ///
    /// # Errors
    /// When a file is missing or malformed.
    pub fn load(folder: &Path) -> Result<Self, TokenizerError> {
        Err(TokenizerError::Load { path: folder.display().to_string(), reason: "not written yet".into() })
    }

    /// Token ids of a text. `special` adds the tokens that the tokenizer's post-processor adds (a leading BOS, say);
    /// prompts made by a chat template hold theirs already, so pass `false` for these.
    ///
    /// # Errors
    /// When the library refuses the text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        let _ = (text, special);
        Ok(Vec::new())
    }

    /// The text of token ids; invalid UTF-8 becomes U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let _ = (ids, skip_special);
        String::new()
    }

    /// The bytes of one token as it appears inside a text; empty for special tokens.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let _ = id;
        Vec::new()
    }

    /// Whether a token is special (never shown).
    pub fn is_special(&self, id: u32) -> bool {
        let _ = id;
        false
    }

    /// The id of a token by its text.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        let _ = token;
        None
    }

    /// A decoder for one stream of tokens.
    pub fn stream(self: &std::sync::Arc<Self>) -> TokenStream {
        TokenStream {}
    }
}

/// Turns tokens into text as they come. Emits whole characters only.
#[derive(Debug)]
pub struct TokenStream {}

impl TokenStream {
    /// Takes one token and returns the text that became certain with it; often empty in mid-character.
    pub fn push(&mut self, id: u32) -> String {
        let _ = id;
        String::new()
    }

    /// What is left at the end: an unfinished character as U+FFFD.
    pub fn finish(&mut self) -> String {
        String::new()
    }
}
