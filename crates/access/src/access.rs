//! An open data folder: authenticates requests, applies their limits, and records their usage.

mod administer;
mod keeping;
mod mover;
pub(crate) mod shared;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::task::{Context, Poll};

use tokio::sync::oneshot;

use crate::audit::Actor;
use crate::error::AccessError;
use crate::fair::Claimant;
use crate::gate::Gate;
use crate::journal::Journal;
use crate::key::{Key, KeyState, Role, StoredKey};
use crate::limits::{LimitKind, Policy};
use crate::meter::{Ask, Limited, Meter, Refusal, Reservation, Scope, Standing, Used};
use crate::prompts::Prompts;
use crate::secret::{self, SecretHash};
use crate::store::{FILE, Store};
use crate::time::{Now, Time};
use crate::usage::{Filter, Outcome, UsageRecord};
use shared::Peers;

/// Days for which usage is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// For single requests. A longer time helps with questions about one request, and costs about
    /// 600 bytes a request.
    pub records_days: u32,
    /// For sums of each hour, key and model. A longer time shows older months.
    pub sums_days: u32,
}

impl Default for Retention {
    fn default() -> Self {
        Self { records_days: 30, sums_days: 1100 }
    }
}

/// Who a request is from.
#[derive(Debug, Clone, PartialEq)]
pub enum Caller {
    /// The server has no keys, so everyone who reaches it may do everything.
    Open,
    /// The server's own user, through a socket that only this user can open.
    Local,
    /// One of the keys that the server was started with (`--api-key`).
    Fixed,
    /// A key of the store.
    Key(Arc<Key>),
}

impl Caller {
    /// What the caller may do.
    pub fn role(&self) -> Role {
        match self {
            Self::Open | Self::Local => Role::Admin,
            Self::Fixed => Role::User,
            Self::Key(key) => key.role,
        }
    }

    /// The caller's name in the audit log. The caller's address is `remote`.
    pub fn actor(&self, remote: Option<IpAddr>) -> Actor {
        let name = match self {
            Self::Open => "anyone (the server has no keys)".to_owned(),
            Self::Local => "local".to_owned(),
            Self::Fixed => "--api-key".to_owned(),
            Self::Key(key) => format!("key {} ({})", key.id, key.name),
        };
        Actor { name, remote: remote.map(|address| address.to_canonical().to_string()) }
    }

    /// The caller's key.
    pub fn key(&self) -> Option<&Arc<Key>> {
        match self {
            Self::Key(key) => Some(key),
            _ => None,
        }
    }

    /// The team and key that share the engine's time for this caller.
    pub fn claimant(&self, policy: &Policy) -> Claimant {
        let key = self.key();
        let team = key.and_then(|key| key.team.clone()).unwrap_or_default();
        let weight = policy.team(&team).weight;
        Claimant { team, weight, key: key.map(|key| key.id.clone()).unwrap_or_default() }
    }
}

/// Why a secret is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// No key has this secret.
    #[error("the API key is not valid")]
    Unknown,
    /// The key's time is over.
    #[error("the API key \"{name}\" expired on {at}: ask an administrator for a new one")]
    Expired {
        /// Its name.
        name: String,
        /// When.
        at: Time,
    },
    /// The key was revoked.
    #[error("the API key \"{name}\" was revoked on {at}: ask an administrator for a new one")]
    Revoked {
        /// Its name.
        name: String,
        /// When.
        at: Time,
    },
}

/// Why a request is refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StartError {
    /// A limit is hit.
    #[error("{0}")]
    Limit(Box<Refusal>),
    /// Usage cannot be recorded, so requests that could not be counted are refused.
    #[error("usage cannot be recorded: {0}")]
    NoRecord(String),
}

/// The keys, found by the letters in their secrets.
type KeyRing = HashMap<String, Arc<StoredKey>>;

/// An open data folder. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Access(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    folder: PathBuf,
    store: Store,
    keys: RwLock<KeyRing>,
    policy: RwLock<Arc<Policy>>,
    meter: Mutex<Meter>,
    journal: Mutex<Numbered>,
    /// Records that wait for the journal.
    pending: Mutex<Vec<Pending>>,
    /// Locked while a key or a limit changes.
    changing: Mutex<()>,
    /// Locked while records move to the store.
    moving: Mutex<()>,
    retention: Mutex<Retention>,
    gate: Option<Gate>,
    /// Refusals since the last move, by the id of their key.
    refusals: Mutex<HashMap<Option<String>, UsageRecord>>,
    /// The journal's last write failed.
    is_failing: AtomicBool,
    /// Every request needs a key, even if no key exists.
    needs_keys: AtomicBool,
    /// Prompts and answers kept by a policy.
    prompts: Prompts,
    /// The other servers that share keys and limits.
    peers: OnceLock<Arc<dyn Peers>>,
}

/// The journal, and the number of its last record.
#[derive(Debug)]
struct Numbered {
    journal: Journal,
    last: u64,
    /// Records that could not be written yet.
    backlog: VecDeque<UsageRecord>,
}

/// A record for the journal, and the request that waits until it is written.
#[derive(Debug)]
struct Pending {
    record: UsageRecord,
    done: oneshot::Sender<()>,
}

/// The end of [`Access::finish`]: ready when the record survives the end of the process. The record
/// is written even if this is dropped.
#[derive(Debug, Default)]
#[must_use = "an answer may end only when its record is written"]
pub struct Recorded(Option<oneshot::Receiver<()>>);

impl Recorded {
    /// Blocks until the record is written. Only for threads that may block.
    ///
    /// # Panics
    /// On a thread of an async runtime.
    pub fn wait(self) {
        if let Some(receiver) = self.0 {
            // An error means that the folder was closed, which writes all records.
            let _ = receiver.blocking_recv();
        }
    }
}

impl Future for Recorded {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        match &mut self.0 {
            Some(receiver) => Pin::new(receiver).poll(context).map(drop),
            None => Poll::Ready(()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Access {
    /// Opens a data folder, and creates it if it does not exist. At most `at_once` answers are
    /// computed in parallel; further requests wait in fair order. `None`: no request waits here.
    ///
    /// # Errors
    /// When another process has it open, or it cannot be read.
    pub fn open(folder: &Path, retention: Retention, at_once: Option<usize>) -> Result<Self, AccessError> {
        Self::open_at(folder, retention, at_once, Now::read())
    }

    /// Like [`Access::open`] at this moment: the usage of its day and month counts.
    fn open_at(
        folder: &Path,
        retention: Retention,
        at_once: Option<usize>,
        now: Now,
    ) -> Result<Self, AccessError> {
        let store = Store::open(folder)?;
        let journal = Journal::open(folder).map_err(AccessError::system("write to", folder))?;
        let keys = store.keys()?.into_iter();
        let keys = keys.map(|stored| (stored.key.lookup().to_owned(), Arc::new(stored))).collect();
        let policy = Arc::new(store.policy()?);
        let prompts = Prompts::new(folder, store.keep_policy()?)?;
        let inner = Inner {
            folder: folder.to_owned(),
            store,
            keys: RwLock::new(keys),
            policy: RwLock::new(policy),
            meter: Mutex::default(),
            journal: Mutex::new(Numbered { journal, last: 0, backlog: VecDeque::new() }),
            pending: Mutex::default(),
            changing: Mutex::default(),
            moving: Mutex::default(),
            retention: Mutex::new(retention),
            gate: at_once.map(Gate::new),
            refusals: Mutex::default(),
            is_failing: AtomicBool::new(false),
            needs_keys: AtomicBool::new(false),
            prompts,
            peers: OnceLock::new(),
        };
        let access = Self(Arc::new(inner));
        access.move_records()?;
        lock(&access.0.journal).last = access.0.store.moved()?;
        access.resume(now)?;
        mover::start(&access.0).map_err(AccessError::system("start the thread for", folder))?;
        Ok(access)
    }

    /// Whether a folder has a store.
    pub fn exists(folder: &Path) -> bool {
        folder.join(FILE).exists()
    }

    /// The data folder.
    pub fn folder(&self) -> &Path {
        &self.0.folder
    }

    /// Sets how long usage is kept. Older usage is removed within an hour.
    pub fn retain(&self, retention: Retention) {
        *lock(&self.0.retention) = retention;
    }

    pub(crate) fn store(&self) -> &Store {
        &self.0.store
    }

    /// Counts the usage of this day and this month from the store.
    fn resume(&self, now: Now) -> Result<(), AccessError> {
        let filter = Filter { since: Some(now.time.month_begin()), ..Filter::default() };
        let mut used: HashMap<Scope, (u64, u64, u64)> = HashMap::new();
        self.0.store.each_hour(&filter, |hour, dimensions, sums| {
            let tokens = sums.prompt_tokens + sums.completion_tokens;
            let today = if hour.day() == now.time.day() { tokens } else { 0 };
            let key = dimensions.key_id.clone().map(Scope::Key);
            let team = dimensions.team.clone().map(Scope::Team);
            for scope in [key, team, Some(Scope::Model(dimensions.model.clone()))].into_iter().flatten() {
                let (day, month, nanos) = used.entry(scope).or_default();
                *day += today;
                *month += tokens;
                *nanos += sums.cost_nanos;
            }
        })?;
        let mut meter = lock(&self.0.meter);
        for (scope, (day, month, nanos)) in used {
            meter.resume(scope, day, (month, nanos), now);
        }
        Ok(())
    }

    /// Whether the store has or ever had a key, or [`Access::need_keys`] was called. Then every
    /// request needs a key. A server must not become open when its last key expires.
    pub fn has_keys(&self) -> bool {
        self.0.needs_keys.load(Ordering::Relaxed)
            || !self.0.keys.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Requires a key for every request, even if no key exists. For sign-in, which creates keys.
    pub fn need_keys(&self) {
        self.0.needs_keys.store(true, Ordering::Relaxed);
    }

    /// The key of a secret.
    ///
    /// # Errors
    /// When it is no key's, or its key does not work any more.
    pub fn authenticate(&self, secret: &str, now: Time) -> Result<Caller, AuthError> {
        let found = secret::lookup(secret).and_then(|lookup| {
            self.0.keys.read().unwrap_or_else(PoisonError::into_inner).get(lookup).cloned()
        });
        let stored = found.ok_or(AuthError::Unknown)?;
        if !stored.opens(&SecretHash::of(secret), now) {
            return Err(AuthError::Unknown);
        }
        let (name, key) = (stored.key.name.clone(), &stored.key);
        match key.state(now) {
            KeyState::Revoked => Err(AuthError::Revoked { name, at: key.revoked.unwrap_or(now) }),
            KeyState::Expired => Err(AuthError::Expired { name, at: key.expires.unwrap_or(now) }),
            KeyState::Active | KeyState::Rotating => Ok(Caller::Key(Arc::new(key.clone()))),
        }
    }

    /// The limits and prices in force.
    pub fn policy(&self) -> Arc<Policy> {
        self.0.policy.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The gate in front of the engine, if requests wait here.
    pub fn gate(&self) -> Option<&Gate> {
        self.0.gate.as_ref()
    }

    /// The scopes whose limits apply to a caller's request for a model.
    pub fn limited(&self, caller: &Caller, model: &str) -> Vec<Limited> {
        let policy = self.policy();
        let mut limited = Vec::with_capacity(3);
        if let Some(key) = caller.key() {
            let limits = key.limits.or(&policy.default_limits);
            limited.push(Limited { scope: Scope::Key(key.id.clone()), label: key.name.clone(), limits });
            if let Some(team) = &key.team {
                let limits = policy.team(team).limits;
                limited.push(Limited { scope: Scope::Team(team.clone()), label: team.clone(), limits });
            }
        }
        let limits = policy.model(model).limits;
        limited.push(Limited { scope: Scope::Model(model.to_owned()), label: model.to_owned(), limits });
        limited
    }

    /// Refuses a request that would be refused in any case, before its body is read. Counts
    /// nothing.
    ///
    /// # Errors
    /// The limit that is hit.
    pub fn check(&self, caller: &Caller, model: &str, now: Now) -> Result<(), StartError> {
        if self.is_failing() {
            let folder = self.0.folder.display();
            return Err(StartError::NoRecord(format!("{folder} cannot be written: see the server's log")));
        }
        let limited = self.limited(caller, model);
        lock(&self.0.meter).check(&limited, now).map_err(|refusal| self.refused(refusal))
    }

    /// Admits a request, and counts it until [`Access::finish`].
    ///
    /// # Errors
    /// The limit that is hit.
    pub fn begin(
        &self,
        caller: &Caller,
        model: &str,
        ask: &Ask,
        now: Now,
    ) -> Result<Reservation, StartError> {
        let limited = self.limited(caller, model);
        let ask = self.priced(model, ask);
        let admitted = lock(&self.0.meter).admit(&limited, &ask, now);
        admitted.map_err(|refusal| self.refused(refusal))
    }

    fn refused(&self, refusal: Refusal) -> StartError {
        let currency = self.policy().currency.clone().filter(|_| refusal.limit == LimitKind::CostPerMonth);
        StartError::Limit(Box::new(Refusal { currency, ..refusal }))
    }

    /// The same ask with the prices of a model's tokens.
    pub(super) fn priced(&self, model: &str, ask: &Ask) -> Ask {
        let price = self.policy().model(model).price.unwrap_or_default();
        Ask { token_nanos: (price.input * 1e3, price.output * 1e3), ..*ask }
    }

    /// Ends a request: counts and records its usage. Fills in the record's number, cost and key. If
    /// another thread is writing records at this moment, that thread also writes this one;
    /// otherwise the caller does. The answer may end only when the result is ready.
    pub fn finish(
        &self,
        caller: &Caller,
        reservation: Option<Reservation>,
        mut record: UsageRecord,
        now: Now,
    ) -> Recorded {
        if let Some(key) = caller.key() {
            record.key = Some(key.name.clone());
            record.key_id = Some(key.id.clone());
            (record.owner, record.team) = (key.owner.clone(), key.team.clone());
        }
        if record.outcome != Outcome::Refused
            && let Some(price) = self.policy().model(&record.model).price
        {
            record.cost_nanos =
                price.nanos(record.prompt_tokens, record.cached_tokens, record.completion_tokens);
        }
        if let Some(reservation) = reservation {
            let used = Used {
                prompt_tokens: record.prompt_tokens,
                answer_tokens: record.completion_tokens,
                nanos: record.cost_nanos,
            };
            lock(&self.0.meter).settle(reservation, &used, now);
        }
        if record.outcome == Outcome::Refused {
            // A client that ignores refusals must not fill the disk: all refusals within a second
            // are one record.
            let mut refusals = lock(&self.0.refusals);
            match refusals.entry(record.key_id.clone()) {
                Entry::Occupied(mut before) => before.get_mut().count += 1,
                Entry::Vacant(place) => drop(place.insert(record)),
            }
            return Recorded(None);
        }
        self.0.record(record)
    }

    /// Removes a request that turned out to be invalid. It still counts as a request of its minute.
    pub fn cancel(&self, reservation: Reservation, now: Now) {
        lock(&self.0.meter).settle(reservation, &Used::default(), now);
    }

    /// Whether usage cannot be recorded, so that requests are refused.
    pub fn is_failing(&self) -> bool {
        self.0.is_failing.load(Ordering::Relaxed)
    }

    /// The state of a caller's limits for a model; without a model, of the key's and the team's
    /// limits.
    pub fn standings(&self, caller: &Caller, model: Option<&str>, now: Now) -> Vec<Standing> {
        let mut limited = self.limited(caller, model.unwrap_or_default());
        if model.is_none() {
            limited.pop();
        }
        lock(&self.0.meter).standings(&limited, now)
    }

    /// When a key last began a request, if it did since the server started.
    pub fn last_used(&self, key: &Key) -> Option<Time> {
        lock(&self.0.meter).last_used(&Scope::Key(key.id.clone()))
    }

    /// Keys that have begun a request since the server started.
    pub fn users_seen(&self) -> usize {
        lock(&self.0.meter).keys_seen()
    }

    /// Moves all usage records to the store, so that the next reading includes them.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn move_records(&self) -> Result<(), AccessError> {
        self.0.move_records()
    }

    /// Whether an admin key works.
    fn has_other_admin(&self, except: &str, now: Time) -> bool {
        let keys = self.0.keys.read().unwrap_or_else(PoisonError::into_inner);
        keys.values()
            .any(|stored| stored.key.id != except && stored.key.role == Role::Admin && stored.key.works(now))
    }
}

#[cfg(test)]
#[path = "access_tests.rs"]
mod tests;
