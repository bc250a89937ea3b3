//! `/admin/prompts`: prompts and answers that a policy keeps, and the policy. Each reading is in
//! the audit log.

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use thunder_access::{Access, Caller, KeepPolicy, Now};

use super::export::{self, Format};
use super::usage::{filter, page_size};
use super::{Admin, Query, asker, blocking, body, store};
use crate::error::ApiError;

/// GET /admin/prompts.
pub(crate) async fn list(State(admin): State<Admin>, request: Request) -> Result<Response, ApiError> {
    let actor = asker(&request);
    let caller = request.extensions().get::<Caller>().cloned().unwrap_or(Caller::Open);
    let mut query = Query::of(&request)?;
    let filter = filter(&mut query, &caller)?;
    let format = Format::take(&mut query)?;
    let limit = page_size(&mut query)?;
    query.finish()?;
    if format == Format::Csv {
        return Err(ApiError::field("format", "`format` is \"csv\", but must be json or jsonl here"));
    }
    let read = blocking(&admin, move |access| access.kept_prompts(&filter, limit, &actor, Now::read().time));
    let kept = read.await?;
    if format == Format::Json {
        return Ok(Json(json!({ "prompts": kept })).into_response());
    }
    // Structs of strings and numbers always serialize.
    let lines = kept.iter().map(|one| serde_json::to_string(one).unwrap_or_default() + "\n");
    Ok(export::whole(format, lines.collect()))
}

fn view(access: &Access) -> Value {
    json!({ "policy": access.keep_policy(), "lost": access.prompts_lost() })
}

/// GET /admin/prompts/policy.
pub(crate) async fn policy(State(admin): State<Admin>) -> Result<Json<Value>, ApiError> {
    Ok(Json(view(&store(&admin)?)))
}

/// PUT /admin/prompts/policy.
pub(crate) async fn set_policy(
    State(admin): State<Admin>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let actor = asker(&request);
    let policy: KeepPolicy = body(request).await?;
    let set = blocking(&admin, move |access| {
        access.set_keep_policy(policy, &actor, Now::read().time)?;
        Ok(view(&access))
    });
    set.await.map(Json)
}
