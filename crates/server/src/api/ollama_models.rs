//! Ollama's API: the list of models.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::{Extension, Json};
use serde_json::{Value, json};
use thunder_access::Caller;
use thunder_engine::{ModelFiles, ModelInfo, ModelKind};

use super::ollama::moment;
use crate::access::check_allowed;
use crate::app::App;
use crate::error::ApiError;
use crate::request::fields::Fields;
use crate::request::json as request_json;

/// When the model is unloaded.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// The served model and its adapters, if the caller's key may use them.
fn entries(app: &App, caller: &Caller) -> impl Iterator<Item = Value> {
    let info = app.engine.info();
    let is_allowed = check_allowed(caller, &info.name).is_ok();
    let adapters = info.adapters.iter().map(|of| (&of.name, &of.digest, info.files.bytes + of.bytes));
    let model = (&info.name, &info.digest, info.files.bytes);
    let all = std::iter::once(model).chain(adapters).filter(move |_| is_allowed);
    all.map(|(name, digest, size)| {
        json!({
            "name": name, "model": name, "modified_at": moment(app.started.as_secs()), "digest": digest,
            "size": size, "details": details(info),
        })
    })
}

/// Ollama's words for what a model is.
fn details(info: &ModelInfo) -> Value {
    let ModelFiles { family, bytes, weights, is_quantized } = &info.files;
    let bits = (bytes * 8).checked_div(*weights).unwrap_or(0);
    let level = match bits {
        0 => "unknown".to_owned(),
        bits if *is_quantized => format!("Q{bits}"),
        24.. => "F32".to_owned(),
        _ => "F16".to_owned(),
    };
    json!({
        "parent_model": "", "format": "", "family": family, "families": [family],
        "parameter_size": parameter_size(*weights), "quantization_level": level,
    })
}

/// A number of weights as Ollama writes it: "8.2B", "135M".
fn parameter_size(weights: u64) -> String {
    let number = weights as f64;
    match weights {
        1_000_000_000.. => format!("{:.1}B", number / 1e9),
        1_000_000.. => format!("{:.0}M", number / 1e6),
        _ => format!("{:.0}K", number / 1e3),
    }
}

/// GET /api/tags.
pub(crate) async fn tags(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Json<Value> {
    Json(json!({"models": entries(&app, &caller).collect::<Vec<_>>()}))
}

/// GET /api/ps.
pub(crate) async fn running(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Json<Value> {
    let context = app.engine.info().context_length;
    let loaded = |mut entry: Value| {
        entry["context_length"] = context.into();
        // The ranks' memory is not divided by device, and no model is ever unloaded.
        entry["size_vram"] = 0.into();
        entry["expires_at"] = NEVER.into();
        entry
    };
    Json(json!({"models": entries(&app, &caller).map(loaded).collect::<Vec<_>>()}))
}

/// GET /api/version.
pub(crate) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// POST /api/show.
pub(crate) async fn show(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    check_allowed(&caller, &app.engine.info().name)?;
    let body = app.receive(request).await?;
    let mut fields = Fields::new(request_json::parse(&body.bytes)?, "")?;
    // "name" is the field's older name.
    let older = fields.string("name")?;
    let model = fields.string("model")?.or(older).ok_or_else(|| fields.missing("model"))?;
    fields.boolean("verbose")?;
    fields.finish(&[])?;
    let adapter = app.check_model(model.strip_suffix(":latest").unwrap_or(&model))?;
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
        "modified_at": moment(app.started.as_secs()), "details": details(info),
        "model_info": {
            "general.name": app.model_name(adapter), "general.context_length": info.context_length,
            "general.architecture": info.files.family, "general.parameter_count": info.files.weights,
        },
        "capabilities": capabilities,
    })))
}
