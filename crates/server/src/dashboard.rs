//! The dashboard's files, and the administrative endpoints that a single server has.
//!
//! The responses have the form of a cluster's (`crates/node/src/agent/admin.rs`), so the pages work
//! with both.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::Router;
use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Serialize;
use serde_json::{Value, json};
use thunder_access::{Caller, Now};
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_dashboard::{Act, Answer, Ask};

use crate::access::{Peer, actor};
use crate::app::App;
use crate::error::ApiError;
use crate::requests::KEPT;

/// Why one server cannot load another model.
const CANNOT_CHANGE: &str = "`thunder serve` has one model for as long as it runs: start `thunder up` on each machine, and \
                             load models there";

/// Maximum size of a response from the program around the server.
const LONGEST_ANSWER_BYTES: usize = 1 << 20;

/// Memory of a rank's shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ShardMemory {
    /// Bytes of weights.
    pub weight_bytes: u64,
    /// Bytes of the KV cache and of states.
    pub kv_bytes: u64,
}

/// The files of the dashboard. They hold no data, so they need no key.
pub(crate) fn pages() -> Router<Arc<App>> {
    thunder_dashboard::paths().fold(Router::new(), |router, path| {
        router.route(path, get(move |headers: HeaderMap| async move { page(path, &headers) }))
    })
}

fn page(path: &str, headers: &HeaderMap) -> Response {
    let given =
        |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok()).unwrap_or_default();
    let Some(page) =
        thunder_dashboard::page(path, given(header::ACCEPT_ENCODING), given(header::IF_NONE_MATCH))
    else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let status = StatusCode::from_u16(page.status).unwrap_or(StatusCode::OK);
    let mut response = (status, page.body).into_response();
    for (name, value) in page.headers {
        if let Ok(value) = HeaderValue::from_str(&value) {
            response.headers_mut().insert(HeaderName::from_static(name), value);
        }
    }
    response
}

/// The endpoints below `/admin` that any key may read, without the middleware that checks keys.
pub(crate) fn open_endpoints() -> Router<Arc<App>> {
    Router::new().route("/admin/cluster", get(cluster)).route("/admin/models", get(models))
}

/// The endpoints below `/admin` for administrators, without the middleware that checks keys.
pub(crate) fn endpoints() -> Router<Arc<App>> {
    Router::new()
        .route("/admin/models/load", post(cannot_change))
        .route("/admin/models/unload", post(cannot_change))
        .merge(of_a_cluster())
        .route("/admin/requests", get(requests))
        .route("/admin/planner", get(extension).post(extension))
        .route("/admin/downloads", get(extension).post(extension))
        .route("/admin/settings", get(extension))
        .route("/admin/config/reload", post(extension))
        .route("/admin/energy", get(energy))
}

/// Acts that only a node of a cluster can do; the response says so.
fn of_a_cluster() -> Router<Arc<App>> {
    const CHANGES: [&str; 10] = [
        "/admin/cluster/approve",
        "/admin/cluster/drain",
        "/admin/cluster/leave",
        "/admin/cluster/remove",
        "/admin/cluster/stop",
        "/admin/cluster/token",
        "/admin/models/delete",
        "/admin/models/pull",
        "/admin/models/update",
        "/admin/models/verify",
    ];
    let router = Router::new()
        .route("/admin/cluster/logs", get(no_cluster))
        .route("/admin/models/stored", get(no_cluster));
    CHANGES.into_iter().fold(router, |router, path| router.route(path, post(no_cluster)))
}

/// Requests of people who are signing in and have no key yet. The program around the server answers
/// them.
pub(crate) fn sign_in() -> Router<Arc<App>> {
    Router::new()
        .route("/auth", get(extension))
        .route("/auth/begin", post(extension))
        .route("/auth/finish", post(extension))
}

/// GET /admin/cluster: one server as a cluster of one node.
async fn cluster(State(app): State<Arc<App>>) -> Json<Value> {
    let status = json!({
        "cluster": false, "me": "here", "code": null, "removed": false, "disk_error": null, "newcomers": [],
        "members": [{
            "id": "here", "short": "here", "name": app.config.node_name, "up": true, "cut_off_from": [], "drained": false,
            "addresses": [],
            "report": {
                "version": env!("CARGO_PKG_VERSION"),
                "system": format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
                "cores": std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
                "memory_total": app.config.memory_total_bytes,
                "memory_free": thunder_compute::memory::available_bytes(),
                "api": null,
            },
        }],
        "models": [{
            "name": app.engine.info().name, "ready": app.engine.stopped().is_none(), "generation": 1, "ranks": ranks(&app),
        }],
    });
    Json(status)
}

fn ranks(app: &App) -> Vec<Value> {
    let (state, words) = match app.engine.stopped() {
        None => (json!("Ready"), "ready".to_owned()),
        Some(why) => (json!({ "Ended": why }), format!("ended: {why}")),
    };
    let rank = |_| json!({ "node": app.config.node_name, "state": state, "words": words });
    (0..app.engine.info().ranks).map(rank).collect()
}

/// GET /admin/models.
async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let model = json!({
        "name": app.engine.info().name, "ready": app.engine.stopped().is_none(), "generation": 1, "ranks": ranks(&app),
        "load": load(&app),
    });
    Json(json!({ "cannot_change": CANNOT_CHANGE, "models": [model] }))
}

/// What the engine counts.
fn load(app: &App) -> Value {
    let (info, counters) = (app.engine.info(), app.engine.counters());
    let (running, waiting) = app.engine.load();
    let tokens = |blocks: usize| blocks * KV_BLOCK_TOKENS;
    let step_ns = counters.step_ns.load(Ordering::Relaxed);
    let reduce_ns = counters.reduce_ns.load(Ordering::Relaxed);
    let shard = |shard: &ShardMemory| json!({ "node": app.config.node_name, "weight_bytes": shard.weight_bytes, "kv_bytes": shard.kv_bytes });
    json!({
        "ranks": info.ranks, "context": info.context_length, "running": running, "waiting": waiting,
        "kv_tokens": tokens(counters.kv_blocks.load(Ordering::Relaxed)),
        "kv_tokens_used": tokens(counters.kv_blocks_used.load(Ordering::Relaxed)),
        "prompt_tokens": counters.prompt_tokens.load(Ordering::Relaxed),
        "generated_tokens": counters.generated_tokens.load(Ordering::Relaxed),
        "reduce_share": (step_ns > 0).then(|| reduce_ns as f64 / step_ns as f64),
        "shards": app.config.shards.iter().map(shard).collect::<Vec<_>>(),
    })
}

async fn no_cluster() -> ApiError {
    let message = "this is one server, without a cluster: `thunder up` on each machine makes one, and `thunder \
                   model` looks after this machine's disk";
    ApiError::invalid(message).status(StatusCode::CONFLICT).code("no_cluster")
}

async fn cannot_change() -> ApiError {
    ApiError::invalid(CANNOT_CHANGE).status(StatusCode::CONFLICT).code("one_model")
}

/// GET /admin/requests.
async fn requests(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let failed = |error: serde_json::Error| ApiError::engine_failed(error.to_string());
    let model = &app.engine.info().name;
    let rows = app.requests.rows().into_iter().map(|row| {
        let mut row = serde_json::to_value(row).map_err(failed)?;
        (row["model"], row["queue_s"]) = (model.as_str().into(), Value::Null);
        Ok(row)
    });
    let rows = rows.collect::<Result<Vec<_>, ApiError>>()?;
    Ok(Json(json!({ "requests": rows, "kept": KEPT })))
}

/// GET /admin/energy: the machine's energy since the server started, for each token, request and
/// user.
async fn energy(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let state = app.clone();
    let response = extension(State(app), request).await?;
    let mut energy = json!({
        "joules": null, "watts": null, "seconds": 0.0, "estimated": false, "sources": [],
        "missing": ["this server does not watch what its machine draws"],
    });
    if response.status() == StatusCode::OK {
        let body = to_bytes(response.into_body(), LONGEST_ANSWER_BYTES).await;
        let body = body.map_err(|error| ApiError::engine_failed(error.to_string()))?;
        energy = serde_json::from_slice(&body).map_err(|error| ApiError::engine_failed(error.to_string()))?;
    }
    let users = match state.config.access.clone() {
        Some(access) => tokio::task::spawn_blocking(move || access.users_seen()).await.ok(),
        None => None,
    };
    let joules = energy["joules"].as_f64();
    let each = |count: Option<u64>| {
        joules.zip(count.filter(|count| *count > 0)).map(|(all, count)| all / count as f64)
    };
    let counters = state.engine.counters();
    let tokens = [&counters.read_tokens, &counters.generated_tokens];
    let tokens: u64 = tokens.map(|counter| counter.load(Ordering::Relaxed)).iter().sum();
    let requests = state.metrics.answered();
    let users = users.map(|users| users as u64);
    energy["requests"] = requests.into();
    energy["tokens"] = tokens.into();
    energy["users"] = json!(users);
    energy["joules_per_request"] = json!(each(Some(requests)));
    energy["joules_per_token"] = json!(each(Some(tokens)));
    energy["joules_per_user"] = json!(each(users));
    Ok(Json(energy).into_response())
}

/// The answer of the program around the server. The audit log has each act.
async fn extension(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let caller = request.extensions().get::<Caller>().cloned().unwrap_or(Caller::Open);
    let actor = actor(&caller, request.extensions().get::<Peer>().copied());
    let (method, path) = (request.method().to_string(), request.uri().path().to_owned());
    let body = if method == "GET" { Vec::new() } else { app.receive(request).await?.bytes };
    let answering = tokio::task::spawn_blocking(move || {
        let ask = Ask { method: &method, path: &path, body: &body };
        let known = app.config.extension.as_ref().and_then(|extension| extension.answer(&ask));
        let Answer { status, body, act, retry_after_s } = known.unwrap_or_else(|| Answer::unknown(&ask));
        if let (Some(access), Some(act)) = (&app.config.access, act) {
            let Act { action, subject, details } = act;
            let noted = access.note_act(&actor, action, subject.as_deref(), details, Now::read().time);
            noted.map_err(|error| ApiError::unavailable(error.to_string(), "store_failed"))?;
        }
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(body)).into_response();
        if let Some(seconds) = retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        Ok(response)
    });
    answering.await.map_err(|error| ApiError::engine_failed(error.to_string()))?
}
