//! Answers that follow a grammar: llguidance compiles the grammar, and separate threads compute
//! masks while the ranks compute the next step.

mod masks;

use std::fmt;
use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie,
};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::model_info::ModelInfo;

pub(crate) use masks::{MaskFailure, MaskedAnswer};

/// Maximum size of a grammar or schema. Compiling takes about a hundred times this much memory.
pub const MAX_GRAMMAR_BYTES: usize = 256 << 10;
/// Limits a grammar's lexer to about 40 MB: 1 to 2 kB for each state. Real schemas have hundreds.
const MAX_LEXER_STATES: usize = 20_000;

/// What an answer must follow.
#[derive(Debug, Clone, PartialEq)]
pub enum Grammar {
    /// A JSON value that a schema describes.
    JsonSchema(Value),
    /// A text that a regular expression matches as a whole.
    Regex(String),
    /// A text that a grammar in llguidance's form of Lark describes.
    Lark(String),
}

/// Why a grammar cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(String);

/// A compiled grammar.
#[derive(Clone)]
pub struct Constraint {
    matcher: Matcher,
    eos: Arc<[u32]>,
    threads: masks::Threads,
}

impl Constraint {
    /// The constraint for the rest of an answer, after its first tokens.
    ///
    /// # Errors
    /// If it does not allow these tokens.
    pub fn after(mut self, tokens: impl Iterator<Item = u32>) -> Result<Self, GrammarError> {
        for token in tokens {
            self.matcher.consume_token(token).map_err(|error| GrammarError(in_words(&error)))?;
        }
        Ok(self)
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").finish_non_exhaustive()
    }
}

/// Compiles grammars for one model.
pub(crate) struct Compiler {
    factory: ParserFactory,
    eos: Arc<[u32]>,
    threads: masks::Threads,
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler").field("eos", &self.eos).finish_non_exhaustive()
    }
}

impl Compiler {
    pub fn new(info: &ModelInfo) -> Result<Self, GrammarError> {
        let wrong = |error: &dyn fmt::Display| GrammarError(format!("grammars cannot be used: {error:#}"));
        let tokens = vocabulary(info);
        let mut factory = ParserFactory::new(
            &tokens,
            InferenceCapabilities::default(),
            &SlicedBiasComputer::general_slices(),
        )
        .map_err(|error| wrong(&error))?;
        factory.quiet();
        let limits = factory.limits_mut();
        *limits = ParserLimits {
            max_lexer_states: MAX_LEXER_STATES,
            // Its time has no limit.
            precompute_large_lexemes: false,
            // Errors go to clients, who know their grammar.
            verbose_errors: false,
            ..limits.clone()
        };
        let threads = masks::Threads::start().map_err(|error| wrong(&error))?;
        Ok(Self { factory, eos: info.eos.as_slice().into(), threads })
    }

    pub fn compile(&self, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        let top = match grammar {
            Grammar::JsonSchema(schema) => TopLevelGrammar::from_json_schema(compact(schema)),
            Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Grammar::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        };
        let bytes = serde_json::to_string(&top).map_or(0, |text| text.len());
        if bytes > MAX_GRAMMAR_BYTES {
            let message = format!("it has {bytes} bytes, {MAX_GRAMMAR_BYTES} are the most");
            return Err(GrammarError(message));
        }
        let parser = self.factory.create_parser(top).map_err(|error| GrammarError(in_words(&error)))?;
        let mut matcher = Matcher::new(Ok(parser));
        // A grammar that allows no answer is an error now, not a stream that fails.
        matcher.compute_mask_or_eos().map_err(|error| GrammarError(in_words(&error)))?;
        Ok(Constraint { matcher, eos: self.eos.clone(), threads: self.threads.clone() })
    }
}

/// The schema with a single JSON layout; otherwise a small model may write white space forever.
fn compact(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        other => other.clone(),
    };
    if let Some(fields) = schema.as_object_mut() {
        fields.entry("x-guidance").or_insert_with(json_form);
    }
    schema
}

/// The JSON layout for llguidance: one line, with the usual spaces.
pub fn json_form() -> Value {
    json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "})
}

/// llguidance's message in one line, with other words for what only its authors would understand.
fn in_words(error: &dyn fmt::Display) -> String {
    let text = format!("{error:#}");
    let line = text.lines().next().unwrap_or("malformed");
    for (known, words) in KNOWN_ERRORS {
        if line.contains(known) {
            return (*words).to_owned();
        }
    }
    line.chars().take(500).collect()
}

/// Parts of llguidance's messages, and what they mean.
const KNOWN_ERRORS: &[(&str, &str)] = &[
    (
        "NoExtensionBias",
        "no text can follow it: a rule, or a \"$ref\", that needs itself has no end. Give it an \
         alternative that does not need itself",
    ),
    (
        "too many expressions constructed",
        "it is too complex: a regular expression has nested or very large repetitions. Make them \
         smaller, or unlimited (`*`)",
    ),
    (
        "too many states",
        "it is too complex: its regular expressions have too many states. Make repetitions smaller, \
         or unlimited (`*`)",
    ),
    (
        "too many items",
        "it is too ambiguous: too many of its rules match the same text. Write each text in one way",
    ),
];

/// The tokens' bytes. Special tokens begin with a byte that no text contains.
fn vocabulary(info: &ModelInfo) -> TokEnv {
    let word = |id: u32| {
        if info.tokenizer.is_special(id) {
            let name = info.tokenizer.decode(&[id], false);
            [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat()
        } else {
            info.tokenizer.token_bytes(id)
        }
    };
    let size = info.vocab_size as u32;
    let words: Vec<Vec<u8>> = (0..size).map(word).collect();
    let eos: Vec<u32> = info.eos.iter().copied().filter(|id| *id < size).collect();
    let trie = TokTrie::from(&TokRxInfo::new(size, eos.first().copied().unwrap_or(INVALID_TOKEN)), &words);
    let trie = if eos.is_empty() { trie } else { trie.with_eos_tokens(&eos) };
    Arc::new(ApproximateTokEnv::new(trie))
}

#[cfg(test)]
mod tests;
