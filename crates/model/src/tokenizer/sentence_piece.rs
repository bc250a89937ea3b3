//! SentencePiece's byte pairs: tokens have scores instead of merges. Read from a `.model` file,
//! which is a message of Protocol Buffers (sentencepiece_model.proto), or from a GGUF file's
//! metadata.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::bpe::BytePairs;
use super::ranks::begins_with;
use super::{MAX_TOKEN_ID, Parts};

/// Types of pieces, in `.model` files and in GGUF's `tokenizer.ggml.token_type`.
pub(crate) mod piece {
    pub const UNKNOWN: u64 = 2;
    pub const CONTROL: u64 = 3;
    pub const USER_DEFINED: u64 = 4;
}

/// Represents a space in tokens.
const SPACE: &str = "▁";

/// Byte pairs of whole texts, in which [`SPACE`] represents a space.
pub(crate) struct Spaced<'a> {
    pub texts: &'a [&'a str],
    pub merges: Vec<(&'a str, &'a str)>,
    /// A space is put before a text.
    pub prefix: bool,
    pub post_processor: Value,
    pub added: Vec<(String, bool)>,
}

impl Spaced<'_> {
    pub fn parts(self) -> Result<Parts, String> {
        let pairs =
            BytePairs { tokens: self.texts, merges: self.merges, byte_fallback: true, whole_first: false };
        let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
        let prepend = json!({ "type": "Prepend", "prepend": SPACE });
        let mut decoders = vec![
            json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
            json!({ "type": "ByteFallback" }),
            json!({ "type": "Fuse" }),
        ];
        if self.prefix {
            decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        let normalizers: Vec<Value> = self.prefix.then_some(prepend).into_iter().chain([spaces]).collect();
        Ok(Parts {
            pairs: pairs.build()?,
            normalizer: json!({ "type": "Sequence", "normalizers": normalizers }),
            pre_tokenizer: Value::Null,
            post_processor: self.post_processor,
            decoder: json!({ "type": "Sequence", "decoders": decoders }),
            added: self.added,
        })
    }
}

/// Longer tokens are not formed by merges, because each would take a lookup for each of its
/// positions.
const LONGEST_MERGED_BYTES: usize = 1024;

/// The merges that transformers derives from scores: every way to form a token from two others; the
/// largest score first, then the longest left part.
pub(crate) fn merges_of_scores<'a>(texts: &[&'a str], scores: &[f32]) -> Vec<(&'a str, &'a str)> {
    let ids: HashMap<&str, usize> = texts.iter().enumerate().map(|(id, text)| (*text, id)).collect();
    let mut merges = Vec::new();
    for (id, text) in texts.iter().enumerate() {
        if ids.get(text) != Some(&id) || text.len() > LONGEST_MERGED_BYTES {
            continue;
        }
        let first = merges.len();
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(left_id), Some(right_id)) = (ids.get(left), ids.get(right)) {
                let length = left.chars().count();
                merges.push((
                    scores[id],
                    length,
                    text.chars().count() - length,
                    (*left_id, *right_id),
                    (left, right),
                ));
            }
        }
        merges[first..].sort_by_key(|merge| merge.3);
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)).then(b.2.cmp(&a.2)));
    merges.into_iter().map(|merge| merge.4).collect()
}

/// The content of a `.model` file.
#[derive(Debug, Default, PartialEq)]
struct File {
    pieces: Vec<(String, f32, u64)>,
    /// 1: unigram, 2: byte pairs.
    kind: u64,
    byte_fallback: bool,
    has_charsmap: bool,
    prefix: bool,
    trims: bool,
    keeps_spaces: bool,
}

/// Fields of the messages, by number.
mod field {
    pub const PIECES: u64 = 1;
    pub const TRAINER: u64 = 2;
    pub const NORMALIZER: u64 = 3;
    pub const PIECE_TEXT: u64 = 1;
    pub const PIECE_SCORE: u64 = 2;
    pub const PIECE_TYPE: u64 = 3;
    pub const TRAINER_KIND: u64 = 3;
    pub const TRAINER_BYTE_FALLBACK: u64 = 35;
    pub const NORMALIZER_CHARSMAP: u64 = 2;
    pub const NORMALIZER_PREFIX: u64 = 3;
    pub const NORMALIZER_TRIMS: u64 = 4;
    pub const NORMALIZER_ESCAPES: u64 = 5;
}

/// A value of Protocol Buffers.
#[derive(Clone, Copy)]
enum Wire<'a> {
    Number(u64),
    Fixed32(u32),
    Bytes(&'a [u8]),
}

impl Wire<'_> {
    fn number(self) -> u64 {
        match self {
            Self::Number(number) => number,
            Self::Fixed32(bits) => u64::from(bits),
            Self::Bytes(_) => 0,
        }
    }

    fn is_true(self) -> bool {
        self.number() != 0
    }
}

/// Reads the fields of a message: number and value. Fields of 8 bytes have no use here.
fn fields<'a>(
    mut bytes: &'a [u8],
    mut take: impl FnMut(u64, Wire<'a>) -> Result<(), String>,
) -> Result<(), String> {
    let cut = || "it ends in the middle of a value: download it again".to_owned();
    while !bytes.is_empty() {
        let key = varint(&mut bytes).ok_or_else(cut)?;
        let value = match key & 7 {
            0 => Wire::Number(varint(&mut bytes).ok_or_else(cut)?),
            1 => {
                bytes = bytes.get(8..).ok_or_else(cut)?;
                continue;
            }
            2 => {
                let len = usize::try_from(varint(&mut bytes).ok_or_else(cut)?).map_err(|_| cut())?;
                let (value, rest) = bytes.split_at_checked(len).ok_or_else(cut)?;
                bytes = rest;
                Wire::Bytes(value)
            }
            5 => {
                let (value, rest) = bytes.split_first_chunk().ok_or_else(cut)?;
                bytes = rest;
                Wire::Fixed32(u32::from_le_bytes(*value))
            }
            other => {
                return Err(format!("not a SentencePiece model: it has a value of the unknown type {other}"));
            }
        };
        take(key >> 3, value)?;
    }
    Ok(())
}

/// A number of seven bits a byte, the lowest first.
fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

impl File {
    fn read(bytes: &[u8]) -> Result<Self, String> {
        // Defaults of sentencepiece_model.proto.
        let mut file = Self { kind: 1, prefix: true, trims: true, ..Self::default() };
        fields(bytes, |number, value| match (number, value) {
            (field::PIECES, Wire::Bytes(bytes)) => {
                if file.pieces.len() > MAX_TOKEN_ID as usize {
                    return Err(format!("it has more than {MAX_TOKEN_ID} tokens"));
                }
                let (mut text, mut score, mut kind) = (String::new(), 0.0, 1);
                fields(bytes, |number, value| {
                    match (number, value) {
                        (field::PIECE_TEXT, Wire::Bytes(bytes)) => {
                            let found = std::str::from_utf8(bytes);
                            text = found.map_err(|_| "a token is not UTF-8".to_owned())?.to_owned();
                        }
                        (field::PIECE_SCORE, Wire::Fixed32(bits)) => score = f32::from_bits(bits),
                        (field::PIECE_TYPE, value) => kind = value.number(),
                        _ => {}
                    }
                    Ok(())
                })?;
                file.pieces.push((text, score, kind));
                Ok(())
            }
            (field::TRAINER, Wire::Bytes(bytes)) => fields(bytes, |number, value| {
                match number {
                    field::TRAINER_KIND => file.kind = value.number(),
                    field::TRAINER_BYTE_FALLBACK => file.byte_fallback = value.is_true(),
                    _ => {}
                }
                Ok(())
            }),
            (field::NORMALIZER, Wire::Bytes(bytes)) => fields(bytes, |number, value| {
                match (number, value) {
                    (field::NORMALIZER_CHARSMAP, Wire::Bytes(bytes)) => file.has_charsmap = !bytes.is_empty(),
                    (field::NORMALIZER_PREFIX, value) => file.prefix = value.is_true(),
                    (field::NORMALIZER_TRIMS, value) => file.trims = value.is_true(),
                    (field::NORMALIZER_ESCAPES, value) => file.keeps_spaces = !value.is_true(),
                    _ => {}
                }
                Ok(())
            }),
            _ => Ok(()),
        })?;
        Ok(file)
    }
}

/// A `.model` file. `config` is tokenizer_config.json, which says whether texts begin with BOS.
pub(super) fn model(bytes: &[u8], config: &Value) -> Result<Parts, String> {
    let file = File::read(bytes)?;
    if file.pieces.is_empty() {
        return Err("not a SentencePiece model: it has no tokens".into());
    }
    if file.kind != 2 {
        let kind = if file.kind == 1 { "unigram".to_owned() } else { format!("type {}", file.kind) };
        return Err(format!(
            "it is a SentencePiece model of {kind}, which is not supported: byte pairs are; take a folder with a tokenizer.json"
        ));
    }
    if !file.byte_fallback || file.keeps_spaces {
        return Err(
            "it has no tokens for single bytes, or keeps spaces: take a folder with a tokenizer.json".into(),
        );
    }
    if file.has_charsmap || file.trims {
        // The tokenizers library normalizes some characters differently from SentencePiece.
        return Err("it rewrites characters or removes spaces: take a folder with a tokenizer.json".into());
    }
    let texts: Vec<&str> = file.pieces.iter().map(|(text, ..)| text.as_str()).collect();
    let scores: Vec<f32> = file.pieces.iter().map(|(_, score, _)| *score).collect();
    let is_special = |kind: u64| matches!(kind, piece::CONTROL | piece::UNKNOWN);
    let added = file
        .pieces
        .iter()
        .filter(|(text, _, kind)| !text.is_empty() && (is_special(*kind) || *kind == piece::USER_DEFINED));
    let added = added.map(|(text, _, kind)| (text.clone(), is_special(*kind))).collect();
    let begins = config["add_bos_token"].as_bool().unwrap_or(true);
    let named = config["bos_token"].as_str().or_else(|| config["bos_token"]["content"].as_str());
    let bos = named.unwrap_or("<s>");
    let id = texts.iter().position(|text| *text == bos).filter(|_| begins);
    let post_processor = id.map_or(Value::Null, |id| begins_with(bos, id as u32));
    let merges = merges_of_scores(&texts, &scores);
    Spaced { texts: &texts, merges, prefix: file.prefix, post_processor, added }.parts()
}
