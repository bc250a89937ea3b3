//! Secrets of keys: 256 random bits, shown once, stored as a hash.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// Prefix of every secret, so that scanners of source code find leaked secrets.
const PREFIX: &str = "th-";
/// Letters of a key's id. i, l, o and u are missing because people misread them.
const LETTERS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
/// Length of the part of a secret by which its key is found.
const LOOKUP_LENGTH: usize = 8;
/// Longer texts cannot be secrets of this program.
const LONGEST: usize = 128;

/// The random source of the system failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the system's random source failed: {0}")]
pub struct RandomError(#[from] getrandom::Error);

/// The hash of a secret. A slow hash is not needed, because a secret has 256 random bits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SecretHash(String);

impl SecretHash {
    /// The hash of a secret.
    pub fn of(secret: &str) -> Self {
        Self(hex(&Sha256::digest(secret.as_bytes())))
    }

    /// Compares two hashes in constant time.
    pub fn matches(&self, other: &Self) -> bool {
        bool::from(self.0.as_bytes().ct_eq(other.0.as_bytes()))
    }
}

/// Eight random letters: the id of a key, and the part of its secrets by which it is found.
///
/// # Errors
/// When the system has no random numbers.
pub fn new_lookup() -> Result<String, RandomError> {
    let mut bytes = [0; LOOKUP_LENGTH];
    getrandom::fill(&mut bytes)?;
    Ok(bytes.iter().map(|byte| char::from(LETTERS[usize::from(byte % 32)])).collect())
}

/// A new secret for the key with this `lookup`.
///
/// # Errors
/// When the system has no random numbers.
pub fn new_secret(lookup: &str) -> Result<String, RandomError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)?;
    Ok(format!("{PREFIX}{lookup}-{}", URL_SAFE_NO_PAD.encode(bytes)))
}

/// The part of a secret by which its key is found; `None` if the text cannot be a secret of this
/// program.
pub fn lookup(secret: &str) -> Option<&str> {
    if secret.len() > LONGEST {
        return None;
    }
    let (lookup, _) = secret.strip_prefix(PREFIX)?.split_once('-')?;
    (lookup.len() == LOOKUP_LENGTH).then_some(lookup)
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_secret_finds_its_key_and_is_never_stored() {
        let id = new_lookup().unwrap();
        let secret = new_secret(&id).unwrap();
        assert_eq!(lookup(&secret), Some(id.as_str()));
        assert!(secret.starts_with(&format!("{PREFIX}{id}-")));
        // 43 characters of base64 are 256 bits.
        assert_eq!(secret.len(), "th-".len() + 8 + 1 + 43);
        assert_ne!(new_secret(&id).unwrap(), secret);
        let hash = SecretHash::of(&secret);
        assert!(hash.matches(&SecretHash::of(&secret)) && !hash.matches(&SecretHash::of(&secret[1..])));
        // FIPS 180-2's first example.
        assert_eq!(
            SecretHash::of("abc").0,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    proptest! {
        #[test]
        fn any_text_is_a_secret_or_none(text in ".{0,200}") {
            let _ = lookup(&text);
        }
    }
}
