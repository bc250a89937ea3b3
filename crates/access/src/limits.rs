//! Limits of keys, teams and models, and prices.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::secret::hex;

/// Maximum number of teams and models with their own settings.
const MOST_ENTRIES: usize = 1000;
/// Number of tokens for which a price is given.
const PRICED_TOKENS: f64 = 1e6;

/// Limits of one key, team or model. An absent limit allows everything.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Requests that begin within any 60 s.
    pub requests_per_minute: Option<u64>,
    /// Tokens of prompts and answers within any 60 s.
    pub tokens_per_minute: Option<u64>,
    /// Requests at a time.
    pub parallel_requests: Option<u64>,
    /// Tokens of prompts and answers within a day of UTC.
    pub tokens_per_day: Option<u64>,
    /// The same within a month.
    pub tokens_per_month: Option<u64>,
    /// Cost within a month, in the policy's currency.
    pub cost_per_month: Option<f64>,
}

/// One of the limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitKind {
    /// [`Limits::requests_per_minute`]
    RequestsPerMinute,
    /// [`Limits::tokens_per_minute`]
    TokensPerMinute,
    /// [`Limits::parallel_requests`]
    ParallelRequests,
    /// [`Limits::tokens_per_day`]
    TokensPerDay,
    /// [`Limits::tokens_per_month`]
    TokensPerMonth,
    /// [`Limits::cost_per_month`], counted in billionths of the currency's unit
    CostPerMonth,
}

impl LimitKind {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::RequestsPerMinute,
        Self::TokensPerMinute,
        Self::ParallelRequests,
        Self::TokensPerDay,
        Self::TokensPerMonth,
        Self::CostPerMonth,
    ];

    /// The field of [`Limits`].
    pub fn name(self) -> &'static str {
        match self {
            Self::RequestsPerMinute => "requests_per_minute",
            Self::TokensPerMinute => "tokens_per_minute",
            Self::ParallelRequests => "parallel_requests",
            Self::TokensPerDay => "tokens_per_day",
            Self::TokensPerMonth => "tokens_per_month",
            Self::CostPerMonth => "cost_per_month",
        }
    }
}

impl fmt::Display for LimitKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::RequestsPerMinute => "requests a minute",
            Self::TokensPerMinute => "tokens a minute",
            Self::ParallelRequests => "requests at a time",
            Self::TokensPerDay => "tokens a day",
            Self::TokensPerMonth => "tokens a month",
            Self::CostPerMonth => "cost a month",
        })
    }
}

/// A limit or price that is not valid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BadLimit {
    /// The limit allows nothing, or is not a number.
    #[error(
        "`{name}` is {value}, but must be above 0; leave it out for no limit, revoke a key to refuse everything"
    )]
    Zero {
        /// The field.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// A price or weight out of range.
    #[error("`{name}` is {value}, but must be {must_be}")]
    Range {
        /// The field.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What it may be.
        must_be: &'static str,
    },
    /// Too many teams or models.
    #[error("{count} {what} have settings, but {MOST_ENTRIES} are the most")]
    Many {
        /// Teams or models.
        what: &'static str,
        /// Their number.
        count: usize,
    },
    /// A name that cannot be shown.
    #[error("\"{0}\" is no name: use 1 to 100 characters without control characters")]
    Name(String),
    /// A currency that is none.
    #[error("`currency` is \"{0}\", but must be three capital letters, like EUR")]
    Currency(String),
}

impl Limits {
    /// One of the limits, in the unit in which it is counted.
    pub fn get(&self, kind: LimitKind) -> Option<u64> {
        match kind {
            LimitKind::RequestsPerMinute => self.requests_per_minute,
            LimitKind::TokensPerMinute => self.tokens_per_minute,
            LimitKind::ParallelRequests => self.parallel_requests,
            LimitKind::TokensPerDay => self.tokens_per_day,
            LimitKind::TokensPerMonth => self.tokens_per_month,
            LimitKind::CostPerMonth => self.cost_per_month.map(|cost| (cost * 1e9) as u64),
        }
    }

    /// These limits, completed with the limits of `other`.
    pub fn or(&self, other: &Self) -> Self {
        Self {
            requests_per_minute: self.requests_per_minute.or(other.requests_per_minute),
            tokens_per_minute: self.tokens_per_minute.or(other.tokens_per_minute),
            parallel_requests: self.parallel_requests.or(other.parallel_requests),
            tokens_per_day: self.tokens_per_day.or(other.tokens_per_day),
            tokens_per_month: self.tokens_per_month.or(other.tokens_per_month),
            cost_per_month: self.cost_per_month.or(other.cost_per_month),
        }
    }

    /// Checks that each allows something.
    ///
    /// # Errors
    /// The first that does not.
    pub fn check(&self) -> Result<(), BadLimit> {
        for kind in LimitKind::ALL {
            if self.get(kind) == Some(0) {
                let value = self.cost_per_month.filter(|_| kind == LimitKind::CostPerMonth);
                let value = value.map_or("0".to_owned(), |value| value.to_string());
                return Err(BadLimit::Zero { name: kind.name(), value });
            }
        }
        match self.cost_per_month {
            Some(cost) if !(cost.is_finite() && cost <= 1e9) => Err(BadLimit::Range {
                name: LimitKind::CostPerMonth.name(),
                value: cost,
                must_be: "above 0 and at most 1e9",
            }),
            _ => Ok(()),
        }
    }
}

/// Prices of a million tokens of a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// Tokens of prompts.
    pub input: f64,
    /// Tokens of prompts that were in the cache; absent: as `input`.
    #[serde(default)]
    pub cached: Option<f64>,
    /// Tokens of answers.
    pub output: f64,
}

impl Price {
    /// The cost in billionths of the currency's unit.
    pub fn nanos(&self, prompt: u64, cached: u64, output: u64) -> u64 {
        let cached = cached.min(prompt);
        let whole = (prompt - cached) as f64 * self.input
            + cached as f64 * self.cached.unwrap_or(self.input)
            + output as f64 * self.output;
        (whole / PRICED_TOKENS * 1e9).round() as u64
    }

    fn check(&self) -> Result<(), BadLimit> {
        let prices = [("input", self.input), ("cached", self.cached.unwrap_or(0.0)), ("output", self.output)];
        for (name, value) in prices {
            if !(0.0..=1e6).contains(&value) {
                return Err(BadLimit::Range { name, value, must_be: "0 to 1e6 per million tokens" });
            }
        }
        Ok(())
    }
}

/// A team's share and limits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TeamPolicy {
    /// Its share of the engine under load, relative to other teams' weights.
    pub weight: f64,
    /// Limits of all its keys together.
    pub limits: Limits,
}

impl Default for TeamPolicy {
    fn default() -> Self {
        Self { weight: 1.0, limits: Limits::default() }
    }
}

/// A model's limits and price.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelPolicy {
    /// Limits of all keys together.
    pub limits: Limits,
    /// What its tokens cost.
    pub price: Option<Price>,
}

/// All limits except those of single keys.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    /// Currency of prices and budgets.
    pub currency: Option<String>,
    /// Limits of each key without its own limits.
    #[serde(rename = "default")]
    pub default_limits: Limits,
    /// Teams by name. A team that is not here has weight 1 and no limits.
    pub teams: BTreeMap<String, TeamPolicy>,
    /// Models by full name or last part.
    pub models: BTreeMap<String, ModelPolicy>,
}

impl Policy {
    /// Identifies these limits: different limits have a different version.
    pub fn version(&self) -> String {
        // Maps are sorted, so equal limits give equal text. Serialization cannot fail.
        let text = serde_json::to_vec(self).unwrap_or_default();
        hex(&Sha256::digest(&text)[..8])
    }

    /// Whether this policy changes nothing in `current`. A new team or model without settings is no
    /// change: it is like one that is not named.
    pub fn changes_nothing_in(&self, current: &Self) -> bool {
        let mut policy = self.clone();
        let is_known = |name: &String| current.teams.contains_key(name);
        policy.teams.retain(|name, team| is_known(name) || *team != TeamPolicy::default());
        let is_known = |name: &String| current.models.contains_key(name);
        policy.models.retain(|name, model| is_known(name) || *model != ModelPolicy::default());
        policy == *current
    }

    /// A team's share and limits.
    pub fn team(&self, name: &str) -> TeamPolicy {
        self.teams.get(name).cloned().unwrap_or_default()
    }

    /// A model's limits and price.
    pub fn model(&self, name: &str) -> ModelPolicy {
        let last = name.rsplit('/').next().unwrap_or(name);
        self.models.get(name).or_else(|| self.models.get(last)).cloned().unwrap_or_default()
    }

    /// Checks what people type.
    ///
    /// # Errors
    /// The first value that is wrong.
    pub fn check(&self) -> Result<(), BadLimit> {
        for (what, count) in [("teams", self.teams.len()), ("models", self.models.len())] {
            if count > MOST_ENTRIES {
                return Err(BadLimit::Many { what, count });
            }
        }
        for name in self.teams.keys().chain(self.models.keys()) {
            let is_name = (1..=100).contains(&name.chars().count()) && !name.contains(char::is_control);
            if !is_name {
                return Err(BadLimit::Name(name.chars().filter(|c| !c.is_control()).take(40).collect()));
            }
        }
        if let Some(currency) = &self.currency
            && !(currency.len() == 3 && currency.bytes().all(|byte| byte.is_ascii_uppercase()))
        {
            return Err(BadLimit::Currency(currency.chars().take(40).collect()));
        }
        self.default_limits.check()?;
        for team in self.teams.values() {
            team.limits.check()?;
            if !(0.001..=1000.0).contains(&team.weight) {
                let must_be = "0.001 to 1000";
                return Err(BadLimit::Range { name: "weight", value: team.weight, must_be });
            }
        }
        for model in self.models.values() {
            model.limits.check()?;
            model.price.map_or(Ok(()), |price| price.check())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_the_prices_times_the_tokens() {
        let price = Price { input: 0.5, cached: Some(0.05), output: 1.5 };
        // 700 × 0.5 + 300 × 0.05 + 100 × 1.5 = 515 per million, in billionths 515 000.
        assert_eq!(price.nanos(1000, 300, 100), 515_000);
        assert_eq!(Price { cached: None, ..price }.nanos(1000, 300, 0), 500_000);
    }

    #[test]
    fn a_policy_is_checked_and_unknown_fields_are_refused() {
        let policy = |text: &str| serde_json::from_str::<Policy>(text);
        let good = r#"{"currency": "EUR", "teams": {"a": {"weight": 2}}, "models": {"m": {"price": {"input": 1, "output": 2}}}}"#;
        let good = policy(good).unwrap();
        good.check().unwrap();
        assert_eq!((good.team("a").weight, good.team("b").weight), (2.0, 1.0));
        assert!(good.model("org/m").price.is_some() && good.model("org/n").price.is_none());
        for bad in [
            r#"{"default": {"requests_per_minute": 0}}"#,
            r#"{"default": {"cost_per_month": -1}}"#,
            r#"{"teams": {"a": {"weight": 0}}}"#,
            r#"{"teams": {"": {}}}"#,
            r#"{"models": {"m": {"price": {"input": -1, "output": 2}}}}"#,
            r#"{"currency": "euro"}"#,
        ] {
            assert!(policy(bad).unwrap().check().is_err(), "{bad}");
        }
        assert!(policy(r#"{"default": {"requests": 3}}"#).is_err());
    }
}
