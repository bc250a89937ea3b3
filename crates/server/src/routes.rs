//! Paths and their handlers, with the middleware in front of them: keys, body limit, request log.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{OriginalUri, Request};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post};
use thunder_access::EXPOSED_HEADERS;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::access::{require_admin, require_key};
use crate::account::own::{Arrived, Moment};
use crate::administer;
use crate::api::chat::Chat;
use crate::api::completions::Completions;
use crate::api::messages::{self, Messages};
use crate::api::ollama::{self, OllamaChat, OllamaGenerate};
use crate::api::responses::{self, Responses};
use crate::api::{create, embeddings, models, ollama_models, rerank, tokenize};
use crate::app::App;
use crate::dashboard;
use crate::error::ApiError;
use crate::host::require_own_host;

/// How long a browser may remember that an origin is allowed.
const ALLOWED_FOR: Duration = Duration::from_secs(3600);

/// The router with all paths.
pub(crate) fn build(app: Arc<App>) -> Router {
    let origins = allowed_origins(&app.config.allowed_origins);
    let v1 = Router::new()
        .route("/chat/completions", post(create::<Chat>))
        .route("/completions", post(create::<Completions>))
        .route("/embeddings", post(embeddings::openai))
        .route("/rerank", post(rerank::rerank))
        .route("/messages", post(create::<Messages>))
        .route("/responses", post(create::<Responses>))
        .route("/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/messages/count_tokens", post(messages::count_tokens))
        .route("/models", get(models::list))
        .route("/models/{*id}", get(models::get))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), require_key));
    let ollama = Router::new()
        .route("/chat", post(create::<OllamaChat>))
        .route("/generate", post(create::<OllamaGenerate>))
        .route("/embed", post(embeddings::ollama))
        .route("/embeddings", post(embeddings::ollama_one))
        .route("/tags", get(ollama_models::tags))
        .route("/show", post(ollama_models::show))
        .route("/ps", get(ollama_models::running))
        .route("/version", get(ollama_models::version))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), require_key));
    let tokens = Router::new()
        .route("/metrics", get(models::show_metrics))
        .route("/rerank", post(rerank::rerank))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), require_key));
    let administration = administer::routes(app.config.access.clone())
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), require_key));
    let dashboard = dashboard::endpoints()
        .layer(from_fn(require_admin))
        .merge(dashboard::open_endpoints())
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), require_key));
    let router = Router::new()
        .merge(dashboard::pages())
        .merge(dashboard::sign_in())
        .merge(dashboard)
        .nest("/admin", administration)
        .nest("/v1", v1)
        .nest("/api", ollama)
        .merge(tokens)
        .route("/health", get(models::health))
        .route("/health/live", get(models::live))
        .route("/health/ready", get(models::health))
        .route("/openapi.json", get(models::openapi))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(app.clone(), require_own_host))
        .layer(from_fn(errors_of_the_api))
        .layer(from_fn(log_request))
        .with_state(app);
    match origins {
        Some(origins) => router.layer(origins),
        None => router,
    }
}

/// Answers browsers' CORS requests; `None` if no other origin may use this server.
fn allowed_origins(origins: &[String]) -> Option<CorsLayer> {
    let origins = match origins {
        [] => return None,
        origins if origins.iter().any(|origin| origin == "*") => AllowOrigin::any(),
        origins => AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok())),
    };
    let layer = CorsLayer::new()
        .allow_origin(origins)
        .allow_methods([Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE])
        // OpenAI's clients send headers of their own.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED_HEADERS.map(HeaderName::from_static))
        .max_age(ALLOWED_FOR);
    Some(layer)
}

/// Logs one line per request when its response begins.
async fn log_request(mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    request.extensions_mut().insert(Arrived(Moment::now()));
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let response = next.run(request).await;
    let ms = began.elapsed().as_secs_f64() * 1e3;
    tracing::info!(%method, path, status = response.status().as_u16(), ms, "response begins");
    response
}

/// Gives errors the form of the API whose path was asked for.
async fn errors_of_the_api(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let form = if path.starts_with("/v1/messages") {
        messages::error_body
    } else if path.starts_with("/api/") {
        ollama::error_body
    } else {
        ApiError::body
    };
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        let body = form(&error).to_string();
        response.headers_mut().remove(header::CONTENT_LENGTH);
        *response.body_mut() = body.into();
    }
    response
}

async fn unknown_path(method: Method, OriginalUri(uri): OriginalUri) -> ApiError {
    let message =
        format!("no endpoint {method} {}: GET /openapi.json lists what this server has", uri.path());
    ApiError::invalid(message).status(StatusCode::NOT_FOUND).code("unknown_url")
}

async fn wrong_method(method: Method, OriginalUri(uri): OriginalUri) -> ApiError {
    let message = format!("{method} is not allowed for {}: see the Allow header", uri.path());
    ApiError::invalid(message).status(StatusCode::METHOD_NOT_ALLOWED).code("method_not_allowed")
}
