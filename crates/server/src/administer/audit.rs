//! `/admin/audit`: the acts of administrators.

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use thunder_access::{AccessError, AuditFilter, Entry, Sealed};

use super::export::{Format, Partial, Row, export};
use super::usage::{page_size, period};
use super::{Admin, Query, blocking, store};
use crate::error::ApiError;

pub(crate) async fn list(State(admin): State<Admin>, request: Request) -> Result<Response, ApiError> {
    let mut query = Query::of(&request)?;
    let (since, until) = period(&mut query)?;
    let filter = AuditFilter { since, until, action: query.text("action") };
    let format = Format::take(&mut query)?;
    let limit = page_size(&mut query)?;
    let before = query.parse::<u64>("before", "the number of an entry")?;
    let partial = Partial::take(&mut query)?;
    query.finish()?;
    if format != Format::Json {
        let access = store(&admin)?;
        let page = move |before, count| {
            let (entries, missing) = access.all_audit(&filter, before, count)?;
            partial.accept(entries, &missing)
        };
        let first = page.clone();
        blocking(&admin, move |_| first(before, 1)).await?;
        return Ok(export(format, COLUMNS, before, page));
    }
    let read = blocking(&admin, move |access| access.all_audit(&filter, before, limit));
    let (entries, missing) = read.await?;
    let next = if entries.len() == limit { entries.last().map(|(number, _)| *number) } else { None };
    // The text was hashed, so it is passed on unchanged.
    let raw = entries.iter().map(|(_, sealed)| RawValue::from_string(sealed.line()));
    let raw =
        raw.collect::<Result<Vec<_>, _>>().map_err(|error| ApiError::engine_failed(error.to_string()))?;
    #[derive(serde::Serialize)]
    struct Page {
        entries: Vec<Box<RawValue>>,
        next: Option<u64>,
        missing: Vec<String>,
    }
    Ok(Json(Page { entries: raw, next, missing }).into_response())
}

pub(crate) async fn verify(State(admin): State<Admin>) -> Result<Json<Value>, ApiError> {
    let verified = blocking(&admin, |access| {
        let (others, wrong) = access.verify_others();
        let other = |(node, entries, head)| json!({"node": node, "entries": entries, "head": head});
        let others: Vec<Value> = others.into_iter().map(other).collect();
        match access.verify_audit() {
            Ok(chain) => Ok(json!({
                "intact": true, "entries": chain.entries, "head": chain.head, "others": others, "others_wrong": wrong,
            })),
            Err(AccessError::Audit(broken)) => Ok(json!({
                "intact": false, "first_bad": broken.number, "why": broken.why, "others": others, "others_wrong": wrong,
            })),
            Err(error) => Err(error),
        }
    });
    verified.await.map(Json)
}

const COLUMNS: &[&str] =
    &["number", "time", "actor", "remote", "action", "subject", "details", "previous", "hash", "node"];

impl Row for (u64, Sealed) {
    fn number(&self) -> u64 {
        self.0
    }

    fn line(&self) -> String {
        self.1.line()
    }

    fn cells(&self) -> Vec<String> {
        let Ok(entry) = serde_json::from_str::<Entry>(&self.1.text) else {
            return vec![self.0.to_string(), self.1.text.clone()];
        };
        vec![
            entry.number.to_string(),
            entry.time.to_string(),
            entry.actor,
            entry.remote.unwrap_or_default(),
            entry.action,
            entry.subject.unwrap_or_default(),
            entry.details.to_string(),
            entry.previous,
            self.1.hash.clone(),
            entry.node.unwrap_or_default(),
        ]
    }
}
