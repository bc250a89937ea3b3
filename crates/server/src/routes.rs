//! Paths and their handlers, with the middleware in front of them: keys, body limit, request log.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{DefaultBodyLimit, OriginalUri, Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use crate::api::{chat, completions, models};
use crate::app::App;
use crate::error::ApiError;

/// The router with all paths.
pub(crate) fn build(app: Arc<App>) -> Router {
    let limit = app.config.body_limit_bytes;
    let v1 = Router::new()
        .route("/chat/completions", post(chat::create))
        .route("/completions", post(completions::create))
        .route("/models", get(models::list))
        .route("/models/{*id}", get(models::get))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), require_key));
    Router::new()
        .nest("/v1", v1)
        .route("/health", get(models::health))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(limit))
        .layer(from_fn(log_request))
        .with_state(app)
}

/// Logs one line per request when its response begins.
async fn log_request(request: Request, next: Next) -> Response {
    let began = Instant::now();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let response = next.run(request).await;
    let ms = began.elapsed().as_secs_f64() * 1e3;
    tracing::info!(%method, path, status = response.status().as_u16(), ms, "response begins");
    response
}

async fn require_key(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match app.check_key(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

async fn unknown_path(method: Method, OriginalUri(uri): OriginalUri) -> ApiError {
    let message = format!(
        "no endpoint {method} {}: this server has /v1/chat/completions, /v1/completions, /v1/models and /health",
        uri.path()
    );
    ApiError::invalid(message).status(StatusCode::NOT_FOUND).code("unknown_url")
}

async fn wrong_method(method: Method, OriginalUri(uri): OriginalUri) -> ApiError {
    let message = format!("{method} is not allowed for {}: see the Allow header", uri.path());
    ApiError::invalid(message).status(StatusCode::METHOD_NOT_ALLOWED).code("method_not_allowed")
}
