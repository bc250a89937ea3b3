//! Identifies a vocabulary.

use std::fmt;

use sha2::{Digest, Sha256};

use super::Tokenizer;

/// Digits of the checksum that people see.
const SHOWN_DIGITS: usize = 8;

/// A vocabulary's size and checksum, equal for tokenizers whose ids represent the same texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vocabulary {
    /// Ids, those without a text included.
    pub tokens: usize,
    /// SHA-256 of all tokens' bytes, in hexadecimal digits.
    pub checksum: String,
}

impl Tokenizer {
    /// The vocabulary's size and checksum.
    pub fn vocabulary(&self) -> Vocabulary {
        let mut hash = Sha256::new();
        let tokens = self.tokens.len();
        for id in 0..tokens as u32 {
            let bytes = self.tokens.bytes(id);
            // The length marks a token's end, and distinguishes an id without a token from an empty
            // one.
            hash.update(bytes.map_or(u64::MAX, |bytes| bytes.len() as u64).to_le_bytes());
            hash.update(bytes.unwrap_or_default());
        }
        let checksum = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Vocabulary { tokens, checksum }
    }
}

impl fmt::Display for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.checksum.get(..SHOWN_DIGITS).unwrap_or(&self.checksum);
        write!(f, "{} tokens, checksum {shown}", self.tokens)
    }
}
