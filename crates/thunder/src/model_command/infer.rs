//! `thunder model infer`: asks a model of the cluster.

use std::io::{BufRead, BufReader, Read, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use serde_json::{Value, json};
use ureq::tls::TlsConfig;

use crate::cluster_command::fetch;
use crate::current_thread;
use crate::up::DataArgs;

/// Maximum length of a stream's line, and maximum bytes of an error's body.
const MAX_LINE_BYTES: u64 = 1 << 20;
/// Time for the next bytes of an answer: a model may have to be loaded again.
const READ_LIMIT: Duration = Duration::from_secs(180);
const MAKE_KEY: &str = "`thunder keys create NAME` on a node makes one";

/// `thunder model infer`.
#[derive(Args)]
pub struct Infer {
    /// Name of the model in `thunder cluster status`
    #[arg(value_name = "MODEL")]
    model: String,
    /// The prompt
    #[arg(value_name = "PROMPT")]
    prompt: String,
    /// Maximum tokens of the answer
    #[arg(long, value_name = "TOKENS", default_value_t = 256)]
    max_tokens: u32,
    /// 0 always chooses the likeliest token
    #[arg(long, value_name = "NUMBER", default_value_t = 0.0)]
    temperature: f32,
    /// Ignore the model's end-of-sequence tokens, up to --max-tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Print one JSON object with the text, its tokens and the times
    #[arg(long)]
    json: bool,
    /// Key of this node's API, if it has one
    #[arg(long, value_name = "KEY", env = "THUNDER_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    #[command(flatten)]
    data: DataArgs,
}

/// An answer, as it came.
#[derive(Debug, Default)]
struct Heard {
    text: String,
    tokens: u64,
    first: Option<Duration>,
    longest_pause: Duration,
    total: Duration,
}

impl Infer {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let data = self.data.folder()?;
        let status = current_thread::runtime()?.block_on(fetch(&data))?;
        if status.removed {
            bail!(
                "this node was removed from its cluster, so it reaches no model: `thunder cluster leave` makes it a \
                 new node"
            );
        }
        let own = status.members.iter().find(|member| member.id == status.me);
        let api = own.and_then(|member| member.report.as_ref()?.api.clone());
        let api = api.context("this node serves no API")?;
        let base = if api.contains("://") { api } else { format!("http://{api}") };
        let body = json!({
            "model": self.model, "messages": [{"role": "user", "content": self.prompt}], "stream": true,
            "stream_options": {"include_usage": true}, "max_tokens": self.max_tokens, "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
        });
        // This machine's agent has named the address, so the certificate need not be checked.
        let tls = TlsConfig::builder().disable_verification(true).build();
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .tls_config(tls)
            .timeout_recv_response(Some(READ_LIMIT))
            .timeout_per_read(Some(READ_LIMIT))
            .build();
        let agent: ureq::Agent = config.into();
        let mut request = agent.post(format!("{base}/v1/chat/completions"));
        if let Some(key) = self.api_key.as_deref().and_then(|keys| keys.split(',').next()) {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let began = Instant::now();
        let response = request.header("content-type", "application/json").send(body.to_string())?;
        let (status, body) = (response.status(), response.into_body().into_reader());
        if !status.is_success() {
            let mut text = String::new();
            let _ = body.take(MAX_LINE_BYTES).read_to_string(&mut text);
            match &self.api_key {
                None if status == 401 => {
                    bail!("this node's API needs a key: give one by --api-key or THUNDER_API_KEY; {MAKE_KEY}")
                }
                Some(_) if status == 401 => {
                    bail!(
                        "the key of --api-key or THUNDER_API_KEY is refused: {}; {MAKE_KEY}",
                        message_of(&text)
                    )
                }
                _ => bail!("{}", message_of(&text)),
            }
        }
        let heard = listen(began, BufReader::new(body), !self.json)?;
        if self.json {
            println!(
                "{}",
                json!({
                    "model": self.model, "text": heard.text, "tokens": heard.tokens,
                    "first_token_s": heard.first.unwrap_or_default().as_secs_f64(),
                    "longest_pause_s": heard.longest_pause.as_secs_f64(), "seconds": heard.total.as_secs_f64(),
                })
            );
        } else {
            println!();
            let (tokens, seconds) = (heard.tokens, heard.total.as_secs_f64());
            eprintln!("{tokens} tokens in {seconds:.2} s, {:.0} tokens/s", tokens as f64 / seconds.max(1e-3));
        }
        Ok(())
    }
}

/// Reads a stream to its end, and shows its text as it arrives.
fn listen(began: Instant, mut body: impl BufRead, shows: bool) -> anyhow::Result<Heard> {
    let (mut heard, mut line, mut last) = (Heard::default(), String::new(), began);
    let mut out = std::io::stdout();
    loop {
        line.clear();
        let read = (&mut body).take(MAX_LINE_BYTES).read_line(&mut line);
        if read.context("the answer was cut off")? == 0 {
            bail!("the answer was cut off");
        }
        if let Some(comment) = line.trim_end().strip_prefix(": ") {
            eprintln!("\n[{comment}]");
        }
        let Some(data) = line.trim_end().strip_prefix("data:").map(str::trim) else { continue };
        if data == "[DONE]" {
            heard.total = began.elapsed();
            return Ok(heard);
        }
        let chunk: Value = serde_json::from_str(data).context("an event of the answer is no JSON")?;
        if !chunk["error"].is_null() {
            bail!("{}", message_of(data));
        }
        let delta = &chunk["choices"][0]["delta"];
        let texts = ["reasoning_content", "content"].map(|field| delta[field].as_str().unwrap_or_default());
        let text = texts.concat();
        if !text.is_empty() {
            match heard.first {
                None => heard.first = Some(began.elapsed()),
                Some(_) => heard.longest_pause = heard.longest_pause.max(last.elapsed()),
            }
            last = Instant::now();
            heard.text.push_str(&text);
            if shows {
                out.write_all(text.as_bytes())?;
                out.flush()?;
            }
        }
        heard.tokens = chunk["usage"]["completion_tokens"].as_u64().unwrap_or(heard.tokens);
    }
}

fn message_of(text: &str) -> String {
    let body: Option<Value> = serde_json::from_str(text).ok();
    let message = body.as_ref().and_then(|body| body["error"]["message"].as_str());
    message.unwrap_or(text).chars().take(500).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn an_answer_is_read_to_its_end_and_a_cut_one_is_an_error() {
        let chunk = |text: &str| format!("data: {}\n\n", json!({"choices": [{"delta": {"content": text}}]}));
        let body = format!("{}: it goes on\n\n{}data: [DONE]\n\n", chunk("a"), chunk("b"));
        let heard = listen(Instant::now(), body.as_bytes(), false).unwrap();
        assert_eq!((heard.text.as_str(), heard.first.is_some()), ("ab", true));
        for (body, error) in [
            (chunk("a"), "cut off"),
            ("data: {\"error\": {\"message\": \"gone\"}}\n\n".to_owned(), "gone"),
            ("data: x\n\n".to_owned(), "no JSON"),
        ] {
            assert!(listen(Instant::now(), body.as_bytes(), false).unwrap_err().to_string().contains(error));
        }
    }
}
