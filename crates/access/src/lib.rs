//! Access control: keys, limits, fair shares, usage and the audit log.
//!
//! [`Access`] owns a data folder: keys, limits, usage and the audit log, in one embedded store. A
//! server calls [`Access::authenticate`] and [`Access::begin`] when a request arrives, and
//! [`Access::finish`] when it ends. Everything else is for administrators.
//!
//! This crate knows no HTTP, no engine and no async runtime. Callers pass the time, so tests can
//! choose it.

mod access;
mod audit;
mod backup;
mod error;
mod fair;
mod gate;
mod journal;
mod key;
mod limits;
mod meter;
pub mod private;
mod prompts;
mod secret;
mod store;
mod time;
mod usage;
mod window;

pub use access::shared::{Found, Peers, Shared, Wanted};
pub use access::{Access, AuthError, Caller, Recorded, Retention, StartError};
pub use audit::{Actor, Broken, Chain, Entry, FIRST_PREVIOUS, Sealed, hash};
pub use backup::{BackupReport, Restored, restore};
pub use error::AccessError;
pub use fair::{Claimant, FairQueue};
pub use gate::{Full, Gate, Turn};
pub use key::{BadKey, Key, KeyChange, KeyState, LONGEST_GRACE_S, NewKey, Role, StoredKey};
pub use limits::{BadLimit, LimitKind, Limits, ModelPolicy, Policy, Price, TeamPolicy};
pub use meter::{
    Ask, EXPOSED_HEADERS, Held, Limited, Meter, Refusal, Reservation, Scope, ScopeKind, Share, Standing,
    Used, rate_headers,
};
pub use prompts::{
    BadKeepPolicy, BadPattern, BadPlace, Gathering, KeepPolicy, Keeping, KeptPage, KeptPart, KeptPrompt,
    KeptText, Place, PromptsAsk, Redaction,
};
pub use secret::{RandomError, hex};
pub use store::AuditFilter;
pub use time::{BadTime, DAY_MS, HOUR_MS, Now, Time};
pub use usage::{By, Dimensions, Filter, Groups, Outcome, Sums, Totals, UsageRecord, UsageView};
