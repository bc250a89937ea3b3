//! CORS headers, which tell browsers which pages of other origins may use the API, as in
//! `crates/server/src/routes.rs` for a single server.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use thunder_access::EXPOSED_HEADERS;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::http::Head;

/// How long a browser may remember that an origin is allowed.
const ALLOWED_FOR_S: u32 = 3600;
const METHODS: &str = "GET,POST,PUT,PATCH,DELETE";

/// The header lines of a response to this request; none if no origin is allowed.
pub(super) fn header_lines(allowed: &[String], head: &Head) -> String {
    let origin = head.header("origin").unwrap_or_default();
    let name = if allowed.iter().any(|known| known == "*") {
        "*"
    } else if allowed.iter().any(|known| known == origin) {
        origin
    } else if allowed.is_empty() {
        return String::new();
    } else {
        return "vary: origin\r\n".to_owned();
    };
    let exposed = EXPOSED_HEADERS.join(",");
    format!(
        "vary: origin\r\naccess-control-allow-origin: {name}\r\naccess-control-expose-headers: {exposed}\r\n"
    )
}

/// The response to a browser's preflight request, which has no key.
pub(super) fn preflight(allowed: &[String], head: &Head) -> Option<Vec<u8>> {
    let asks = head.method == "OPTIONS" && head.header("access-control-request-method").is_some();
    if !asks || allowed.is_empty() {
        return None;
    }
    // OpenAI's clients send headers of their own.
    let wanted = head.header("access-control-request-headers");
    let headers = wanted.map(|wanted| format!("access-control-allow-headers: {wanted}\r\n"));
    let response = format!(
        "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\naccess-control-allow-methods: {METHODS}\r\n\
         access-control-max-age: {ALLOWED_FOR_S}\r\n{}\r\n",
        headers.unwrap_or_default()
    );
    Some(response.into_bytes())
}

/// A client's connection that adds header lines to the response.
pub(super) struct WithHeaders<S> {
    stream: S,
    lines: Vec<u8>,
    written: usize,
    part: Part,
}

/// The part of the response that is written next.
enum Part {
    /// The status line, or the remaining bytes of an interim response.
    Status {
        interim: usize,
    },
    Lines,
    Rest,
}

impl<S> WithHeaders<S> {
    /// `lines` are whole header lines.
    pub fn new(stream: S, lines: String) -> Self {
        Self { stream, lines: lines.into_bytes(), written: 0, part: Part::Status { interim: 0 } }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WithHeaders<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        loop {
            match &mut this.part {
                // `100 Continue` is written as a whole, and retried with its remainder.
                Part::Status { interim } if *interim > 0 || bytes.starts_with(b"HTTP/1.1 1") => {
                    let left = if *interim > 0 { *interim } else { bytes.len() };
                    let written =
                        ready!(Pin::new(&mut this.stream).poll_write(cx, &bytes[..left.min(bytes.len())]))?;
                    *interim = left - written;
                    return Poll::Ready(Ok(written));
                }
                Part::Status { .. } => {
                    let end = bytes.iter().position(|byte| *byte == b'\n').map(|place| place + 1);
                    let line = &bytes[..end.unwrap_or(bytes.len())];
                    let written = ready!(Pin::new(&mut this.stream).poll_write(cx, line))?;
                    if end == Some(written) {
                        this.part = Part::Lines;
                    }
                    return Poll::Ready(Ok(written));
                }
                Part::Lines if this.written == this.lines.len() => this.part = Part::Rest,
                Part::Lines => {
                    let rest = &this.lines[this.written..];
                    match ready!(Pin::new(&mut this.stream).poll_write(cx, rest))? {
                        0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                        written => this.written += written,
                    }
                }
                Part::Rest => return Pin::new(&mut this.stream).poll_write(cx, bytes),
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WithHeaders<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn head(text: &str) -> Head {
        Head::parse(format!("{text}\r\n\r\n").as_bytes()).unwrap().unwrap().0
    }

    #[test]
    fn an_allowed_origin_is_named_and_another_is_not() {
        let allowed = vec!["https://chat.example".to_owned()];
        let lines = |allowed: &[String], origin: &str| {
            header_lines(allowed, &head(&format!("GET / HTTP/1.1\r\norigin: {origin}")))
        };
        let known = lines(&allowed, "https://chat.example");
        assert!(known.contains("access-control-allow-origin: https://chat.example\r\n"), "{known}");
        assert!(known.contains("x-ratelimit-remaining-tokens"), "{known}");
        assert_eq!(lines(&allowed, "https://evil.example"), "vary: origin\r\n");
        assert_eq!(lines(&[], "https://chat.example"), "");
        assert!(lines(&["*".to_owned()], "https://x.example").contains("allow-origin: *"));
    }

    #[test]
    fn a_browsers_question_is_answered_without_a_key() {
        let allowed = ["*".to_owned()];
        let asks = head(
            "OPTIONS /v1/chat/completions HTTP/1.1\r\norigin: https://a.example\r\n\
             access-control-request-method: POST\r\naccess-control-request-headers: authorization,x-stainless-os",
        );
        let answer = String::from_utf8(preflight(&allowed, &asks).unwrap()).unwrap();
        assert!(answer.contains("allow-headers: authorization,x-stainless-os\r\n"), "{answer}");
        assert!(preflight(&[], &asks).is_none(), "no page may");
        assert!(preflight(&allowed, &head("OPTIONS / HTTP/1.1")).is_none(), "no browser asks");
    }

    proptest! {
        #[test]
        fn lines_follow_the_status_however_the_response_is_cut(piece in 1usize..40, interim: bool, body in "[a-z\n]{0,60}") {
            let response = format!("HTTP/1.1 200 OK\r\nx: y\r\n\r\n{body}");
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let read = runtime.block_on(async {
                let (near, mut far) = tokio::io::duplex(piece);
                let mut client = WithHeaders::new(near, "a: b\r\n".to_owned());
                let write = async {
                    if interim {
                        client.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await.unwrap();
                    }
                    client.write_all(response.as_bytes()).await.unwrap();
                    drop(client);
                };
                let mut text = String::new();
                let (_, read) = tokio::join!(write, far.read_to_string(&mut text));
                read.unwrap();
                text
            });
            let first = if interim { "HTTP/1.1 100 Continue\r\n\r\n" } else { "" };
            prop_assert_eq!(read, format!("{first}HTTP/1.1 200 OK\r\na: b\r\nx: y\r\n\r\n{body}"));
        }
    }
}
