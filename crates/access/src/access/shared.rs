//! Keys and limits shared by several servers, and the usage and audit records of each.
//!
//! Each server counts the requests of its own clients and keeps their records. The servers agree on
//! one of them that counts for all: it imports every server's counts, and admits the requests of
//! all ([`crate::Meter`]).

use std::fmt::Debug;
use std::sync::{Arc, PoisonError};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Access, lock};
use crate::audit::{Actor, Chain, Entry, Sealed};
use crate::error::AccessError;
use crate::key::StoredKey;
use crate::limits::Policy;
use crate::meter::{Ask, Limited, Reservation, Scope, Share, Standing};
use crate::prompts::{KeepPolicy, KeptPage, PromptsAsk};
use crate::store::AuditFilter;
use crate::time::{HOUR_MS, Now, Time};
use crate::usage::{By, Filter, Groups, Sums, UsageRecord};

/// Numbers for each millisecond in lists of several servers. With this value, a number fits into
/// the 53 bits of JavaScript's numbers until 2039.
const NUMBERS_OF_MS: u64 = NUMBERS_OF_NODE * NUMBERS_OF_NODE;
/// Numbers of one server within a millisecond, and the number of servers that can be distinguished.
const NUMBERS_OF_NODE: u64 = 64;

/// The other servers. Each call may block on the network: call it only where blocking is allowed.
pub trait Peers: Debug + Send + Sync {
    /// Sends a key to all servers; it replaces a key with the same id.
    ///
    /// # Errors
    /// Why they do not take it, in words.
    fn put_key(&self, key: &StoredKey) -> Result<(), String>;

    /// Sends the limits to all servers.
    ///
    /// # Errors
    /// Why they do not take them, in words.
    fn put_policy(&self, policy: &Policy) -> Result<(), String>;

    /// Sends the policy of kept prompts to all servers.
    ///
    /// # Errors
    /// Why they do not take it, in words.
    fn put_keep_policy(&self, policy: &KeepPolicy) -> Result<(), String>;

    /// Asks the other servers for their records. Each entry has the server's name, with its answer
    /// or the reason why it is missing.
    fn look(&self, wanted: &Wanted) -> Vec<(String, Result<Found, String>)>;

    /// The state of limits, counted over all servers; `None` if this server counts alone.
    fn standings(&self, limited: &[Limited]) -> Option<Vec<Standing>>;
}

/// A query for a server's records.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Wanted {
    /// Sums of whole hours.
    Sums {
        /// Of these requests.
        filter: Filter,
        /// Divided by these.
        by: Vec<By>,
    },
    /// Usage records, newest first.
    Records {
        /// Of these requests.
        filter: Filter,
        /// With smaller numbers.
        before: Option<u64>,
        /// Records at most.
        limit: usize,
    },
    /// Entries of the audit log, newest first.
    Audit {
        /// These entries.
        filter: AuditFilter,
        /// With smaller numbers.
        before: Option<u64>,
        /// Entries at most.
        limit: usize,
    },
    /// A check of the audit log.
    Verify,
    /// Kept prompts. The server notes in its audit log that they were read.
    Prompts {
        /// Which ones.
        ask: PromptsAsk,
        /// Who reads them.
        reader: Actor,
        /// Name of the server that was asked.
        by: String,
    },
    /// Number of prompts that should have been kept and were not.
    PromptsLost,
}

/// What a server keeps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Found {
    /// Sums, by the values of their dimensions.
    Sums(Vec<(Vec<Option<String>>, Sums)>),
    /// Usage records.
    Records(Vec<UsageRecord>),
    /// Numbers and entries of the audit log.
    Audit(Vec<(u64, Sealed)>),
    /// Entries of an audit log that is intact, and its last hash.
    Chain(u64, String),
    /// Kept prompts.
    Prompts(KeptPage),
    /// Prompts that should have been kept and were not, since the server's start.
    PromptsLost(u64),
}

/// The records of several servers, and the reasons why some are missing.
pub type Gathered<T> = (T, Vec<String>);

/// What servers share.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Shared {
    /// The keys, with the hashes of their secrets.
    pub keys: Vec<StoredKey>,
    /// All limits except those of single keys.
    pub policy: Policy,
    /// Whose prompts and answers are kept.
    pub keep: KeepPolicy,
}

/// A number for lists of several servers: later records have larger numbers. Within one
/// millisecond, the server's name and the record's own number make the difference.
fn listed(node: u64, time: Time, number: u64) -> u64 {
    let within = node % NUMBERS_OF_NODE * NUMBERS_OF_NODE + number % NUMBERS_OF_NODE;
    time.0.saturating_mul(NUMBERS_OF_MS).saturating_add(within)
}

impl Access {
    /// Makes this server share keys and limits from now on. `node` is its name.
    pub fn share(&self, node: &str, peers: Arc<dyn Peers>) {
        // A server shares once, for as long as it lives.
        let _ = self.0.store.node.set(node.to_owned());
        let _ = self.0.peers.set(peers);
    }

    /// Whether keys and limits of the store are those of a cluster.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn is_shared(&self) -> Result<bool, AccessError> {
        self.0.store.is_shared()
    }

    /// The keys, limits and policy that this server shares.
    pub fn shared(&self) -> Shared {
        let keys = self.0.keys.read().unwrap_or_else(PoisonError::into_inner);
        let keys = keys.values().map(|key| key.as_ref().clone()).collect();
        Shared { keys, policy: self.policy().as_ref().clone(), keep: self.keep_policy() }
    }

    /// Applies the cluster's keys and limits at once; [`Access::keep_shared`] writes them to the
    /// store.
    pub fn adopt(&self, Shared { keys, policy, keep }: Shared) {
        self.0.prompts.follow(keep);
        let keys = keys.into_iter().map(|stored| (stored.key.lookup().to_owned(), Arc::new(stored)));
        *self.0.keys.write().unwrap_or_else(PoisonError::into_inner) = keys.collect();
        *self.0.policy.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(policy);
    }

    /// Writes the cluster's keys and limits to the store, for backups and for the next start.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn keep_shared(&self) -> Result<(), AccessError> {
        self.0.store.put_shared(&self.shared())
    }

    pub(super) fn peers(&self) -> Option<&Arc<dyn Peers>> {
        self.0.peers.get()
    }

    pub(super) fn ask_others(&self, wanted: &Wanted) -> Vec<(String, Result<Found, String>)> {
        self.peers().map(|peers| peers.look(wanted)).unwrap_or_default()
    }

    /// Sends a key to the other servers, if there are any.
    pub(super) fn give_key(&self, key: &StoredKey) -> Result<(), AccessError> {
        self.peers().map_or(Ok(()), |peers| peers.put_key(key).map_err(AccessError::Peers))
    }

    /// Completes a request's ask with the expected length of its answer and the prices of the
    /// model's tokens.
    pub fn estimate(&self, limited: &[Limited], model: &str, ask: &Ask) -> Ask {
        let likely = || lock(&self.0.meter).expected(limited, ask.answers);
        let answer_tokens = Some(ask.answer_tokens.unwrap_or_else(likely));
        Ask { answer_tokens, ..self.priced(model, ask) }
    }

    /// Counts a request that was admitted by the server that counts for all.
    pub fn reserve(&self, limited: &[Limited], ask: &Ask, now: Now) -> Reservation {
        lock(&self.0.meter).reserve(limited, ask, now)
    }

    /// The usage of this server's clients.
    pub fn shares(&self, now: Now) -> Vec<(Scope, Share)> {
        lock(&self.0.meter).export(now)
    }

    /// What this server keeps.
    ///
    /// # Errors
    /// When the disk fails, or the audit log was changed.
    pub fn look(&self, wanted: &Wanted) -> Result<Found, AccessError> {
        Ok(match wanted {
            Wanted::Sums { filter, by } => Found::Sums(self.sums(filter, by)?.into_iter().collect()),
            Wanted::Records { filter, before, limit } => {
                Found::Records(self.listed_records(filter, *before, *limit)?)
            }
            Wanted::Audit { filter, before, limit } => {
                Found::Audit(self.listed_audit(filter, *before, *limit)?)
            }
            Wanted::Verify => {
                let Chain { entries, head } = self.verify_audit()?;
                Found::Chain(entries, head)
            }
            Wanted::Prompts { ask, reader, by } => {
                Found::Prompts(self.prompts_for(ask, reader, by, Now::read().time)?)
            }
            Wanted::PromptsLost => Found::PromptsLost(self.prompts_lost()),
        })
    }

    /// Distinguishes this server's numbers from those of others.
    fn node_number(&self) -> u64 {
        let hash = self.0.store.node.get().map(|name| Sha256::digest(name.as_bytes()));
        hash.and_then(|hash| hash.first().copied()).map_or(0, u64::from)
    }

    fn listed_records(
        &self,
        filter: &Filter,
        before: Option<u64>,
        limit: usize,
    ) -> Result<Vec<UsageRecord>, AccessError> {
        self.move_records()?;
        let before = before.unwrap_or(u64::MAX);
        // Later records have larger numbers, unless a clock was set back.
        let latest = Time((before / NUMBERS_OF_MS).saturating_add(HOUR_MS));
        let (mut records, node) = (Vec::new(), self.node_number());
        self.store().each_record(filter, self.store().number_after(latest)?, |mut record| {
            record.number = listed(node, record.time, record.number);
            if record.number < before {
                records.push(record);
            }
            records.len() < limit
        })?;
        Ok(records)
    }

    fn listed_audit(
        &self,
        filter: &AuditFilter,
        before: Option<u64>,
        limit: usize,
    ) -> Result<Vec<(u64, Sealed)>, AccessError> {
        let before = before.unwrap_or(u64::MAX);
        let (mut entries, node) = (Vec::new(), self.node_number());
        self.store().each_entry(filter, u64::MAX, |number, sealed| {
            let time = serde_json::from_str::<Entry>(&sealed.text).map_or(Time(0), |entry| entry.time);
            let number = listed(node, time, number);
            if number < before {
                entries.push((number, sealed));
            }
            entries.len() < limit
        })?;
        Ok(entries)
    }

    /// The records of all other servers. `of_one` gets a server's name and answer, and returns
    /// `None` for an answer that does not fit the query. The second value lists the servers that do
    /// not answer, with the reasons.
    pub(super) fn of_others<T>(
        &self,
        wanted: &Wanted,
        of_one: impl Fn(&str, Found) -> Option<T>,
    ) -> Gathered<Vec<T>> {
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for (name, answer) in self.ask_others(wanted) {
            match answer.map(|answer| of_one(&name, answer)) {
                Ok(Some(theirs)) => found.push(theirs),
                Ok(None) => missing.push(format!("{name}: a strange answer")),
                Err(why) => missing.push(why),
            }
        }
        (found, missing)
    }

    /// The records of this server and all others. The second value lists the servers that do not
    /// answer, with the reasons.
    fn look_everywhere(&self, wanted: &Wanted) -> Result<Gathered<Vec<Found>>, AccessError> {
        let own = self.look(wanted)?;
        let (mut found, missing) = self.of_others(wanted, |_, found| Some(found));
        found.insert(0, own);
        Ok((found, missing))
    }

    /// Sums of usage of all servers, in whole hours, divided by these dimensions; and the servers
    /// that are missing.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn all_sums(&self, filter: &Filter, by: &[By]) -> Result<Gathered<Groups>, AccessError> {
        let wanted = Wanted::Sums { filter: filter.clone(), by: by.to_vec() };
        let (found, missing) = self.look_everywhere(&wanted)?;
        let mut groups = Groups::new();
        for found in found {
            let Found::Sums(sums) = found else { continue };
            sums.iter().for_each(|(values, sums)| groups.entry(values.clone()).or_default().merge(sums));
        }
        Ok((groups, missing))
    }

    /// At most `limit` usage records of all servers with numbers below `before`, newest first; and
    /// the servers that are missing.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn all_records(
        &self,
        filter: &Filter,
        before: Option<u64>,
        limit: usize,
    ) -> Result<Gathered<Vec<UsageRecord>>, AccessError> {
        if self.peers().is_none() {
            return Ok((self.records(filter, before, limit)?, Vec::new()));
        }
        let wanted = Wanted::Records { filter: filter.clone(), before, limit };
        let of_one = |found| if let Found::Records(records) = found { records } else { Vec::new() };
        self.newest_of_all(&wanted, limit, of_one, |record| record.number)
    }

    /// At most `limit` entries of the audit logs of all servers, like [`Access::all_records`].
    ///
    /// # Errors
    /// When the disk fails.
    pub fn all_audit(
        &self,
        filter: &AuditFilter,
        before: Option<u64>,
        limit: usize,
    ) -> Result<Gathered<Vec<(u64, Sealed)>>, AccessError> {
        if self.peers().is_none() {
            return Ok((self.audit(filter, before, limit)?, Vec::new()));
        }
        let wanted = Wanted::Audit { filter: filter.clone(), before, limit };
        let of_one = |found| if let Found::Audit(entries) = found { entries } else { Vec::new() };
        self.newest_of_all(&wanted, limit, of_one, |(number, _)| *number)
    }

    /// The records of all servers in one list, largest number first.
    fn newest_of_all<T>(
        &self,
        wanted: &Wanted,
        limit: usize,
        of_one: impl Fn(Found) -> Vec<T>,
        number: impl Fn(&T) -> u64,
    ) -> Result<Gathered<Vec<T>>, AccessError> {
        let (found, missing) = self.look_everywhere(wanted)?;
        let mut all: Vec<T> = found.into_iter().flat_map(of_one).collect();
        all.sort_by_key(|one| std::cmp::Reverse(number(one)));
        all.truncate(limit);
        Ok((all, missing))
    }

    /// Checks the audit logs of the other servers. Returns the name, entries and last hash of each
    /// intact log, and the errors of the others.
    pub fn verify_others(&self) -> Gathered<Vec<(String, u64, String)>> {
        self.of_others(&Wanted::Verify, |name, found| match found {
            Found::Chain(entries, head) => Some((name.to_owned(), entries, head)),
            _ => None,
        })
    }

    /// The state of a caller's limits, counted over all servers.
    pub fn all_standings(&self, caller: &super::Caller, model: Option<&str>, now: Now) -> Vec<Standing> {
        let mut limited = self.limited(caller, model.unwrap_or_default());
        if model.is_none() {
            limited.pop();
        }
        let everywhere = self.peers().and_then(|peers| peers.standings(&limited));
        everywhere.unwrap_or_else(|| lock(&self.0.meter).standings(&limited, now))
    }
}

#[cfg(test)]
#[path = "shared_tests.rs"]
mod tests;
