//! The paths, and what they share: keys, bodies, the served model.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, OriginalUri, Path, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use subtle::ConstantTimeEq;
use thunder_engine::Engine;
use tokio::sync::watch;

use crate::error::ApiError;
use crate::{ServerConfig, chat, completions};

/// Another name of whatever model is served, for clients that need not care.
const ANY_MODEL: &str = "default";

/// What the handlers share.
#[derive(Debug)]
pub(crate) struct App {
    pub engine: Engine,
    config: ServerConfig,
    /// Becomes true when answers in flight must end.
    pub closing: watch::Sender<bool>,
    /// Changes with the version and the number of ranks, on which bits can depend. The same seed gives the same text while it,
    /// --split, --activations and --kv stay.
    pub fingerprint: String,
    /// Start of the server: `created` of its model, and a part of its answers' ids.
    started: std::time::Duration,
    answers: AtomicU64,
}

impl App {
    pub fn new(engine: Engine, config: ServerConfig) -> Self {
        let fingerprint = format!("fp_thunder_{}_{}", env!("CARGO_PKG_VERSION"), engine.info().ranks);
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let closing = watch::Sender::new(false);
        Self { engine, config, closing, fingerprint, started, answers: AtomicU64::new(0) }
    }

    /// An id that no other answer has.
    pub fn next_id(&self, prefix: &str) -> String {
        let number = self.answers.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}-{:016x}{number:08x}", self.started.as_nanos() as u64)
    }

    /// A name asks for the served model if it is the model's own, the last component of that, or "default".
    pub fn check_model(&self, asked: &str) -> Result<(), ApiError> {
        let served = &self.engine.info().name;
        let short = served.rsplit('/').next().unwrap_or(served);
        if asked == served || asked == short || asked == ANY_MODEL {
            return Ok(());
        }
        Err(ApiError::unknown_model(&asked.chars().take(100).collect::<String>(), served))
    }

    /// Reads a JSON body, of bounded size and in bounded time.
    pub async fn read_json(&self, request: Request) -> Result<Value, ApiError> {
        check_content_type(request.headers())?;
        let limit = self.config.body_limit_bytes;
        let reading = tokio::time::timeout(self.config.read_timeout, Bytes::from_request(request, &()));
        let bytes = match reading.await {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(rejection)) if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => {
                let message = format!("the body has more than {limit} bytes, the most that is allowed here");
                return Err(ApiError::invalid(message).status(StatusCode::PAYLOAD_TOO_LARGE));
            }
            Ok(Err(rejection)) => {
                return Err(ApiError::invalid(format!("cannot read the body: {rejection}")));
            }
            Err(_) => {
                let message = format!("the body did not arrive within {:?}", self.config.read_timeout);
                return Err(ApiError::invalid(message).status(StatusCode::REQUEST_TIMEOUT));
            }
        };
        serde_json::from_slice(&bytes)
            .map_err(|error| ApiError::invalid(format!("the body is not JSON: {error}")))
    }

    /// Runs work that takes a processor for a while (templates, tokenizing) off the threads that serve connections.
    pub async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let failed = |error| ApiError::engine_failed(format!("preparing the prompt failed: {error}"));
        tokio::task::spawn_blocking(work).await.map_err(failed)?
    }

    fn has_key(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let keys = &self.config.api_keys;
        if keys.is_empty() {
            return Ok(());
        }
        let given = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()).unwrap_or_default();
        let token = match given.split_at_checked(b"bearer ".len()) {
            Some((scheme, token)) if scheme.eq_ignore_ascii_case(b"bearer ") => token,
            _ => b"",
        };
        if token.is_empty() {
            let message = "an API key is needed here: send the header \"Authorization: Bearer KEY\"";
            return Err(ApiError::unauthorized(message));
        }
        // All keys are compared, each in constant time, so that answers tell nothing about near misses.
        let known =
            keys.iter().fold(subtle::Choice::from(0), |known, key| known | key.as_bytes().ct_eq(token));
        if bool::from(known) { Ok(()) } else { Err(ApiError::unauthorized("the API key is not valid here")) }
    }
}

/// A browser lets any page send text or forms to this machine, but JSON only to servers that agree. Insisting on JSON's
/// type keeps foreign pages out of a server that has no keys.
fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let given = headers.get(header::CONTENT_TYPE).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let essence = given.as_deref().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = "the body must be JSON: send the header \"Content-Type: application/json\"";
    Err(ApiError::invalid(message).status(StatusCode::UNSUPPORTED_MEDIA_TYPE))
}

/// All paths.
pub(crate) fn build(app: Arc<App>) -> Router {
    let limit = app.config.body_limit_bytes;
    let v1 = Router::new()
        .route("/chat/completions", post(chat::create))
        .route("/completions", post(completions::create))
        .route("/models", get(models))
        .route("/models/{*id}", get(model))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), require_key));
    Router::new()
        .nest("/v1", v1)
        .route("/health", get(health))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(limit))
        .layer(from_fn(log_request))
        .with_state(app)
}

/// A line for each request, when its answer begins.
async fn log_request(request: Request, next: Next) -> Response {
    let began = Instant::now();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let response = next.run(request).await;
    let ms = began.elapsed().as_secs_f64() * 1e3;
    tracing::info!(%method, path, status = response.status().as_u16(), ms, "answered");
    response
}

async fn require_key(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match app.has_key(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

async fn unknown_path(method: Method, OriginalUri(uri): OriginalUri) -> ApiError {
    let message = format!(
        "there is no {method} {}: this server has /v1/chat/completions, /v1/completions, /v1/models and /health",
        uri.path()
    );
    ApiError::invalid(message).status(StatusCode::NOT_FOUND).code("unknown_url")
}

async fn wrong_method(method: Method, OriginalUri(uri): OriginalUri) -> ApiError {
    let message = format!("{method} is not allowed for {}: see the Allow header", uri.path());
    ApiError::invalid(message).status(StatusCode::METHOD_NOT_ALLOWED).code("method_not_allowed")
}

fn model_object(app: &App) -> Value {
    let info = app.engine.info();
    json!({
        "id": info.name,
        "object": "model",
        "created": app.started.as_secs(),
        "owned_by": "thunderhead",
        "context_length": info.context_length,
    })
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [model_object(&app)]}))
}

async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    app.check_model(&id)?;
    Ok(Json(model_object(&app)))
}

/// 200 while requests are taken, 503 once the engine has stopped. Needs no key: load balancers ask.
async fn health(State(app): State<Arc<App>>) -> Response {
    let info = app.engine.info();
    let (running, waiting) = app.engine.load();
    let mut body = json!({
        "status": "ok", "model": info.name, "ranks": info.ranks, "running": running, "waiting": waiting,
    });
    let Some(why) = app.engine.stopped() else { return Json(body).into_response() };
    body["status"] = "stopped".into();
    body["reason"] = why.into();
    (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
}
