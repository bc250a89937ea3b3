//! The launcher's own output. Written when `poll` reports it writable, so that a slow reader does
//! not block the launcher.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

/// Output held for a slow reader. Beyond this, the ranks' pipes are not read, so the ranks wait.
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

    /// Whether its reader has closed it.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Call when `poll` reports the output writable: a write of at most `PIPE_BUF` bytes then does
    /// not block.
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
        // Moving the rest to the front only now and then keeps the buffer small without a copy per
        // write.
        if self.is_empty() || self.written > HELD_BYTES {
            self.waiting.drain(..self.written);
            self.written = 0;
        }
    }

    /// Drops what is waiting if the reader has closed the output.
    pub fn discard(&mut self) {
        if self.is_closed {
            self.waiting.clear();
            self.written = 0;
        }
    }
}
