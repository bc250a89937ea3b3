//! Traces of requests, sent to an OpenTelemetry collector over OTLP/HTTP with JSON.
//!
//! A trace is one span for the request and one for each of its stages, with those of a model's
//! ranks below them. Spans are handed to a thread
//! and sent in batches; if the collector does not keep up, spans are dropped and counted, and
//! requests are never delayed.

mod context;
mod document;
mod work;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

pub use context::TraceContext;
pub use document::{Attribute, RequestTrace, Stage};
pub use work::{Phase, RankTime, Work};

/// Maximum number of traces that wait to be sent. More are dropped.
const MOST_WAITING: usize = 2048;
/// Traces of one message.
const BATCH: usize = 256;
/// A batch that is not full is sent after this time.
const SEND_AFTER: Duration = Duration::from_secs(1);
/// Time limit for the collector's answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Interval of log messages while sending fails.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Why traces cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum TracesError {
    /// No address.
    #[error(
        "the collector's address \"{0}\" must be http:// or https:// with a host and, if it is not the usual one, a \
         port, e.g. http://127.0.0.1:4318"
    )]
    Address(String),
    /// A header that is none.
    #[error("the header number {0} for the collector must be NAME=VALUE")]
    Header(usize),
    /// No thread.
    #[error("cannot start the thread that sends traces: {0}")]
    Thread(#[from] std::io::Error),
}

/// Accepts traces and sends them. Cheap to clone; the thread ends with the last clone, after it has
/// sent the waiting traces.
#[derive(Debug, Clone)]
pub struct Traces {
    sender: SyncSender<RequestTrace>,
    dropped: Arc<AtomicU64>,
}

impl Traces {
    /// Sends to `endpoint`, the collector's base address; traces go to its path `/v1/traces`.
    /// `headers` are sent with each message, each as `NAME=VALUE`; `service` names this program.
    ///
    /// # Errors
    /// When the address or a header is malformed.
    pub fn start(endpoint: &str, headers: &[String], service: &str) -> Result<Self, TracesError> {
        let headers = Self::check(endpoint, headers)?;
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(ANSWER_LIMIT))
            .build()
            .into();
        let url = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
        let (sender, receiver) = sync_channel(MOST_WAITING);
        let dropped = Arc::new(AtomicU64::new(0));
        let exporter = Exporter { agent, url, headers, service: service.to_owned(), warned: None };
        let lost = dropped.clone();
        std::thread::Builder::new().name("traces".into()).spawn(move || exporter.run(&receiver, &lost))?;
        Ok(Self { sender, dropped })
    }

    /// Checks an address and headers, as [`Traces::start`] does. Returns the headers' names and
    /// values.
    ///
    /// # Errors
    /// When the address or a header is malformed.
    pub fn check(endpoint: &str, headers: &[String]) -> Result<Vec<(String, String)>, TracesError> {
        if !is_address(endpoint) {
            // It may hold a password.
            let shown = endpoint.rsplit('@').next().unwrap_or_default();
            return Err(TracesError::Address(shown.chars().take(100).collect()));
        }
        let pairs = headers.iter().zip(1..).map(|(header, number)| {
            let (name, value) = header.split_once('=').ok_or(TracesError::Header(number))?;
            let is_name =
                !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
            let is_value = value.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
            if !(is_name && is_value) {
                return Err(TracesError::Header(number));
            }
            Ok((name.to_owned(), value.to_owned()))
        });
        pairs.collect()
    }

    /// Hands a trace over. Never waits.
    pub fn send(&self, trace: RequestTrace) {
        if self.sender.try_send(trace).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Traces that were not delivered.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// Whether messages can be sent to paths below this address.
fn is_address(text: &str) -> bool {
    let Ok(address) = text.parse::<ureq::http::Uri>() else { return false };
    let is_scheme = matches!(address.scheme_str(), Some("http" | "https"));
    let is_base = address.query().is_none();
    let Some(authority) = address.authority().filter(|_| is_scheme && is_base) else { return false };
    let host = authority.host();
    let port = authority.as_str().rsplit('@').next().and_then(|of| of.strip_prefix(host));
    let is_port = |port: &str| match port.strip_prefix(':') {
        Some(number) => number.parse::<u16>().is_ok_and(|number| number > 0),
        None => port.is_empty(),
    };
    !host.is_empty() && port.is_some_and(is_port)
}

struct Exporter {
    agent: ureq::Agent,
    url: String,
    headers: Vec<(String, String)>,
    service: String,
    warned: Option<Instant>,
}

impl Exporter {
    fn run(mut self, receiver: &Receiver<RequestTrace>, dropped: &AtomicU64) {
        loop {
            let Ok(first) = receiver.recv() else { return };
            let (mut batch, deadline) = (vec![first], Instant::now() + SEND_AFTER);
            let mut is_over = false;
            while batch.len() < BATCH && !is_over {
                match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                    Ok(trace) => batch.push(trace),
                    Err(RecvTimeoutError::Timeout) => break,
                    Err(RecvTimeoutError::Disconnected) => is_over = true,
                }
            }
            if let Err(why) = self.send(&batch) {
                dropped.fetch_add(batch.len() as u64, Ordering::Relaxed);
                if self.warned.is_none_or(|at| at.elapsed() > WARN_EVERY) {
                    self.warned = Some(Instant::now());
                    let lost = dropped.load(Ordering::Relaxed);
                    // The address may hold a password.
                    let host = self.url.rsplit('@').next().unwrap_or_default();
                    tracing::warn!(lost, "traces do not reach {host}: {why}");
                }
            }
            if is_over {
                return;
            }
        }
    }

    fn send(&self, batch: &[RequestTrace]) -> Result<(), String> {
        let body = document::document(&self.service, batch).to_string();
        let mut request = self.agent.post(&self.url).header("content-type", "application/json");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let response = request.send(body).map_err(|error| error.to_string())?;
        if response.status().is_success() {
            return Ok(());
        }
        Err(format!("the collector answers with {}", response.status()))
    }
}

#[cfg(test)]
mod tests;
