//! Counts of one meter, for another meter that counts for several.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Counts, Held, Meter, Reservation, Scope, Used};
use crate::time::Now;

/// The usage of one scope, for import into another meter: see [`Meter::export`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Age in seconds, requests and tokens, for the last minute.
    minute: Vec<(u64, u64, u64)>,
    parallel: u64,
    day: u64,
    day_tokens: u64,
    month: u64,
    month_tokens: u64,
    month_nanos: u64,
}

impl Counts {
    fn export(&mut self, now: Now) -> Share {
        self.roll(now.time);
        let mut minute: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for (age_ms, count) in self.requests.parts(now.steady_ms) {
            minute.entry(age_ms / 1000).or_default().0 += count;
        }
        for (age_ms, count) in self.tokens.parts(now.steady_ms) {
            minute.entry(age_ms / 1000).or_default().1 += count;
        }
        Share {
            minute: minute.into_iter().map(|(age, (requests, tokens))| (age, requests, tokens)).collect(),
            parallel: self.parallel,
            day: if self.day_tokens > 0 { self.day } else { 0 },
            day_tokens: self.day_tokens,
            month: if self.month_tokens > 0 { self.month } else { 0 },
            month_tokens: self.month_tokens,
            month_nanos: self.month_nanos,
        }
    }

    fn import(&mut self, share: &Share, now: Now) {
        self.roll(now.time);
        for (age_s, requests, tokens) in &share.minute {
            let age_ms = age_s.saturating_mul(1000);
            self.requests.add_earlier(now.steady_ms, age_ms, *requests);
            self.tokens.add_earlier(now.steady_ms, age_ms, *tokens);
        }
        self.parallel = self.parallel.saturating_add(share.parallel);
        if share.day == self.day {
            self.day_tokens = self.day_tokens.saturating_add(share.day_tokens);
        }
        if share.month == self.month {
            self.month_tokens = self.month_tokens.saturating_add(share.month_tokens);
            self.month_nanos = self.month_nanos.saturating_add(share.month_nanos);
        }
    }
}

impl Meter {
    /// Ends a request that is counted here without a reservation: its share was imported.
    pub fn settle_imported(&mut self, scopes: Vec<Scope>, held: Held, used: &Used, now: Now) {
        let place = |scope: Scope| {
            let counts = self.counts.entry(scope.clone()).or_default();
            counts.roll(now.time);
            (scope, (counts.tokens.add(now.steady_ms, 0), counts.day, counts.month))
        };
        let places = scopes.into_iter().map(place).collect();
        self.settle(Reservation { held, answers: 1, places }, used, now);
    }

    /// The usage of all scopes, for a meter that counts for several.
    pub fn export(&mut self, now: Now) -> Vec<(Scope, Share)> {
        let shares = self.counts.iter_mut().map(|(scope, counts)| (scope.clone(), counts.export(now)));
        shares.filter(|(_, share)| *share != Share::default()).collect()
    }

    /// Adds another meter's counts of a scope.
    pub fn import(&mut self, scope: Scope, share: &Share, now: Now) {
        self.counts.entry(scope).or_default().import(share, now);
    }
}
