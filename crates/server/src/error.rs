//! Errors as OpenAI's error bodies.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use thunder_access::{LimitKind, Refusal, Standing};
use thunder_engine::{Fault, ModelInfo, ModelKind, PromptError, SubmitError};

use crate::account::headers::of_limits;

/// The `Retry-After` header when the engine's queue is full.
const RETRY_AFTER_MS: u64 = 1000;
/// Clients that wait longer than this should give up instead.
const LONGEST_RETRY_MS: u64 = 120_000;

/// A refused or failed request: an HTTP status and OpenAI's error object.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct ApiError {
    pub status: StatusCode,
    /// OpenAI's `type`.
    pub error_type: &'static str,
    pub message: String,
    /// The field that is wrong.
    pub param: Option<String>,
    pub code: Option<&'static str>,
    /// When to try again; `None`: trying again does not help.
    pub retry_after_ms: Option<u64>,
    /// The state of the caller's limits, if one of them is hit.
    pub standings: Box<[Standing]>,
}

impl ApiError {
    fn new(status: StatusCode, error_type: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            error_type,
            message: message.into(),
            param: None,
            code: None,
            retry_after_ms: None,
            standings: Box::default(),
        }
    }

    /// 400: the request is malformed.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400: one field is wrong.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::invalid(message) }
    }

    /// Sets OpenAI's `code`.
    pub fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// Sets the HTTP status.
    pub fn status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    /// 404: this server does not have the requested model.
    pub fn unknown_model(requested: &str, served: &str) -> Self {
        let message = format!(
            "this server does not have the model \"{requested}\": use \"{served}\" (see GET /v1/models)"
        );
        Self::field("model", message).status(StatusCode::NOT_FOUND).code("model_not_found")
    }

    /// 401.
    pub fn unauthorized(message: &str, code: &'static str) -> Self {
        Self::invalid(message).status(StatusCode::UNAUTHORIZED).code(code)
    }

    /// 500: the engine could not finish a completion.
    pub fn engine_failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message).code("engine_failed")
    }

    /// The engine could not finish a completion: 500, or 400 if the request is the cause.
    pub fn failed(message: impl Into<String>, fault: Fault) -> Self {
        match fault {
            Fault::Engine => Self::engine_failed(message),
            Fault::Request => Self::invalid(message).code("answer_failed"),
        }
    }

    /// 504: the request has reached its deadline.
    pub fn late(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", message).code("deadline_exceeded")
    }

    /// 503: the engine or the server no longer accepts requests.
    pub fn unavailable(message: impl Into<String>, code: &'static str) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message).code(code)
    }

    /// 413: the body has more than `limit` bytes.
    pub fn too_large(limit: usize) -> Self {
        let message = format!(
            "the body is larger than the limit of {limit} bytes: send less, or start the server with a larger --body-limit"
        );
        Self::invalid(message).status(StatusCode::PAYLOAD_TOO_LARGE)
    }

    /// 429: too many requests are waiting.
    pub fn busy(message: impl Into<String>) -> Self {
        let retry_after_ms = Some(RETRY_AFTER_MS);
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        Self { retry_after_ms, ..error.code("rate_limit_exceeded") }
    }

    /// 429: a limit of a key, a team or a model is reached.
    pub fn over_limit(message: String, refusal: &Refusal) -> Self {
        let code = match (refusal.retry_after_ms, refusal.limit) {
            (None, _) => "request_too_large",
            (_, LimitKind::TokensPerDay | LimitKind::TokensPerMonth | LimitKind::CostPerMonth) => {
                "insufficient_quota"
            }
            _ => "rate_limit_exceeded",
        };
        let param = Some(format!("{}.{}", refusal.scope, refusal.limit.name()));
        let (retry_after_ms, standings) = (refusal.retry_after_ms, refusal.standings.clone().into());
        Self { code: Some(code), param, retry_after_ms, standings, ..Self::busy(message) }
    }

    /// The text of field `param` is not a valid prompt.
    pub fn no_prompt(error: &PromptError, param: &str) -> Self {
        let message = error.to_string();
        match error {
            PromptError::NoTemplate(_) => Self::field(param, format!("{message}: use /v1/completions")),
            PromptError::TooLong { .. } => Self::field(param, message).code("context_length_exceeded"),
            PromptError::Chat(_) | PromptError::Tokenizer(_) => Self::field(param, message),
        }
    }

    /// The model is an encoder, which cannot be used for this endpoint; `remedy` says what to do.
    pub fn wrong_kind(info: &ModelInfo, remedy: &str) -> Self {
        let what = info.kind.no_text().unwrap_or("a decoder");
        Self::field("model", format!("\"{}\" is {what}: {remedy}", info.name)).code("unsupported_model")
    }

    /// The model writes no text.
    pub fn no_text(info: &ModelInfo) -> Option<Self> {
        let remedy = match info.kind {
            ModelKind::Decoder => return None,
            ModelKind::Embedder => "use /v1/embeddings, or serve a chat model",
            ModelKind::Reranker => "use /v1/rerank, or serve a chat model",
        };
        Some(Self::wrong_kind(info, remedy))
    }

    /// The engine refused the request; `prompt` is the field that the prompt came from.
    pub fn refused(error: &SubmitError, prompt: &str) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::EmptyPrompt => Self::field(prompt, message),
            SubmitError::NoText { .. } => Self::field("model", message).code("unsupported_model"),
            SubmitError::PromptTooLong { .. } => Self::field(prompt, message).code("context_length_exceeded"),
            SubmitError::BadParameter { name: "prompt", value, must_be } => {
                Self::field(prompt, format!("{prompt} is {value}, but must be {must_be}"))
            }
            SubmitError::BadParameter { name, .. } => Self::field(*name, message),
            SubmitError::Busy { .. } => Self::busy(message),
            SubmitError::Stopped(_) => Self::unavailable(message, "engine_stopped"),
        }
    }

    /// OpenAI's error body.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message, "type": self.error_type, "param": self.param, "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        // APIs with another form of errors convert this one.
        response.extensions_mut().insert(self.clone());
        let headers = response.headers_mut();
        headers.extend(of_limits(&self.standings));
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            let wait_ms = self.retry_after_ms.filter(|ms| *ms <= LONGEST_RETRY_MS);
            if let Some(ms) = self.retry_after_ms {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1000)));
                headers.insert("retry-after-ms", HeaderValue::from(ms));
            }
            // OpenAI's clients follow this header: they do not wait until tomorrow, and do not
            // repeat a request that cannot succeed.
            let should_retry = if wait_ms.is_some() { "true" } else { "false" };
            headers.insert("x-should-retry", HeaderValue::from_static(should_retry));
        }
        if self.status == StatusCode::GATEWAY_TIMEOUT {
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
