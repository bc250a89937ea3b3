//! `/admin/prompts`: prompts and answers that a policy keeps, and the policy. Each reading is in
//! the audit log.

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use thunder_access::{Access, Caller, KeepPolicy, Now, Place, PromptsAsk};

use super::export::{self, Format, Partial};
use super::usage::{check_known, filter, page_size};
use super::{Admin, Query, asker, blocking, body};
use crate::error::ApiError;

/// GET /admin/prompts.
pub(crate) async fn list(State(admin): State<Admin>, request: Request) -> Result<Response, ApiError> {
    let actor = asker(&request);
    let caller = request.extensions().get::<Caller>().cloned().unwrap_or(Caller::Open);
    let mut query = Query::of(&request)?;
    let filter = filter(&mut query, &caller)?;
    let before = query.parse::<Place>("before", "the `next` of an earlier answer")?;
    let format = Format::take(&mut query)?;
    let asked = filter.clone();
    let ask = PromptsAsk { filter, before, limit: page_size(&mut query)? };
    let partial = Partial::take(&mut query)?;
    query.finish()?;
    if format == Format::Csv {
        return Err(ApiError::field("format", "`format` is \"csv\", but must be json or jsonl here"));
    }
    let read = blocking(&admin, move |access| access.kept_prompts(&ask, &actor, Now::read().time));
    let (page, missing) = read.await?;
    if page.prompts.is_empty() {
        check_known(&admin, &caller, asked).await?;
    }
    if format == Format::Json {
        let next = page.next().map(|next| next.to_string());
        return Ok(Json(json!({ "prompts": page.prompts, "next": next, "missing": missing })).into_response());
    }
    let kept = partial.accept(page.prompts, &missing).map_err(|error| super::failed(&error))?;
    // Serialization of strings and numbers cannot fail.
    let lines = kept.iter().map(|one| serde_json::to_string(one).unwrap_or_default() + "\n");
    Ok(export::whole(format, lines.collect()))
}

fn view(access: &Access) -> Value {
    let (lost, missing) = access.all_prompts_lost();
    json!({ "policy": access.keep_policy(), "lost": lost, "missing": missing })
}

/// GET /admin/prompts/policy.
pub(crate) async fn policy(State(admin): State<Admin>) -> Result<Json<Value>, ApiError> {
    blocking(&admin, |access| Ok(view(&access))).await.map(Json)
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
