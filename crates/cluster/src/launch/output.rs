//! The launcher's own output and the pipes to its ranks: written when `poll` says so, so that no reader holds up the rest.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

/// More than this is not held; the ranks that write it have to wait.
const HELD_BYTES: usize = 1 << 20;

/// Standard output or standard error of the launcher.
pub(super) struct Output {
    fd: OwnedFd,
    waiting: Vec<u8>,
    written: usize,
    is_closed: bool,
}

impl Output {
    pub fn new(fd: impl AsFd) -> std::io::Result<Self> {
        let fd = fd.as_fd().try_clone_to_owned()?;
        Ok(Self { fd, waiting: Vec::new(), written: 0, is_closed: false })
    }

    /// Where lines are appended.
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.waiting
    }

    pub fn is_full(&self) -> bool {
        self.waiting.len() - self.written > HELD_BYTES
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.len() == self.written
    }

    /// Whether its reader has gone away.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// To be called when `poll` says that it can be written. What fits a pipe's atomic size then never blocks.
    pub fn write(&mut self) {
        let end = self.waiting.len().min(self.written + libc::PIPE_BUF);
        match rustix::io::write(&self.fd, &self.waiting[self.written..end]) {
            Ok(count) => self.written += count,
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(_) => {
                self.is_closed = true;
                self.written = self.waiting.len();
            }
        }
        // Moving the rest to the front now and then keeps the buffer small without copying it for every step.
        if self.is_empty() || self.written > HELD_BYTES {
            self.waiting.drain(..self.written);
            self.written = 0;
        }
    }

    /// Drops what cannot be written any more.
    pub fn discard(&mut self) {
        if self.is_closed {
            self.waiting.clear();
            self.written = 0;
        }
    }
}

/// A pipe to a process, which may take its time to read it.
pub(super) struct Pipe {
    fd: Option<OwnedFd>,
    waiting: Vec<u8>,
    close_when_empty: bool,
}

impl Pipe {
    pub fn new(fd: impl Into<OwnedFd>) -> std::io::Result<Self> {
        let fd = fd.into();
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self { fd: Some(fd), waiting: Vec::new(), close_when_empty: false })
    }

    pub fn push(&mut self, data: &[u8]) {
        if self.fd.is_some() {
            self.waiting.extend_from_slice(data);
        }
    }

    /// Closes it once everything is written.
    pub fn finish(&mut self) {
        self.close_when_empty = true;
        if self.waiting.is_empty() {
            self.close();
        }
    }

    pub fn close(&mut self) {
        self.fd = None;
        self.waiting.clear();
    }

    /// What `poll` has to watch while something is waiting.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().filter(|_| !self.waiting.is_empty()).map(AsFd::as_fd)
    }

    /// To be called when `poll` says that it can be written.
    pub fn write(&mut self) {
        let Some(fd) = &self.fd else { return };
        match rustix::io::write(fd, &self.waiting) {
            Ok(count) => {
                self.waiting.drain(..count);
            }
            Err(Errno::INTR | Errno::AGAIN) => return,
            // The reader wants no more: for a rank that is no failure.
            Err(_) => self.close(),
        }
        if self.close_when_empty && self.waiting.is_empty() {
            self.close();
        }
    }
}
