//! Whose prompts and answers are kept.

use serde::{Deserialize, Serialize};

use super::redact::{BadPattern, Redaction, Redactor};
use crate::key::Key;

/// Maximum number of names in a list of a policy.
const MOST_NAMES: usize = 1000;
/// Maximum number of days for which a policy may keep texts.
const MOST_DAYS: u32 = 3650;

/// Whose prompts and answers are kept. By default nobody's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KeepPolicy {
    /// Everybody's.
    pub all: bool,
    /// Those of these keys, by name or id.
    pub keys: Vec<String>,
    /// Those of these teams.
    pub teams: Vec<String>,
    /// Those for these models, by full name or last part.
    pub models: Vec<String>,
    /// Kinds of text that are replaced before writing.
    pub redact: Vec<Redaction>,
    /// Further regular expressions whose matches are replaced.
    pub patterns: Vec<String>,
    /// Days that texts are kept.
    pub days: u32,
}

impl Default for KeepPolicy {
    fn default() -> Self {
        Self {
            all: false,
            keys: Vec::new(),
            teams: Vec::new(),
            models: Vec::new(),
            redact: Redaction::ALL.to_vec(),
            patterns: Vec::new(),
            days: 30,
        }
    }
}

/// Why a policy is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadKeepPolicy {
    /// Too short or too long.
    #[error("`days` is {0}, but must be 1 to {MOST_DAYS}")]
    Days(u32),
    /// Too many names.
    #[error("`{list}` has {count} entries, {MOST_NAMES} are the most")]
    Many {
        /// The field.
        list: &'static str,
        /// Its entries.
        count: usize,
    },
    /// A pattern that is none.
    #[error(transparent)]
    Pattern(#[from] BadPattern),
}

impl KeepPolicy {
    /// Whether the policy keeps anything.
    pub fn is_on(&self) -> bool {
        self.all || !(self.keys.is_empty() && self.teams.is_empty() && self.models.is_empty())
    }

    /// Replaces a policy that this version cannot read: nothing more is kept, and nothing is
    /// removed.
    pub fn unknown() -> Self {
        Self { days: MOST_DAYS, ..Self::default() }
    }

    /// Whether a request's texts are kept.
    pub(super) fn covers(&self, key: Option<&Key>, model: &str) -> bool {
        let last = model.rsplit('/').next().unwrap_or(model);
        let names = |list: &[String], name: &str| list.iter().any(|one| one == name);
        let by_key = |key: &Key| {
            let team = key.team.as_deref();
            names(&self.keys, &key.name)
                || names(&self.keys, &key.id)
                || team.is_some_and(|team| names(&self.teams, team))
        };
        self.all || names(&self.models, model) || names(&self.models, last) || key.is_some_and(by_key)
    }

    pub(super) fn check(&self) -> Result<Redactor, BadKeepPolicy> {
        if !(1..=MOST_DAYS).contains(&self.days) {
            return Err(BadKeepPolicy::Days(self.days));
        }
        for (list, names) in [("keys", &self.keys), ("teams", &self.teams), ("models", &self.models)] {
            if names.len() > MOST_NAMES {
                return Err(BadKeepPolicy::Many { list, count: names.len() });
            }
        }
        Ok(Redactor::new(&self.redact, &self.patterns)?)
    }
}
