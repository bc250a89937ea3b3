//! TCP: non-blocking connections without Nagle's delay, and a buffer so that a small message takes
//! one system call.
//!
//! Several connections carry one stream of bytes in stripes, in turn. A long message uses them all,
//! a short one only the connection that is next.

mod sealed;

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};

use super::{Closed, Interest, Link};
use crate::Transport;
pub(crate) use sealed::Sealed;

/// A non-blocking stream of bytes: TCP's own, or sealed records on it.
pub(crate) trait Connection: Send {
    /// Makes it non-blocking, without Nagle's delay.
    fn set_up(&self) -> io::Result<()>;

    /// Reads what has arrived; 0 at the stream's end.
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize>;

    /// Takes bytes of `first`, then of `second`. Whoever gets fewer passes the rest again.
    fn write(&mut self, first: &[u8], second: &[u8]) -> io::Result<usize>;

    /// True if there are readable bytes that the descriptor does not report.
    fn is_ready(&self) -> bool {
        false
    }

    /// For `poll`.
    fn descriptor(&self) -> RawFd;
}

impl Connection for TcpStream {
    fn set_up(&self) -> io::Result<()> {
        self.set_nodelay(true)?;
        self.set_nonblocking(true)
    }

    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        Read::read(self, target)
    }

    fn write(&mut self, first: &[u8], second: &[u8]) -> io::Result<usize> {
        if first.is_empty() {
            Write::write(self, second)
        } else {
            self.write_vectored(&[IoSlice::new(first), IoSlice::new(second)])
        }
    }

    fn descriptor(&self) -> RawFd {
        self.as_raw_fd()
    }
}

/// Fits the second-level cache, so that a reduction reads what the kernel has just copied.
const BUFFER_BYTES: usize = 256 << 10;
/// From this length on bytes go directly to their destination.
const DIRECT_BYTES: usize = 16 << 10;
/// Bytes per stripe. Several stripes fit into a connection's buffers, so that all connections stay
/// busy, and a stripe is long enough for efficient system calls.
const STRIPE_BYTES: usize = 64 << 10;

/// The next connection, and the remaining bytes of its stripe.
struct StripeCursor {
    connection: usize,
    left: usize,
}

impl StripeCursor {
    fn new(connections: usize) -> Self {
        // A single connection has one endless stripe.
        Self { connection: 0, left: if connections == 1 { usize::MAX } else { STRIPE_BYTES } }
    }

    fn advance(&mut self, count: usize, connections: usize) {
        if connections == 1 {
            return;
        }
        self.left -= count;
        if self.left == 0 {
            *self = Self { connection: (self.connection + 1) % connections, left: STRIPE_BYTES };
        }
    }
}

/// One rank's end of the connections of a pair.
pub(crate) struct TcpLink<C> {
    streams: Vec<C>,
    sending: StripeCursor,
    receiving: StripeCursor,
    buffer: Box<[u8]>,
    /// The range of received bytes that have not been consumed.
    start: usize,
    end: usize,
    shown: usize,
    /// What was wrong with the bytes of a connection.
    fault: Option<String>,
}

impl<C: Connection> TcpLink<C> {
    /// Both ends must pass their connections, at least one, in the same order.
    pub fn new(streams: Vec<C>) -> io::Result<Self> {
        streams.iter().try_for_each(Connection::set_up)?;
        let cursor = || StripeCursor::new(streams.len());
        let (sending, receiving) = (cursor(), cursor());
        let buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        Ok(Self { streams, sending, receiving, buffer, start: 0, end: 0, shown: 0, fault: None })
    }

    /// Reads from the connection that is next. Returns 0 when nothing has arrived.
    fn read(&mut self, into: ReadTarget) -> Result<usize, Closed> {
        let stream = &mut self.streams[self.receiving.connection];
        let target: &mut [u8] = match into {
            ReadTarget::Buffer => &mut self.buffer[self.end..],
            // SAFETY: the creator vouches for the bytes; any value is a valid u8.
            ReadTarget::Memory(to, length) => unsafe { std::slice::from_raw_parts_mut(to, length) },
        };
        let length = target.len().min(self.receiving.left);
        let count = loop {
            match stream.read(&mut target[..length]) {
                Ok(0) => return Err(Closed),
                Ok(count) => break count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    if error.kind() == ErrorKind::InvalidData {
                        self.fault = Some(error.to_string());
                    }
                    return Err(Closed);
                }
            }
        };
        self.receiving.advance(count, self.streams.len());
        Ok(count)
    }
}

/// Where bytes are read to.
enum ReadTarget {
    /// The free end of the buffer.
    Buffer,
    /// Memory that the caller vouches for.
    Memory(*mut u8, usize),
}

impl<C: Connection> Link for TcpLink<C> {
    fn transport(&self) -> Transport {
        Transport::Tcp
    }

    fn send(&mut self, first: &[u8], second: &[u8]) -> Result<usize, Closed> {
        let mut sent = 0;
        // Continues with the next stripe as long as a connection takes a whole one.
        while sent < first.len() + second.len() {
            let (first, second) =
                (&first[sent.min(first.len())..], &second[sent.saturating_sub(first.len())..]);
            let first = &first[..first.len().min(self.sending.left)];
            let second = &second[..second.len().min(self.sending.left - first.len())];
            let count = match self.streams[self.sending.connection].write(first, second) {
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Err(Closed),
            };
            self.sending.advance(count, self.streams.len());
            sent += count;
            if count < first.len() + second.len() {
                break;
            }
        }
        Ok(sent)
    }

    fn fill_view(&mut self, want: usize) -> Result<usize, Closed> {
        let mut there = self.end - self.start;
        if there < want {
            if there == 0 {
                (self.start, self.end) = (0, 0);
            } else if self.end == self.buffer.len() {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, there);
            }
            match self.read(ReadTarget::Buffer) {
                Ok(count) => self.end += count,
                // Bytes that arrived before the end are still valid.
                Err(Closed) if there > 0 => {}
                Err(Closed) => return Err(Closed),
            }
            there = self.end - self.start;
        }
        self.shown = there.min(want);
        Ok(self.shown)
    }

    fn view(&self) -> &[u8] {
        &self.buffer[self.start..self.start + self.shown]
    }

    fn consume(&mut self, count: usize) {
        debug_assert!(count <= self.shown);
        self.shown -= count;
        self.start += count;
    }

    unsafe fn receive_into(&mut self, to: *mut u8, length: usize) -> Result<usize, Closed> {
        if self.start == self.end && length >= DIRECT_BYTES {
            // The caller vouches for `length` bytes at `to`.
            return self.read(ReadTarget::Memory(to, length));
        }
        let count = self.fill_view(length)?;
        // SAFETY: the view holds `count <= length` bytes.
        unsafe { std::ptr::copy_nonoverlapping(self.view().as_ptr(), to, count) };
        self.consume(count);
        Ok(count)
    }

    fn arm(&mut self, interest: Interest) -> bool {
        !(interest.receive && self.streams[self.receiving.connection].is_ready())
    }

    fn disarm(&mut self) {}

    fn descriptors(&self, interest: Interest, set: &mut Vec<libc::pollfd>) {
        let mut add = |cursor: &StripeCursor, events| {
            let fd = self.streams[cursor.connection].descriptor();
            set.push(libc::pollfd { fd, events, revents: 0 });
        };
        if interest.receive {
            add(&self.receiving, libc::POLLIN);
        }
        if interest.send {
            add(&self.sending, libc::POLLOUT);
        }
    }

    fn reports_end(&self) -> bool {
        true
    }

    fn fault(&self) -> Option<String> {
        self.fault.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    #[test]
    fn a_long_message_uses_all_connections_and_arrives_in_order() {
        const CONNECTIONS: usize = 3;
        let (ours, theirs): (Vec<_>, Vec<_>) = (0..CONNECTIONS).map(|_| pair()).unzip();
        let watched: Vec<TcpStream> = theirs.iter().map(|stream| stream.try_clone().unwrap()).collect();
        let (mut sender, mut receiver) = (TcpLink::new(ours).unwrap(), TcpLink::new(theirs).unwrap());
        let message: Vec<u8> = (0..10 * STRIPE_BYTES + 123).map(|index| (index / 7) as u8).collect();
        let (header, rest) = message.split_at(64);
        let mut sent = 0;
        let mut received = vec![0; message.len()];
        let mut got = 0;
        while got < message.len() {
            let (first, second) = (&header[sent.min(64)..], &rest[sent.saturating_sub(64)..]);
            sent += sender.send(first, second).unwrap();
            if got == 0 && sent >= CONNECTIONS * STRIPE_BYTES {
                let waiting = watched.iter().filter(|stream| matches!(stream.peek(&mut [0]), Ok(1)));
                assert_eq!(waiting.count(), CONNECTIONS);
            }
            // Short pieces go through the buffer, long ones directly to their destination.
            let want = if got % 2 == 0 { 1001 } else { 40_000 }.min(message.len() - got);
            // SAFETY: `got + want` is within `received`.
            got += unsafe { receiver.receive_into(received.as_mut_ptr().add(got), want) }.unwrap();
        }
        assert!(received == message);
    }
}
