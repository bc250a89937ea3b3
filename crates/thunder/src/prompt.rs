//! From what a person typed to a request, and from its events to their terminal.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use serde_json::{Map, Value, json};
use thunder_engine::{Engine, Event, EventStream, FinishReason, Request, Sampling, Usage};

/// How tokens are chosen. What is not given is the model's own default.
#[derive(Args, Debug, Clone)]
pub struct SamplingArgs {
    /// 0 takes the likeliest token, higher is more varied (to 2)
    #[arg(long, allow_hyphen_values = true)]
    temperature: Option<f32>,
    /// Choose among the likeliest tokens that have this probability together
    #[arg(long, allow_hyphen_values = true)]
    top_p: Option<f32>,
    /// Choose among this many likeliest tokens (0: all)
    #[arg(long, allow_hyphen_values = true)]
    top_k: Option<usize>,
    /// Choose among tokens at least this fraction as likely as the likeliest
    #[arg(long, allow_hyphen_values = true)]
    min_p: Option<f32>,
    /// Above 1, turns away from tokens that were used
    #[arg(long, allow_hyphen_values = true)]
    repetition_penalty: Option<f32>,
    /// Above 0, turns away from tokens that the answer has (-2 to 2)
    #[arg(long, allow_hyphen_values = true)]
    presence_penalty: Option<f32>,
    /// The same, more so for each time (-2 to 2)
    #[arg(long, allow_hyphen_values = true)]
    frequency_penalty: Option<f32>,
    /// Add to the logit of a token id, e.g. 42=-100 bans token 42; may be repeated
    #[arg(long, value_name = "ID=BIAS", value_parser = logit_bias)]
    logit_bias: Vec<(u32, f32)>,
    /// The same seed gives the same answer
    #[arg(long)]
    seed: Option<u64>,
    /// Most tokens to generate
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// End before this text; may be repeated
    #[arg(long)]
    stop: Vec<String>,
    /// Instructions that stand before the conversation
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
        }
    }
}

/// One message of a conversation.
pub fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

/// The prompt of a conversation, by the model's chat template; of its last text alone if it has none.
///
/// # Errors
/// When the template refuses the messages.
pub fn tokens(engine: &Engine, messages: &[Value]) -> anyhow::Result<Vec<u32>> {
    let info = engine.info();
    match &info.chat_template {
        Some(template) => Ok(info.tokenizer.encode(&template.render(messages, &Map::new())?, false)?),
        None => {
            let text = messages.last().and_then(|message| message["content"].as_str()).unwrap_or_default();
            Ok(info.tokenizer.encode(text, true)?)
        }
    }
}

/// A finished answer.
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Why it ended; `None` if it was interrupted.
    pub reason: Option<FinishReason>,
    /// What it took.
    pub usage: Usage,
}

/// Reads an answer to its end, handing on its text as it comes. Ends early once `interrupted` is set.
///
/// # Errors
/// When the engine fails.
pub fn read(
    mut stream: EventStream,
    interrupted: &AtomicBool,
    mut show: impl FnMut(&str) -> std::io::Result<()>,
) -> anyhow::Result<Answer> {
    let mut text = String::new();
    while !interrupted.load(Ordering::Relaxed) {
        let Some(event) = stream.next_within(LOOK_AT_FLAG) else { continue };
        match event {
            Some(Event::Delta { text: more, .. }) => {
                show(&more).context("cannot write the answer")?;
                text.push_str(&more);
            }
            Some(Event::Done { reason, usage }) => return Ok(Answer { text, reason: Some(reason), usage }),
            Some(Event::Failed { message }) => bail!("the answer was cut off: {message}"),
            None => bail!("the engine went away in the middle of the answer"),
        }
    }
    Ok(Answer { text, reason: None, usage: Usage::default() })
}

/// How soon an interruption is noticed while the model says nothing.
const LOOK_AT_FLAG: Duration = Duration::from_millis(50);

/// Writes to the terminal at once.
pub fn print_now(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Tokens a second of an answer's decode phase: the first token belongs to the prefill.
pub fn decode_rate(usage: &Usage) -> f64 {
    usage.completion_tokens.saturating_sub(1) as f64 / usage.decode_time.as_secs_f64().max(1e-9)
}
