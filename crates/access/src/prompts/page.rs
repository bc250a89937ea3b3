//! Reading kept prompts: the newest first, in pages, from one server or several.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::KeptPrompt;
use crate::time::Time;
use crate::usage::Filter;

/// The place of a kept prompt in lists, for all servers: later prompts come first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    time: Time,
    id: String,
}

/// A text is no place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no place in a list of prompts")]
pub struct BadPlace(String);

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.time, self.id)
    }
}

impl FromStr for Place {
    type Err = BadPlace;

    fn from_str(text: &str) -> Result<Self, BadPlace> {
        let place = text
            .split_once('/')
            .and_then(|(time, id)| Some(Self { time: time.parse().ok()?, id: id.to_owned() }));
        place.ok_or_else(|| BadPlace(text.chars().take(60).collect()))
    }
}

impl KeptPrompt {
    pub(super) fn place(&self) -> Place {
        Place { time: self.time, id: self.id.clone() }
    }
}

/// A query for kept prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PromptsAsk {
    /// Of these requests.
    pub filter: Filter,
    /// Older than this one.
    pub before: Option<Place>,
    /// Prompts at most.
    pub limit: usize,
}

impl PromptsAsk {
    /// Whether the query may include texts of a day.
    pub(super) fn may_be_of(&self, day: &str) -> bool {
        let Filter { since, until, .. } = &self.filter;
        let before = self.before.as_ref().map(|place| place.time);
        since.is_none_or(|since| *day >= *since.date())
            && [*until, before].iter().flatten().all(|last| *day <= *last.date())
    }

    pub(super) fn fits(&self, kept: &KeptPrompt) -> bool {
        kept.fits(&self.filter) && self.before.as_ref().is_none_or(|before| kept.place() < *before)
    }
}

/// A page of the prompts of a query.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct KeptPage {
    /// The newest first.
    pub prompts: Vec<KeptPrompt>,
    /// There may be older ones.
    pub has_more: bool,
}

impl KeptPage {
    /// Joins the pages of several servers to one page of at most `limit` prompts.
    pub(crate) fn merge(pages: Vec<Self>, limit: usize) -> Self {
        // Prompts older than the end of a server's page may be on that server's next page.
        let ends = pages.iter().filter(|page| page.has_more);
        let end = ends.filter_map(|page| page.prompts.last()).map(KeptPrompt::place).max();
        let mut prompts: Vec<KeptPrompt> = pages.into_iter().flat_map(|page| page.prompts).collect();
        prompts.sort_by_key(|kept| std::cmp::Reverse(kept.place()));
        let is_known = |kept: &KeptPrompt| end.as_ref().is_none_or(|end| kept.place() >= *end);
        let known = prompts.iter().take_while(|kept| is_known(kept)).count().min(limit);
        let has_more = end.is_some() || known < prompts.len();
        prompts.truncate(known);
        Self { prompts, has_more }
    }

    /// The value of [`PromptsAsk::before`] for the next page, if there may be one.
    pub fn next(&self) -> Option<Place> {
        self.prompts.last().filter(|_| self.has_more).map(KeptPrompt::place)
    }
}
