//! Requests to the hub. The token is sent to the hub only, never to a host that it redirects to.

use std::{io::Read as _, sync::Arc, time::Duration};

use thunder_parts::Run;
use ureq::{
    Agent, Body,
    http::{Request, Response, header},
};

use crate::{
    error::HubError,
    failure::Failure,
    options::PullOptions,
    peer::{self, Peer},
    runs::RUNS_HEADER,
    url::{escape, origin, resolve},
};

/// Maximum number of redirects of one request.
const MAX_REDIRECTS: usize = 8;
/// Largest list of a repository's files: 16 MiB hold about 100,000 files.
const MAX_LISTING_BYTES: u64 = 16 << 20;
/// Longest wait between two attempts.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// The address of any peer in requests. A peer is identified by its connection.
const PEER_ENDPOINT: &str = "http://peer";
/// If a peer sends nothing for this long, another peer is used. The hub may be slower.
const PEER_STALL: Duration = Duration::from_secs(5);

/// A connection pool for one hub, or one peer.
pub(crate) struct Client {
    agent: Agent,
    /// The hub's address, without a slash at the end.
    endpoint: String,
    /// A peer's name, or the hub's address.
    pub(crate) name: String,
    /// Whether it is a peer.
    pub(crate) is_peer: bool,
    token: Option<String>,
    /// Number of consecutive attempts without a new byte before giving up.
    attempts: u32,
    /// Wait after the first failure; doubled after each further failure.
    first_wait: Duration,
}

/// A file's etag and size in bytes, as the hub reports them.
#[derive(Debug, Clone)]
pub(crate) struct RemoteFile {
    pub(crate) etag: String,
    pub(crate) size: u64,
}

impl Client {
    /// A client for the hub of `options`.
    pub(crate) fn new(options: &PullOptions) -> Result<Self, HubError> {
        let endpoint = options.endpoint.trim_end_matches('/').to_owned();
        let valid = origin(&endpoint).is_some_and(|(scheme, _)| scheme == "http" || scheme == "https");
        if !valid {
            return Err(HubError::BadEndpoint { endpoint });
        }
        let agent = config(options.stall).build().into();
        let (name, token) = (endpoint.clone(), options.token.clone());
        Ok(Self {
            agent,
            endpoint,
            name,
            is_peer: false,
            token,
            attempts: options.attempts.max(1),
            first_wait: options.first_wait,
        })
    }

    /// For a peer.
    pub(crate) fn of_peer(peer: &Arc<dyn Peer>, options: &PullOptions) -> Self {
        // A proxy from the environment would lead to the internet.
        let config = config(options.stall.min(PEER_STALL)).proxy(None).build();
        Self {
            agent: peer::agent(config, peer.clone()),
            endpoint: PEER_ENDPOINT.to_owned(),
            name: peer.name(),
            is_peer: true,
            token: None,
            attempts: options.attempts.max(1),
            first_wait: options.first_wait,
        }
    }

    /// The hub's JSON list of a revision's files.
    pub(crate) fn listing(&self, repo: &str, revision: &str) -> Result<Vec<u8>, Failure> {
        let url = format!("{}/api/models/{repo}/revision/{}", self.endpoint, escape(revision, false));
        // If the first request gets no connection, later attempts most likely get none either.
        let response = self
            .follow("GET", url, None)
            .map_err(|failure| Failure { retry: failure.retry && !failure.is_unreachable, ..failure })?;
        if !response.status().is_success() {
            return Err(Failure::of_status(&response));
        }
        let mut bytes = Vec::new();
        let mut body = response.into_body().into_reader().take(MAX_LISTING_BYTES + 1);
        body.read_to_end(&mut bytes).map_err(|error| Failure::transient(error.to_string()))?;
        if bytes.len() as u64 > MAX_LISTING_BYTES {
            return Err(Failure::permanent(format!(
                "the list of files is larger than {MAX_LISTING_BYTES} bytes"
            )));
        }
        Ok(bytes)
    }

    /// A file's etag and size. For large files, the hub sends both with a redirect to another host.
    pub(crate) fn remote_file(&self, repo: &str, commit: &str, file: &str) -> Result<RemoteFile, Failure> {
        let response = self.follow("HEAD", self.file_url(repo, commit, file), None)?;
        let status = response.status();
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let in_redirect = status.is_redirection() && header("x-linked-etag").is_some();
        if !status.is_success() && !in_redirect {
            return Err(Failure::of_status(&response));
        }
        if let Some(other) = header("x-repo-commit").filter(|other| *other != commit) {
            return Err(Failure::permanent(format!("the file belongs to commit {other}, not to {commit}")));
        }
        let etag = header("x-linked-etag").or_else(|| header("etag")).map(plain_etag);
        let etag = etag
            .filter(|etag| is_blob_name(etag))
            .ok_or_else(|| Failure::permanent("the file has no usable etag"))?;
        let length = if status.is_success() { header("content-length") } else { None };
        let size = header("x-linked-size").or(length).and_then(|text| text.parse().ok());
        let size = size.ok_or_else(|| Failure::permanent("the file has no size"))?;
        Ok(RemoteFile { etag: etag.to_owned(), size })
    }

    /// A file's content from byte `from` up to `end` (exclusive), or to its last byte. Status 206:
    /// the content starts at `from`. 200: the server sends the whole file. 416: the file is not
    /// longer than `from` bytes.
    pub(crate) fn content(
        &self,
        repo: &str,
        commit: &str,
        file: &str,
        from: u64,
        end: Option<u64>,
    ) -> Result<Response<Body>, Failure> {
        let range = match end {
            Some(end) => Some(format!("bytes={from}-{}", end.saturating_sub(1))),
            None => (from > 0).then(|| format!("bytes={from}-")),
        };
        let range = range.map(|range| ("range", range));
        let response = self.follow("GET", self.file_url(repo, commit, file), range)?;
        match response.status().as_u16() {
            200 | 206 | 416 => Ok(response),
            _ => Err(Failure::of_status(&response)),
        }
    }

    /// Some bytes of a peer's file, one after the other, in one answer.
    pub(crate) fn content_of_runs(
        &self,
        repo: &str,
        commit: &str,
        file: &str,
        runs: &[Run],
    ) -> Result<Response<Body>, Failure> {
        let runs: Vec<String> = runs.iter().map(Run::to_string).collect();
        let runs = Some((RUNS_HEADER, runs.join(" ")));
        let response = self.follow("GET", self.file_url(repo, commit, file), runs)?;
        if response.status().is_success() { Ok(response) } else { Err(Failure::of_status(&response)) }
    }

    fn file_url(&self, repo: &str, commit: &str, file: &str) -> String {
        format!("{}/{repo}/resolve/{commit}/{}", self.endpoint, escape(file, true))
    }

    /// Sends a request, perhaps with one more header, and follows redirects. A HEAD request stops
    /// at a redirect to another host.
    fn follow(
        &self,
        method: &str,
        mut url: String,
        extra: Option<(&str, String)>,
    ) -> Result<Response<Body>, Failure> {
        for _ in 0..MAX_REDIRECTS {
            let at_hub = origin(&url) == origin(&self.endpoint);
            let mut request = Request::builder().method(method).uri(&url);
            if let Some(token) = self.token.as_ref().filter(|_| at_hub) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            if let Some((name, value)) = &extra {
                request = request.header(*name, value);
            }
            let request = request.body(()).map_err(|error| Failure::permanent(format!("{url}: {error}")))?;
            let response = self.agent.run(request)?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(response);
            }
            let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let next = location.and_then(|location| resolve(&url, location));
            let next = next.ok_or_else(|| {
                Failure::permanent(format!("a redirect without a usable address ({location:?})"))
            })?;
            if url.starts_with("https:") && !next.starts_with("https:") {
                return Err(Failure::permanent(format!("a redirect from https to {next}")));
            }
            if method == "HEAD" && origin(&next) != origin(&url) {
                return Ok(response);
            }
            url = next;
        }
        Err(Failure::permanent(format!("more than {MAX_REDIRECTS} redirects")))
    }

    /// Calls `attempt` until it succeeds, fails permanently, or has failed too often. An error has
    /// the number of attempts.
    pub(crate) fn retrying<T>(
        &self,
        mut attempt: impl FnMut() -> Result<T, Failure>,
        mut on_retry: impl FnMut(&Failure, Duration),
    ) -> Result<T, (Failure, u32)> {
        let mut failed = 0;
        loop {
            let failure = match attempt() {
                Ok(value) => return Ok(value),
                Err(failure) => failure,
            };
            failed += 1;
            match self.wait_before_retry(&failure, failed) {
                Some(wait) => on_retry(&failure, wait),
                None => return Err((failure, failed)),
            }
        }
    }

    /// Sleeps after consecutive failure number `failed` and returns the wait; `None` means to give
    /// up.
    pub(crate) fn wait_before_retry(&self, failure: &Failure, failed: u32) -> Option<Duration> {
        if failure.retry { self.pause(failure.wait, failed) } else { None }
    }

    /// Sleeps after consecutive failure number `failed`, for the time that the server asked for, or
    /// longer after each failure; `None` if it has failed too often.
    pub(crate) fn pause(&self, asked: Option<Duration>, failed: u32) -> Option<Duration> {
        if failed >= self.attempts {
            return None;
        }
        let doubled = self.first_wait.saturating_mul(1 << (failed - 1).min(16));
        let wait = asked.unwrap_or(doubled).min(MAX_WAIT);
        std::thread::sleep(wait);
        Some(wait)
    }

    /// The error for a file (or the list of files) whose last of `attempts` attempts failed.
    pub(crate) fn error(
        &self,
        repo: &str,
        revision: &str,
        file: &str,
        failure: Failure,
        attempts: u32,
    ) -> HubError {
        let (repo, file, endpoint) = (repo.to_owned(), file.to_owned(), self.name.clone());
        let Failure { reason, retry, is_unreachable, status, code, .. } = failure;
        match (status, code.as_deref()) {
            (_, Some("GatedRepo")) => HubError::Gated { repo, file, endpoint },
            (_, Some("RevisionNotFound")) => {
                HubError::RevisionNotFound { repo, revision: revision.into(), endpoint }
            }
            (_, Some("EntryNotFound")) => HubError::FileNotFound { repo, file },
            (_, Some("RepoNotFound")) => HubError::RepoNotFound { repo, endpoint },
            (Some(404), None) if file != FILE_LIST => HubError::FileNotFound { repo, file },
            (Some(404), _) => HubError::RepoNotFound { repo, endpoint },
            // Without a token, the hub also answers 401 for names that do not exist.
            (Some(401), _) if self.token.is_none() => HubError::RepoNotFound { repo, endpoint },
            (Some(status @ (401 | 403)), _) => HubError::Refused { repo, file, status },
            _ if is_unreachable && file == FILE_LIST => HubError::Unreachable { repo, endpoint, reason },
            _ if retry => HubError::Network { repo, file, endpoint, reason, attempts },
            _ => HubError::Response { repo, file, reason },
        }
    }
}

fn config(stall: Duration) -> ureq::config::ConfigBuilder<ureq::typestate::AgentScope> {
    Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .user_agent(concat!("thunderhead/", env!("CARGO_PKG_VERSION")))
        // A compressed response would not have the requested length.
        .accept_encoding("identity")
        .timeout_connect(Some(stall))
        .timeout_recv_response(Some(stall))
        .timeout_per_read(Some(stall))
}

/// The name of the list of files in messages.
pub(crate) const FILE_LIST: &str = "list of files";

/// An etag without the prefix of weak etags and without quotes.
fn plain_etag(etag: &str) -> &str {
    etag.trim_start_matches("W/").trim_matches('"')
}

/// True if an etag can be a file name in the cache.
fn is_blob_name(etag: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    !etag.is_empty() && etag.len() <= 128 && etag.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etags_lose_quotes_and_only_safe_ones_name_blobs() {
        assert_eq!(plain_etag("W/\"abc\""), "abc");
        assert!(is_blob_name("0a9f") && !is_blob_name("../x") && !is_blob_name("") && !is_blob_name("a.b"));
    }

    #[test]
    fn an_endpoint_must_be_an_http_address() {
        let new = |endpoint: &str| {
            let options = PullOptions { endpoint: endpoint.to_owned(), ..PullOptions::from_env() };
            Client::new(&options).map(|client| client.endpoint)
        };
        assert_eq!(new("http://127.0.0.1:9/").expect("an address"), "http://127.0.0.1:9");
        for bad in ["", "huggingface.co", "ftp://x", "https://"] {
            assert!(matches!(new(bad), Err(HubError::BadEndpoint { .. })), "{bad}");
        }
    }
}
