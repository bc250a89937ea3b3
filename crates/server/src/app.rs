//! State and helpers that all handlers share: the engine, keys, request bodies, the served model.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use thunder_access::{Access, Caller};
use thunder_engine::Engine;
use thunder_model::chat::AnswerFormat;
use tokio::sync::watch;

use crate::access::check_allowed;
use crate::admission::{Admission, LARGE_BODIES_BYTES, ReceivedBody, drop_rest};
use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::requests::RequestLog;
use crate::stored::StoredResponses;

/// Always accepted as the model's name, so that clients need not know the real one.
const ANY_MODEL: &str = "default";

/// State that all handlers share.
#[derive(Debug, Clone)]
pub(crate) struct App {
    pub engine: Engine,
    /// How the model writes its thinking and its calls.
    pub format: Arc<AnswerFormat>,
    pub config: ServerConfig,
    pub admission: Arc<Admission>,
    /// What Prometheus reads.
    pub metrics: Arc<Metrics>,
    /// Requests for the dashboard.
    pub requests: Arc<RequestLog>,
    /// Responses that later ones may continue.
    pub stored: Arc<StoredResponses>,
    /// Whether a request must name this machine in its `Host`.
    pub checks_host: bool,
    /// Becomes true when completions in flight must end.
    pub closing: watch::Sender<bool>,
    /// Depends on the version and the number of ranks, because results may depend on both. The same
    /// seed gives the same text while this, `--split`, `--activations` and `--kv` stay the same.
    pub fingerprint: String,
    /// Server start since the epoch: the model's `created`, and a part of each response's id.
    pub started: std::time::Duration,
    /// Ids given so far.
    ids_given: Arc<AtomicU64>,
    id_key: RandomState,
}

impl App {
    pub fn new(engine: Engine, config: ServerConfig, checks_host: bool) -> Self {
        let fingerprint = format!("fp_thunder_{}_{}", env!("CARGO_PKG_VERSION"), engine.info().ranks);
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let closing = watch::Sender::new(false);
        let (admission, ids_given) = (Arc::new(Admission::new()), Arc::default());
        let info = engine.info();
        let format = Arc::new(AnswerFormat::detect(info.chat_template.as_deref(), &info.tokenizer));
        let stored = Arc::new(StoredResponses::new(config.stored_responses_bytes));
        let metrics = Arc::new(Metrics::new(&engine, &config));
        limit_waiting(&engine, &config);
        Self {
            engine,
            metrics,
            requests: Arc::default(),
            stored,
            format,
            config,
            admission,
            checks_host,
            closing,
            fingerprint,
            started,
            ids_given,
            id_key: RandomState::new(),
        }
    }

    /// The same server with other settings. Its address, store, model and counters stay.
    pub fn renewed(&self, config: ServerConfig, checks_host: bool) -> Self {
        self.stored.limit(config.stored_responses_bytes);
        limit_waiting(&self.engine, &config);
        Self { config, checks_host, ..self.clone() }
    }

    /// A new id for one response. It cannot be guessed, because a client that knows the id of a
    /// stored response can read the response.
    pub fn next_id(&self, prefix: &str) -> String {
        let number = self.ids_given.fetch_add(1, Ordering::Relaxed);
        // SipHash with a random key.
        let half = |which: u8| self.id_key.hash_one((which, number));
        format!("{prefix}{:016x}{:016x}", half(0), half(1))
    }

    /// A number that cannot be guessed.
    pub fn random(&self) -> u64 {
        self.id_key.hash_one(("random", self.ids_given.fetch_add(1, Ordering::Relaxed)))
    }

    /// True if the engine or the server is ending: an answer may continue on another server.
    pub fn is_ending(&self) -> bool {
        self.engine.stopped().is_some() || *self.closing.borrow()
    }

    /// Accepts the served model's full name, its last component, "default", its aliases, and the
    /// names of the adapters. Returns the adapter.
    pub fn check_model(&self, requested: &str) -> Result<Option<usize>, ApiError> {
        let (served, adapters) = (&self.engine.info().name, &self.engine.info().adapters);
        if let Some(adapter) = adapters.iter().position(|of| of.name == requested) {
            return Ok(Some(adapter));
        }
        let short = served.rsplit('/').next().unwrap_or(served);
        let is_alias = self.config.aliases.iter().any(|alias| alias == requested || alias == "*");
        if requested == served || requested == short || requested == ANY_MODEL || is_alias {
            return Ok(None);
        }
        Err(ApiError::unknown_model(&requested.chars().take(100).collect::<String>(), served))
    }

    /// Like [`App::check_model`], and refuses a model that the caller's key does not name.
    pub fn check_model_for(&self, caller: &Caller, requested: &str) -> Result<Option<usize>, ApiError> {
        let adapter = self.check_model(requested)?;
        check_allowed(caller, &self.engine.info().name)?;
        Ok(adapter)
    }

    /// The name of the served model, or of one of its adapters.
    pub fn model_name(&self, adapter: Option<usize>) -> &str {
        let info = self.engine.info();
        adapter.and_then(|adapter| info.adapters.get(adapter)).map_or(&info.name, |of| &of.name)
    }

    /// Receives a JSON body. Size and time are limited by the config.
    pub async fn receive(&self, request: Request) -> Result<ReceivedBody, ApiError> {
        check_content_type(request.headers())?;
        // A node has already limited the body, which also contains the tokens of a begun answer.
        let limit = if self.config.relay { LARGE_BODIES_BYTES } else { self.config.body_limit_bytes };
        let timeout = self.config.read_timeout;
        let announced = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
        if announced.and_then(|length| length.parse::<u64>().ok()).is_some_and(|length| length > limit as u64)
        {
            drop_rest(request.into_body().into_data_stream()).await;
            return Err(ApiError::too_large(limit));
        }
        let receiving = self.admission.receive(request.into_body(), limit);
        tokio::time::timeout(timeout, receiving).await.unwrap_or_else(|_| {
            let message = format!("the body did not arrive within {timeout:?}");
            Err(ApiError::invalid(message).status(StatusCode::REQUEST_TIMEOUT))
        })
    }
}

/// Limits the queue in front of the engine: the fair queue, and the engine's own queue for requests
/// that use no fair queue.
fn limit_waiting(engine: &Engine, config: &ServerConfig) {
    let Some(most) = config.max_waiting else { return };
    engine.limit_waiting(most);
    let fair = [config.access.as_ref().and_then(Access::gate), config.gate.as_ref()];
    fair.into_iter().flatten().for_each(|gate| gate.limit_waiting(most));
}

/// Accepts JSON bodies only. A browser lets any web page send text or forms to this machine, but
/// JSON only if the server allows it, so this check protects a server without keys from web pages.
/// Bodies without a type are accepted if no browser sent them (LiteLLM sends such bodies to
/// Ollama): a browser states the origin with every POST.
pub(crate) fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let given = headers.get(header::CONTENT_TYPE).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let essence = given.as_deref().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let is_of_browser = headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site");
    if essence.eq_ignore_ascii_case("application/json") || (given.is_none() && !is_of_browser) {
        return Ok(());
    }
    let message = "the body must be JSON: send the header \"Content-Type: application/json\"";
    Err(ApiError::invalid(message).status(StatusCode::UNSUPPORTED_MEDIA_TYPE))
}
