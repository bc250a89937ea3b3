//! `/admin/backup`: the whole state in one file on the server's machine.

use axum::Json;
use axum::extract::{Request, State};
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::PathBuf;
use thunder_access::{Caller, Now};

use super::{Admin, asker, blocking, body};
use crate::error::ApiError;

/// Where a backup goes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Target {
    /// An absolute path of a file that does not exist.
    path: PathBuf,
}

/// Only for the server's own user: others could fill any folder that the server can write to.
pub(crate) async fn create(State(admin): State<Admin>, request: Request) -> Result<Json<Value>, ApiError> {
    if request.extensions().get::<Caller>() != Some(&Caller::Local) {
        let message = "backups are written by `thunder backup` on the server's machine only";
        return Err(ApiError::invalid(message).status(axum::http::StatusCode::FORBIDDEN).code("local_only"));
    }
    let actor = asker(&request);
    let Target { path } = body(request).await?;
    if !path.is_absolute() {
        return Err(ApiError::field("path", format!("`path` is {}, but must be absolute", path.display())));
    }
    let made = blocking(&admin, move |access| {
        let now = Now::read().time;
        let details = json!({"path": path.display().to_string()});
        access.note_act(&actor, "store.backup", None, details, now)?;
        access.backup(&path, now)
    });
    Ok(Json(json!(made.await?)))
}
