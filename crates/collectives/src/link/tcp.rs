//! TCP: one non-blocking connection without delay, and a buffer so that a small message is one system call.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};

use super::{Closed, Interest, Link};
use crate::Transport;

/// Fits the second-level cache, so that a reduction reads what the kernel has just copied.
const BUFFER_BYTES: usize = 256 << 10;
/// From here on bytes go straight to where they are wanted.
const DIRECT_BYTES: usize = 16 << 10;

/// One rank's end of a pair's connection.
pub(crate) struct TcpLink {
    stream: TcpStream,
    buffer: Box<[u8]>,
    /// The bytes that have arrived and not been consumed.
    start: usize,
    end: usize,
    shown: usize,
}

impl TcpLink {
    pub fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, buffer: vec![0; BUFFER_BYTES].into_boxed_slice(), start: 0, end: 0, shown: 0 })
    }

    fn read(mut stream: &TcpStream, into: &mut [u8]) -> Result<usize, Closed> {
        loop {
            match stream.read(into) {
                Ok(0) => return Err(Closed),
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(Closed),
            }
        }
    }
}

impl Link for TcpLink {
    fn transport(&self) -> Transport {
        Transport::Tcp
    }

    fn send(&mut self, first: &[u8], second: &[u8]) -> Result<usize, Closed> {
        if first.is_empty() && second.is_empty() {
            return Ok(0);
        }
        loop {
            let result = if first.is_empty() {
                self.stream.write(second)
            } else {
                self.stream.write_vectored(&[IoSlice::new(first), IoSlice::new(second)])
            };
            match result {
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(Closed),
            }
        }
    }

    fn arrived(&mut self, want: usize) -> Result<usize, Closed> {
        let mut there = self.end - self.start;
        if there < want {
            if there == 0 {
                (self.start, self.end) = (0, 0);
            } else if self.end == self.buffer.len() {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, there);
            }
            match Self::read(&self.stream, &mut self.buffer[self.end..]) {
                Ok(count) => self.end += count,
                // What came before the end is still good.
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
            // SAFETY: the caller vouches for `length` bytes at `to`; any bytes are valid u8.
            return Self::read(&self.stream, unsafe { std::slice::from_raw_parts_mut(to, length) });
        }
        let count = self.arrived(length)?;
        // SAFETY: the view holds `count <= length` bytes.
        unsafe { std::ptr::copy_nonoverlapping(self.view().as_ptr(), to, count) };
        self.consume(count);
        Ok(count)
    }

    fn arm(&mut self, _interest: Interest) -> bool {
        true
    }

    fn disarm(&mut self) {}

    fn descriptor(&self, interest: Interest) -> (RawFd, libc::c_short) {
        let mut events = 0;
        if interest.receive {
            events |= libc::POLLIN;
        }
        if interest.send {
            events |= libc::POLLOUT;
        }
        (self.stream.as_raw_fd(), events)
    }

    fn reports_end(&self) -> bool {
        true
    }
}
