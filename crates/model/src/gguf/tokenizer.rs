//! The tokenizer in a file's metadata, as the same model's tokenizer.json has it.

use serde_json::{Value as Json, json};

use super::files::GgufFiles;
use super::pre_tokenizers::{PreTokenizer, WHOLE_TEXTS};
use super::values::{Metadata, Value};
use crate::tokenizer::{BytePairs, Parts, Spaced, Tokenizer, TokenizerError, merges_of_scores, piece};

/// Builds the tokenizer of a file.
///
/// # Errors
/// When the file has none, or one of an unknown kind, or it is malformed.
pub(crate) fn tokenizer(files: &GgufFiles) -> Result<Tokenizer, TokenizerError> {
    let wrong = |reason| TokenizerError::Load { path: files.path().display().to_string(), reason };
    let parts = parts(files.metadata()).map_err(wrong)?;
    let tokenizer = Tokenizer::from_parts(parts).map_err(wrong);
    files.release_header();
    tokenizer
}

/// The tokens of a file, by id.
pub(super) struct Tokens<'a> {
    pub texts: Vec<&'a str>,
    types: Vec<u64>,
}

impl<'a> Tokens<'a> {
    /// `None` if the file has no tokens.
    pub fn read(metadata: Metadata<'a>) -> Result<Option<Self>, String> {
        let Some(texts) = metadata.texts("tokenizer.ggml.tokens")? else { return Ok(None) };
        let types = match metadata.numbers("tokenizer.ggml.token_type")? {
            None => vec![1; texts.len()],
            Some(types) => {
                same_count("tokenizer.ggml.token_type", types.len(), texts.len())?;
                types
                    .map(|kind| if let Value::Signed(n) = kind { n as u64 } else { unsigned(&kind) })
                    .collect()
            }
        };
        Ok(Some(Self { texts, types }))
    }

    /// True if a token is special: it has no text for users.
    pub fn is_special(&self, id: usize) -> bool {
        matches!(self.types[id], piece::CONTROL | piece::UNKNOWN)
    }

    /// Tokens that are found in a text before it is cut, and whether each is special.
    fn added(&self) -> impl Iterator<Item = (String, bool)> {
        let added = |id: &usize| self.is_special(*id) || self.types[*id] == piece::USER_DEFINED;
        (0..self.texts.len())
            .filter(added)
            .filter(|id| !self.texts[*id].is_empty())
            .map(|id| (self.texts[id].to_owned(), self.is_special(id)))
    }
}

fn unsigned(value: &Value) -> u64 {
    if let Value::Unsigned(number) = value { *number } else { 0 }
}

fn same_count(key: &str, count: usize, tokens: usize) -> Result<(), String> {
    match count == tokens {
        true => Ok(()),
        false => Err(format!("{key} has {count} items for {tokens} tokens")),
    }
}

fn parts(metadata: Metadata<'_>) -> Result<Parts, String> {
    let kind = metadata.text("tokenizer.ggml.model")?;
    let tokens = Tokens::read(metadata)?;
    match (kind, tokens) {
        (Some("gpt2"), Some(tokens)) => match metadata.text("tokenizer.ggml.pre")? {
            Some(name) if WHOLE_TEXTS.contains(&name) => spaced(metadata, &tokens, merges(metadata)?, false),
            name => byte_pair(metadata, &tokens, name),
        },
        (Some("llama"), Some(tokens)) => sentence_piece(metadata, &tokens),
        (Some("gemma4"), Some(tokens)) => spaced(metadata, &tokens, merges(metadata)?, false),
        (None | Some("no_vocab" | "none"), _) | (Some("gpt2" | "llama" | "gemma4"), None) => {
            Err("the file has no tokenizer: it can be planned and measured, but not given texts".into())
        }
        (Some(other), _) => Err(format!(
            "tokenizer.ggml.model is {other:?}, which is not supported: gpt2 (byte pairs), gemma4 (byte pairs of whole texts) and llama (SentencePiece) are"
        )),
    }
}

/// Byte pairs with GPT-2's table of bytes.
fn byte_pair(metadata: Metadata<'_>, tokens: &Tokens<'_>, name: Option<&str>) -> Result<Parts, String> {
    let name = name.ok_or(
        "it has no tokenizer.ggml.pre, so nothing says how texts are cut: an old program wrote it; take a newer file",
    )?;
    let cut = PreTokenizer::named(name).ok_or_else(|| {
        format!(
            "tokenizer.ggml.pre is {name:?}, which is not supported: {} are",
            PreTokenizer::known().join(", ")
        )
    })?;
    let pairs = BytePairs {
        tokens: &tokens.texts,
        merges: merges(metadata)?,
        byte_fallback: false,
        whole_first: cut.whole_first,
    };
    Ok(Parts {
        pairs: pairs.build()?,
        normalizer: cut.normalizer(),
        pre_tokenizer: cut.pre_tokenizer(),
        post_processor: post_processor(metadata, tokens, cut.adds_bos)?,
        decoder: json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true }),
        added: tokens.added().collect(),
    })
}

/// Pairs of tokens that become one, first to last.
fn merges(metadata: Metadata<'_>) -> Result<Vec<(&str, &str)>, String> {
    let merges = metadata.texts("tokenizer.ggml.merges")?.ok_or("it has no tokenizer.ggml.merges")?;
    // No token has a space: bytes are printable, or "▁" stands for it.
    let two = |line: &str| format!("the merge {line:?} is not two tokens");
    merges.into_iter().map(|line| line.split_once(' ').ok_or_else(|| two(line))).collect()
}

/// SentencePiece's byte pairs: tokens have scores instead of merges.
fn sentence_piece(metadata: Metadata<'_>, tokens: &Tokens<'_>) -> Result<Parts, String> {
    let scores = metadata.numbers("tokenizer.ggml.scores")?.ok_or("it has no tokenizer.ggml.scores")?;
    same_count("tokenizer.ggml.scores", scores.len(), tokens.texts.len())?;
    let scores: Vec<f32> =
        scores.map(|score| if let Value::Float(score) = score { score as f32 } else { 0.0 }).collect();
    spaced(metadata, tokens, merges_of_scores(&tokens.texts, &scores), true)
}

/// Byte pairs of whole texts, in which another character stands for a space. `prefix`: a space is
/// put before a text unless the file says otherwise.
fn spaced(
    metadata: Metadata<'_>,
    tokens: &Tokens<'_>,
    merges: Vec<(&str, &str)>,
    prefix: bool,
) -> Result<Parts, String> {
    Spaced {
        texts: &tokens.texts,
        merges,
        prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(prefix),
        post_processor: post_processor(metadata, tokens, true)?,
        added: tokens.added().collect(),
    }
    .parts()
}

/// Puts BOS before and EOS after a text, as the file says.
fn post_processor(metadata: Metadata<'_>, tokens: &Tokens<'_>, adds_bos: bool) -> Result<Json, String> {
    let adds = |name: &str, usual| -> Result<Option<(&str, u64)>, String> {
        if !metadata.bool(&format!("tokenizer.ggml.add_{name}_token"))?.unwrap_or(usual) {
            return Ok(None);
        }
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(id) = metadata.unsigned(&key)? else { return Ok(None) };
        let text = usize::try_from(id).ok().and_then(|id| tokens.texts.get(id));
        text.map(|text| Some((*text, id)))
            .ok_or_else(|| format!("{key} is {id}: there are {} tokens", tokens.texts.len()))
    };
    let (bos, eos) = (adds("bos", adds_bos)?, adds("eos", false)?);
    if bos.is_none() && eos.is_none() {
        return Ok(Json::Null);
    }
    let special = |token: Option<(&str, u64)>| {
        token.map(|(text, _)| json!({ "SpecialToken": { "id": text, "type_id": 0 } }))
    };
    let text = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
    let of = |sequences: &[&str]| -> Vec<Json> {
        special(bos).into_iter().chain(sequences.iter().map(|id| text(id))).chain(special(eos)).collect()
    };
    let named = bos
        .iter()
        .chain(&eos)
        .map(|(text, id)| ((*text).to_owned(), json!({ "id": text, "ids": [id], "tokens": [text] })));
    Ok(json!({
        "type": "TemplateProcessing",
        "single": of(&["A"]),
        "pair": of(&["A", "B"]),
        "special_tokens": named.collect::<serde_json::Map<_, _>>(),
    }))
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
