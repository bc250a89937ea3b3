//! `/admin/usage`: the usage. A user's key sees only its own usage.

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Map, Value, json};
use thunder_access::{Access, By, Caller, Filter, Now, Outcome, Role, Sums, Time, UsageRecord};

use super::export::{self, Format, Partial, Row, export};
use super::{Admin, Query, blocking, store};
use crate::error::ApiError;

/// Default number of rows of a page.
const PAGE: usize = 100;
/// The largest page.
const LARGEST_PAGE: usize = 1000;
/// Maximum number of dimensions of sums.
const MOST_BY: usize = 3;

/// The parameters `since` and `until`.
pub(super) fn period(query: &mut Query) -> Result<(Option<Time>, Option<Time>), ApiError> {
    let now = Now::read().time;
    let mut time = |name| {
        let must_be =
            "a date like 2026-11-23, a time like 2026-11-23T08:30:00Z or an age like 7d, 24h or 30m";
        query.parse_by(name, must_be, |text| Time::ago(text, now))
    };
    let (since, until) = (time("since")?, time("until")?);
    if let Some(since) = since {
        check_period(since, until.unwrap_or(Time(now.0 + 1)))?;
    }
    Ok((since, until))
}

/// Refuses a period that is empty, so that no report looks as if nothing had been used.
fn check_period(since: Time, until: Time) -> Result<(), ApiError> {
    if since < until {
        return Ok(());
    }
    let message = format!(
        "the period from {since} until {until} is empty: `since` must be before `until`, which is now unless it is given"
    );
    Err(ApiError::field("since", message))
}

/// The parameter `limit`.
pub(super) fn page_size(query: &mut Query) -> Result<usize, ApiError> {
    let limit = query.parse::<usize>("limit", "an integer")?.unwrap_or(PAGE);
    if (1..=LARGEST_PAGE).contains(&limit) {
        return Ok(limit);
    }
    Err(ApiError::field("limit", format!("`limit` is {limit}, but must be 1 to {LARGEST_PAGE}")))
}

/// The caller's query, limited to the requests that the caller may see.
pub(super) fn filter(query: &mut Query, caller: &Caller) -> Result<Filter, ApiError> {
    let outcome = match query.text("outcome") {
        None => None,
        Some(name) => Some(serde_json::from_value::<Outcome>(name.clone().into()).map_err(|_| {
            let name: String = name.chars().take(40).collect();
            let must_be = "stop, length, calls, cancelled, failed or refused";
            ApiError::field("outcome", format!("`outcome` is \"{name}\", but must be {must_be}"))
        })?),
    };
    let (since, until) = period(query)?;
    let mut filter = Filter {
        since,
        until,
        key: query.text("key"),
        team: query.text("team"),
        model: query.text("model"),
        outcome,
    };
    if caller.role() != Role::Admin {
        // Keys of `--api-key` are not distinguished, so they have no usage to show.
        let own = caller.key().map(|key| key.id.clone()).unwrap_or_else(|| "none".to_owned());
        filter.key = Some(own);
    }
    Ok(filter)
}

/// GET /admin/usage.
pub(crate) async fn sums(
    State(admin): State<Admin>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let mut query = Query::of(&request)?;
    let mut filter = filter(&mut query, &caller)?;
    let format = Format::take(&mut query)?;
    let by = by(query.text("by"))?;
    let partial = Partial::take(&mut query)?;
    query.finish()?;
    let now = Now::read().time;
    let since = *filter.since.get_or_insert(now.month_begin());
    let until = *filter.until.get_or_insert(Time(now.0 + 1));
    // This month's first day may be after a given end.
    check_period(since, until)?;
    let (divided, asked) = (by.clone(), filter.clone());
    let ((groups, missing), currency) = blocking(&admin, move |access| {
        Ok((access.all_sums(&filter, &divided)?, access.policy().currency.clone()))
    })
    .await?;
    if groups.is_empty() {
        check_known(&admin, &caller, asked).await?;
    }
    let mut total = Sums::default();
    let mut rows = Vec::new();
    for (values, sums) in &groups {
        total.merge(sums);
        let mut row = Map::new();
        for (by, value) in by.iter().zip(values) {
            row.insert(by.name().to_owned(), json!(value));
        }
        if let Ok(Value::Object(totals)) = serde_json::to_value(sums.totals()) {
            row.extend(totals);
        }
        rows.push(SumRow(row));
    }
    if format != Format::Json {
        let rows = partial.accept(rows, &missing).map_err(|error| super::failed(&error))?;
        let mut columns: Vec<&str> = by.iter().map(|by| by.name()).collect();
        let names: Vec<String> = match serde_json::to_value(total.totals()) {
            Ok(Value::Object(totals)) => totals.keys().cloned().collect(),
            _ => Vec::new(),
        };
        columns.extend(names.iter().map(String::as_str));
        let text = export::heading(format, &columns) + &export::rows(format, &rows);
        return Ok(export::whole(format, text));
    }
    let names: Vec<&str> = by.iter().map(|by| by.name()).collect();
    let rows: Vec<Value> = rows.into_iter().map(|row| row.0.into()).collect();
    let body = json!({
        "since": since, "until": until, "by": names, "currency": currency, "rows": rows, "total": total.totals(),
        "missing": missing,
    });
    Ok(Json(body).into_response())
}

/// Refuses a key or team that is not known, after nothing of it was found: an empty report
/// looks as if it had used nothing. Not for users, who see their own usage whatever they ask for.
pub(super) async fn check_known(admin: &Admin, caller: &Caller, filter: Filter) -> Result<(), ApiError> {
    if caller.role() != Role::Admin {
        return Ok(());
    }
    match blocking(admin, move |access| unknown_in(&access, &filter)).await? {
        Some((field, message)) => Err(ApiError::field(field, message)),
        None => Ok(()),
    }
}

/// The first of a filter's names that no key, no limit and no usage has.
fn unknown_in(
    access: &Access,
    filter: &Filter,
) -> Result<Option<(&'static str, String)>, thunder_access::AccessError> {
    let (keys, policy) = (access.keys(), access.policy());
    let is_key = |name: &String| keys.iter().any(|key| key.name == *name || key.id == *name);
    let is_team = |name: &String| {
        policy.teams.contains_key(name) || keys.iter().any(|key| key.team.as_ref() == Some(name))
    };
    // A key may have had this name before, and a team may have left the keys.
    let key = Filter { key: filter.key.clone().filter(|name| !is_key(name)), ..Filter::default() };
    let team = Filter { team: filter.team.clone().filter(|name| !is_team(name)), ..Filter::default() };
    for (field, ever, remedy) in [
        ("key", key, "`thunder keys list --all` lists the keys"),
        ("team", team, "`thunder keys list` shows the keys' teams"),
    ] {
        let Some(name) = ever.key.clone().or(ever.team.clone()) else { continue };
        let (groups, missing) = access.all_sums(&ever, &[])?;
        if groups.is_empty() && missing.is_empty() {
            let name: String = name.chars().take(100).collect();
            let message =
                format!("no {field} \"{name}\" is known, and no request of it is recorded: {remedy}");
            return Ok(Some((field, message)));
        }
    }
    Ok(None)
}

/// The parameter `by`.
fn by(text: Option<String>) -> Result<Vec<By>, ApiError> {
    let text = text.unwrap_or_else(|| By::Key.name().to_owned());
    let known = || By::ALL.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let one = |name: &str| {
        let found = By::ALL.iter().find(|(known, _)| *known == name).map(|(_, by)| *by);
        found.ok_or_else(|| {
            let name: String = name.chars().take(40).collect();
            ApiError::field("by", format!("`by` has \"{name}\", but must be some of {}", known()))
        })
    };
    let by = text.split(',').map(str::trim).map(one).collect::<Result<Vec<_>, _>>()?;
    if by.len() > MOST_BY {
        return Err(ApiError::field("by", format!("`by` has {} names, but may have {MOST_BY}", by.len())));
    }
    Ok(by)
}

/// GET /admin/usage/records.
pub(crate) async fn records(
    State(admin): State<Admin>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let mut query = Query::of(&request)?;
    let filter = filter(&mut query, &caller)?;
    let format = Format::take(&mut query)?;
    let limit = page_size(&mut query)?;
    let before = query.parse::<u64>("before", "the number of a record")?;
    let asked = filter.clone();
    let partial = Partial::take(&mut query)?;
    query.finish()?;
    if format != Format::Json {
        let access = store(&admin)?;
        let page = move |before, count| {
            let (records, missing) = access.all_records(&filter, before, count)?;
            partial.accept(records, &missing)
        };
        // Records that are missing from the start give an error status, not a list that is aborted.
        let first = page.clone();
        if blocking(&admin, move |_| first(before, 1)).await?.is_empty() {
            check_known(&admin, &caller, asked).await?;
        }
        return Ok(export(format, COLUMNS, before, page));
    }
    let read = blocking(&admin, move |access| access.all_records(&filter, before, limit));
    let (records, missing) = read.await?;
    if records.is_empty() {
        check_known(&admin, &caller, asked).await?;
    }
    let next = if records.len() == limit { records.last().map(|record| record.number) } else { None };
    let views: Vec<_> = records.iter().map(UsageRecord::view).collect();
    Ok(Json(json!({"records": views, "next": next, "missing": missing})).into_response())
}

const COLUMNS: &[&str] = &[
    "number",
    "id",
    "time",
    "key",
    "key_id",
    "owner",
    "team",
    "model",
    "api",
    "node",
    "outcome",
    "status",
    "count",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cost",
    "queue_s",
    "time_to_first_token_s",
    "duration_s",
];

impl Row for UsageRecord {
    fn number(&self) -> u64 {
        self.number
    }

    fn line(&self) -> String {
        serde_json::to_string(&self.view()).unwrap_or_default()
    }

    fn cells(&self) -> Vec<String> {
        cells(serde_json::to_value(self.view()).ok().as_ref().and_then(Value::as_object))
    }
}

/// A sum, with the common properties of its requests.
struct SumRow(Map<String, Value>);

impl Row for SumRow {
    fn number(&self) -> u64 {
        0
    }

    fn line(&self) -> String {
        serde_json::to_string(&self.0).unwrap_or_default()
    }

    fn cells(&self) -> Vec<String> {
        cells(Some(&self.0))
    }
}

/// Values in the order of their fields.
fn cells(fields: Option<&Map<String, Value>>) -> Vec<String> {
    let cell = |value: &Value| match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    fields.map(|fields| fields.values().map(cell).collect()).unwrap_or_default()
}
