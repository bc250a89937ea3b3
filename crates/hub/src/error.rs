//! The crate's errors. Each message says what to do.

use std::{io, path::PathBuf};

/// Why a model was not found or could not be downloaded.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The model is neither a model folder nor in the cache.
    #[error(
        "model {name:?} is neither a folder with a config.json nor a GGUF file ({}), nor in the Hugging Face cache ({}); download it \
         with `thunder model pull {name}`", folder.display(), cache.display()
    )]
    NotFound {
        /// The requested model.
        name: String,
        /// The folder that was tried.
        folder: PathBuf,
        /// The folder in the cache that was tried.
        cache: PathBuf,
    },
    /// The text is neither a model folder nor a valid name.
    #[error(
        "model {name:?} is neither a folder with a config.json ({}) nor a name of the form org/name: {reason}",
        folder.display()
    )]
    BadName {
        /// The requested model.
        name: String,
        /// The folder that was tried.
        folder: PathBuf,
        /// The fault in the name.
        reason: String,
    },
    /// Not a name of a repository on the hub.
    #[error("{name:?} is not a name of the form org/name: {reason}")]
    BadRepoName {
        /// What was given.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A folder or file that is not a model folder.
    #[error("{}: {reason}", path.display())]
    NotAModel {
        /// The given path.
        path: PathBuf,
        /// The reason why it is not a model folder.
        reason: String,
    },
    /// A model in the cache lacks files.
    #[error("{repo} is incomplete in the cache ({} lacks {missing}); complete it with `thunder model pull {repo}`",
        folder.display())]
    Incomplete {
        /// org/name.
        repo: String,
        /// Its folder in the cache.
        folder: PathBuf,
        /// A file that is missing.
        missing: String,
    },
    /// A repository has GGUF files of several quantizations, and none was named.
    #[error("{repo} has several quantizations: name one, such as {repo}:{}; there are {}",
        quantizations.first().map_or("Q4_K_M", String::as_str), quantizations.join(", "))]
    SeveralQuantizations {
        /// org/name.
        repo: String,
        /// Their names.
        quantizations: Vec<String>,
    },
    /// The endpoint is not an HTTP address.
    #[error(
        "endpoint {endpoint:?} is not an address that begins with http:// or https://; check HF_ENDPOINT"
    )]
    BadEndpoint {
        /// The endpoint.
        endpoint: String,
    },
    /// The hub does not have this repository, or hides it from requests without a token.
    #[error(
        "{repo} was not found at {endpoint}: check the name; if the repository is private, set HF_TOKEN to a token \
        that may read it"
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
    /// The repository lists a file that the hub does not have.
    #[error("{repo}: the hub lists {file} but does not have it; try again later")]
    FileNotFound {
        /// org/name.
        repo: String,
        /// The file.
        file: String,
    },
    /// The account whose token is sent must first accept the repository's licence.
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
    /// The token is invalid or may not read this repository.
    #[error(
        "{repo}: access to {file} was refused (HTTP {status}); check HF_TOKEN: it must be valid and allowed to read \
         {repo}"
    )]
    Refused {
        /// org/name.
        repo: String,
        /// The file that was refused.
        file: String,
        /// 401 or 403.
        status: u16,
    },
    /// The first request could not reach the hub.
    #[error(
        "cannot reach {endpoint} to pull {repo}: {reason}; check this machine's network, or set HF_ENDPOINT to a mirror"
    )]
    Unreachable {
        /// org/name.
        repo: String,
        /// The hub.
        endpoint: String,
        /// Why there is no connection.
        reason: String,
    },
    /// The network or the server failed on every attempt.
    #[error(
        "{repo}: {file} at {endpoint}: {reason} (after {attempts} attempts); pull again later: it continues where it \
         stopped"
    )]
    Network {
        /// org/name.
        repo: String,
        /// The file.
        file: String,
        /// The hub.
        endpoint: String,
        /// The last failure.
        reason: String,
        /// Number of consecutive attempts without a new byte.
        attempts: u32,
    },
    /// A response that the hub would not send.
    #[error("{repo}: {file}: unexpected response from the server: {reason}; check HF_ENDPOINT and proxies")]
    Response {
        /// org/name.
        repo: String,
        /// The file, or "list of files".
        file: String,
        /// The fault in the response.
        reason: String,
    },
    /// A file name from the server would escape the repository's folder.
    #[error("{repo} lists a file with the unsafe name {file:?}; nothing was downloaded")]
    UnsafeName {
        /// org/name.
        repo: String,
        /// The file's name.
        file: String,
    },
    /// The repository has no model in a supported format.
    #[error("{repo} has no {missing}, so it is not a model that thunder can run{hint}")]
    NotRunnable {
        /// org/name.
        repo: String,
        /// The files that it lacks.
        missing: String,
        /// The weights that the repository has instead, or empty.
        hint: String,
    },
    /// A downloaded file has the wrong checksum. It was deleted.
    #[error("{repo}: {file} has the {algorithm} {actual}, not {expected}; it was deleted: pull again")]
    Checksum {
        /// org/name.
        repo: String,
        /// The file.
        file: String,
        /// "sha256" or "git blob hash".
        algorithm: &'static str,
        /// The hub's checksum.
        expected: String,
        /// The downloaded file's checksum.
        actual: String,
    },
    /// Not enough free disk space.
    #[error(
        "{repo} needs {needed_bytes} more bytes, but {} has {available_bytes} free; free some space, or set \
         HF_HUB_CACHE to a folder on another disk", path.display()
    )]
    NoSpace {
        /// org/name.
        repo: String,
        /// The destination folder.
        path: PathBuf,
        /// Bytes still to download.
        needed_bytes: u64,
        /// Free bytes.
        available_bytes: u64,
    },
    /// Another process pulls the same repository.
    #[error("another pull of {repo} is running (it holds {}); wait for it", lock.display())]
    Busy {
        /// org/name.
        repo: String,
        /// The lock file.
        lock: PathBuf,
    },
    /// A file is missing, and use of the network is forbidden.
    #[error(
        "{repo} is not complete in the cache, and HF_HUB_OFFLINE forbids downloads; unset HF_HUB_OFFLINE to pull"
    )]
    Offline {
        /// org/name.
        repo: String,
    },
    /// An update needs the hub, and use of the network is forbidden.
    #[error(
        "only the hub knows whether {repo} has a newer commit, and HF_HUB_OFFLINE forbids to ask it; unset \
         HF_HUB_OFFLINE to update"
    )]
    OfflineUpdate {
        /// org/name.
        repo: String,
    },
    /// The model to remove does not exist.
    #[error("{name} is not in {}; `thunder model list` shows what is", cache.display())]
    NotInCache {
        /// The model.
        name: String,
        /// The cache.
        cache: PathBuf,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The operation, such as "read".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl HubError {
    /// Makes the closure for `map_err` of a file operation.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
