//! From the user's text to a request, and from its events to the terminal.

use std::io::Write;
use std::str::FromStr;
use std::sync::Once;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use indicatif::ProgressBar;
use serde_json::{Map, Value, json};
use thunder_engine::{Engine, Event, EventStream, FinishReason, Request, Sampling, Usage};

use crate::progress;

/// How tokens are sampled. Options that are not given have the model's own defaults.
#[derive(Args, Debug, Clone)]
pub struct SamplingArgs {
    /// Randomness, 0 to 2: 0 always chooses the likeliest token, higher values vary more
    #[arg(long, value_name = "T", allow_hyphen_values = true)]
    temperature: Option<f32>,
    /// Sample from the likeliest tokens whose probabilities add up to P (above 0, up to 1)
    #[arg(long, value_name = "P", allow_hyphen_values = true)]
    top_p: Option<f32>,
    /// Sample from the K likeliest tokens; 0 means all
    #[arg(long, value_name = "K", allow_hyphen_values = true)]
    top_k: Option<usize>,
    /// Sample from tokens that are at least P times as likely as the likeliest (0 to 1)
    #[arg(long, value_name = "P", allow_hyphen_values = true)]
    min_p: Option<f32>,
    /// Make tokens of the prompt and the answer less likely, with values above 1
    #[arg(long, value_name = "F", allow_hyphen_values = true)]
    repetition_penalty: Option<f32>,
    /// Make tokens that the answer already has less likely, with values above 0 (-2 to 2)
    #[arg(long, value_name = "F", allow_hyphen_values = true)]
    presence_penalty: Option<f32>,
    /// The same, in proportion to how often the answer has the token (-2 to 2)
    #[arg(long, value_name = "F", allow_hyphen_values = true)]
    frequency_penalty: Option<f32>,
    /// Add BIAS to the logit of token ID; 42=-100 bans token 42; may be repeated
    #[arg(long, value_name = "ID=BIAS", value_parser = logit_bias)]
    logit_bias: Vec<(u32, f32)>,
    /// Seed of the random numbers: the same seed gives the same answer
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Maximum tokens to generate [default: as many as fit into the context]
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// End the answer before this text; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// System prompt: instructions before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
}

fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let parsed = text.split_once('=').and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    parsed.ok_or_else(|| "must be a token id and a number, like 42=-100".to_owned())
}

impl SamplingArgs {
    /// A request for an answer to a prompt.
    pub fn request(&self, prompt: Vec<u32>, default: &Sampling) -> Request {
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(default.temperature),
            top_p: self.top_p.unwrap_or(default.top_p),
            top_k: self.top_k.unwrap_or(default.top_k),
            min_p: self.min_p.unwrap_or(default.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(default.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(default.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(default.frequency_penalty),
            logit_bias: self.logit_bias.clone(),
            seed: self.seed,
        };
        Request {
            prompt,
            sampling,
            max_tokens: self.max_tokens,
            stop: self.stop.clone(),
            ignore_eos: false,
            logprobs: None,
            ..Request::default()
        }
    }
}

/// The numbers that `/set` of a chat shows and changes.
const SETTABLE: &str = "temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed, \
                        max_tokens";

impl SamplingArgs {
    /// Changes an option by its name; the value `default` removes it.
    ///
    /// # Errors
    /// When there is no such option, or the value is no number or out of range.
    pub fn set(&mut self, name: &str, value: &str, engine: &Engine) -> anyhow::Result<()> {
        fn parsed<T: FromStr>(name: &str, value: &str) -> anyhow::Result<Option<T>> {
            if value == "default" {
                return Ok(None);
            }
            let number = value.parse().ok();
            Ok(Some(number.with_context(|| format!("{name} is {value:?}, but must be a number or default"))?))
        }
        let mut changed = self.clone();
        let name = name.replace('-', "_");
        match name.as_str() {
            "temperature" => changed.temperature = parsed(&name, value)?,
            "top_p" => changed.top_p = parsed(&name, value)?,
            "top_k" => changed.top_k = parsed(&name, value)?,
            "min_p" => changed.min_p = parsed(&name, value)?,
            "repetition_penalty" => changed.repetition_penalty = parsed(&name, value)?,
            "presence_penalty" => changed.presence_penalty = parsed(&name, value)?,
            "frequency_penalty" => changed.frequency_penalty = parsed(&name, value)?,
            "seed" => changed.seed = parsed(&name, value)?,
            "max_tokens" => changed.max_tokens = parsed(&name, value)?,
            _ => bail!("no option {name:?}: there are {SETTABLE}"),
        }
        // Any prompt works, because only the numbers are checked.
        changed.request(vec![0], &engine.info().default_sampling).check(engine.info())?;
        *self = changed;
        Ok(())
    }

    /// The options and their values, a line each.
    pub fn shown(&self, default: &Sampling) -> String {
        let Request { sampling, max_tokens, .. } = self.request(Vec::new(), default);
        let of = |value: Option<String>, unset: &str| value.unwrap_or_else(|| unset.to_owned());
        let rows = [
            ("temperature", sampling.temperature.to_string()),
            ("top_p", sampling.top_p.to_string()),
            ("top_k", sampling.top_k.to_string()),
            ("min_p", sampling.min_p.to_string()),
            ("repetition_penalty", sampling.repetition_penalty.to_string()),
            ("presence_penalty", sampling.presence_penalty.to_string()),
            ("frequency_penalty", sampling.frequency_penalty.to_string()),
            ("seed", of(sampling.seed.map(|seed| seed.to_string()), "another one for each answer")),
            (
                "max_tokens",
                of(max_tokens.map(|most| most.to_string()), "as many as the context has room for"),
            ),
        ];
        rows.map(|(name, value)| format!("{name:19} {value}")).join("\n")
    }

    /// Maximum tokens of an answer, if there is a limit.
    pub fn max_tokens(&self) -> Option<usize> {
        self.max_tokens
    }
}

/// One message of a conversation.
pub fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

/// The prompt of a conversation, by the model's chat template: special tokens in messages are
/// ordinary text. Without a template: the last message alone.
///
/// # Errors
/// When the template rejects the messages.
pub fn tokens(engine: &Engine, messages: &[Value]) -> anyhow::Result<Vec<u32>> {
    let info = engine.info();
    if info.chat_template.is_some() {
        return Ok(info.chat_prompt(messages, &Map::new())?);
    }
    static TOLD: Once = Once::new();
    TOLD.call_once(|| {
        eprintln!("warning: the model has no chat template: it gets the last message alone, as plain text");
    });
    let text = messages.last().and_then(|message| message["content"].as_str()).unwrap_or_default();
    Ok(info.text_prompt(text)?)
}

/// A finished answer.
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Why it ended; `None` if it was interrupted.
    pub reason: Option<FinishReason>,
    /// Tokens and times.
    pub usage: Usage,
}

/// Reads an answer to its end and passes each piece of text to `show`. Ends early if
/// `is_interrupted` returns true.
///
/// # Errors
/// When the engine fails.
pub fn read(
    mut stream: EventStream,
    is_interrupted: impl Fn() -> bool,
    mut show: impl FnMut(&str) -> std::io::Result<()>,
) -> anyhow::Result<Answer> {
    let mut text = String::new();
    while !is_interrupted() {
        let Some(event) = stream.next_within(CHECK_INTERRUPT_EVERY) else { continue };
        match event {
            Some(Event::Delta { text: more, .. }) => {
                show(&more).context("cannot write the answer")?;
                text.push_str(&more);
            }
            // Only text was asked for.
            Some(
                Event::Mark { .. }
                | Event::Accepted { .. }
                | Event::Work(_)
                | Event::Hidden { .. }
                | Event::Likelihoods { .. },
            ) => {}
            Some(Event::Done { reason, usage }) => return Ok(Answer { text, reason: Some(reason), usage }),
            Some(Event::Failed { message, .. }) => bail!("the answer was cut off: {message}"),
            None => bail!("the engine ended in the middle of the answer"),
        }
    }
    Ok(Answer { text, reason: None, usage: Usage::default() })
}

/// How much of a prompt the engine's steps have taken, while it has no other requests. Shown on
/// standard error from a second on: a long prompt takes longer, and so does a GPU's first step,
/// which compiles kernels.
pub struct Reading<'a> {
    engine: &'a Engine,
    /// Tokens that they had taken before.
    before: u64,
    began: Instant,
    bar: ProgressBar,
}

impl<'a> Reading<'a> {
    /// For a request that is going to be submitted.
    pub fn new(engine: &'a Engine, request: &Request) -> Self {
        let before = engine.counters().read_tokens.load(Ordering::Relaxed);
        Self { engine, before, began: Instant::now(), bar: progress::prompt(request.prompt.len()) }
    }

    fn show(&self) {
        if self.began.elapsed() > Duration::from_secs(1) && !self.bar.is_finished() {
            self.bar.set_position(self.engine.counters().read_tokens.load(Ordering::Relaxed) - self.before);
        }
    }

    /// Reads the answer, like [`read`].
    ///
    /// # Errors
    /// When the engine fails.
    pub fn answer(
        self,
        stream: EventStream,
        is_interrupted: impl Fn() -> bool,
        mut show: impl FnMut(&str) -> std::io::Result<()>,
    ) -> anyhow::Result<Answer> {
        let is_interrupted = || {
            self.show();
            is_interrupted()
        };
        let answer = read(stream, is_interrupted, |text| {
            self.bar.finish_and_clear();
            show(text)
        });
        self.bar.finish_and_clear();
        answer
    }
}

/// Interval between checks of the flag while there is no event.
const CHECK_INTERRUPT_EVERY: Duration = Duration::from_millis(50);

/// Writes to standard output without buffering.
pub fn print_now(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Decode speed of an answer, in tokens per second. The first token belongs to the prefill and does
/// not count.
pub fn decode_rate(usage: &Usage) -> f64 {
    usage.completion_tokens.saturating_sub(1) as f64 / usage.decode_time.as_secs_f64().max(1e-9)
}
