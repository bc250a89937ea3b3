//! Ollama's API: what there is to run.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use serde_json::{Value, json};
use thunder_engine::ModelKind;

use super::ollama::moment;
use crate::app::App;
use crate::error::ApiError;
use crate::request::fields::Fields;
use crate::request::json as request_json;

/// The served model, and its adapters.
fn entries(app: &App) -> impl Iterator<Item = Value> {
    let info = app.engine.info();
    let adapters = info.adapters.iter().map(|adapter| (&adapter.name, &adapter.digest));
    std::iter::once((&info.name, &info.digest)).chain(adapters).map(|(name, digest)| {
        json!({
            "name": name, "model": name, "modified_at": moment(app.started.as_secs()), "digest": digest,
            "details": {"families": [], "format": ""},
        })
    })
}

/// GET /api/tags.
pub(crate) async fn tags(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"models": entries(&app).collect::<Vec<_>>()}))
}

/// GET /api/ps.
pub(crate) async fn running(State(app): State<Arc<App>>) -> Json<Value> {
    let context = app.engine.info().context_length;
    let with_context = |mut entry: Value| {
        entry["context_length"] = context.into();
        entry
    };
    Json(json!({"models": entries(&app).map(with_context).collect::<Vec<_>>()}))
}

/// GET /api/version.
pub(crate) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// POST /api/show.
pub(crate) async fn show(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let body = app.receive(request).await?;
    let mut fields = Fields::new(request_json::parse(&body.bytes)?, "")?;
    // "name" is the field's older name.
    let older = fields.string("name")?;
    let model = fields.string("model")?.or(older).ok_or_else(|| fields.missing("model"))?;
    fields.boolean("verbose")?;
    fields.finish(&[])?;
    app.check_model(model.strip_suffix(":latest").unwrap_or(&model))?;
    let info = app.engine.info();
    let mut capabilities = match info.kind {
        ModelKind::Decoder => vec!["completion"],
        ModelKind::Embedder => vec!["embedding"],
        ModelKind::Reranker => Vec::new(),
    };
    if info.kind == ModelKind::Decoder && info.chat_template.is_some() {
        capabilities.push("tools");
    }
    if info.kind == ModelKind::Decoder && app.format.thinks() {
        capabilities.push("thinking");
    }
    Ok(Json(json!({
        "modified_at": moment(app.started.as_secs()), "details": {"families": [], "format": ""},
        "model_info": {"general.name": info.name, "general.context_length": info.context_length},
        "capabilities": capabilities,
    })))
}
