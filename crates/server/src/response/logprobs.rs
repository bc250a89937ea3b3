//! Log-probabilities in the forms of OpenAI's two APIs.

use std::fmt::Write;

use serde::Serialize;
use serde_json::{Map, Value};
use thunder_engine::TokenLogprob;
use thunder_model::tokenizer::Tokenizer;

/// One token in the chat API's form.
#[derive(Debug, Serialize)]
pub(crate) struct ChatToken {
    #[serde(flatten)]
    chosen: ChatAlternative,
    top_logprobs: Vec<ChatAlternative>,
}

#[derive(Debug, Serialize)]
struct ChatAlternative {
    token: String,
    logprob: f64,
    /// `null` for tokens without text.
    bytes: Option<Vec<u8>>,
}

/// `logprobs` of a choice of the chat API.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprobs {
    pub content: Vec<ChatToken>,
}

impl ChatLogprobs {
    pub fn new(tokens: &[TokenLogprob], tokenizer: &Tokenizer) -> Self {
        let alternative = |id, bytes: &[u8], logprob| ChatAlternative {
            token: name(tokenizer, id, bytes, ""),
            logprob: finite(logprob),
            bytes: (!bytes.is_empty()).then(|| bytes.to_vec()),
        };
        let token = |token: &TokenLogprob| ChatToken {
            chosen: alternative(token.id, &token.bytes, token.logprob),
            top_logprobs: token.top.iter().map(|(id, bytes, p)| alternative(*id, bytes, *p)).collect(),
        };
        Self { content: tokens.iter().map(token).collect() }
    }
}

/// `logprobs` of a choice of the completions API: parallel lists.
#[derive(Debug, Serialize)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f64>,
    /// Maps token to log-probability. Always includes the chosen token, as OpenAI does.
    top_logprobs: Vec<Map<String, Value>>,
    /// Start of each token in the choice's text, in characters.
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    /// `offset` is the start of the first token, in characters; it is advanced past the last token.
    pub fn new(tokens: &[TokenLogprob], tokenizer: &Tokenizer, offset: &mut usize) -> Self {
        let mut lists = Self {
            tokens: Vec::with_capacity(tokens.len()),
            token_logprobs: Vec::with_capacity(tokens.len()),
            top_logprobs: Vec::with_capacity(tokens.len()),
            text_offset: Vec::with_capacity(tokens.len()),
        };
        for token in tokens {
            let chosen = name(tokenizer, token.id, &token.bytes, "bytes:");
            let mut top: Map<String, Value> = token
                .top
                .iter()
                .map(|(id, bytes, logprob)| (name(tokenizer, *id, bytes, "bytes:"), finite(*logprob).into()))
                .collect();
            top.insert(chosen.clone(), finite(token.logprob).into());
            lists.tokens.push(chosen);
            lists.token_logprobs.push(finite(token.logprob));
            lists.top_logprobs.push(top);
            // A token whose first byte continues a character begins where that character begins.
            let continues = token.bytes.first().is_some_and(|&byte| !begins_character(byte));
            lists.text_offset.push(offset.saturating_sub(usize::from(continues)));
            *offset += token.bytes.iter().filter(|&&byte| begins_character(byte)).count();
        }
        lists
    }
}

/// JSON has no infinity. OpenAI writes -9999 for impossible tokens.
fn finite(logprob: f32) -> f64 {
    f64::from(logprob).max(-9999.0)
}

fn begins_character(byte: u8) -> bool {
    byte & 0b1100_0000 != 0b1000_0000
}

/// A token's text. Incomplete characters are written as `mark` and escapes, special tokens by name.
fn name(tokenizer: &Tokenizer, id: u32, bytes: &[u8], mark: &str) -> String {
    if bytes.is_empty() {
        return tokenizer.decode(&[id], false);
    }
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold(mark.to_owned(), |mut escaped, byte| {
            // Writing to a string cannot fail.
            let _ = write!(escaped, "\\x{byte:02x}");
            escaped
        }),
    }
}
