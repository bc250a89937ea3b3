//! `/admin/limits`: limits of teams and models, and prices of tokens.

use axum::Json;
use axum::extract::{Request, State};
use serde_json::Value;
use thunder_access::{Now, Policy};

use super::{Admin, asker, blocking, body, read_as, store};
use crate::error::ApiError;

/// Identifies the version that was read, so that a change does not overwrite another change that
/// its author has not seen.
const VERSION: &str = "version";

fn shown(policy: &Policy) -> Value {
    // Serialization of strings and numbers cannot fail.
    let mut shown = serde_json::to_value(policy).unwrap_or_default();
    shown[VERSION] = policy.version().into();
    shown
}

pub(crate) async fn show(State(admin): State<Admin>) -> Result<Json<Value>, ApiError> {
    Ok(Json(shown(&store(&admin)?.policy())))
}

/// Without a version, any limits are replaced.
pub(crate) async fn set(State(admin): State<Admin>, request: Request) -> Result<Json<Value>, ApiError> {
    let actor = asker(&request);
    let mut given: Value = body(request).await?;
    let based_on = match given.as_object_mut().and_then(|given| given.remove(VERSION)) {
        None | Some(Value::Null) => None,
        Some(Value::String(version)) => Some(version),
        Some(other) => {
            let message = format!("`version` is {other}, but must be the text that GET /admin/limits gives");
            return Err(ApiError::field(VERSION, message));
        }
    };
    let policy: Policy = read_as(given)?;
    let set = blocking(&admin, move |access| {
        access.set_policy(policy, based_on.as_deref(), &actor, Now::read().time)?;
        Ok(shown(&access.policy()))
    });
    set.await.map(Json)
}
