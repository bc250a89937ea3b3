//! `options` of Ollama's API.

use serde_json::json;
use thunder_engine::Sampling;

use crate::error::ApiError;
use crate::request::fields::{Fields, invalid_value};
use crate::request::options::{Options, top_k};

/// Numbers that say how to load and compute a model. The server's command sets these.
const LOAD_NUMBERS: [&str; 5] = ["num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep"];
/// The same, true or false.
const LOAD_SWITCHES: [&str; 6] = ["use_mmap", "use_mlock", "numa", "low_vram", "f16_kv", "vocab_only"];

/// Reads `options`. Returns the requested context.
pub(super) fn take(mut fields: Fields, options: &mut Options) -> Result<Option<usize>, ApiError> {
    let sampling = &mut options.sampling;
    for (name, target) in [
        ("temperature", &mut sampling.temperature),
        ("top_p", &mut sampling.top_p),
        ("min_p", &mut sampling.min_p),
        ("repeat_penalty", &mut sampling.repetition_penalty),
        ("presence_penalty", &mut sampling.presence_penalty),
        ("frequency_penalty", &mut sampling.frequency_penalty),
    ] {
        if let Some(number) = fields.number(name)? {
            *target = number;
        }
    }
    sampling.top_k = top_k(&mut fields)?.unwrap_or(sampling.top_k);
    sampling.seed = fields.seed("seed")?.or(sampling.seed);
    // 0, -1 and -2 mean as many tokens as fit.
    options.max_tokens = match fields.value("num_predict") {
        None => None,
        Some(value) if value.as_i64().is_some_and(|number| number <= 0) => None,
        Some(value) => {
            let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
            let must_be = "an integer, or -1 for no limit";
            Some(number.ok_or_else(|| invalid_value("options.num_predict", &value, must_be))?)
        }
    };
    options.stop = Options::stop_list(&mut fields, "stop")?;
    repeat_window(&mut fields, &mut options.sampling)?;
    for name in LOAD_NUMBERS {
        fields.seed(name)?;
    }
    for name in LOAD_SWITCHES {
        fields.boolean(name)?;
    }
    let context = fields.integer("num_ctx", 1, usize::MAX, "an integer of at least 1")?;
    fields.accept_only("typical_p", &[json!(1), json!(1.0)])?;
    fields.accept_only("mirostat", &[json!(0)])?;
    fields.finish(&[])?;
    Ok(context)
}

/// Reads the number of last tokens for the penalties: only all (-1) is supported, and 0, which
/// turns them off.
fn repeat_window(fields: &mut Fields, sampling: &mut Sampling) -> Result<(), ApiError> {
    let name = "repeat_last_n";
    let Some(value) = fields.value(name) else { return Ok(()) };
    let must_be = "-1 (all tokens) or 0 (no penalties): others only without penalties";
    let window = value.as_i64().filter(|window| *window >= -1);
    let window = window.ok_or_else(|| invalid_value(&fields.name(name), &value, must_be))?;
    if window == 0 {
        sampling.repetition_penalty = 1.0;
        (sampling.presence_penalty, sampling.frequency_penalty) = (0.0, 0.0);
    }
    let has_penalties = sampling.repetition_penalty != 1.0
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0;
    match window > 0 && has_penalties {
        true => Err(invalid_value(&fields.name(name), &value, must_be)),
        false => Ok(()),
    }
}
