//! The bytes of every token, computed once from the tokenizer's decoder.

use serde_json::Value;

use super::{Library, MAX_TOKEN_ID, too_large};

/// The decoder's rule for the start of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leading {
    /// No rule.
    Keep,
    /// Up to `count` of this character are removed (SentencePiece puts a space before the first
    /// word).
    Strip { content: char, count: usize },
    /// This character is removed everywhere in the first token, before it would become a space
    /// (Metaspace decoders).
    DropFromFirstToken(char),
}

/// The bytes of each token in the middle of a text, and which tokens are special.
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    /// By id. A token's bytes begin where those of the previous id end.
    entries: Vec<Entry>,
    leading: Leading,
    /// For `Leading::DropFromFirstToken`: bytes at the start of a text, of the tokens that contain
    /// the character.
    first: std::collections::HashMap<u32, Vec<u8>>,
}

#[derive(Clone, Copy)]
struct Entry {
    end: u32,
    known: bool,
    special: bool,
}

/// One step from a token's text to its bytes.
enum Step {
    /// Each character represents a byte (GPT-2's table).
    ByteLevel,
    /// `<0x41>` represents a byte.
    ByteFallback,
    Replace {
        from: String,
        to: String,
    },
    /// A token is a word with a space before it, or, with this prefix, continues a word.
    WordPiece {
        prefix: String,
    },
}

impl TokenBytes {
    /// Computes the bytes of all tokens. Errors say what is wrong with the file.
    pub(super) fn new(inner: &Library, decoder: &Value) -> Result<Self, String> {
        let (steps, leading) = parse_decoder(decoder)?;
        let added = inner.get_added_vocabulary().get_added_tokens_decoder();
        let last = added.keys().copied().chain(inner.get_model().last_id()).max();
        let last = last.ok_or("the vocabulary is empty")?;
        if last > MAX_TOKEN_ID {
            return Err(too_large(last));
        }
        let byte_of_char = byte_level_table();
        let mut tokens = Self {
            bytes: Vec::new(),
            entries: Vec::with_capacity(last as usize + 1),
            leading,
            first: std::collections::HashMap::new(),
        };
        for id in 0..=last {
            let Some(text) = inner.id_to_token(id) else {
                tokens.close(false, false)?;
                continue;
            };
            if let Leading::DropFromFirstToken(content) = leading
                && text.contains(content)
            {
                let without = text.replace(content, "");
                tokens.first.insert(id, token_bytes(without, &steps, &byte_of_char));
            }
            tokens.bytes.extend(token_bytes(text, &steps, &byte_of_char));
            tokens.close(true, added.get(&id).is_some_and(|token| token.special))?;
        }
        Ok(tokens)
    }

    /// Ends the entry of the next id at the bytes written so far.
    fn close(&mut self, known: bool, special: bool) -> Result<(), String> {
        let end = u32::try_from(self.bytes.len()).map_err(|_| "the vocabulary is above 4 GiB".to_owned())?;
        self.entries.push(Entry { end, known, special });
        Ok(())
    }

    /// The number of ids.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Bytes of the longest token.
    pub(super) fn longest(&self) -> usize {
        let ends = self.entries.iter().map(|entry| entry.end);
        let starts = std::iter::once(0).chain(ends.clone());
        ends.zip(starts).map(|(end, start)| (end - start) as usize).max().unwrap_or(0)
    }

    pub(super) fn leading(&self) -> Leading {
        self.leading
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.entries.get(id as usize).is_some_and(|entry| entry.special)
    }

    /// A token's bytes inside a text; `None` if there is no such token.
    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let index = id as usize;
        let entry = self.entries.get(index).filter(|entry| entry.known)?;
        let start = if index == 0 { 0 } else { self.entries[index - 1].end };
        Some(&self.bytes[start as usize..entry.end as usize])
    }

    /// A token's bytes at the beginning of a text; `None` if there is no such token.
    pub(super) fn first_bytes(&self, id: u32) -> Option<&[u8]> {
        self.first.get(&id).map(Vec::as_slice).or_else(|| self.bytes(id))
    }
}

/// A token's text through the decoder's steps.
fn token_bytes(mut text: String, steps: &[Step], byte_of_char: &[Option<u8>]) -> Vec<u8> {
    for step in steps {
        match step {
            Step::ByteLevel => {
                let bytes: Option<Vec<u8>> = text
                    .chars()
                    .map(|c| byte_of_char.get(u32::from(c) as usize).copied().flatten())
                    .collect();
                // A token with any other character (an added token) is its own text.
                return bytes.unwrap_or_else(|| text.into_bytes());
            }
            Step::ByteFallback => {
                let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                if let Some(byte) =
                    digits.filter(|d| d.len() == 2).and_then(|d| u8::from_str_radix(d, 16).ok())
                {
                    return vec![byte];
                }
            }
            Step::Replace { from, to } => text = text.replace(from.as_str(), to),
            Step::WordPiece { prefix } => {
                text = match text.strip_prefix(prefix.as_str()) {
                    Some(rest) => rest.to_owned(),
                    None => format!(" {text}"),
                };
            }
        }
    }
    text.into_bytes()
}

/// Reads the decoder's JSON. Only decoders in which a token's bytes do not depend on its neighbours
/// are supported; language models use no others.
fn parse_decoder(decoder: &Value) -> Result<(Vec<Step>, Leading), String> {
    let mut steps = Vec::new();
    let mut leading = Leading::Keep;
    let mut fused = false;
    let parts = match decoder["type"].as_str() {
        Some("Sequence") => decoder["decoders"].as_array().map(Vec::as_slice).unwrap_or_default(),
        Some(_) => std::slice::from_ref(decoder),
        None => return Err("has no decoder, so its tokens cannot be turned back into text".into()),
    };
    for part in parts {
        let unsupported = || format!("its decoder has a part that is not supported: {part}");
        let kind = part["type"].as_str().ok_or_else(unsupported)?;
        // After Fuse, only a rule for the start of the text is meaningful; after such a rule,
        // nothing is.
        if fused && kind != "Strip" || leading != Leading::Keep {
            return Err(unsupported());
        }
        match kind {
            "ByteLevel" => steps.push(Step::ByteLevel),
            "ByteFallback" => steps.push(Step::ByteFallback),
            "Fuse" => fused = true,
            "Replace" => steps.push(Step::Replace {
                from: part["pattern"]["String"].as_str().ok_or_else(unsupported)?.to_owned(),
                to: part["content"].as_str().ok_or_else(unsupported)?.to_owned(),
            }),
            "Strip" if fused && part["stop"].as_u64() == Some(0) => {
                let count = part["start"].as_u64().and_then(|count| usize::try_from(count).ok());
                leading = Leading::Strip {
                    content: single_char(&part["content"]).ok_or_else(unsupported)?,
                    count: count.ok_or_else(unsupported)?,
                };
            }
            // Its cleanup of spaces before punctuation depends on neighbours, and is omitted.
            "WordPiece" => {
                let prefix = part["prefix"].as_str().ok_or_else(unsupported)?.to_owned();
                steps.push(Step::WordPiece { prefix });
                leading = Leading::Strip { content: ' ', count: 1 };
            }
            "Metaspace" => {
                let content = single_char(&part["replacement"]).ok_or_else(unsupported)?;
                steps.push(Step::Replace { from: content.to_string(), to: " ".into() });
                if part["prepend_scheme"] != "never" {
                    leading = Leading::DropFromFirstToken(content);
                }
            }
            _ => return Err(unsupported()),
        }
    }
    Ok((steps, leading))
}

fn single_char(value: &Value) -> Option<char> {
    let mut chars = value.as_str()?.chars();
    let first = chars.next()?;
    chars.next().is_none().then_some(first)
}

/// GPT-2's table, by code point: printable Latin-1 bytes are themselves, the others are the code
/// points from 256, in order.
pub(super) fn byte_level_table() -> Vec<Option<u8>> {
    let mut table = vec![None; 512];
    let mut next = 256;
    for byte in 0..=255_u8 {
        let itself = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let code_point = if itself {
            usize::from(byte)
        } else {
            next += 1;
            next - 1
        };
        table[code_point] = Some(byte);
    }
    table
}
