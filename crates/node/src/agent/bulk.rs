//! Members' connections for bulk data. They have threads of their own with blocking sockets: files
//! and encryption would block the agent's two threads, and with them its heartbeats.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use rustls::{ClientConnection, ServerConnection, StreamOwned};

use super::Agent;
use crate::gate::Connection;

/// Bytes that one call to the system reads. TLS alone would read 4 KiB.
const INPUT_BYTES: usize = 256 << 10;
/// Plain bytes that TLS collects before it writes: a whole piece of a file.
const TLS_BUFFER_BYTES: usize = 256 << 10;

/// The connecting side of a connection.
pub(super) type ClientStream = StreamOwned<ClientConnection, Socket>;
/// The accepting side of a connection.
pub(super) type ServerStream = StreamOwned<ServerConnection, Socket>;

/// A blocking socket that reads much at once.
#[derive(Debug)]
pub(super) struct Socket {
    stream: TcpStream,
    buffer: Box<[u8]>,
    /// The part of the buffer that was not returned yet.
    unread: std::ops::Range<usize>,
}

impl Socket {
    fn new(stream: tokio::net::TcpStream) -> io::Result<Self> {
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        Ok(Self { stream, buffer: vec![0; INPUT_BYTES].into_boxed_slice(), unread: 0..0 })
    }

    /// Limits each read and each write; `None`: no limit.
    pub fn set_limits(&self, read: Option<Duration>, write: Option<Duration>) -> io::Result<()> {
        self.stream.set_read_timeout(read)?;
        self.stream.set_write_timeout(write)
    }
}

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.unread.is_empty() {
            self.unread = 0..self.stream.read(&mut self.buffer)?;
        }
        let count = bytes.len().min(self.unread.len());
        bytes[..count].copy_from_slice(&self.buffer[self.unread.start..][..count]);
        self.unread.start += count;
        Ok(count)
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn write_vectored(&mut self, pieces: &[io::IoSlice<'_>]) -> io::Result<usize> {
        self.stream.write_vectored(pieces)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// A connection that this node has opened, with blocking calls from now on.
pub(super) fn client(
    stream: tokio_rustls::client::TlsStream<tokio::net::TcpStream>,
) -> io::Result<ClientStream> {
    let (socket, mut tls) = stream.into_inner();
    tls.set_buffer_limit(Some(TLS_BUFFER_BYTES));
    Ok(StreamOwned::new(tls, Socket::new(socket)?))
}

impl Agent {
    /// Runs `work` with an accepted connection, in a thread of its own, until it ends or the node
    /// is removed.
    pub(super) async fn serve_blocking(
        &self,
        connection: Connection,
        work: impl FnOnce(&mut ServerStream) -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let (socket, mut tls) = connection.stream.into_inner();
        let socket = Socket::new(socket)?;
        let closer = socket.stream.try_clone()?;
        tls.set_buffer_limit(Some(TLS_BUFFER_BYTES));
        let served = tokio::task::spawn_blocking(move || work(&mut StreamOwned::new(tls, socket)));
        tokio::select! {
            served = served => served.unwrap_or_else(|error| Err(io::Error::other(error))),
            // The thread's next read or write fails.
            () = self.until_removed(connection.peer) => closer.shutdown(Shutdown::Both),
        }
    }
}
