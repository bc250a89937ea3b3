//! `/admin/me`: the caller, its limits and its usage.

use axum::extract::State;
use axum::{Extension, Json};
use serde_json::{Value, json};
use thunder_access::{By, Caller, DAY_MS, Filter, Now, Time, Totals};

use super::{Admin, blocking, keys};
use crate::error::ApiError;

pub(crate) async fn show(
    State(admin): State<Admin>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Value>, ApiError> {
    let role = caller.role();
    if admin.0.is_none() {
        return Ok(Json(json!({"key": null, "role": role, "currency": null, "limits": [], "usage": null})));
    }
    let now = Now::read();
    let me = blocking(&admin, move |access| {
        let used = |since: Time| {
            let key = caller.key().map(|key| key.id.clone());
            let filter = Filter { since: Some(since), key, ..Filter::default() };
            let (groups, _) = access.all_sums(&filter, &[By::Key])?;
            let mut sums = thunder_access::Sums::default();
            // All callers without a key share these requests.
            let is_mine = |name: &Option<String>| caller.key().is_some() || name.is_none();
            groups.iter().filter(|(by, _)| by.iter().all(is_mine)).for_each(|(_, group)| sums.merge(group));
            Ok::<Totals, thunder_access::AccessError>(sums.totals())
        };
        let today = used(Time(now.time.day() * DAY_MS))?;
        let month = used(now.time.month_begin())?;
        Ok(json!({
            "key": caller.key().map(|key| keys::view(&access, key, now.time)),
            "role": role,
            "currency": access.policy().currency,
            "limits": access.all_standings(&caller, None, now),
            "usage": {"today": today, "month": month},
        }))
    });
    me.await.map(Json)
}
