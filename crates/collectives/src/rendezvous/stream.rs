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
    /// The address of the other side, for people.
    fn peer(&self) -> String;
}

macro_rules! handshake_stream {
    ($($stream:ty: $peer:expr),*) => {$(
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
            fn peer(&self) -> String {
                $peer(self)
            }
        }
    )*};
}
handshake_stream!(TcpStream: tcp_peer, UnixStream: |_: &UnixStream| "a process of this host".to_owned());

/// Without the port, which the other side's system has chosen.
fn tcp_peer(stream: &TcpStream) -> String {
    stream
        .peer_addr()
        .map_or_else(|_| "a closed connection".to_owned(), |peer| peer.ip().to_canonical().to_string())
}

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

/// The system reports a timeout of a read as "resource temporarily unavailable".
fn named(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            io::Error::new(io::ErrorKind::TimedOut, "connected, but no rank answers there")
        }
        _ => error,
    }
}

impl<S: HandshakeStream> Read for DeadlineStream<'_, S> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.limited().and_then(|stream| stream.read(into)).map_err(named)
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
