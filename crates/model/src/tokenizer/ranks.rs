//! Tokenizers that are lists of byte strings by rank: tiktoken files (Kimi) and Mistral's
//! tekken.json.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::bpe::Ranked;
use super::token_bytes::byte_level_table;
use super::{MAX_TOKEN_ID, Parts, too_large};

/// Kimi's expression, from the code next to its files (tokenization_kimi.py).
pub(crate) const KIMI: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// Special tokens that Kimi's tokenizer has after its ranks, named in tokenizer_config.json or not.
const KIMI_SPECIALS: usize = 256;

/// Special tokens of a tekken.json that names none, by id (mistral-common's
/// `DEPRECATED_SPECIAL_TOKENS`).
const TEKKEN_SPECIALS: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

/// A tiktoken file, as Kimi has it: lines of a token's bytes in base64 and its rank.
/// `config` is tokenizer_config.json, which names special tokens.
pub(super) fn tiktoken(file: &str, config: &Value) -> Result<Parts, String> {
    let mut tokens = Vec::new();
    let letters = letters();
    for (line, text) in file.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
        let wrong = || format!("line {}, {:?}, is not a token in base64 and its rank", line + 1, short(text));
        let (bytes, rank) = text.trim().split_once(' ').ok_or_else(wrong)?;
        let rank: u32 = rank.trim().parse().map_err(|_| wrong())?;
        if rank > MAX_TOKEN_ID {
            return Err(too_large(rank));
        }
        let bytes = STANDARD.decode(bytes).map_err(|_| wrong())?;
        tokens.push((rank, spelled(&bytes, &letters)));
    }
    let first = tokens.iter().map(|(rank, _)| rank + 1).max().ok_or("it has no tokens")?;
    let mut specials = Vec::new();
    for id in first..first + KIMI_SPECIALS as u32 {
        let entry = &config["added_tokens_decoder"][id.to_string()];
        let text = entry["content"].as_str().map(str::to_owned);
        // As in the model's code. Tokens that may occur in config.json's text are not special.
        let special = entry["special"].as_bool().unwrap_or(true);
        specials.push((id, text.unwrap_or_else(|| format!("<|reserved_token_{id}|>")), special));
    }
    parts(Ranked { tokens, specials: plain(&specials) }, &specials, KIMI, Value::Null)
}

/// Mistral's tekken.json.
#[derive(Deserialize)]
struct Tekken {
    config: TekkenConfig,
    vocab: Vec<TekkenToken>,
    special_tokens: Option<Vec<TekkenSpecial>>,
}

#[derive(Deserialize)]
struct TekkenConfig {
    pattern: String,
    default_vocab_size: usize,
    default_num_special_tokens: usize,
}

#[derive(Deserialize)]
struct TekkenToken {
    rank: u32,
    token_bytes: String,
}

#[derive(Deserialize)]
struct TekkenSpecial {
    rank: u32,
    token_str: String,
    #[serde(default = "control")]
    is_control: bool,
}

const fn control() -> bool {
    true
}

/// Maximum special tokens. Mistral's files have 1,000.
const MOST_SPECIALS: usize = 65_536;

/// Mistral's tekken.json: special tokens are the first ids, a token's id is its rank after them.
pub(super) fn tekken(file: &[u8]) -> Result<Parts, String> {
    let file: Tekken = serde_json::from_slice(file).map_err(|error| error.to_string())?;
    let TekkenConfig { pattern, default_vocab_size: all, default_num_special_tokens: count } = file.config;
    let most = MAX_TOKEN_ID as usize;
    if all > most || count >= all || count > MOST_SPECIALS {
        return Err(format!(
            "it has {all} tokens, {count} of them special: at most {most} tokens can be, and {MOST_SPECIALS} special ones \
             next to some plain ones"
        ));
    }
    let mut named: Vec<_> = match file.special_tokens {
        Some(tokens) => {
            tokens.into_iter().map(|token| (token.rank, token.token_str, token.is_control)).collect()
        }
        None => (0..).zip(TEKKEN_SPECIALS).map(|(id, text)| (id, text.to_owned(), true)).collect(),
    };
    if let Some((id, text, _)) = named.iter().find(|(id, ..)| *id as usize >= count) {
        return Err(format!("special token {text:?} has the rank {id}, but {count} are special"));
    }
    let filler = named.len() as u32..count as u32;
    named.extend(filler.map(|id| (id, format!("<SPECIAL_{id}>"), true)));
    let letters = letters();
    let mut tokens = Vec::with_capacity(all - count);
    for token in file.vocab {
        if token.rank as usize >= all - count {
            continue;
        }
        let bytes = STANDARD.decode(&token.token_bytes);
        let bytes = bytes.map_err(|_| format!("{:?} is not base64", short(&token.token_bytes)))?;
        tokens.push((token.rank + count as u32, spelled(&bytes, &letters)));
    }
    let bos = named.iter().find(|(_, text, _)| text == "<s>");
    let post_processor = bos.map_or(Value::Null, |(id, text, _)| begins_with(text, *id));
    parts(Ranked { tokens, specials: plain(&named) }, &named, &pattern, post_processor)
}

/// A post-processor that puts a token before each text.
pub(super) fn begins_with(token: &str, id: u32) -> Value {
    let special = json!({ "SpecialToken": { "id": token, "type_id": 0 } });
    let text = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
    let mut tokens = Map::new();
    tokens.insert(token.to_owned(), json!({ "id": token, "ids": [id], "tokens": [token] }));
    json!({
        "type": "TemplateProcessing",
        "single": [special, text("A")],
        "pair": [special, text("A"), text("B")],
        "special_tokens": tokens,
    })
}

fn plain(specials: &[(u32, String, bool)]) -> Vec<(u32, String)> {
    specials.iter().map(|(id, text, _)| (*id, text.clone())).collect()
}

fn parts(
    ranked: Ranked,
    specials: &[(u32, String, bool)],
    expression: &str,
    post_processor: Value,
) -> Result<Parts, String> {
    let split = json!({ "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated", "invert": false });
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    Ok(Parts {
        pairs: ranked.build()?,
        normalizer: Value::Null,
        pre_tokenizer: json!({ "type": "Sequence", "pretokenizers": [split, bytes] }),
        post_processor,
        decoder: json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true }),
        added: specials.iter().map(|(_, text, special)| (text.clone(), *special)).collect(),
    })
}

/// The characters that represent the 256 bytes in pieces of text (GPT-2's table).
fn letters() -> Vec<char> {
    let mut letters = vec!['\0'; 256];
    for (code_point, byte) in (0..).zip(byte_level_table()) {
        if let (Some(byte), Some(letter)) = (byte, char::from_u32(code_point)) {
            letters[usize::from(byte)] = letter;
        }
    }
    letters
}

fn spelled(bytes: &[u8], letters: &[char]) -> String {
    bytes.iter().map(|byte| letters[usize::from(*byte)]).collect()
}

/// The start of a text, for error texts.
fn short(text: &str) -> String {
    text.chars().take(40).collect()
}

/// The first of these files that a folder has.
pub(super) fn first_of<'a>(folder: &Path, names: &[&'a str]) -> Option<&'a str> {
    names.iter().copied().find(|name| folder.join(name).is_file())
}
