//! GET /v1/models, and other endpoints about the server itself.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Value, json};
use thunder_access::Caller;

use super::ollama::moment;
use crate::access::check_allowed;
use crate::app::App;
use crate::error::ApiError;
use crate::metrics;
use crate::request::path::PathPart;

/// The served model, or one of its adapters, whose `parent` is the model.
fn model_object(app: &App, adapter: Option<usize>) -> Value {
    let info = app.engine.info();
    let mut object = json!({
        "id": app.model_name(adapter),
        "object": "model",
        "created": app.started.as_secs(),
        "owned_by": "thunderhead",
        "context_length": info.context_length,
        // Anthropic's clients read these.
        "type": "model",
        "display_name": app.model_name(adapter),
        "created_at": moment(app.started.as_secs()),
    });
    if adapter.is_some() {
        object["parent"] = info.name.clone().into();
    }
    object
}

/// The description of all endpoints.
const OPENAPI: &str = include_str!("openapi.json");

/// The description of all endpoints, of a server and of a node of a cluster.
pub fn document() -> Value {
    serde_json::from_str(OPENAPI).unwrap_or_default()
}

/// GET /openapi.json.
pub(crate) async fn openapi() -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, json)], OPENAPI).into_response()
}

/// GET /v1/models: those that the caller's key may use.
pub(crate) async fn list(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Json<Value> {
    let info = app.engine.info();
    let adapters = (0..info.adapters.len()).map(Some);
    let all = std::iter::once(None).chain(adapters).filter(|_| check_allowed(&caller, &info.name).is_ok());
    let models: Vec<Value> = all.map(|of| model_object(&app, of)).collect();
    let (first, last) = (models.first().map(|of| &of["id"]), models.last().map(|of| &of["id"]));
    Json(json!({"object": "list", "has_more": false, "first_id": first, "last_id": last, "data": models}))
}

pub(crate) async fn get(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    PathPart(id): PathPart,
) -> Result<Json<Value>, ApiError> {
    let adapter = app.check_model_for(&caller, &id)?;
    Ok(Json(model_object(&app, adapter)))
}

/// GET /metrics, for Prometheus. Needs a key where requests do, because the numbers show how others
/// use the server.
pub(crate) async fn show_metrics(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let text = app.metrics.text().map_err(|error| ApiError::engine_failed(error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static(metrics::CONTENT_TYPE))], text).into_response())
}

/// Status 200 as long as the process answers: whether to restart it.
pub(crate) async fn live() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// Status 200 while the engine accepts requests, 503 once it has stopped. Load balancers ask
/// without a key.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Response {
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
