//! Tokens to text as they come.

use std::{fmt, sync::Arc};

use super::{
    Tokenizer,
    pieces::{Leading, Pieces},
};

/// Turns tokens into text as they come. Emits whole characters only.
///
/// The texts that [`push`](Self::push) and [`finish`](Self::finish) return, joined, are what
/// [`Tokenizer::decode`] gives for all the tokens without the special ones.
pub struct TokenStream {
    tokenizer: Arc<Tokenizer>,
    text: Text,
}

impl TokenStream {
    pub(super) fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let text = Text::new(&tokenizer.pieces);
        Self { tokenizer, text }
    }

    /// Takes one token and returns the text that became certain with it; often empty in mid-character.
    pub fn push(&mut self, id: u32) -> String {
        let mut out = String::new();
        if !self.tokenizer.pieces.is_special(id) {
            self.text.push(&self.tokenizer.pieces, id, &mut out);
        }
        out
    }

    /// What is left at the end: an unfinished character as U+FFFD. The stream then begins a new text.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        self.text.finish(&mut out);
        self.text = Text::new(&self.tokenizer.pieces);
        out
    }
}

impl fmt::Debug for TokenStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenStream").field("pending", &self.text.pending).finish_non_exhaustive()
    }
}

/// The state of a text that is being decoded.
pub(super) struct Text {
    /// The beginning of a character whose other bytes have not come: 3 bytes at most between calls.
    pending: Vec<u8>,
    /// No token has come yet.
    at_start: bool,
    /// The leading characters that may still go.
    strip: Option<(char, usize)>,
}

impl Text {
    pub(super) fn new(pieces: &Pieces) -> Self {
        let strip = match pieces.leading() {
            Leading::Strip { content, count } => Some((content, count)),
            Leading::Keep | Leading::DropFromFirstToken(_) => None,
        };
        Self { pending: Vec::new(), at_start: true, strip }
    }

    /// Appends to `out` what one token makes certain.
    pub(super) fn push(&mut self, pieces: &Pieces, id: u32, out: &mut String) {
        let bytes = if self.at_start { pieces.first_bytes(id) } else { pieces.bytes(id) };
        let Some(bytes) = bytes else { return };
        self.at_start = false;
        self.pending.extend_from_slice(bytes);
        let start = out.len();
        let done = decode_certain(&self.pending, out);
        self.pending.drain(..done);
        self.strip_leading(start, out);
    }

    /// Appends U+FFFD to `out` for a character that was never finished.
    pub(super) fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }

    /// Takes away the leading characters that go, from the text that begins at `start` of `out`.
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

/// Appends the characters of `bytes` to `out`, U+FFFD for each invalid sequence, and returns how many bytes that were:
/// all but the beginning of a character at the end.
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
