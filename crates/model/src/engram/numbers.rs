//! Numbers of tokens, equal for tokens that differ only in case, accents, compositions or white
//! space.

use std::collections::HashMap;
use std::path::Path;

use serde_json::json;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper};

use crate::error::ModelError;
use crate::spec::EngramShape;
use crate::tokenizer::Tokenizer;

/// Replaces a token that is a single space while spaces around tokens are removed.
const LONE_SPACE: &str = "\u{E000}";

/// The number of each token id.
#[derive(Debug)]
pub(crate) struct TokenNumbers {
    of: Vec<u32>,
    /// The number of what is before the first token.
    pub pad: u32,
}

impl TokenNumbers {
    /// The numbers of a folder's tokens, of which the model has `vocab`.
    ///
    /// # Errors
    /// When the folder has no tokenizer, its tokens have another count of numbers than the config
    /// says, or none is the config's padding: then hashes would be others than those of training.
    pub fn of_folder(folder: &Path, vocab: usize, shape: &EngramShape) -> Result<Self, ModelError> {
        let malformed =
            |reason: String| ModelError::Malformed { path: folder.join("tokenizer.json"), reason };
        let tokenizer = Tokenizer::load(folder).map_err(|error| malformed(error.to_string()))?;
        let (of, count) = numbers(&tokenizer).map_err(malformed)?;
        if count != shape.numbers {
            return Err(malformed(format!(
                "its tokens have {count} different numbers, but engram_compressed_vocab_size in config.json is \
                 {}: the tokenizer is not the model's",
                shape.numbers
            )));
        }
        let Some(&pad) = of.get(shape.pad as usize) else {
            return Err(malformed(format!(
                "it has {} tokens, none of them engram_pad_token_id in config.json, {}",
                of.len(),
                shape.pad
            )));
        };
        let mut numbers = Self { of, pad };
        // Ids that no token has, at the end of the vocabulary, are never in a text.
        numbers.of.resize(numbers.of.len().max(vocab), 0);
        Ok(numbers)
    }

    /// A token's number.
    pub fn of(&self, id: u32) -> u32 {
        self.of.get(id as usize).copied().unwrap_or(0)
    }
}

/// The number of each token, in the order of their ids, and the count of different numbers.
pub(crate) fn numbers(tokenizer: &Tokenizer) -> Result<(Vec<u32>, usize), String> {
    // NFD after NFKC, so that accents become separate characters.
    let normalizer: NormalizerWrapper = serde_json::from_value(json!({ "type": "Sequence", "normalizers": [
        { "type": "NFKC" },
        { "type": "NFD" },
        { "type": "StripAccents" },
        { "type": "Lowercase" },
        { "type": "Replace", "pattern": { "Regex": r"[ \t\r\n]+" }, "content": " " },
        { "type": "Replace", "pattern": { "Regex": "^ $" }, "content": LONE_SPACE },
        { "type": "Strip", "strip_left": true, "strip_right": true },
        { "type": "Replace", "pattern": { "String": LONE_SPACE }, "content": " " },
    ] }))
    .map_err(|error| error.to_string())?;
    let mut known: HashMap<String, u32> = HashMap::new();
    let mut of = Vec::with_capacity(tokenizer.ids());
    for id in 0..tokenizer.ids() as u32 {
        let text = tokenizer.decode(&[id], false);
        let key = if text.contains(char::REPLACEMENT_CHARACTER) {
            // A part of a character: the vocabulary's own text of it counts.
            tokenizer.token(id).unwrap_or_default()
        } else {
            let mut normalized = NormalizedString::from(text.as_str());
            normalizer.normalize(&mut normalized).map_err(|error| error.to_string())?;
            if normalized.is_empty() { text } else { normalized.get().to_owned() }
        };
        let next = known.len() as u32;
        of.push(*known.entry(key).or_insert(next));
    }
    Ok((of, known.len()))
}
