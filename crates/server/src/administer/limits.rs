//! `/admin/limits`: what teams and models may use, and what tokens cost.

use axum::Json;
use axum::extract::{Request, State};
use thunder_access::{Now, Policy};

use super::{Admin, asker, blocking, body, store};
use crate::error::ApiError;

pub(crate) async fn show(State(admin): State<Admin>) -> Result<Json<Policy>, ApiError> {
    Ok(Json(Policy::clone(&store(&admin)?.policy())))
}

pub(crate) async fn set(State(admin): State<Admin>, request: Request) -> Result<Json<Policy>, ApiError> {
    let actor = asker(&request);
    let policy: Policy = body(request).await?;
    let set = blocking(&admin, move |access| {
        access.set_policy(policy, &actor, Now::read().time)?;
        Ok(Policy::clone(&access.policy()))
    });
    set.await.map(Json)
}
