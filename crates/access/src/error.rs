//! Errors of the store.

use std::io;
use std::path::{Path, PathBuf};

use crate::audit::Broken;
use crate::key::BadKey;
use crate::limits::BadLimit;
use crate::prompts::BadKeepPolicy;
use crate::secret::RandomError;

/// Why the store refused an operation.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// Another process has the store open.
    #[error(
        "{0} is in use by another process: let the running server do it (its commands find it by --store), or end it"
    )]
    InUse(PathBuf),
    /// The system refused.
    #[error("cannot {what} {path}: {why}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        why: io::Error,
    },
    /// The store's file is not readable.
    #[error("the store {path} failed: {why}; `thunder restore` replaces it by a backup")]
    Store {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A later version wrote the store.
    #[error("{path} has format {found}, this version reads {known}: use the version that wrote it")]
    Format {
        /// The file.
        path: PathBuf,
        /// The format found.
        found: u64,
        /// The latest known one.
        known: u64,
    },
    /// There is no such key.
    #[error("no key has the id or name \"{0}\": `thunder keys list` shows all")]
    NoKey(String),
    /// A key of this name is there.
    #[error("the key \"{0}\" exists: choose another name, rotate it for a new secret, or revoke it first")]
    KeyExists(String),
    /// The key was revoked.
    #[error("the key \"{0}\" was revoked, for good: create a new one")]
    Revoked(String),
    /// After this change nobody could administer the server.
    #[error("\"{0}\" is the last admin key that works: create another admin key first")]
    LastAdmin(String),
    /// A property of a key is not valid.
    #[error(transparent)]
    BadKey(#[from] BadKey),
    /// A limit is not valid.
    #[error(transparent)]
    BadLimit(#[from] BadLimit),
    /// The new limits are based on a version that is no longer in force.
    #[error("the limits were changed by somebody else meanwhile: read them again, and make the change there")]
    PolicyChanged,
    /// A policy for keeping prompts is not valid.
    #[error(transparent)]
    BadKeepPolicy(#[from] BadKeepPolicy),
    /// Kept prompts cannot be read or written.
    #[error("kept prompts, {path}: {why}")]
    Prompts {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// No random numbers.
    #[error(transparent)]
    Random(#[from] RandomError),
    /// The audit log was changed.
    #[error("the audit log is broken: {0}")]
    Audit(#[from] Broken),
    /// The other servers did not accept a change.
    #[error("the cluster does not take the change: {0}")]
    Peers(String),
    /// Other servers do not answer with their records.
    #[error("the list is not complete: {0}; \"partial=true\" leaves out what these nodes keep")]
    Missing(String),
    /// A backup that cannot be restored.
    #[error("{path} is no backup that can be restored: {why}")]
    BadBackup {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
}

impl AccessError {
    /// For `map_err` of system calls.
    pub(crate) fn system(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |why| Self::System { what, path, why }
    }
}
