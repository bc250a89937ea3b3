//! Streams that a handshake runs on, and a deadline for all reads and writes of a handshake.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A socket that a handshake can run on.
pub(crate) trait HandshakeStream: Read + Write + Send + Sized + 'static {
    /// Limits each read and each write; `None` removes the limit.
    fn set_timeouts(&self, limit: Option<Duration>) -> io::Result<()>;
    /// Returns another handle of the same socket.
    fn duplicate(&self) -> io::Result<Self>;
    /// Ends all reads and writes on the socket, including those under way.
    fn shut_down(&self) -> io::Result<()>;
}

macro_rules! handshake_stream {
    ($($stream:ty),*) => {$(
        impl HandshakeStream for $stream {
            fn set_timeouts(&self, limit: Option<Duration>) -> io::Result<()> {
                self.set_read_timeout(limit)?;
                self.set_write_timeout(limit)
            }
            fn duplicate(&self) -> io::Result<Self> {
                self.try_clone()
            }
            fn shut_down(&self) -> io::Result<()> {
                self.shutdown(Shutdown::Both)
            }
        }
    )*};
}
handshake_stream!(TcpStream, UnixStream);

/// A stream on which all reads and writes together end by a deadline. A limit for each read alone
/// would let a stranger that sends a byte now and then stay connected for hours.
pub(crate) struct DeadlineStream<'a, S> {
    stream: &'a mut S,
    deadline: Instant,
}

impl<'a, S: HandshakeStream> DeadlineStream<'a, S> {
    pub fn new(stream: &'a mut S, limit: Duration) -> Self {
        Self { stream, deadline: Instant::now() + limit }
    }

    fn limited(&mut self) -> io::Result<&mut S> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_timeouts(Some(left))?;
        Ok(self.stream)
    }
}

impl<S: HandshakeStream> Read for DeadlineStream<'_, S> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.limited()?.read(into)
    }
}

impl<S: HandshakeStream> Write for DeadlineStream<'_, S> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.limited()?.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
