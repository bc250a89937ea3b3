//! The part of HTTP/1.1 that the gateway reads: a request's head, and a body of known length.

use std::net::IpAddr;
use std::time::Duration;

use serde_json::{Value, json};
use thunder_access::{LimitKind, Refusal, rate_headers};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Maximum length of a request's head.
const LONGEST_HEAD_BYTES: usize = 64 << 10;
/// Maximum headers of a request.
const MOST_HEADERS: usize = 100;

/// Limits for clients of the API.
#[derive(Debug, Clone, Copy)]
pub struct ApiLimits {
    /// Simultaneous requests; more are answered with 503. Each takes two open files, and up to
    /// `body_bytes` of memory.
    pub connections: usize,
    /// Larger request bodies are refused.
    pub body_bytes: usize,
    /// Time for a request's head, and again for its body. Raise it for slow links.
    pub read_timeout: Duration,
    /// A client that reads nothing of its answer for this long is disconnected.
    pub write_timeout: Duration,
    /// Time limit of a request; its client may set less.
    pub request_timeout: Option<Duration>,
}

impl Default for ApiLimits {
    fn default() -> Self {
        Self {
            connections: 512,
            body_bytes: 8 << 20,
            read_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            request_timeout: None,
        }
    }
}

/// An error in the form of OpenAI's API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpError {
    status: u16,
    code: &'static str,
    message: String,
    /// The parameter that the error is about.
    param: Option<String>,
    /// Additional headers of the response.
    headers: String,
}

/// Headers as lines of a response's head.
pub fn header_lines(headers: Vec<(&'static str, String)>) -> String {
    headers.into_iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect()
}

/// If a client would have to wait longer, it is told not to try again.
const LONGEST_RETRY_MS: u64 = 120_000;

impl HttpError {
    /// An error with a status, a code for programs and a message for people.
    pub fn new(status: u16, code: &'static str, message: &str) -> Self {
        Self { status, code, message: message.to_owned(), param: None, headers: String::new() }
    }

    /// A limit of a key, a team or a model is reached.
    pub fn over_limit(refusal: &Refusal) -> Self {
        let code = match (refusal.retry_after_ms, refusal.limit) {
            (None, _) => "request_too_large",
            (_, LimitKind::TokensPerDay | LimitKind::TokensPerMonth | LimitKind::CostPerMonth) => {
                "insufficient_quota"
            }
            _ => "rate_limit_exceeded",
        };
        let wait = refusal.retry_after_ms;
        let mut headers = format!("x-should-retry: {}\r\n", wait.is_some_and(|ms| ms <= LONGEST_RETRY_MS));
        if let Some(ms) = wait {
            headers += &format!("retry-after: {}\r\nretry-after-ms: {ms}\r\n", ms.div_ceil(1000));
        }
        headers += &header_lines(rate_headers(&refusal.standings));
        let param = Some(format!("{}.{}", refusal.scope, refusal.limit.name()));
        Self { param, headers, ..Self::new(429, code, &refusal.to_string()) }
    }

    /// The status of its response.
    pub fn status(&self) -> u16 {
        self.status
    }

    fn kind(&self) -> &'static str {
        match self.status {
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The body in the form of the API that `path` belongs to.
    fn body(&self, path: &str) -> Value {
        let Self { code, message, param, .. } = self;
        if path.starts_with("/api/") {
            return json!({ "error": message });
        }
        if path.starts_with("/v1/messages") {
            let kind = match self.status {
                401 => "authentication_error",
                403 => "permission_error",
                404 => "not_found_error",
                413 => "request_too_large",
                429 => "rate_limit_error",
                500.. => "api_error",
                _ => "invalid_request_error",
            };
            return json!({ "type": "error", "error": { "type": kind, "message": message } });
        }
        json!({ "error": { "message": message, "type": self.kind(), "param": param, "code": code } })
    }

    /// The last frame of a stream of the API that `path` belongs to.
    pub fn frame(&self, path: &str) -> String {
        let body = self.body(path);
        match path {
            "/v1/messages" => format!("event: error\ndata: {body}\n\n"),
            "/v1/responses" => {
                let event = json!({
                    "type": "error", "code": self.code, "message": self.message, "param": null, "sequence_number": 0,
                });
                format!("event: error\ndata: {event}\n\n")
            }
            path if path.starts_with("/api/") => format!("{body}\n"),
            _ => format!("data: {body}\n\n"),
        }
    }

    /// The whole response in OpenAI's form.
    pub fn response(&self) -> Vec<u8> {
        self.response_of("")
    }

    /// The whole response in the form of the API that `path` belongs to.
    pub fn response_of(&self, path: &str) -> Vec<u8> {
        let reason = match self.status {
            400 => "Bad Request",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "Not Found",
            408 => "Request Timeout",
            411 => "Length Required",
            413 => "Content Too Large",
            415 => "Unsupported Media Type",
            429 => "Too Many Requests",
            431 => "Request Header Fields Too Large",
            500 => "Internal Server Error",
            _ => "Service Unavailable",
        };
        let body = self.body(path).to_string();
        let retry = match self.status {
            503 => "retry-after: 5\r\n",
            401 => "www-authenticate: Bearer\r\n",
            _ => "",
        };
        let (status, length, headers) = (self.status, body.len(), &self.headers);
        format!(
            "HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{retry}{headers}\
             connection: close\r\n\r\n{body}"
        )
        .into_bytes()
    }
}

/// A request's head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// `GET`, `POST`, …
    pub method: String,
    /// Path and query.
    pub path: String,
    /// Names in lower case.
    headers: Vec<(String, String)>,
}

impl Head {
    /// Parses the head at the start of `bytes`, and its length; `None` if more bytes are needed.
    ///
    /// # Errors
    /// If the bytes are not a head.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, HttpError> {
        let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        let bad = |error: httparse::Error| {
            HttpError::new(400, "invalid_request", &format!("the request is not HTTP/1.1: {error}"))
        };
        let httparse::Status::Complete(length) = request.parse(bytes).map_err(bad)? else { return Ok(None) };
        let header = |header: &httparse::Header<'_>| {
            (header.name.to_ascii_lowercase(), String::from_utf8_lossy(header.value).trim().to_owned())
        };
        let head = Self {
            method: request.method.unwrap_or_default().to_owned(),
            path: request.path.unwrap_or_default().to_owned(),
            headers: request.headers.iter().map(header).collect(),
        };
        Ok(Some((head, length)))
    }

    /// The value of a header; `name` is in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The key of an `Authorization` header.
    pub fn bearer(&self) -> Option<&str> {
        let (scheme, key) = self.header("authorization")?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    }

    /// The client's key, as OpenAI's or as Anthropic's clients send it.
    pub fn key(&self) -> Option<&str> {
        self.bearer().or_else(|| self.header("x-api-key"))
    }

    /// Refuses a request whose host is neither localhost nor an address.
    ///
    /// # Errors
    /// If it names another host.
    pub fn check_host(&self) -> Result<(), HttpError> {
        let host = self.header("host").unwrap_or("localhost");
        let name = match host.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or_default(),
            None => host.split(':').next().unwrap_or_default(),
        };
        if name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok() {
            return Ok(());
        }
        let message = format!(
            "the request is for \"{}\", but without an API key this node answers to localhost and to addresses only",
            name.chars().take(100).collect::<String>()
        );
        Err(HttpError::new(403, "host_not_allowed", &message))
    }

    /// Refuses a body that is not JSON, because a browser lets any web page send text or forms
    /// here.
    ///
    /// # Errors
    /// If it has another content type.
    pub fn check_json(&self) -> Result<(), HttpError> {
        let kind = self.header("content-type").unwrap_or_default();
        let kind = kind.split(';').next().unwrap_or_default().trim();
        if kind.eq_ignore_ascii_case("application/json") {
            return Ok(());
        }
        let message = "the body must be JSON: send the header \"Content-Type: application/json\"";
        Err(HttpError::new(415, "invalid_request", message))
    }

    /// Length of the body, at most `most` bytes.
    ///
    /// # Errors
    /// If the request does not give a length, or it is too large.
    pub fn body_length(&self, most: usize) -> Result<usize, HttpError> {
        if self.header("transfer-encoding").is_some() {
            return Err(HttpError::new(411, "length_required", "send the body with a Content-Length"));
        }
        let length = self.header("content-length").and_then(|length| length.parse::<usize>().ok());
        let length =
            length.ok_or_else(|| HttpError::new(411, "length_required", "Content-Length is missing"))?;
        if length > most {
            let message = format!("a body of {length} bytes is larger than the {most} that are allowed");
            return Err(HttpError::new(413, "body_too_large", &message));
        }
        Ok(length)
    }
}

/// Reads a request's head, which must arrive within `limit`. Also returns the part of the body that
/// arrived with it.
///
/// # Errors
/// If it is malformed, too long or too slow. A client that only closes the connection gets an error
/// too, which it does not read.
pub async fn read_head(
    client: &mut (impl AsyncRead + Unpin),
    limit: Duration,
) -> Result<(Head, Vec<u8>), HttpError> {
    let read = async {
        let mut bytes = Vec::new();
        loop {
            if let Some((head, length)) = Head::parse(&bytes)? {
                return Ok((head, bytes.split_off(length)));
            }
            if bytes.len() >= LONGEST_HEAD_BYTES {
                let message = format!("the request's head is longer than {LONGEST_HEAD_BYTES} bytes");
                return Err(HttpError::new(431, "head_too_large", &message));
            }
            let mut piece = [0; 4096];
            match client.read(&mut piece).await {
                Ok(count @ 1..) => bytes.extend_from_slice(&piece[..count]),
                _ => return Err(HttpError::new(400, "invalid_request", "the request ended early")),
            }
        }
    };
    tokio::time::timeout(limit, read).await.unwrap_or_else(|_| Err(too_slow(limit)))
}

/// Reads a request's body. `bytes` is the part that arrived with the head.
///
/// # Errors
/// If its length is missing or too large, or it does not arrive.
pub async fn read_body(
    client: &mut (impl AsyncRead + AsyncWrite + Unpin),
    head: &Head,
    mut bytes: Vec<u8>,
    limits: &ApiLimits,
) -> Result<Vec<u8>, HttpError> {
    let length = head.body_length(limits.body_bytes)?;
    let read = async {
        if head.header("expect").is_some() && bytes.len() < length {
            client.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        let left = length.saturating_sub(bytes.len()) as u64;
        client.take(left).read_to_end(&mut bytes).await?;
        Ok::<_, std::io::Error>(())
    };
    match tokio::time::timeout(limits.read_timeout, read).await {
        Err(_) => Err(too_slow(limits.read_timeout)),
        Ok(Ok(())) if bytes.len() >= length => {
            bytes.truncate(length);
            Ok(bytes)
        }
        Ok(_) => Err(HttpError::new(400, "invalid_request", "the body ended early")),
    }
}

fn too_slow(limit: Duration) -> HttpError {
    HttpError::new(408, "timeout", &format!("the request did not arrive within {limit:?}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use proptest::prelude::*;

    use super::*;

    fn head(text: &str) -> Head {
        Head::parse(text.as_bytes()).unwrap().unwrap().0
    }

    #[test]
    fn heads_are_read_and_checked() {
        let post = head(
            "POST /v1/x?y HTTP/1.1\r\nHost: [::1]:80\r\nAUTHORIZATION: bearer k\r\ncontent-length: 5\r\n\r\nhello",
        );
        assert_eq!((post.method.as_str(), post.path.as_str(), post.bearer()), ("POST", "/v1/x?y", Some("k")));
        assert_eq!((post.check_host(), post.body_length(8)), (Ok(()), Ok(5)));
        assert!(post.check_json().is_err());
        assert_eq!(Head::parse(b"POST / HTTP/1.1\r\nhost: a"), Ok(None));
        assert!(Head::parse(b"\x16\x03\x01").is_err());
        let status = |text: &str| head(text).body_length(8).unwrap_err().status;
        assert_eq!(status("POST / HTTP/1.1\r\n\r\n"), 411);
        assert_eq!(status("POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n"), 411);
        assert_eq!(status("POST / HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n"), 413);
        assert_eq!(
            head("GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n").check_host().unwrap_err().status,
            403
        );
        assert_eq!(head("GET / HTTP/1.1\r\nhost: localhost:8000\r\n\r\n").check_host(), Ok(()));
    }

    #[test]
    fn an_error_is_a_whole_response() {
        let error = HttpError::new(503, "busy", "a \"quoted\" word");
        let text = String::from_utf8(error.response()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())) && head.contains("retry-after"));
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["error"]["message"], "a \"quoted\" word");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_head_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Head::parse(&bytes);
        }

        #[test]
        fn a_request_arrives_in_any_pieces(body in "[a-z]{0,200}", piece in 1usize..20) {
            let request = format!("POST / HTTP/1.1\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let read = runtime.block_on(async {
                let (mut near, mut far) = tokio::io::duplex(piece);
                let write = async { near.write_all(request.as_bytes()).await.unwrap(); near };
                let read = async {
                    let (head, rest) = read_head(&mut far, Duration::from_secs(9)).await.unwrap();
                    read_body(&mut far, &head, rest, &ApiLimits::default()).await.unwrap()
                };
                tokio::join!(write, read).1
            });
            prop_assert_eq!(read, body.into_bytes());
        }
    }
}
