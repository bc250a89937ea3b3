//! Incremental decoding of tokens.

use std::{fmt, sync::Arc};

use super::{
    Tokenizer,
    token_bytes::{Leading, TokenBytes},
};

/// Decodes tokens one by one into whole characters.
///
/// The texts of [`push`](Self::push) and [`finish`](Self::finish), joined, equal
/// [`Tokenizer::decode`] of all tokens that are not special.
pub struct TokenStream {
    tokenizer: Arc<Tokenizer>,
    text: PartialText,
}

impl TokenStream {
    pub(super) fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let text = PartialText::new(&tokenizer.tokens);
        Self { tokenizer, text }
    }

    /// Adds one token and returns the characters that it completes; often none.
    pub fn push(&mut self, id: u32) -> String {
        let mut out = String::new();
        if !self.tokenizer.tokens.is_special(id) {
            self.text.push(&self.tokenizer.tokens, id, &mut out);
        }
        out
    }

    /// The text of an unfinished character, as at the end of the text; the text continues.
    pub fn flush(&mut self) -> String {
        let mut out = String::new();
        self.text.finish(&mut out);
        out
    }

    /// Ends the text: returns U+FFFD if a character is unfinished. The stream then begins a new
    /// text.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        self.text.finish(&mut out);
        self.text = PartialText::new(&self.tokenizer.tokens);
        out
    }
}

impl fmt::Debug for TokenStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenStream").field("pending", &self.text.pending).finish_non_exhaustive()
    }
}

/// The state of a text that is being decoded.
pub(super) struct PartialText {
    /// The first bytes of an unfinished character: at most 3 between calls.
    pending: Vec<u8>,
    /// No token was added yet.
    at_start: bool,
    /// Leading characters that may still be removed.
    strip: Option<(char, usize)>,
}

impl PartialText {
    pub(super) fn new(tokens: &TokenBytes) -> Self {
        let strip = match tokens.leading() {
            Leading::Strip { content, count } => Some((content, count)),
            Leading::Keep | Leading::DropFromFirstToken(_) => None,
        };
        Self { pending: Vec::new(), at_start: true, strip }
    }

    /// Appends to `out` the characters that one token completes.
    pub(super) fn push(&mut self, tokens: &TokenBytes, id: u32, out: &mut String) {
        let bytes = if self.at_start { tokens.first_bytes(id) } else { tokens.bytes(id) };
        let Some(bytes) = bytes else { return };
        self.at_start = false;
        self.pending.extend_from_slice(bytes);
        let start = out.len();
        let done = decode_certain(&self.pending, out);
        self.pending.drain(..done);
        self.strip_leading(start, out);
    }

    /// Appends U+FFFD to `out` for an unfinished character.
    pub(super) fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }

    /// Removes leading characters from the text at `start` of `out`.
    fn strip_leading(&mut self, start: usize, out: &mut String) {
        while let Some((content, count)) = self.strip
            && let Some(first) = out[start..].chars().next()
        {
            if first != content || count == 0 {
                self.strip = None;
                return;
            }
            out.remove(start);
            self.strip = Some((content, count - 1));
        }
    }
}

/// Appends the characters of `bytes` to `out`, U+FFFD for each invalid sequence. Returns the bytes
/// used: all except an unfinished character at the end.
fn decode_certain(bytes: &[u8], out: &mut String) -> usize {
    let mut done = 0;
    loop {
        let rest = &bytes[done..];
        let error = match std::str::from_utf8(rest) {
            Ok(text) => {
                out.push_str(text);
                return bytes.len();
            }
            Err(error) => error,
        };
        let (valid, _) = rest.split_at(error.valid_up_to());
        out.push_str(std::str::from_utf8(valid).unwrap_or_default());
        done += valid.len();
        match error.error_len() {
            Some(invalid) => {
                out.push(char::REPLACEMENT_CHARACTER);
                done += invalid;
            }
            None => return done,
        }
    }
}
