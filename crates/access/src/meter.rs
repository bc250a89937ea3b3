//! Counts the usage of keys, teams and models, and admits a request if all their limits allow it.
//!
//! A request reserves its prompt and the longest answer that it asks for. When it ends, its actual
//! usage replaces the reservation. So requests that state their maximum length never exceed a
//! limit.

mod headers;
mod share;

use std::collections::HashMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::limits::{LimitKind, Limits};
use crate::time::{DAY_MS, Now, Time};
use crate::window::{Slice, Window};

pub use headers::{EXPOSED_HEADERS, rate_headers};
pub use share::Share;

/// Expected answer tokens for a key without history.
const FIRST_EXPECTED_TOKENS: f64 = 256.0;
/// Weight of the latest answer in the running mean that predicts the next answer's length.
const EXPECTED_WEIGHT: f64 = 0.1;

/// What a limit is of.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Scope {
    /// A key, by its id.
    Key(String),
    /// A team, by its name.
    Team(String),
    /// A model, by its name.
    Model(String),
}

impl Scope {
    /// The kind of scope.
    pub fn kind(&self) -> ScopeKind {
        match self {
            Self::Key(_) => ScopeKind::Key,
            Self::Team(_) => ScopeKind::Team,
            Self::Model(_) => ScopeKind::Model,
        }
    }

    /// Its id or name.
    pub fn name(&self) -> &str {
        match self {
            Self::Key(name) | Self::Team(name) | Self::Model(name) => name,
        }
    }
}

/// The kind of scope that a limit applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScopeKind {
    /// A key.
    Key,
    /// A team.
    Team,
    /// A model.
    Model,
}

impl ScopeKind {
    /// `key`, `team` or `model`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Team => "team",
            Self::Model => "model",
        }
    }
}

impl fmt::Display for ScopeKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A scope with its limits and its display name.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Limited {
    /// What is limited.
    pub scope: Scope,
    /// How people call it.
    pub label: String,
    /// Its limits.
    pub limits: Limits,
}

/// The known maximum usage of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Ask {
    /// Tokens of its prompts.
    pub prompt_tokens: u64,
    /// Maximum tokens of all its answers, if the request sets it.
    pub answer_tokens: Option<u64>,
    /// Answers.
    pub answers: u64,
    /// Cost of a prompt token, and of an answer's token, in billionths of the currency's unit.
    pub token_nanos: (f64, f64),
}

/// What a request used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    /// Tokens of its prompts.
    pub prompt_tokens: u64,
    /// Tokens of its answers.
    pub answer_tokens: u64,
    /// The cost in billionths of the currency's unit.
    pub nanos: u64,
}

/// Why a request has to wait.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Refusal {
    /// A key, a team or a model.
    pub scope: ScopeKind,
    /// Name of that key, team or model.
    pub name: String,
    /// The limit that was hit.
    pub limit: LimitKind,
    /// What it allows.
    pub allowed: u64,
    /// What is in use.
    pub used: u64,
    /// The amount that the request would add.
    pub asked: u64,
    /// When to try again; `None`: the request alone exceeds the limit.
    pub retry_after_ms: Option<u64>,
    /// Of a cost, if the policy names one.
    #[serde(default)]
    pub currency: Option<String>,
    /// The state of all limits of the request. Nodes of earlier versions do not send it.
    #[serde(default)]
    pub standings: Vec<Standing>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scope, name, limit, allowed, used, asked, .. } = self;
        let show = |count: u64| match (limit, &self.currency) {
            (LimitKind::CostPerMonth, Some(currency)) => format!("{} {currency}", money(count)),
            (LimitKind::CostPerMonth, None) => money(count),
            _ => count.to_string(),
        };
        let (allowed, used, asked) = (show(*allowed), show(*used), show(*asked));
        write!(formatter, "the limit of {allowed} {limit} of {scope} \"{name}\"")?;
        match self.retry_after_ms {
            None if *limit == LimitKind::CostPerMonth => {
                write!(formatter, " is below what this request may cost ({asked}): lower max_tokens")
            }
            None => write!(
                formatter,
                " is below what this request may use ({asked}, its prompt and max_tokens): lower max_tokens"
            ),
            Some(ms) => write!(
                formatter,
                " is reached: {used} in use, this request needs {asked}; try again in {}",
                Wait(ms)
            ),
        }
    }
}

/// Formats billionths of the currency's unit exactly, with at least two decimals.
fn money(nanos: u64) -> String {
    let decimals = format!("{:09}", nanos % 1_000_000_000);
    let needed = decimals.trim_end_matches('0').len().max(2);
    format!("{}.{}", nanos / 1_000_000_000, &decimals[..needed])
}

/// Formats a time to wait, for people.
struct Wait(u64);

impl fmt::Display for Wait {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.div_ceil(1000);
        match seconds {
            0..=119 => write!(formatter, "{seconds} s"),
            120..=7199 => write!(formatter, "{} minutes", seconds.div_ceil(60)),
            _ => write!(formatter, "{} hours", seconds.div_ceil(3600)),
        }
    }
}

/// The state of one limit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Standing {
    /// A key, a team or a model.
    pub scope: ScopeKind,
    /// Name of that key, team or model.
    pub name: String,
    /// Which limit.
    pub limit: LimitKind,
    /// What it allows.
    pub allowed: f64,
    /// What is in use.
    pub used: f64,
    /// What is left.
    pub left: f64,
    /// Seconds until no usage counts any more; `null` for parallel requests.
    pub resets_s: Option<f64>,
}

/// What one scope used.
#[derive(Debug, Default)]
struct Counts {
    requests: Window,
    tokens: Window,
    parallel: u64,
    day: u64,
    day_tokens: u64,
    month: u64,
    month_tokens: u64,
    month_nanos: u64,
    /// Mean length of answers.
    expected: Option<f64>,
    last_used: Option<Time>,
}

impl Counts {
    fn roll(&mut self, time: Time) {
        if self.day != time.day() {
            (self.day, self.day_tokens) = (time.day(), 0);
        }
        if self.month != time.month() {
            (self.month, self.month_tokens, self.month_nanos) = (time.month(), 0, 0);
        }
    }

    /// The used part of a limit.
    fn used(&mut self, kind: LimitKind, now: Now) -> u64 {
        self.roll(now.time);
        match kind {
            LimitKind::RequestsPerMinute => self.requests.total(now.steady_ms),
            LimitKind::TokensPerMinute => self.tokens.total(now.steady_ms),
            LimitKind::ParallelRequests => self.parallel,
            LimitKind::TokensPerDay => self.day_tokens,
            LimitKind::TokensPerMonth => self.month_tokens,
            LimitKind::CostPerMonth => self.month_nanos,
        }
    }

    /// Milliseconds until at most `left` of a limit is in use.
    fn wait(&mut self, kind: LimitKind, left: u64, now: Now) -> u64 {
        match kind {
            LimitKind::RequestsPerMinute => self.requests.wait_until(now.steady_ms, left),
            LimitKind::TokensPerMinute => self.tokens.wait_until(now.steady_ms, left),
            // The end of an answer is not known in advance.
            LimitKind::ParallelRequests => 1000,
            LimitKind::TokensPerDay => DAY_MS - now.time.0 % DAY_MS,
            LimitKind::TokensPerMonth | LimitKind::CostPerMonth => now.time.next_month().0 - now.time.0,
        }
    }

    fn reserve(&mut self, held: &Held, now: Now) -> (Slice, u64, u64) {
        self.roll(now.time);
        self.requests.add(now.steady_ms, 1);
        self.parallel += 1;
        self.day_tokens += held.tokens;
        self.month_tokens += held.tokens;
        self.month_nanos += held.nanos;
        self.last_used = Some(now.time);
        (self.tokens.add(now.steady_ms, held.tokens), self.day, self.month)
    }

    /// Replaces a reservation with the actual usage.
    fn settle(&mut self, held: &Held, at: (Slice, u64, u64), used: &Used, now: Now) {
        self.roll(now.time);
        self.parallel = self.parallel.saturating_sub(1);
        let (slice, day, month) = at;
        let tokens = used.prompt_tokens + used.answer_tokens;
        if tokens >= held.tokens {
            self.tokens.add(now.steady_ms, tokens - held.tokens);
        } else {
            self.tokens.take_back(now.steady_ms, slice, held.tokens - tokens);
        }
        if day == self.day {
            self.day_tokens = self.day_tokens.saturating_sub(held.tokens);
        }
        if month == self.month {
            self.month_tokens = self.month_tokens.saturating_sub(held.tokens);
            self.month_nanos = self.month_nanos.saturating_sub(held.nanos);
        }
        self.day_tokens += tokens;
        self.month_tokens += tokens;
        self.month_nanos += used.nanos;
    }
}

/// What a request holds.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Held {
    tokens: u64,
    nanos: u64,
}

/// An admitted request. It counts until it is settled.
#[derive(Debug)]
#[must_use = "a reservation counts until it is settled"]
pub struct Reservation {
    held: Held,
    answers: u64,
    places: Vec<(Scope, (Slice, u64, u64))>,
}

impl Reservation {
    /// Tokens that it holds.
    pub fn tokens(&self) -> u64 {
        self.held.tokens
    }

    /// What it holds.
    pub fn held(&self) -> Held {
        self.held
    }
}

/// Counts of all scopes.
#[derive(Debug, Default)]
pub struct Meter {
    counts: HashMap<Scope, Counts>,
}

impl Meter {
    /// Sets the usage of a scope's day and month, after a start.
    pub fn resume(&mut self, scope: Scope, day_tokens: u64, month: (u64, u64), now: Now) {
        let counts = self.counts.entry(scope).or_default();
        counts.roll(now.time);
        counts.day_tokens = day_tokens;
        (counts.month_tokens, counts.month_nanos) = month;
    }

    /// Admits a request if all limits allow it, and counts it.
    ///
    /// # Errors
    /// The limit that is hit: of several, the one with the longest wait.
    pub fn admit(&mut self, limited: &[Limited], ask: &Ask, now: Now) -> Result<Reservation, Refusal> {
        let held = self.held(limited, ask);
        match self.refusal(limited, &held, now) {
            Some(refusal) => Err(refusal),
            None => Ok(self.hold(limited, held, ask, now)),
        }
    }

    /// Counts a request without checking limits, because another meter has admitted it.
    pub fn reserve(&mut self, limited: &[Limited], ask: &Ask, now: Now) -> Reservation {
        let held = self.held(limited, ask);
        self.hold(limited, held, ask, now)
    }

    /// Expected answer tokens, from the earlier answers of the key.
    pub fn expected(&self, limited: &[Limited], answers: u64) -> u64 {
        let expected = limited.first().and_then(|first| self.counts.get(&first.scope)?.expected);
        (expected.unwrap_or(FIRST_EXPECTED_TOKENS) * answers.max(1) as f64).ceil() as u64
    }

    fn held(&self, limited: &[Limited], ask: &Ask) -> Held {
        let answer = ask.answer_tokens.unwrap_or_else(|| self.expected(limited, ask.answers));
        let (input, output) = ask.token_nanos;
        let nanos = (ask.prompt_tokens as f64 * input + answer as f64 * output).ceil() as u64;
        Held { tokens: ask.prompt_tokens.saturating_add(answer), nanos }
    }

    fn hold(&mut self, limited: &[Limited], held: Held, ask: &Ask, now: Now) -> Reservation {
        let places = limited.iter().map(|limited| {
            let at = self.counts.entry(limited.scope.clone()).or_default().reserve(&held, now);
            (limited.scope.clone(), at)
        });
        Reservation { held, answers: ask.answers.max(1), places: places.collect() }
    }

    /// Whether any request of this key would be refused. Counts nothing.
    ///
    /// # Errors
    /// The limit that is hit.
    pub fn check(&mut self, limited: &[Limited], now: Now) -> Result<(), Refusal> {
        self.refusal(limited, &Held { tokens: 1, nanos: 0 }, now).map_or(Ok(()), Err)
    }

    fn refusal(&mut self, limited: &[Limited], held: &Held, now: Now) -> Option<Refusal> {
        let mut worst: Option<Refusal> = None;
        for Limited { scope, label, limits } in limited {
            let counts = self.counts.entry(scope.clone()).or_default();
            for limit in LimitKind::ALL {
                let Some(allowed) = limits.get(limit) else { continue };
                let asked = match limit {
                    LimitKind::RequestsPerMinute | LimitKind::ParallelRequests => 1,
                    LimitKind::CostPerMonth => held.nanos,
                    _ => held.tokens,
                };
                let used = counts.used(limit, now);
                // A used-up budget also refuses requests that cost nothing.
                let is_full = limit == LimitKind::CostPerMonth && used >= allowed;
                if used.saturating_add(asked) <= allowed && !is_full {
                    continue;
                }
                let left = allowed.checked_sub(asked);
                let retry_after_ms = left.map(|left| counts.wait(limit, left, now).max(1));
                let (kind, name) = (scope.kind(), label.clone());
                let standings = Vec::new();
                let refusal = Refusal {
                    scope: kind,
                    name,
                    limit,
                    allowed,
                    used,
                    asked,
                    retry_after_ms,
                    currency: None,
                    standings,
                };
                let wait = |refusal: &Refusal| refusal.retry_after_ms.unwrap_or(u64::MAX);
                if worst.as_ref().is_none_or(|worst| wait(worst) < wait(&refusal)) {
                    worst = Some(refusal);
                }
            }
        }
        worst.map(|worst| Refusal { standings: self.standings(limited, now), ..worst })
    }

    /// Ends a request: its actual usage replaces the reservation.
    pub fn settle(&mut self, reservation: Reservation, used: &Used, now: Now) {
        for (nth, (scope, at)) in reservation.places.into_iter().enumerate() {
            let counts = self.counts.entry(scope).or_default();
            counts.settle(&reservation.held, at, used, now);
            if nth == 0 && used.answer_tokens > 0 {
                let mean = used.answer_tokens as f64 / reservation.answers as f64;
                let before = counts.expected.unwrap_or(mean);
                counts.expected = Some(before + (mean - before) * EXPECTED_WEIGHT);
            }
        }
    }

    /// The state of all limits that are set.
    pub fn standings(&mut self, limited: &[Limited], now: Now) -> Vec<Standing> {
        let mut standings = Vec::new();
        for Limited { scope, label, limits } in limited {
            let counts = self.counts.entry(scope.clone()).or_default();
            for limit in LimitKind::ALL {
                let Some(allowed) = limits.get(limit) else { continue };
                let used = counts.used(limit, now);
                let unit = if limit == LimitKind::CostPerMonth { 1e9 } else { 1.0 };
                let resets_ms = (limit != LimitKind::ParallelRequests)
                    .then(|| if used == 0 { 0 } else { counts.wait(limit, 0, now) });
                standings.push(Standing {
                    scope: scope.kind(),
                    name: label.clone(),
                    limit,
                    allowed: allowed as f64 / unit,
                    used: used as f64 / unit,
                    left: allowed.saturating_sub(used) as f64 / unit,
                    resets_s: resets_ms.map(|ms| ms as f64 / 1e3),
                });
            }
        }
        standings
    }

    /// When a scope last began a request.
    pub fn last_used(&self, scope: &Scope) -> Option<Time> {
        self.counts.get(scope)?.last_used
    }

    /// Keys that have begun a request.
    pub fn keys_seen(&self) -> usize {
        let seen = |(scope, counts): &(&Scope, &Counts)| {
            matches!(scope, Scope::Key(_)) && counts.last_used.is_some()
        };
        self.counts.iter().filter(seen).count()
    }

    /// Removes a scope that no longer exists.
    pub fn forget(&mut self, scope: &Scope) {
        self.counts.remove(scope);
    }
}

#[cfg(test)]
#[path = "meter_tests.rs"]
mod tests;
