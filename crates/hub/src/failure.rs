//! Why one attempt at a request failed.

use std::{io, time::Duration};

use ureq::{Body, http::Response};

/// A failed attempt.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) reason: String,
    /// True if another attempt may succeed.
    pub(crate) retry: bool,
    /// True if there was no connection to the server at all.
    pub(crate) is_unreachable: bool,
    /// The HTTP status, if the server answered.
    pub(crate) status: Option<u16>,
    /// The hub's error code (`X-Error-Code`).
    pub(crate) code: Option<String>,
    /// The wait that the server asks for (`Retry-After`).
    pub(crate) wait: Option<Duration>,
}

impl Failure {
    /// A transport failure, such as a broken connection. Another attempt may succeed.
    pub(crate) fn transient(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            retry: true,
            is_unreachable: false,
            status: None,
            code: None,
            wait: None,
        }
    }

    /// An invalid response. The server would send the same again.
    pub(crate) fn permanent(reason: impl Into<String>) -> Self {
        Self { retry: false, ..Self::transient(reason) }
    }

    pub(crate) fn of_status(response: &Response<Body>) -> Self {
        let status = response.status();
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let message = header("x-error-message").map(|message| format!(": {message}")).unwrap_or_default();
        Self {
            reason: format!("HTTP status {status}{message}"),
            retry: status.is_server_error() || matches!(status.as_u16(), 408 | 429),
            is_unreachable: false,
            status: Some(status.as_u16()),
            code: header("x-error-code").map(str::to_owned),
            wait: header("retry-after").and_then(|text| text.parse().ok()).map(Duration::from_secs),
        }
    }
}

impl From<ureq::Error> for Failure {
    fn from(error: ureq::Error) -> Self {
        let permanent = match &error {
            // An invalid certificate, or a server that does not speak TLS.
            ureq::Error::Io(inner) => inner.kind() == io::ErrorKind::InvalidData,
            ureq::Error::BadUri(_) | ureq::Error::Tls(_) | ureq::Error::Rustls(_) => true,
            other => matches!(other, ureq::Error::InvalidProxyUrl),
        };
        let is_unreachable = !permanent
            && match &error {
                // A broken connection. All other errors occur before a connection exists, such as a
                // name that the system cannot look up.
                ureq::Error::Io(inner) => !matches!(
                    inner.kind(),
                    io::ErrorKind::ConnectionReset
                        | io::ErrorKind::ConnectionAborted
                        | io::ErrorKind::BrokenPipe
                        | io::ErrorKind::UnexpectedEof
                        | io::ErrorKind::TimedOut
                        | io::ErrorKind::WouldBlock
                ),
                ureq::Error::Timeout(ureq::Timeout::Resolve | ureq::Timeout::Connect) => true,
                other => matches!(other, ureq::Error::HostNotFound | ureq::Error::ConnectionFailed),
            };
        Self { retry: !permanent, is_unreachable, ..Self::transient(error.to_string()) }
    }
}
