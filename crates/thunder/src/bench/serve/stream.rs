//! One request to the server, and the times of its tokens.

use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::{Value, json};
use ureq::Agent;

/// Maximum length of a stream's line, and maximum bytes of an error's body.
const MAX_LINE_BYTES: u64 = 1 << 20;
/// Maximum characters of an error to keep.
const MAX_ERROR_CHARS: usize = 200;

/// A server's address.
pub struct Api {
    agent: Agent,
    /// Ends with `/v1`.
    base: String,
    key: Option<String>,
}

/// What requests ask for.
pub struct Target {
    pub api: Api,
    pub model: String,
    pub most_tokens: u32,
    pub ignores_eos: bool,
}

/// The times of one answer.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    pub time_to_first: Duration,
    /// Between one piece of the answer and the next.
    pub between: Vec<Duration>,
    pub total: Duration,
    pub prompt_tokens: u64,
    /// Tokens that a prefix cache had.
    pub cached_tokens: u64,
    pub tokens: u64,
}

impl Api {
    pub fn new(url: &str, key: Option<String>, timeout: Duration) -> anyhow::Result<Self> {
        let url = url.trim_end_matches('/');
        let base = if url.ends_with("/v1") { url.to_owned() } else { format!("{url}/v1") };
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(timeout.min(Duration::from_secs(10))))
            .timeout_recv_response(Some(timeout))
            .timeout_per_read(Some(timeout))
            .max_idle_connections_per_host(1024)
            .build();
        Ok(Self { agent: config.into(), base, key })
    }

    fn authorized<B>(&self, request: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        match &self.key {
            Some(key) => request.header("authorization", format!("Bearer {key}")),
            None => request,
        }
    }

    /// The first model that the server lists.
    pub fn first_model(&self) -> anyhow::Result<String> {
        let url = format!("{}/models", self.base);
        let asked = || format!("cannot ask {url} for its models");
        let response = self.authorized(self.agent.get(url.as_str())).call().with_context(asked)?;
        let status = response.status();
        let mut body = String::new();
        response
            .into_body()
            .into_reader()
            .take(MAX_LINE_BYTES)
            .read_to_string(&mut body)
            .with_context(asked)?;
        if !status.is_success() {
            bail!("{url} answers with {status}: {}", clipped(&body));
        }
        let models: Value = serde_json::from_str(&body).with_context(asked)?;
        let name = models["data"][0]["id"].as_str();
        Ok(name.with_context(|| format!("{url} lists no model: name one with --model-name"))?.to_owned())
    }
}

impl Target {
    /// Sends one request and reads its answer. The error is for people, and short.
    pub fn ask(&self, prompt: &str) -> Result<Answer, String> {
        let mut body = json!({
            "model": self.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": self.most_tokens,
            "temperature": 0, "stream": true, "stream_options": {"include_usage": true},
        });
        if self.ignores_eos {
            body["ignore_eos"] = true.into();
        }
        let began = Instant::now();
        let request = self.api.agent.post(format!("{}/chat/completions", self.api.base));
        let request = self.api.authorized(request).header("content-type", "application/json");
        let response = request.send(body.to_string()).map_err(|error| clipped(&error.to_string()))?;
        let status = response.status();
        let body = response.into_body().into_reader();
        if !status.is_success() {
            let mut text = String::new();
            // The status is the error, even if its body cannot be read.
            let _ = body.take(MAX_LINE_BYTES).read_to_string(&mut text);
            return Err(format!("{status}: {}", error_message(&text)));
        }
        read(began, BufReader::new(body))
    }
}

/// Reads the events of a stream to `[DONE]`.
fn read(began: Instant, mut body: impl BufRead) -> Result<Answer, String> {
    let (mut answer, mut last, mut line, mut pieces) = (Answer::default(), None, String::new(), 0);
    loop {
        line.clear();
        let read = (&mut body).take(MAX_LINE_BYTES).read_line(&mut line);
        if read.map_err(|error| clipped(&error.to_string()))? == 0 {
            return Err("the stream ended without [DONE]".to_owned());
        }
        let Some(data) = line.trim_end().strip_prefix("data:").map(str::trim) else { continue };
        if data == "[DONE]" {
            answer.total = began.elapsed();
            if answer.tokens == 0 {
                // If the server does not report the number of tokens, each piece counts as one.
                answer.tokens = pieces;
            }
            return if pieces > 0 { Ok(answer) } else { Err("the answer was empty".to_owned()) };
        }
        let chunk: Value = serde_json::from_str(data).map_err(|_| "an event is no JSON".to_owned())?;
        if !chunk["error"].is_null() {
            return Err(error_message(data));
        }
        let delta = &chunk["choices"][0]["delta"];
        let has_text = ["content", "reasoning_content"]
            .iter()
            .any(|field| delta[field].as_str().is_some_and(|text| !text.is_empty()));
        if has_text {
            let now = Instant::now();
            pieces += 1;
            match last.replace(now) {
                None => answer.time_to_first = now - began,
                Some(before) => answer.between.push(now - before),
            }
        }
        let usage = &chunk["usage"];
        if let Some(tokens) = usage["completion_tokens"].as_u64() {
            answer.tokens = tokens;
            answer.prompt_tokens = usage["prompt_tokens"].as_u64().unwrap_or(0);
            answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        }
    }
}

/// The message of OpenAI's error body, or the text itself.
fn error_message(text: &str) -> String {
    let body: Option<Value> = serde_json::from_str(text).ok();
    let message = body.as_ref().and_then(|body| body["error"]["message"].as_str().or(body["error"].as_str()));
    clipped(message.unwrap_or(text))
}

fn clipped(text: &str) -> String {
    text.trim().chars().take(MAX_ERROR_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_read_to_their_end() {
        let chunk = |text: &str| format!("data: {}\n\n", json!({"choices": [{"delta": {"content": text}}]}));
        let usage = json!({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5,
                           "prompt_tokens_details": {"cached_tokens": 3}}});
        let body = format!(":\n\n{}{}data: {usage}\n\ndata: [DONE]\n\n", chunk(""), chunk("a") + &chunk("b"));
        let answer = read(Instant::now(), body.as_bytes()).expect("complete");
        assert_eq!((answer.tokens, answer.prompt_tokens, answer.cached_tokens), (5, 7, 3));
        assert_eq!(answer.between.len(), 1);

        for (body, error) in [
            (chunk("a"), "without [DONE]"),
            ("data: [DONE]\n\n".to_owned(), "empty"),
            (format!("{}data: {{\"error\": {{\"message\": \"gone\"}}}}\n\n", chunk("a")), "gone"),
            ("data: x\n\n".to_owned(), "no JSON"),
        ] {
            let found = read(Instant::now(), body.as_bytes()).expect_err(error);
            assert!(found.contains(error), "{found}");
        }
    }
}
