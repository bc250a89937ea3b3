//! Usage: one record for each request, and sums.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::time::Time;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The model ended its answer.
    Stop,
    /// The answer reached its limit.
    Length,
    /// The model calls tools.
    Calls,
    /// The client went away.
    Cancelled,
    /// The engine failed.
    Failed,
    /// A limit refused it.
    Refused,
}

impl Outcome {
    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Calls => "calls",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
            Self::Refused => "refused",
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Usage of one request, without its prompt and answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UsageRecord {
    /// Ascending, without gaps, from 1.
    pub number: u64,
    /// The response's id.
    pub id: String,
    /// When it ended.
    pub time: Time,
    /// Name of its key.
    pub key: Option<String>,
    /// Id of its key.
    pub key_id: Option<String>,
    /// The key's owner.
    pub owner: Option<String>,
    /// The key's team.
    pub team: Option<String>,
    /// The model, by its full name.
    pub model: String,
    /// Path that it came by.
    pub api: String,
    /// Node that computed it.
    pub node: Option<String>,
    /// How it ended.
    pub outcome: Outcome,
    /// HTTP status.
    pub status: u16,
    /// Number of requests in this record: refusals within a second form one record.
    pub count: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Of these, found in the cache.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub completion_tokens: u64,
    /// The cost in billionths of the currency's unit.
    pub cost_nanos: u64,
    /// Time until the request's turn.
    pub queue_us: u64,
    /// From the request to its first token.
    pub first_token_us: u64,
    /// From the request to its end.
    pub duration_us: u64,
}

/// A record as people and programs see it.
#[derive(Debug, Clone, Serialize)]
pub struct UsageView<'a> {
    number: u64,
    id: &'a str,
    time: Time,
    key: Option<&'a str>,
    key_id: Option<&'a str>,
    owner: Option<&'a str>,
    team: Option<&'a str>,
    model: &'a str,
    api: &'a str,
    node: Option<&'a str>,
    outcome: Outcome,
    status: u16,
    count: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
    cost: f64,
    queue_s: f64,
    time_to_first_token_s: f64,
    duration_s: f64,
}

impl UsageRecord {
    /// The record as people and programs see it.
    pub fn view(&self) -> UsageView<'_> {
        let seconds = |us: u64| us as f64 / 1e6;
        UsageView {
            number: self.number,
            id: &self.id,
            time: self.time,
            key: self.key.as_deref(),
            key_id: self.key_id.as_deref(),
            owner: self.owner.as_deref(),
            team: self.team.as_deref(),
            model: &self.model,
            api: &self.api,
            node: self.node.as_deref(),
            outcome: self.outcome,
            status: self.status,
            count: self.count,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            completion_tokens: self.completion_tokens,
            cost: self.cost_nanos as f64 / 1e9,
            queue_s: seconds(self.queue_us),
            time_to_first_token_s: seconds(self.first_token_us),
            duration_s: seconds(self.duration_us),
        }
    }
}

/// Sums over requests. Refused requests are counted separately.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sums {
    requests: u64,
    failed: u64,
    cancelled: u64,
    refused: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    cached_tokens: u64,
    /// Tokens of answers.
    pub completion_tokens: u64,
    /// Cost in billionths of the currency's unit.
    pub cost_nanos: u64,
    first_token_us: u64,
    duration_us: u64,
}

impl Sums {
    /// Adds a request.
    pub fn add(&mut self, record: &UsageRecord) {
        if record.outcome == Outcome::Refused {
            self.refused += record.count;
            return;
        }
        self.requests += 1;
        self.failed += u64::from(record.outcome == Outcome::Failed);
        self.cancelled += u64::from(record.outcome == Outcome::Cancelled);
        self.prompt_tokens += record.prompt_tokens;
        self.cached_tokens += record.cached_tokens;
        self.completion_tokens += record.completion_tokens;
        self.cost_nanos += record.cost_nanos;
        self.first_token_us += record.first_token_us;
        self.duration_us += record.duration_us;
    }

    /// Adds other sums.
    pub fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.failed += other.failed;
        self.cancelled += other.cancelled;
        self.refused += other.refused;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.completion_tokens += other.completion_tokens;
        self.cost_nanos += other.cost_nanos;
        self.first_token_us += other.first_token_us;
        self.duration_us += other.duration_us;
    }

    /// The sums as people and programs see them.
    pub fn totals(&self) -> Totals {
        let mean = |us: u64| us as f64 / 1e6 / self.requests.max(1) as f64;
        Totals {
            requests: self.requests,
            failed: self.failed,
            cancelled: self.cancelled,
            refused: self.refused,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            completion_tokens: self.completion_tokens,
            cost: self.cost_nanos as f64 / 1e9,
            time_to_first_token_s: mean(self.first_token_us),
            duration_s: mean(self.duration_us),
        }
    }
}

/// [`Sums`] as people and programs see them: times are means.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Requests that were not refused.
    pub requests: u64,
    /// Of these, requests that failed in the engine.
    pub failed: u64,
    /// Of these, requests whose client disconnected.
    pub cancelled: u64,
    /// Requests that a limit refused.
    pub refused: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Of these, found in the cache.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub completion_tokens: u64,
    /// Cost in the policy's currency.
    pub cost: f64,
    /// Mean time from a request to its first token.
    pub time_to_first_token_s: f64,
    /// Mean time of a request.
    pub duration_s: f64,
}

/// Properties by which sums are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum By {
    /// Name of the key.
    Key,
    /// Team.
    Team,
    /// Model.
    Model,
    /// Owner of the key.
    Owner,
    /// How requests ended.
    Outcome,
    /// Node.
    Node,
    /// Day of UTC.
    Day,
    /// Hour of UTC.
    Hour,
}

impl By {
    /// All dimensions, with their names.
    pub const ALL: [(&'static str, Self); 8] = [
        ("key", Self::Key),
        ("team", Self::Team),
        ("model", Self::Model),
        ("owner", Self::Owner),
        ("outcome", Self::Outcome),
        ("node", Self::Node),
        ("day", Self::Day),
        ("hour", Self::Hour),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, by)| *by == self).map_or("", |(name, _)| name)
    }
}

/// The common properties of the requests of one sum.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Dimensions {
    /// Name of the key.
    pub key: Option<String>,
    /// Id of the key.
    pub key_id: Option<String>,
    /// Owner of the key.
    pub owner: Option<String>,
    /// Team.
    pub team: Option<String>,
    /// Model.
    pub model: String,
    /// Node.
    pub node: Option<String>,
    /// How requests ended.
    pub outcome: Outcome,
}

impl Dimensions {
    /// Those of a record.
    pub fn of(record: &UsageRecord) -> Self {
        Self {
            key: record.key.clone(),
            key_id: record.key_id.clone(),
            owner: record.owner.clone(),
            team: record.team.clone(),
            model: record.model.clone(),
            node: record.node.clone(),
            outcome: record.outcome,
        }
    }

    /// The value of one dimension; `hour` is the moment that the sum's hour begins.
    pub fn value(&self, by: By, hour: Time) -> Option<String> {
        match by {
            By::Key => self.key.clone(),
            By::Team => self.team.clone(),
            By::Model => Some(self.model.clone()),
            By::Owner => self.owner.clone(),
            By::Outcome => Some(self.outcome.name().to_owned()),
            By::Node => self.node.clone(),
            By::Day => Some(hour.date()),
            By::Hour => Some(hour.to_string()),
        }
    }
}

/// A query for requests.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Filter {
    /// From this moment.
    pub since: Option<Time>,
    /// Before this moment.
    pub until: Option<Time>,
    /// Name or id of the key.
    pub key: Option<String>,
    /// Team.
    pub team: Option<String>,
    /// Model, by full name or last part.
    pub model: Option<String>,
    /// How they ended.
    pub outcome: Option<Outcome>,
}

impl Filter {
    /// Whether the query includes requests with these dimensions. Times are not checked.
    pub fn fits(&self, of: &Dimensions) -> bool {
        let is = |asked: &Option<String>, value: &Option<String>| asked.is_none() || asked == value;
        let key = self.key.is_none() || self.key == of.key || self.key == of.key_id;
        let last = of.model.rsplit('/').next().unwrap_or_default();
        let model = self.model.as_ref().is_none_or(|model| *model == of.model || model == last);
        key && is(&self.team, &of.team) && model && self.outcome.is_none_or(|asked| asked == of.outcome)
    }

    /// Whether the query includes a moment.
    pub fn holds(&self, time: Time) -> bool {
        self.since.is_none_or(|since| since <= time) && self.until.is_none_or(|until| time < until)
    }
}

/// Sums, by the values of their dimensions.
pub type Groups = BTreeMap<Vec<Option<String>>, Sums>;
