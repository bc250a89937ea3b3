//! `/admin/keys`: the keys of the server.

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use thunder_access::{Access, Key, KeyChange, NewKey, Now, Time};

use super::{Admin, Query, asker, blocking, body, body_or_default};
use crate::error::ApiError;
use crate::request::path::PathPart;

/// A key as people and programs see it.
pub(super) fn view(access: &Access, key: &Key, now: Time) -> Value {
    let mut view = serde_json::to_value(key).unwrap_or_default();
    view["state"] = json!(key.state(now));
    view["last_used"] = json!(access.last_used(key));
    view["secret_begins"] = format!("th-{}", key.lookup()).into();
    view
}

pub(crate) async fn list(State(admin): State<Admin>, request: Request) -> Result<Json<Value>, ApiError> {
    let mut query = Query::of(&request)?;
    let state = query.text("state");
    query.finish()?;
    let now = Now::read().time;
    let keys = blocking(&admin, move |access| {
        Ok(access.keys().iter().map(|key| view(&access, key, now)).collect::<Vec<_>>())
    });
    let mut keys = keys.await?;
    if let Some(state) = state {
        keys.retain(|key| key["state"] == state.as_str());
    }
    Ok(Json(json!({"keys": keys})))
}

pub(crate) async fn create(
    State(admin): State<Admin>,
    request: Request,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let actor = asker(&request);
    let new: NewKey = body(request).await?;
    let now = Now::read().time;
    let made = blocking(&admin, move |access| {
        let (key, secret) = access.create_key(new, &actor, now)?;
        Ok(json!({"key": view(&access, &key, now), "secret": secret}))
    });
    Ok((StatusCode::CREATED, Json(made.await?)))
}

pub(crate) async fn show(
    State(admin): State<Admin>,
    PathPart(name): PathPart,
) -> Result<Json<Value>, ApiError> {
    let now = Now::read().time;
    let shown = blocking(&admin, move |access| {
        let key = access.key(&name, now)?;
        Ok(json!({"key": view(&access, &key, now)}))
    });
    shown.await.map(Json)
}

pub(crate) async fn change(
    State(admin): State<Admin>,
    PathPart(name): PathPart,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let actor = asker(&request);
    let change: KeyChange = body(request).await?;
    let now = Now::read().time;
    let changed = blocking(&admin, move |access| {
        let key = access.change_key(&name, change, &actor, now)?;
        Ok(json!({"key": view(&access, &key, now)}))
    });
    changed.await.map(Json)
}

/// How a key is rotated.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rotation {
    /// Seconds for which the former secret works.
    #[serde(default)]
    grace_s: u64,
}

pub(crate) async fn rotate(
    State(admin): State<Admin>,
    PathPart(name): PathPart,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let actor = asker(&request);
    let Rotation { grace_s } = body_or_default(request).await?;
    let now = Now::read().time;
    let rotated = blocking(&admin, move |access| {
        let (key, secret) = access.rotate_key(&name, grace_s, &actor, now)?;
        Ok(json!({"key": view(&access, &key, now), "secret": secret}))
    });
    rotated.await.map(Json)
}

pub(crate) async fn revoke(
    State(admin): State<Admin>,
    PathPart(name): PathPart,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let actor = asker(&request);
    let now = Now::read().time;
    let revoked = blocking(&admin, move |access| {
        let key = access.revoke_key(&name, &actor, now)?;
        Ok(json!({"key": view(&access, &key, now)}))
    });
    revoked.await.map(Json)
}
