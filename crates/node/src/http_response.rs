//! The part of HTTP/1.0 that the gateway reads of a head's responses: a head, then the body up to
//! the connection's end, as a whole or in lines.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

/// Maximum length of a response's head.
const LONGEST_HEAD_BYTES: usize = 64 << 10;
/// Maximum length of a line or body: a response of many choices with log-probabilities.
const LONGEST_BYTES: usize = 64 << 20;
/// Bytes that are read at once.
const PIECE_BYTES: usize = 16 << 10;
/// Maximum headers of a response.
const MOST_HEADERS: usize = 100;

/// A response's head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResponseHead {
    /// Status and reason, such as `404 Not Found`.
    pub status: String,
    /// The status as a number.
    pub code: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
}

impl ResponseHead {
    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    fn parse(bytes: &[u8]) -> io::Result<Option<(Self, usize)>> {
        let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut response = httparse::Response::new(&mut headers);
        let httparse::Status::Complete(length) = response.parse(bytes).map_err(io::Error::other)? else {
            return Ok(None);
        };
        let header = |header: &httparse::Header<'_>| {
            (header.name.to_ascii_lowercase(), String::from_utf8_lossy(header.value).trim().to_owned())
        };
        let code = response.code.unwrap_or(0);
        let status = format!("{code} {}", response.reason.unwrap_or_default());
        Ok(Some((Self { status, code, headers: response.headers.iter().map(header).collect() }, length)))
    }
}

/// Reads a response. Each call is cancellation-safe: it may be dropped and repeated.
pub struct ResponseReader<R> {
    reader: R,
    bytes: Vec<u8>,
    /// Bytes that are known to contain no line end.
    searched: usize,
}

impl<R: AsyncRead + Unpin> ResponseReader<R> {
    /// Reads from a connection.
    pub fn new(reader: R) -> Self {
        Self { reader, bytes: Vec::new(), searched: 0 }
    }

    /// Reads more bytes. Returns false at the end.
    async fn more(&mut self, limit: usize) -> io::Result<bool> {
        if self.bytes.len() >= limit {
            return Err(io::Error::other(format!("a response of more than {limit} bytes")));
        }
        self.bytes.reserve(PIECE_BYTES);
        Ok(self.reader.read_buf(&mut self.bytes).await? > 0)
    }

    /// The response's head.
    ///
    /// # Errors
    /// If the connection fails or ends, or the data is not HTTP.
    pub async fn head(&mut self) -> io::Result<ResponseHead> {
        loop {
            if let Some((head, length)) = ResponseHead::parse(&self.bytes)? {
                self.bytes.drain(..length);
                return Ok(head);
            }
            if !self.more(LONGEST_HEAD_BYTES).await? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// The next line without its end; `None` at the end. An incomplete last line is dropped.
    ///
    /// # Errors
    /// If the connection fails.
    pub async fn line(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            let found = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n');
            if let Some(at) = found.map(|at| at + self.searched) {
                let rest = self.bytes.split_off(at + 1);
                let mut line = std::mem::replace(&mut self.bytes, rest);
                line.truncate(at);
                self.searched = 0;
                return Ok(Some(line));
            }
            self.searched = self.bytes.len();
            if !self.more(LONGEST_BYTES).await? {
                return Ok(None);
            }
        }
    }

    /// All remaining bytes.
    ///
    /// # Errors
    /// If the connection fails.
    pub async fn rest(&mut self) -> io::Result<Vec<u8>> {
        while self.more(LONGEST_BYTES).await? {}
        Ok(std::mem::take(&mut self.bytes))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use proptest::prelude::*;
    use tokio::io::AsyncWriteExt;

    use super::*;

    fn run<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
    }

    proptest! {
        #[test]
        fn lines_arrive_in_any_pieces(lines in prop::collection::vec("[a-z]{0,40}", 0..6), piece in 1usize..9) {
            let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
            let bytes = format!("HTTP/1.0 200 OK\r\ncontent-type: x\r\n\r\n{text}unfinished");
            let (head, got) = run(async {
                let (mut near, far) = tokio::io::duplex(piece);
                let write = async { near.write_all(bytes.as_bytes()).await.unwrap(); drop(near); };
                let read = async {
                    let mut reader = ResponseReader::new(far);
                    let head = reader.head().await.unwrap();
                    let mut got = Vec::new();
                    while let Some(line) = reader.line().await.unwrap() {
                        got.push(String::from_utf8(line).unwrap());
                    }
                    (head, got)
                };
                tokio::join!(write, read).1
            });
            prop_assert_eq!((head.code, head.header("content-type")), (200, Some("x")));
            prop_assert_eq!(got, lines);
        }

        #[test]
        fn any_bytes_are_a_head_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = run(ResponseReader::new(&bytes[..]).head());
        }
    }
}
