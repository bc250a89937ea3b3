//! What can go wrong, with what to do about it.

use std::{io, path::PathBuf};

/// Why a model was not found or could not be downloaded.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// Neither a folder nor in the cache.
    #[error(
        "model {name:?} is neither a folder with a config.json ({}) nor in the Hugging Face cache ({}); download it \
         with `thunder model pull {name}`", folder.display(), cache.display()
    )]
    NotFound {
        /// What was asked for.
        name: String,
        /// The folder that was looked for.
        folder: PathBuf,
        /// The place in the cache that was looked at.
        cache: PathBuf,
    },
    /// Neither a folder nor a name that could be in the cache.
    #[error(
        "model {name:?} is no folder with a config.json ({}), and not a name of the form org/name either: {reason}",
        folder.display()
    )]
    BadName {
        /// What was asked for.
        name: String,
        /// The folder that was looked for.
        folder: PathBuf,
        /// What a name must not have.
        reason: String,
    },
    /// A folder or file that is not a model folder.
    #[error("{}: {reason}", path.display())]
    NotAModel {
        /// The path that was given.
        path: PathBuf,
        /// What it lacks.
        reason: String,
    },
    /// A model in the cache lacks files.
    #[error("{repo} is only partly in the cache ({} lacks {missing}); complete it with `thunder model pull {repo}`",
        folder.display())]
    Incomplete {
        /// org/name.
        repo: String,
        /// Its folder.
        folder: PathBuf,
        /// A file that is missing.
        missing: String,
    },
    /// The endpoint is not an HTTP address.
    #[error(
        "endpoint {endpoint:?} is not an address that begins with http:// or https://; check HF_ENDPOINT"
    )]
    BadEndpoint {
        /// The value.
        endpoint: String,
    },
    /// The hub does not have this repository, or does not show it without a token.
    #[error(
        "{repo} was not found at {endpoint}: check the name; if it is private, set HF_TOKEN to a token that may \
        read it"
    )]
    RepoNotFound {
        /// org/name.
        repo: String,
        /// The server.
        endpoint: String,
    },
    /// The repository does not have this branch, tag or commit.
    #[error("{repo} has no revision {revision:?} at {endpoint}: check its branches and tags")]
    RevisionNotFound {
        /// org/name.
        repo: String,
        /// The branch, tag or commit.
        revision: String,
        /// The server.
        endpoint: String,
    },
    /// The repository lists a file that the hub does not give.
    #[error("{repo}: the hub lists {file} but does not have it; try again later")]
    FileNotFound {
        /// org/name.
        repo: String,
        /// The file.
        file: String,
    },
    /// The repository needs its licence accepted, by an account whose token is sent.
    #[error(
        "{repo} is gated ({file}): accept its licence at {endpoint}/{repo}, then set HF_TOKEN to a token of that account"
    )]
    Gated {
        /// org/name.
        repo: String,
        /// The file that was refused.
        file: String,
        /// The server.
        endpoint: String,
    },
    /// The token is wrong, or may not read this.
    #[error(
        "{repo}: access to {file} was refused (HTTP {status}); check HF_TOKEN: it must be valid and may read {repo}"
    )]
    Refused {
        /// org/name.
        repo: String,
        /// The file that was refused.
        file: String,
        /// 401 or 403.
        status: u16,
    },
    /// The network or the server failed, again and again.
    #[error(
        "{repo}: {file} of {endpoint}: {reason} (after {attempts} attempts); what has come is kept, so pull again to go on"
    )]
    Network {
        /// org/name.
        repo: String,
        /// The file.
        file: String,
        /// The hub that was asked.
        endpoint: String,
        /// The last failure.
        reason: String,
        /// How often it was tried without a byte gained.
        attempts: u32,
    },
    /// The server answered what the hub would not answer.
    #[error("{repo}: {file}: unexpected answer of the server: {reason}; check HF_ENDPOINT and proxies")]
    Answer {
        /// org/name.
        repo: String,
        /// The file, or what was asked for.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// A file name from the server would lead out of its folder.
    #[error("{repo} lists a file with the unsafe name {file:?}; nothing was downloaded")]
    UnsafeName {
        /// org/name.
        repo: String,
        /// The name.
        file: String,
    },
    /// A repository without weights that can be run.
    #[error("{repo} has no {missing}, so it is not a model that can be run here{hint}")]
    NothingToRun {
        /// org/name.
        repo: String,
        /// What it lacks.
        missing: String,
        /// What it has instead, if that is known.
        hint: String,
    },
    /// A file came whole but with other content. The part was deleted.
    #[error("{repo}: {file} has the {kind} {actual}, not {expected}; it was deleted, so pull again")]
    Checksum {
        /// org/name.
        repo: String,
        /// The file.
        file: String,
        /// sha256, or git's blob hash.
        kind: &'static str,
        /// As the hub says.
        expected: String,
        /// As it came.
        actual: String,
    },
    /// The disk is too small.
    #[error(
        "{repo} needs {needed_bytes} bytes more, but {} has {available_bytes} free; free some, or set HF_HUB_CACHE to \
         a folder on another disk", path.display()
    )]
    NoSpace {
        /// org/name.
        repo: String,
        /// Where it would go.
        path: PathBuf,
        /// Bytes still to download.
        needed_bytes: u64,
        /// Bytes free.
        available_bytes: u64,
    },
    /// Another pull of the same repository runs.
    #[error("another pull of {repo} is running (it holds {}); wait for it", lock.display())]
    Busy {
        /// org/name.
        repo: String,
        /// The lock file.
        lock: PathBuf,
    },
    /// Not all is there, and the network must not be used.
    #[error("{repo} is not wholly in the cache, and HF_HUB_OFFLINE forbids to download it; unset it to pull")]
    Offline {
        /// org/name.
        repo: String,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was done.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl HubError {
    /// For `map_err` on file operations.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
