//! Request fields that both APIs share: sampling, length, stop texts, streaming.

use serde_json::{Value, json};
use thunder_engine::{Request, Sampling};

use super::fields::{Fields, invalid_value};
use crate::error::ApiError;

/// Maximum completions of one HTTP request, over all its prompts.
pub(crate) const MAX_CHOICES: usize = 128;
/// Maximum number of stop texts in a request.
const MAX_STOPS: usize = 16;
/// Maximum length of a stop text. At every token, the end of the answer is compared with each
/// beginning of the stop text.
const MAX_STOP_BYTES: usize = 1024;
/// Maximum number of tokens with a bias. Biases are added at every token.
const MAX_BIASES: usize = 4096;
/// Maximum number of alternatives that the engine reports for a token.
pub(crate) const MAX_TOP_LOGPROBS: usize = 20;

/// Request fields that both APIs share.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Options {
    /// The requested model.
    pub model: String,
    /// The adapter with this name.
    pub adapter: Option<usize>,
    /// Completions per prompt.
    pub n: usize,
    pub sampling: Sampling,
    pub max_tokens: Option<usize>,
    pub stop: Vec<String>,
    pub ignore_eos: bool,
    pub stream: bool,
    pub include_usage: bool,
}

impl Options {
    /// Reads the shared fields. Sampling fields that are absent come from the model's `defaults`.
    pub fn take(fields: &mut Fields, defaults: &Sampling) -> Result<Self, ApiError> {
        let model = fields.string("model")?.ok_or_else(|| fields.missing("model"))?;
        let n = fields.integer("n", 1, MAX_CHOICES, "an integer from 1 to 128")?.unwrap_or(1);
        let max_tokens = fields.integer("max_tokens", 1, usize::MAX, "an integer of at least 1")?;
        let stop = Self::stop_list(fields, "stop")?;
        let ignore_eos = fields.boolean("ignore_eos")?.unwrap_or(false);
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let include_usage = stream_options(fields, stream)?;
        accept_labels(fields)?;
        fields.boolean("store")?;
        fields.boolean("cache_prompt")?;
        keep_alive(fields)?;
        Ok(Self {
            model,
            adapter: None,
            n,
            sampling: sampling(fields, defaults)?,
            max_tokens,
            stop,
            ignore_eos,
            stream,
            include_usage,
        })
    }

    /// One completion, with nothing set.
    pub fn new(model: String) -> Self {
        Self {
            model,
            adapter: None,
            n: 1,
            sampling: Sampling::default(),
            max_tokens: None,
            stop: Vec::new(),
            ignore_eos: false,
            stream: false,
            include_usage: false,
        }
    }

    /// Reads stop texts from this field.
    pub fn stop_list(fields: &mut Fields, name: &str) -> Result<Vec<String>, ApiError> {
        let must_be = "a string of 1 to 1024 bytes, or a list of at most 16 such strings";
        let path = fields.name(name);
        let texts = match fields.value(name) {
            None => return Ok(Vec::new()),
            Some(Value::Array(texts)) => texts,
            Some(text) => vec![text],
        };
        if texts.len() > MAX_STOPS {
            return Err(invalid_value(&path, &Value::Array(texts), must_be));
        }
        let stop = |text| match text {
            Value::String(text) if (1..=MAX_STOP_BYTES).contains(&text.len()) => Ok(text),
            other => Err(invalid_value(&path, &other, must_be)),
        };
        texts.into_iter().map(stop).collect()
    }

    /// The engine's request for completion `nth` of a prompt. Completion `nth` uses `seed + nth`,
    /// so that they differ and each can be repeated alone.
    pub fn request(&self, prompt: Vec<u32>, nth: usize, logprobs: Option<usize>) -> Request {
        let mut sampling = self.sampling.clone();
        sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(nth as u64));
        Request {
            prompt,
            sampling,
            max_tokens: self.max_tokens,
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            logprobs,
            adapter: self.adapter,
            ..Request::default()
        }
    }
}

/// Accepts fields that identify the user, or help other servers to bill and to cache. They never
/// change the output.
pub(crate) fn accept_labels(fields: &mut Fields) -> Result<(), ApiError> {
    for text in ["user", "safety_identifier", "prompt_cache_key"] {
        fields.string(text)?;
    }
    fields.one_of("prompt_cache_retention", &["in-memory", "in_memory", "24h"])?;
    fields.one_of("service_tier", &["auto", "default", "flex", "scale", "priority"])?;
    fields.object("metadata").map(drop)
}

/// Reads how long Ollama would keep a model in memory; this server always keeps it. True for 0,
/// which asks that it be unloaded.
pub(crate) fn keep_alive(fields: &mut Fields) -> Result<bool, ApiError> {
    let must_be = "seconds, or a time such as \"5m\"";
    let Some(value) = fields.value("keep_alive") else { return Ok(false) };
    let seconds = match &value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => go_duration_s(text),
        _ => None,
    };
    let seconds = seconds.ok_or_else(|| invalid_value(&fields.name("keep_alive"), &value, must_be))?;
    Ok(seconds == 0.0)
}

/// Seconds of a duration as Go writes it, such as "1h30m", "-1m" or "0".
fn go_duration_s(text: &str) -> Option<f64> {
    const UNITS: [(&str, f64); 8] = [
        ("ns", 1e-9),
        ("us", 1e-6),
        ("\u{b5}s", 1e-6),
        ("\u{3bc}s", 1e-6),
        ("ms", 1e-3),
        ("s", 1.0),
        ("m", 60.0),
        ("h", 3600.0),
    ];
    let (sign, mut rest) = text.strip_prefix('-').map_or((1.0, text), |rest| (-1.0, rest));
    // Clients also write a number of seconds as a text.
    if let Ok(seconds) = rest.parse::<u32>() {
        return Some(sign * f64::from(seconds));
    }
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..end].parse().ok()?;
        let (unit, factor) = UNITS.iter().find(|(unit, _)| rest[end..].starts_with(unit))?;
        seconds += number * factor;
        rest = &rest[end + unit.len()..];
    }
    (!text.is_empty()).then_some(sign * seconds)
}

fn sampling(fields: &mut Fields, defaults: &Sampling) -> Result<Sampling, ApiError> {
    Ok(Sampling {
        temperature: fields.number("temperature")?.unwrap_or(defaults.temperature),
        top_p: fields.number("top_p")?.unwrap_or(defaults.top_p),
        top_k: top_k(fields)?.unwrap_or(defaults.top_k),
        min_p: fields.number("min_p")?.unwrap_or(defaults.min_p),
        repetition_penalty: fields.number("repetition_penalty")?.unwrap_or(defaults.repetition_penalty),
        presence_penalty: fields.number("presence_penalty")?.unwrap_or(defaults.presence_penalty),
        frequency_penalty: fields.number("frequency_penalty")?.unwrap_or(defaults.frequency_penalty),
        logit_bias: logit_bias(fields)?.unwrap_or_else(|| defaults.logit_bias.clone()),
        seed: fields.seed("seed")?.or(defaults.seed),
    })
}

/// Some APIs write "all tokens" as -1; the engine writes 0. Both are accepted.
pub(crate) fn top_k(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let Some(value) = fields.value("top_k") else { return Ok(None) };
    if value.as_i64() == Some(-1) {
        return Ok(Some(0));
    }
    let top_k = value.as_u64().and_then(|number| usize::try_from(number).ok());
    top_k
        .map(Some)
        .ok_or_else(|| invalid_value("top_k", &value, "an integer of at least 0, or -1 for all tokens"))
}

fn logit_bias(fields: &mut Fields) -> Result<Option<Vec<(u32, f32)>>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(None) };
    if map.len() > MAX_BIASES {
        let message = format!("`logit_bias` has {} tokens, {MAX_BIASES} are the most", map.len());
        return Err(ApiError::field("logit_bias", message).code("invalid_value"));
    }
    let mut bias = Vec::with_capacity(map.len());
    for (key, value) in map {
        let id = key.parse().map_err(|_| {
            invalid_value(
                "logit_bias",
                &Value::String(key),
                "a map from token ids, such as {\"50256\": -100}",
            )
        })?;
        let amount = value
            .as_f64()
            .ok_or_else(|| invalid_value("logit_bias", &value, "a map from token ids to numbers"))?;
        bias.push((id, amount as f32));
    }
    Ok(Some(bias))
}

fn stream_options(fields: &mut Fields, stream: bool) -> Result<bool, ApiError> {
    let Some(mut options) = stream_options_of(fields, stream)? else { return Ok(false) };
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    options.finish(&[])?;
    Ok(include_usage)
}

/// Reads the fields of `stream_options` that all of OpenAI's APIs share.
pub(crate) fn stream_options_of(fields: &mut Fields, stream: bool) -> Result<Option<Fields>, ApiError> {
    let Some(mut options) = fields.nested("stream_options")? else { return Ok(None) };
    if !stream {
        let message = "`stream_options` applies to streams only: remove it, or set \"stream\": true";
        return Err(ApiError::field("stream_options", message));
    }
    options.accept_only("include_obfuscation", &[json!(false)])?;
    Ok(Some(options))
}
