//! The client of one request: its response, and whether it is still connected.

use std::pin::pin;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::Instant;

/// Time for an answer after its client has closed its sending side, which looks the same as
/// leaving.
const HALF_CLOSED_LIMIT: Duration = Duration::from_secs(10);

/// The client has left.
#[derive(Debug)]
pub(super) struct Gone;

/// A client's connection, while its response is written.
pub(super) struct Client<'a, S> {
    stream: &'a mut S,
    /// Additional header lines.
    headers: String,
    /// Content type of a stream that has begun.
    streams: Option<String>,
    /// When the client closed its sending side.
    ended: Option<Instant>,
}

impl<'a, S: AsyncRead + AsyncWrite + Unpin> Client<'a, S> {
    pub fn new(stream: &'a mut S) -> Self {
        Self { stream, headers: String::new(), streams: None, ended: None }
    }

    /// Sets additional header lines, before the response has begun.
    pub fn set_headers(&mut self, headers: &str) {
        headers.clone_into(&mut self.headers);
    }

    /// Whether a part of the response has been sent.
    pub fn has_begun(&self) -> bool {
        self.streams.is_some()
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), Gone> {
        let write = async {
            self.stream.write_all(bytes).await?;
            self.stream.flush().await
        };
        // The connection fails if the client reads nothing for too long.
        write.await.map_err(|_: std::io::Error| Gone)
    }

    /// Begins a stream.
    pub async fn begin(&mut self, content_type: &str) -> Result<(), Gone> {
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n\
             transfer-encoding: chunked\r\n{}connection: close\r\n\r\n",
            self.headers
        );
        self.streams = Some(content_type.to_owned());
        self.write(head.as_bytes()).await
    }

    /// Sends a part of a stream in one piece.
    pub async fn send(&mut self, frames: &str) -> Result<(), Gone> {
        if frames.is_empty() {
            return Ok(());
        }
        self.write(format!("{:x}\r\n{frames}\r\n", frames.len()).as_bytes()).await
    }

    /// Shows that the answer continues: a comment, if the stream's format has comments.
    pub async fn keep_alive(&mut self, comment: &str) -> Result<(), Gone> {
        if self.streams.as_deref() == Some("text/event-stream") {
            self.send(&format!(":{comment}\n\n")).await?;
        }
        Ok(())
    }

    /// Ends a stream.
    pub async fn end(&mut self) -> Result<(), Gone> {
        self.write(b"0\r\n\r\n").await
    }

    /// Sends a whole response.
    pub async fn whole(&mut self, status: &str, headers: &str, body: &[u8]) -> Result<(), Gone> {
        let head = format!(
            "HTTP/1.1 {status}\r\n{headers}{}content-length: {}\r\nconnection: close\r\n\r\n",
            self.headers,
            body.len()
        );
        self.write(&[head.as_bytes(), body].concat()).await
    }

    /// Waits until the client has left. May be dropped and called again.
    pub async fn gone(&mut self) {
        let mut rest = [0; 512];
        while self.ended.is_none() {
            match self.stream.read(&mut rest).await {
                // A connection carries one request; further data is not read as another.
                Ok(1..) => {}
                Ok(0) => self.ended = Some(Instant::now()),
                Err(_) => return,
            }
        }
        let ended = self.ended.unwrap_or_else(Instant::now);
        tokio::time::sleep_until(ended + HALF_CLOSED_LIMIT).await;
    }

    /// Waits for `work` while the client is connected, and keeps its stream alive.
    pub async fn wait<T>(&mut self, work: impl Future<Output = T>, every: Duration) -> Result<T, Gone> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return Ok(done),
                () = self.gone() => return Err(Gone),
                () = tokio::time::sleep(every) => self.keep_alive("").await?,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_leaves_is_noticed_and_one_that_only_listens_gets_time() {
        let (near, mut far) = tokio::io::duplex(64);
        let mut client = Client::new(&mut far);
        drop(near);
        let began = Instant::now();
        assert!(client.wait(std::future::pending::<()>(), Duration::from_secs(5)).await.is_err());
        let late = began.elapsed().saturating_sub(HALF_CLOSED_LIMIT);
        assert!(began.elapsed() >= HALF_CLOSED_LIMIT && late < Duration::from_secs(1), "{late:?} late");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_is_kept_alive_while_it_waits() {
        let (mut near, mut far) = tokio::io::duplex(4096);
        let mut client = Client::new(&mut far);
        client.begin("text/event-stream").await.unwrap();
        let work = tokio::time::sleep(Duration::from_secs(12));
        client.wait(work, Duration::from_secs(5)).await.unwrap();
        client.send("data: x\n\n").await.unwrap();
        client.end().await.unwrap();
        drop(far);
        let mut text = String::new();
        near.read_to_string(&mut text).await.unwrap();
        let body = text.split_once("\r\n\r\n").unwrap().1;
        assert_eq!(body, "3\r\n:\n\n\r\n3\r\n:\n\n\r\n9\r\ndata: x\n\n\r\n0\r\n\r\n");
    }
}
