//! A request in the form in which it goes to its model's head, and the size that its JSON implies.

use std::ops::Not;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use thunder_access::Ask;

use super::router::{Prefix, prefix_of};

/// Fields whose text becomes the prompt, in all APIs, in the order in which models read them.
pub(super) const PROMPT_FIELDS: [&str; 7] =
    ["system", "instructions", "tools", "messages", "prompt", "input", "suffix"];
/// Other fields with texts that a model only reads.
const READ_FIELDS: [&str; 2] = ["query", "documents"];
/// Bytes of a prompt's text per token, for an estimate until the head has counted the tokens. Most
/// languages have 3 to 5.
const BYTES_OF_TOKEN: usize = 4;

/// A request in the form in which a model's head gets it.
#[derive(Debug, Clone)]
pub(super) struct Question {
    pub method: String,
    pub path: String,
    /// JSON; empty for requests without a body.
    pub body: Arc<str>,
    /// The cluster's name of the model.
    pub model: String,
    /// The beginning of its prompt.
    pub prefix: Prefix,
    /// Upper bound of what it may use.
    pub ask: Ask,
    /// The trace to which it belongs, according to the client (W3C Trace Context).
    pub traceparent: Option<String>,
    /// Seconds that the client allows.
    pub timeout: Option<String>,
    /// The claimant, as JSON; `None`: callers are not distinguished.
    pub claimant: Option<String>,
    /// True for requests that do not keep an idle model loaded, such as the dashboard's.
    pub looks: bool,
    /// The head reports the texts of request and answer, because a policy keeps them.
    pub tells_texts: bool,
    /// The head reports the ranks' work, for a trace.
    pub tells_work: bool,
}

impl Question {
    /// A POST with this body.
    pub fn with_body(path: &str, model: String, body: &Value) -> Self {
        let prefix = if is_generation(path) { prefix_of(body) } else { Prefix::new() };
        // There is no answer if texts are only read.
        let answer_tokens = if is_reading(path) { Some(0) } else { ask_of(body).answer_tokens };
        Self {
            body: body.to_string().into(),
            prefix,
            ask: Ask { answer_tokens, ..ask_of(body) },
            ..Self::without_body("POST".into(), path.into(), model)
        }
    }

    /// A request without a body.
    pub fn without_body(method: String, path: String, model: String) -> Self {
        let (prefix, ask) = (Prefix::new(), Ask::default());
        Self {
            method,
            path,
            body: "".into(),
            model,
            prefix,
            ask,
            traceparent: None,
            timeout: None,
            claimant: None,
            looks: false,
            tells_texts: false,
            tells_work: false,
        }
    }
}

/// Seconds that a request may take at its head: the client's value, or the gateway's if that is
/// smaller. The head refuses a client's value that is not a number.
pub(super) fn timeout(asked: Option<&str>, limit: Option<Duration>) -> Option<String> {
    let Some(limit) = limit else { return asked.map(str::to_owned) };
    let keeps = asked
        .filter(|asked| asked.trim().parse::<f64>().is_ok_and(|asked| asked > limit.as_secs_f64()).not());
    Some(keeps.map_or_else(|| limit.as_secs().to_string(), str::to_owned))
}

/// Whether requests of this path generate text.
pub(super) fn is_generation(path: &str) -> bool {
    matches!(
        path,
        "/v1/chat/completions"
            | "/v1/completions"
            | "/v1/messages"
            | "/v1/responses"
            | "/api/chat"
            | "/api/generate"
    )
}

/// Whether requests of this path only make a model read texts.
pub(super) fn is_reading(path: &str) -> bool {
    matches!(path, "/v1/embeddings" | "/v1/rerank" | "/rerank" | "/api/embed" | "/api/embeddings")
}

/// Upper bound of what a request may use, from its JSON.
fn ask_of(body: &Value) -> Ask {
    let number = |value: &Value| value.as_u64();
    let most = ["max_tokens", "max_completion_tokens", "max_output_tokens"]
        .iter()
        .find_map(|name| number(&body[*name]))
        .or_else(|| number(&body["options"]["num_predict"]));
    let prompts = body["prompt"].as_array().filter(|prompts| !prompts.iter().all(Value::is_number));
    let answers = number(&body["n"]).unwrap_or(1).max(1) * prompts.map_or(1, |prompts| prompts.len() as u64);
    let fields = PROMPT_FIELDS.iter().chain(&READ_FIELDS);
    let text: usize = fields.map(|name| text_bytes(&body[*name])).sum();
    Ask {
        prompt_tokens: text.div_ceil(BYTES_OF_TOKEN) as u64,
        answer_tokens: most.map(|most| most.saturating_mul(answers)),
        answers,
        ..Ask::default()
    }
}

/// Bytes of the strings in a value. A number in a list counts as a token.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(values) if values.iter().all(Value::is_number) => values.len() * BYTES_OF_TOKEN,
        Value::Array(values) => values.iter().map(text_bytes).sum(),
        Value::Object(fields) => fields.values().map(text_bytes).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_request_says_what_it_may_use_in_each_api() {
        let ask = |body: &Value| {
            let Ask { answer_tokens, answers, .. } = ask_of(body);
            (answer_tokens, answers)
        };
        let prompt = |body: &Value| ask_of(body).prompt_tokens;
        // Only the text counts, not its JSON.
        assert_eq!(prompt(&json!({"model": "a long name", "prompt": "12345678", "max_tokens": 9})), 2);
        assert_eq!(prompt(&json!({"prompt": [[1, 2, 3], [4, 5]]})), 5);
        assert_eq!(prompt(&json!({"messages": [{"role": "user", "content": "1234"}], "system": "1234"})), 3);
        assert_eq!(ask(&json!({"max_completion_tokens": 7, "n": 3})), (Some(21), 3));
        assert_eq!(ask(&json!({"prompt": ["a", "b"], "max_tokens": 5})), (Some(10), 2));
        assert_eq!(ask(&json!({"prompt": [1, 2, 3], "max_tokens": 5})), (Some(5), 1));
        assert_eq!(ask(&json!({"max_output_tokens": 9})), (Some(9), 1));
        assert_eq!(ask(&json!({"options": {"num_predict": 4}})), (Some(4), 1));
        assert_eq!(ask(&json!({})), (None, 1));
        // The head refuses values that are not numbers.
        assert_eq!(ask(&json!({"max_tokens": -1, "n": "x"})), (None, 1));
    }
}
