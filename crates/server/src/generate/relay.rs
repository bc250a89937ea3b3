//! Answers that outlive this server: a node of a cluster relays them to its client. If this server
//! is lost, the node sends what the client has to another server.
//!
//! A relayed request has the header [`HEADER`], and a line of JSON before its body: `null`, or the
//! part of the answer that exists ([`Begun`]). The response is lines of JSON (`relaying.rs`). The
//! node uses each line completely or not at all.
//!
//! The engine computes the tokens again by decoding, not as a prompt. The same parser and presenter
//! make the same frames again, and the frames that the client already has are dropped. So nothing
//! is sent twice and nothing is missing.

use serde::{Deserialize, Serialize};
use thunder_access::KeptText;
use thunder_engine::{AnsweredToken, Engine, Request, TokenLogprob};

use super::prepare::Prepared;
use super::reply::unix_s;
use crate::app::App;
use crate::error::ApiError;

/// Marks a relayed request.
pub(crate) const HEADER: &str = "x-thunder-relay";
/// Marks a relayed request whose texts the node keeps: the response has the texts in addition to
/// its frames.
pub(crate) const TELLS_TEXTS: &str = "x-thunder-tell-texts";
/// Marks a request whose answer's end, or whose response header [`WORK`], reports the ranks' work.
pub(crate) const TELLS_WORK: &str = "x-thunder-tell-work";
/// Header with the ranks' work as JSON, for a response that generates no text.
pub(crate) const WORK: &str = "x-thunder-work";

/// Data of an answer in addition to its tokens.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct State {
    /// The response's id.
    pub id: String,
    /// The arrival time of the request, in seconds since the epoch.
    pub created: u64,
    /// The sampler's seed.
    pub seed: u64,
    /// Makes the ids of calls.
    pub salt: u64,
}

/// The part of one choice that the client has.
#[derive(Debug, Default, Deserialize)]
struct BegunChoice {
    tokens: Vec<u32>,
    /// One for each token, if log-probabilities are requested.
    #[serde(default)]
    reports: Vec<Report>,
    #[serde(default)]
    ended: bool,
}

/// The log-probabilities of a token and of the likeliest tokens. The tokenizer gives their bytes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report(f32, Vec<(u32, f32)>);

/// The part of an answer that the client has.
#[derive(Debug, Deserialize)]
struct Begun {
    state: State,
    choices: Vec<BegunChoice>,
}

/// A choice that may have begun on another server.
#[derive(Debug, Default)]
pub(crate) struct RelayedChoice {
    pub answered: Vec<AnsweredToken>,
    /// The client has its end.
    pub ended: bool,
    constraint: Option<thunder_engine::Constraint>,
}

/// A relayed request.
#[derive(Debug)]
pub(crate) struct Relay {
    pub state: State,
    pub choices: Vec<RelayedChoice>,
    /// The client has the response's beginning.
    pub is_resumed: bool,
    /// The prompt's texts, if the node wants texts.
    pub told: Option<Vec<KeptText>>,
    begun: Vec<BegunChoice>,
}

impl Report {
    pub fn of(report: &TokenLogprob) -> Self {
        // JSON has no infinity.
        let finite = |logprob: f32| logprob.max(f32::MIN);
        let top = report.top.iter().map(|(id, _, logprob)| (*id, finite(*logprob))).collect();
        Self(finite(report.logprob), top)
    }

    fn report(self, id: u32, bytes: impl Fn(u32) -> Vec<u8>) -> TokenLogprob {
        let top = self.1.into_iter().map(|(id, logprob)| (id, bytes(id), logprob)).collect();
        TokenLogprob { id, bytes: bytes(id), logprob: self.0, top }
    }
}

impl Relay {
    /// Reads the line before a relayed body. Returns the body as well.
    ///
    /// # Errors
    /// When the line is missing or malformed.
    pub fn read<'a>(bytes: &'a [u8], app: &App, prefix: &str) -> Result<(Self, &'a [u8]), ApiError> {
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let (line, body) =
            end.map(|end| (&bytes[..end], &bytes[end + 1..])).ok_or_else(|| wrong(&"no line before it"))?;
        let begun: Option<Begun> = serde_json::from_slice(line).map_err(|error| wrong(&error))?;
        let is_resumed = begun.is_some();
        let Begun { state, choices } = begun.unwrap_or_else(|| {
            let state =
                State { id: app.next_id(prefix), created: unix_s(), seed: app.random(), salt: app.random() };
            Begun { state, choices: Vec::new() }
        });
        Ok((Self { state, choices: Vec::new(), is_resumed, told: None, begun: choices }, body))
    }

    /// Adds this to the prepared request.
    ///
    /// # Errors
    /// When the begun answer does not fit the request.
    pub fn attach(mut self, mut prepared: Prepared, engine: &Engine) -> Result<Prepared, ApiError> {
        let seed = &mut prepared.options.sampling.seed;
        if !self.is_resumed {
            self.state.seed = seed.unwrap_or(self.state.seed);
        }
        *seed = Some(self.state.seed);
        let tokenizer = &engine.info().tokenizer;
        let count = prepared.prompts.len() * prepared.options.n;
        let begun = std::mem::take(&mut self.begun);
        if begun.len() > count {
            return Err(wrong(&format!("{} choices have begun, of {count}", begun.len())));
        }
        for begun in begun {
            let mut reports = begun.reports.into_iter();
            let answered = begun.tokens.into_iter().map(|id| {
                let report = reports.next().map(|report| report.report(id, |id| tokenizer.token_bytes(id)));
                AnsweredToken { id, report }
            });
            let answered: Vec<AnsweredToken> = answered.collect();
            let ids = answered.iter().map(|token| token.id);
            let constraint = prepared.constraint.clone().map(|constraint| constraint.after(ids));
            let constraint = constraint.transpose().map_err(|error| wrong(&error))?;
            self.choices.push(RelayedChoice { answered, ended: begun.ended, constraint });
        }
        prepared.relay = Some(self);
        Ok(prepared)
    }

    /// The engine's request for a choice.
    pub fn request(&self, choice: usize, request: Request) -> Request {
        let request = Request { reports_tokens: true, ..request };
        let Some(begun) = self.choices.get(choice) else { return request };
        Request { answered: begun.answered.clone(), constraint: begun.constraint.clone(), ..request }
    }
}

fn wrong(why: &dyn std::fmt::Display) -> ApiError {
    ApiError::invalid(format!("the relayed request is malformed: {why}"))
}

/// The id of a call, the same on every server that computes the answer.
pub(crate) fn call_id(salt: u64, choice: usize, call: usize) -> String {
    let half = |which: u64| mix(salt ^ mix((choice as u64) << 32 | (call as u64) << 1 | which));
    format!("call_{:016x}{:016x}", half(0), half(1))
}

/// SplitMix64's output function.
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
