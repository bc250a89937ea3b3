//! Answers that follow a grammar: compiled by llguidance, and masks computed on threads of their
//! own while the ranks compute the next step.

use std::fmt;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie,
};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::model_info::ModelInfo;

/// Largest grammar or schema. Compiling takes some hundred times its bytes of memory.
pub const MAX_GRAMMAR_BYTES: usize = 256 << 10;
/// Threads that compute masks: a mask takes about 50 us, and a step longer.
const MASK_THREADS: usize = 2;
/// The longest wait for a mask. The limits of a step end any grammar's mask in about 20 ms; the
/// rest is for a machine that is busy.
const MASK_WAIT: Duration = Duration::from_secs(10);
/// Limits a grammar's lexer to about 40 MB: 1 to 2 kB for each state. Real schemas have hundreds.
const MAX_LEXER_STATES: usize = 20_000;

/// What an answer must follow.
#[derive(Debug, Clone, PartialEq)]
pub enum Grammar {
    /// A JSON value that a schema describes.
    JsonSchema(Value),
    /// A text that a regular expression matches as a whole.
    Regex(String),
    /// A text of a grammar in llguidance's form of Lark.
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
    jobs: Sender<Job>,
}

impl Constraint {
    /// The constraint of an answer's rest, after its first tokens.
    ///
    /// # Errors
    /// When it does not allow these tokens.
    pub fn after(mut self, tokens: impl Iterator<Item = u32>) -> Result<Self, GrammarError> {
        for token in tokens {
            self.matcher.consume_token(token).map_err(|error| GrammarError(first_line(&error)))?;
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
    jobs: Sender<Job>,
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
        let (jobs, receiver) = channel();
        let receiver = Arc::new(Mutex::new(receiver));
        for index in 0..MASK_THREADS {
            let receiver = receiver.clone();
            std::thread::Builder::new()
                .name(format!("masks-{index}"))
                .spawn(move || compute_masks(&receiver))
                .map_err(|error| wrong(&error))?;
        }
        Ok(Self { factory, eos: info.eos.as_slice().into(), jobs })
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
        let parser = self.factory.create_parser(top).map_err(|error| GrammarError(first_line(&error)))?;
        let mut matcher = Matcher::new(Ok(parser));
        // A grammar without any answer is an error now, not a stream that fails.
        matcher.compute_mask_or_eos().map_err(|error| GrammarError(first_line(&error)))?;
        Ok(Constraint { matcher, eos: self.eos.clone(), jobs: self.jobs.clone() })
    }
}

/// The schema with JSON in one form: without it, a small model may write white space for ever.
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

/// How llguidance is to write JSON: on one line, with the usual spaces.
pub fn json_form() -> Value {
    json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "})
}

fn first_line(error: &dyn fmt::Display) -> String {
    let text = format!("{error:#}");
    text.lines().next().unwrap_or("malformed").chars().take(500).collect()
}

/// The tokens' bytes. Special tokens begin with a byte that no text has.
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

/// A mask to compute, after one more token.
struct Job {
    matcher: Matcher,
    token: Option<u32>,
    reply: SyncSender<Mask>,
}

/// A computed mask.
struct Mask {
    matcher: Matcher,
    /// `None` if the answer has to end.
    allowed: Result<Option<SimpleVob>, String>,
}

fn compute_masks(jobs: &Mutex<Receiver<Job>>) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Job { mut matcher, token, reply }) = job else { return };
        let consumed = token.map_or(Ok(()), |token| matcher.consume_token(token));
        let allowed = consumed
            .and_then(|()| if matcher.is_stopped() { Ok(None) } else { matcher.compute_mask().map(Some) });
        let allowed = allowed.map_err(|error| first_line(&error));
        // The request may have ended meanwhile.
        let _ = reply.send(Mask { matcher, allowed });
    }
}

/// A constraint during one answer.
pub(crate) struct MaskedAnswer {
    eos: Arc<[u32]>,
    jobs: Sender<Job>,
    coming: Option<Receiver<Mask>>,
    matcher: Option<Matcher>,
    /// The answer is complete without an end token.
    is_complete: bool,
    failure: Option<String>,
}

impl MaskedAnswer {
    /// Begins an answer, and the computing of its first mask.
    pub fn begin(Constraint { matcher, eos, jobs }: Constraint) -> Self {
        let mut masked = Self { eos, jobs, coming: None, matcher: None, is_complete: false, failure: None };
        masked.request_mask(matcher, None);
        masked
    }

    fn request_mask(&mut self, matcher: Matcher, token: Option<u32>) {
        let (reply, coming) = sync_channel(1);
        // If the threads are gone, waiting for the mask says so.
        let _ = self.jobs.send(Job { matcher, token, reply });
        self.coming = Some(coming);
    }

    /// Makes the tokens that may not follow impossible. `None` after a failure.
    pub fn apply(&mut self, logits: &mut [f32]) -> Option<()> {
        let coming = self.coming.take()?;
        let Ok(Mask { matcher, allowed }) = coming.recv_timeout(MASK_WAIT) else {
            self.failure = Some(format!("the answer's grammar gave no mask within {MASK_WAIT:?}"));
            return None;
        };
        self.matcher = Some(matcher);
        match allowed {
            Ok(Some(mask)) => {
                keep_only(&mask, logits);
                Some(())
            }
            Ok(None) => {
                self.is_complete = true;
                let end = self.eos.first().copied().unwrap_or(0) as usize;
                for (id, logit) in logits.iter_mut().enumerate() {
                    *logit = if id == end { 0.0 } else { f32::NEG_INFINITY };
                }
                Some(())
            }
            Err(why) => {
                self.failure = Some(format!("the answer cannot go on by its grammar: {why}"));
                None
            }
        }
    }

    /// Takes the chosen token. True if the answer ends with it, and the token is no part of it.
    pub fn accept(&mut self, token: u32) -> bool {
        if self.is_complete || self.eos.contains(&token) {
            return true;
        }
        if let Some(matcher) = self.matcher.take() {
            self.request_mask(matcher, Some(token));
        }
        false
    }

    /// Why the answer cannot go on.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }
}

fn keep_only(mask: &SimpleVob, logits: &mut [f32]) {
    for (word, logits) in mask.as_slice().iter().zip(logits.chunks_mut(u32::BITS as usize)) {
        if *word == u32::MAX {
            continue;
        }
        for (bit, logit) in logits.iter_mut().enumerate() {
            if word & (1 << bit) == 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

#[cfg(test)]
mod tests;
