//! Requests to the hub: the token goes to the hub alone, never to the hosts that it redirects to.

use std::{io::Read as _, time::Duration};

use ureq::{
    Agent, Body,
    http::{Request, Response, header},
};

use crate::{
    error::HubError,
    failure::Failure,
    url::{escape, origin, resolve},
};

/// Redirects in a row before a server counts as broken.
const MAX_REDIRECTS: usize = 8;
/// The list of a repository's files: 16 MiB are some 100,000 files.
const MAX_LISTING_BYTES: u64 = 16 << 20;
/// The longest wait between two attempts.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// A connection pool for one hub.
pub(crate) struct Client {
    agent: Agent,
    /// Without a slash at the end.
    endpoint: String,
    token: Option<String>,
    /// Attempts without a byte gained before giving up.
    attempts: u32,
    /// The wait after the first failure; doubled after each.
    first_wait: Duration,
}

/// What the hub says of a file.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    pub(crate) etag: String,
    pub(crate) size: u64,
}

impl Client {
    pub(crate) fn new(
        endpoint: &str,
        token: Option<String>,
        attempts: u32,
        first_wait: Duration,
        stall: Duration,
    ) -> Result<Self, HubError> {
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let valid = origin(&endpoint).is_some_and(|(scheme, _)| scheme == "http" || scheme == "https");
        if !valid {
            return Err(HubError::BadEndpoint { endpoint });
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("thunderhead/", env!("CARGO_PKG_VERSION")))
            // Compressed answers would not have the length that is asked for.
            .accept_encoding("identity")
            .timeout_connect(Some(stall))
            .timeout_recv_response(Some(stall))
            .timeout_per_read(Some(stall))
            .build();
        Ok(Self { agent: config.into(), endpoint, token, attempts: attempts.max(1), first_wait })
    }

    /// The list of files of a revision.
    pub(crate) fn listing(&self, repo: &str, revision: &str) -> Result<Vec<u8>, Failure> {
        let url = format!("{}/api/models/{repo}/revision/{}", self.endpoint, escape(revision, false));
        let response = self.follow("GET", url, None)?;
        if !response.status().is_success() {
            return Err(Failure::of_status(&response));
        }
        let mut bytes = Vec::new();
        let mut body = response.into_body().into_reader().take(MAX_LISTING_BYTES + 1);
        body.read_to_end(&mut bytes).map_err(|error| Failure::passing(error.to_string()))?;
        if bytes.len() as u64 > MAX_LISTING_BYTES {
            return Err(Failure::lasting(format!("the list of files is above {MAX_LISTING_BYTES} bytes")));
        }
        Ok(bytes)
    }

    /// A file's etag and size. For large files the hub redirects to another host and says both with that.
    pub(crate) fn remote(&self, repo: &str, commit: &str, file: &str) -> Result<Remote, Failure> {
        let response = self.follow("HEAD", self.file_url(repo, commit, file), None)?;
        let status = response.status();
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let told_by_redirect = status.is_redirection() && header("x-linked-etag").is_some();
        if !status.is_success() && !told_by_redirect {
            return Err(Failure::of_status(&response));
        }
        if let Some(other) = header("x-repo-commit").filter(|other| *other != commit) {
            return Err(Failure::lasting(format!("it is of commit {other}, not of {commit}")));
        }
        let etag = header("x-linked-etag").or_else(|| header("etag")).map(plain_etag);
        let etag = etag
            .filter(|etag| is_blob_name(etag))
            .ok_or_else(|| Failure::lasting("it has no usable etag"))?;
        let length = if status.is_success() { header("content-length") } else { None };
        let size = header("x-linked-size").or(length).and_then(|text| text.parse().ok());
        let size = size.ok_or_else(|| Failure::lasting("it has no size"))?;
        Ok(Remote { etag: etag.to_owned(), size })
    }

    /// A file's content from byte `from` on, as a successful answer (200 if the server cannot begin there, or 206), or
    /// with status 416 if it has no such byte.
    pub(crate) fn content(
        &self,
        repo: &str,
        commit: &str,
        file: &str,
        from: u64,
    ) -> Result<Response<Body>, Failure> {
        let response = self.follow("GET", self.file_url(repo, commit, file), (from > 0).then_some(from))?;
        match response.status().as_u16() {
            200 | 206 | 416 => Ok(response),
            _ => Err(Failure::of_status(&response)),
        }
    }

    fn file_url(&self, repo: &str, commit: &str, file: &str) -> String {
        format!("{}/{repo}/resolve/{commit}/{}", self.endpoint, escape(file, true))
    }

    /// Sends a request and follows redirects. A HEAD request stops at the first redirect to another host.
    fn follow(&self, method: &str, mut url: String, from: Option<u64>) -> Result<Response<Body>, Failure> {
        for _ in 0..MAX_REDIRECTS {
            let at_hub = origin(&url) == origin(&self.endpoint);
            let mut request = Request::builder().method(method).uri(&url);
            if let Some(token) = self.token.as_ref().filter(|_| at_hub) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            if let Some(from) = from {
                request = request.header(header::RANGE, format!("bytes={from}-"));
            }
            let request = request.body(()).map_err(|error| Failure::lasting(format!("{url}: {error}")))?;
            let response = self.agent.run(request)?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(response);
            }
            let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let next = location.and_then(|location| resolve(&url, location));
            let next =
                next.ok_or_else(|| Failure::lasting(format!("a redirect to nowhere ({location:?})")))?;
            if url.starts_with("https:") && !next.starts_with("https:") {
                return Err(Failure::lasting(format!("a redirect from https to {next}")));
            }
            if method == "HEAD" && origin(&next) != origin(&url) {
                return Ok(response);
            }
            url = next;
        }
        Err(Failure::lasting(format!("more than {MAX_REDIRECTS} redirects")))
    }

    /// Calls `attempt` until it succeeds, fails for good, or has failed too often.
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

    /// Waits after the `failed`-th failure in a row, and returns for how long; `None` means to give up.
    pub(crate) fn wait_before_retry(&self, failure: &Failure, failed: u32) -> Option<Duration> {
        if !failure.retry || failed >= self.attempts {
            return None;
        }
        let doubled = self.first_wait.saturating_mul(1 << (failed - 1).min(16));
        let wait = failure.wait.unwrap_or(doubled).min(MAX_WAIT);
        std::thread::sleep(wait);
        Some(wait)
    }

    /// The error to show for a failure that ended `attempts` attempts at a file (or at the list of files).
    pub(crate) fn error(
        &self,
        repo: &str,
        revision: &str,
        file: &str,
        failure: Failure,
        attempts: u32,
    ) -> HubError {
        let (repo, file, endpoint) = (repo.to_owned(), file.to_owned(), self.endpoint.clone());
        let Failure { reason, retry, status, code, .. } = failure;
        match (status, code.as_deref()) {
            (_, Some("GatedRepo")) => HubError::Gated { repo, file, endpoint },
            (_, Some("RevisionNotFound")) => {
                HubError::RevisionNotFound { repo, revision: revision.into(), endpoint }
            }
            (_, Some("EntryNotFound")) => HubError::FileNotFound { repo, file },
            (_, Some("RepoNotFound")) => HubError::RepoNotFound { repo, endpoint },
            (Some(404), None) if file != LIST => HubError::FileNotFound { repo, file },
            (Some(404), _) => HubError::RepoNotFound { repo, endpoint },
            // The hub says 401 for names that do not exist, too, to those who have no token.
            (Some(401), _) if self.token.is_none() => HubError::RepoNotFound { repo, endpoint },
            (Some(status @ (401 | 403)), _) => HubError::Refused { repo, file, status },
            _ if retry => HubError::Network { repo, file, endpoint, reason, attempts },
            _ => HubError::Answer { repo, file, reason },
        }
    }
}

/// What messages call the request for the list of files.
pub(crate) const LIST: &str = "list of files";

/// An etag without the mark of weakness and the quotes.
fn plain_etag(etag: &str) -> &str {
    etag.trim_start_matches("W/").trim_matches('"')
}

/// Whether an etag can be the name of a file in the cache.
fn is_blob_name(etag: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    !etag.is_empty() && etag.len() <= 128 && etag.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etags_are_plain() {
        assert_eq!(plain_etag("W/\"abc\""), "abc");
        assert!(is_blob_name("0a9f") && !is_blob_name("../x") && !is_blob_name("") && !is_blob_name("a.b"));
    }

    #[test]
    fn endpoints_are_addresses() {
        let new = |endpoint: &str| {
            Client::new(endpoint, None, 1, Duration::ZERO, Duration::from_secs(1)).map(|c| c.endpoint)
        };
        assert_eq!(new("http://127.0.0.1:9/").expect("an address"), "http://127.0.0.1:9");
        for bad in ["", "huggingface.co", "ftp://x", "https://"] {
            assert!(matches!(new(bad), Err(HubError::BadEndpoint { .. })), "{bad}");
        }
    }
}
