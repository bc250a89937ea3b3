//! Text to token ids and back, from a folder's tokenizer.json.
//!
//! Encoding uses the `tokenizers` library, with smaller tables for byte pairs (`bpe.rs`) that give
//! the same ids. Decoding uses a table of each token's bytes, made at load: a stream costs one
//! look-up per token and never decodes earlier tokens again.

mod bpe;
mod fragile;
mod pairs;
mod ranks;
mod sentence_piece;
mod stream;
mod token_bytes;
mod user_text;
mod vocabulary;

use std::{fmt, io, path::Path, sync::Arc};

use serde_json::Value;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
};

pub(crate) use bpe::{BytePairs, Pairs};
pub use pairs::TypedTokens;
pub(crate) use ranks::KIMI;
pub(crate) use sentence_piece::{Spaced, merges_of_scores, piece};
use stream::PartialText;
pub use stream::TokenStream;
use token_bytes::TokenBytes;
use user_text::SpecialParts;
pub use vocabulary::Vocabulary;

/// Maximum accepted run of white space, in bytes. From a million on, the library's regular
/// expressions give up, and the ids would silently differ from Python's.
const MAX_WHITE_SPACE_RUN: usize = 500_000;

/// Maximum accepted id. Tables are indexed by id, and a malformed file must not make them fill the
/// memory. Published vocabularies have at most about 300,000 tokens.
const MAX_TOKEN_ID: u32 = 1 << 23;

fn too_large(id: u32) -> String {
    format!("token id {id} is above {MAX_TOKEN_ID}, the most that is supported")
}

type Library =
    TokenizerImpl<Pairs, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// A tokenizer in Hugging Face's format.
pub struct Tokenizer {
    inner: Library,
    tokens: TokenBytes,
    specials: SpecialParts,
}

/// The parts of a tokenizer. JSON values are those of a tokenizer.json, or null.
pub(crate) struct Parts {
    /// The model.
    pub pairs: Pairs,
    pub normalizer: Value,
    pub pre_tokenizer: Value,
    pub post_processor: Value,
    pub decoder: Value,
    /// Tokens that are found in a text before it is split, and whether each is special. All are in
    /// the model's vocabulary.
    pub added: Vec<(String, bool)>,
}

/// Why a tokenizer could not be loaded, or a text not be tokenized.
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
    /// Loads a model folder's tokenizer: tokenizer.json, otherwise tekken.json (Mistral),
    /// tiktoken.model (Kimi) or tokenizer.model (SentencePiece), and tokenizer_config.json if it
    /// exists.
    ///
    /// # Errors
    /// When a file is missing or malformed.
    pub fn load(folder: &Path) -> Result<Self, TokenizerError> {
        const OTHERS: [&str; 3] = ["tekken.json", "tiktoken.model", "tokenizer.model"];
        match ranks::first_of(folder, &["tokenizer.json"]).or_else(|| ranks::first_of(folder, &OTHERS)) {
            None | Some("tokenizer.json") => Self::load_json(folder),
            Some(name) => Self::load_other(folder, name),
        }
    }

    /// A tokenizer in another form than tokenizer.json.
    fn load_other(folder: &Path, name: &str) -> Result<Self, TokenizerError> {
        let path = folder.join(name);
        let wrong = |reason: String| TokenizerError::Load { path: path.display().to_string(), reason };
        let bytes = std::fs::read(&path).map_err(|error| wrong(error.to_string()))?;
        let config = tokenizer_config(&folder.join("tokenizer_config.json"))?;
        let parts = match name {
            "tekken.json" => ranks::tekken(&bytes),
            "tiktoken.model" => match std::str::from_utf8(&bytes) {
                Ok(text) => ranks::tiktoken(text, &config),
                Err(error) => Err(format!("not a list of tokens: {error}")),
            },
            _ => sentence_piece::model(&bytes, &config),
        };
        Self::from_parts(parts.map_err(wrong)?).map_err(wrong)
    }

    fn load_json(folder: &Path) -> Result<Self, TokenizerError> {
        let path = folder.join("tokenizer.json");
        let wrong = |reason: String| TokenizerError::Load { path: path.display().to_string(), reason };
        let bytes = std::fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => wrong(
                "not found; a model folder needs a tokenizer.json, tekken.json, tiktoken.model or tokenizer.model \
                 (transformers' AutoTokenizer.save_pretrained writes a tokenizer.json from other formats)"
                    .into(),
            ),
            _ => wrong(error.to_string()),
        })?;
        let not_one = |error| wrong(format!("not a tokenizer of Hugging Face's format: {error}"));
        fragile::check(&bytes).map_err(not_one)?;
        let mut inner: Library =
            serde_json::from_slice(&bytes).map_err(|error| not_one(error.to_string()))?;
        // Some files have limits for training batches; transformers resets them too.
        inner.with_truncation(None).map_err(|error| wrong(error.to_string()))?;
        inner.with_padding(None);
        add_configured_tokens(&mut inner, &folder.join("tokenizer_config.json"))?;
        let decoder = serde_json::to_value(inner.get_decoder()).map_err(|error| wrong(error.to_string()))?;
        let tokens = TokenBytes::new(&inner, &decoder).map_err(wrong)?;
        let specials = SpecialParts::new(&inner);
        Ok(Self { inner, tokens, specials })
    }

    /// A tokenizer from parts that do not come from a tokenizer.json.
    ///
    /// # Errors
    /// When a part is malformed; the text says which.
    pub(crate) fn from_parts(parts: Parts) -> Result<Self, String> {
        fn read<T: serde::de::DeserializeOwned>(what: &str, value: Value) -> Result<Option<T>, String> {
            serde_json::from_value(value).map_err(|error| format!("its {what} is malformed: {error}"))
        }
        let decoder = parts.decoder.clone();
        let mut inner = Library::new(parts.pairs);
        let normalizer = read::<NormalizerWrapper>("normalizer", parts.normalizer)?;
        inner.with_normalizer(normalizer).map_err(|error| error.to_string())?;
        inner.with_pre_tokenizer(read::<PreTokenizerWrapper>("pre-tokenizer", parts.pre_tokenizer)?);
        inner.with_post_processor(read::<PostProcessorWrapper>("post-processor", parts.post_processor)?);
        inner.with_decoder(read::<DecoderWrapper>("decoder", parts.decoder)?);
        // Runs of one kind are added together: each call builds the search for all.
        for run in parts.added.chunk_by(|a, b| a.1 == b.1) {
            let tokens =
                run.iter().map(|(text, special)| AddedToken::from(text.clone(), *special).normalized(false));
            let special = run[0].1;
            let added = if special { inner.add_special_tokens(tokens) } else { inner.add_tokens(tokens) };
            added.map_err(|error| error.to_string())?;
        }
        let tokens = TokenBytes::new(&inner, &decoder)?;
        let specials = SpecialParts::new(&inner);
        Ok(Self { inner, tokens, specials })
    }

    /// Token ids of a text. `special` adds the post-processor's tokens, such as a leading BOS. A
    /// chat template's output has them already: pass `false` for it.
    ///
    /// # Errors
    /// When the library refuses the text, or it has more than 500,000 bytes of white space in a
    /// row.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        check_white_space(text)?;
        let encoding = self
            .inner
            .encode_fast(text, special)
            .map_err(|error| TokenizerError::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Upper bound of the bytes of text with this number of tokens. A longer text need not be
    /// encoded to know that it has more tokens. Text that a tokenizer drops counts too.
    pub fn most_text_bytes(&self, tokens: usize) -> usize {
        // Unicode's composition reads at most three times as many bytes as it writes.
        let shrinks = if self.inner.get_normalizer().is_some() { 3 } else { 1 };
        tokens.saturating_mul(shrinks * self.tokens.longest())
    }

    /// The text of token ids. Invalid UTF-8 becomes U+FFFD; unknown ids have no text.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut text = PartialText::new(&self.tokens);
        let mut out = String::new();
        for &id in ids {
            if !(skip_special && self.tokens.is_special(id)) {
                text.push(&self.tokens, id, &mut out);
            }
        }
        text.finish(&mut out);
        out
    }

    /// The bytes of one token as it appears inside a text; empty for special tokens.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        if self.tokens.is_special(id) {
            return Vec::new();
        }
        self.tokens.bytes(id).unwrap_or_default().to_vec()
    }

    /// True if a token is special: it has no text for users.
    pub fn is_special(&self, id: u32) -> bool {
        self.tokens.is_special(id)
    }

    /// The id of the token with this text.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The number of ids. Some may have no token.
    pub fn ids(&self) -> usize {
        self.tokens.len()
    }

    /// The vocabulary's text for an id, in which characters may represent bytes.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// A decoder for one stream of tokens.
    pub fn stream(self: &Arc<Self>) -> TokenStream {
        TokenStream::new(Arc::clone(self))
    }
}

fn check_white_space(text: &str) -> Result<(), TokenizerError> {
    let longest_run = text.split(|c: char| !c.is_whitespace()).map(str::len).max().unwrap_or(0);
    if longest_run > MAX_WHITE_SPACE_RUN {
        return Err(TokenizerError::Encode(format!(
            "the text has {longest_run} bytes of white space in a row, {MAX_WHITE_SPACE_RUN} are the most"
        )));
    }
    Ok(())
}

impl fmt::Debug for Tokenizer {
    /// Without the vocabulary, which fills the screen.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("tokens", &self.tokens.len()).finish_non_exhaustive()
    }
}

/// tokenizer_config.json; null if there is none.
fn tokenizer_config(path: &Path) -> Result<Value, TokenizerError> {
    let wrong = |reason: String| TokenizerError::Load { path: path.display().to_string(), reason };
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| wrong(format!("not JSON: {error}"))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Value::Null),
        Err(error) => Err(wrong(error.to_string())),
    }
}

/// Adds the tokens that only tokenizer_config.json has (`added_tokens_decoder`), by ascending id as
/// transformers does.
fn add_configured_tokens(inner: &mut Library, path: &Path) -> Result<(), TokenizerError> {
    let wrong = |reason: String| TokenizerError::Load { path: path.display().to_string(), reason };
    let config = tokenizer_config(path)?;
    let Some(entries) = config.get("added_tokens_decoder").and_then(Value::as_object) else {
        return Ok(());
    };
    let mut missing = Vec::new();
    for (id, entry) in entries {
        let number: u32 =
            id.parse().map_err(|_| wrong(format!("added_tokens_decoder: {id:?} is not a token id")))?;
        let content = entry
            .get("content")
            .and_then(Value::as_str)
            .ok_or_else(|| wrong(format!("added_tokens_decoder: token {id} has no content")))?;
        let known = inner.get_added_vocabulary().get_vocab().contains_key(content);
        if !known && !content.is_empty() {
            let flag = |name: &str| entry.get(name).and_then(Value::as_bool).unwrap_or(false);
            let token = AddedToken::from(content, flag("special"))
                .single_word(flag("single_word"))
                .lstrip(flag("lstrip"))
                .rstrip(flag("rstrip"))
                .normalized(flag("normalized"));
            missing.push((number, token));
        }
    }
    missing.sort_by_key(|(id, _)| *id);
    for (_, token) in missing {
        let added = if token.special { inner.add_special_tokens([token]) } else { inner.add_tokens([token]) };
        added.map_err(|error| wrong(error.to_string()))?;
    }
    Ok(())
}
