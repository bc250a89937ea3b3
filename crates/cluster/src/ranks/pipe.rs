//! A pipe to a process. Written when `poll` reports it writable, so that a slow reader does not
//! block the launcher.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

/// A pipe to a process, with the data that the process has not read yet.
#[derive(Debug)]
pub(crate) struct Pipe {
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

    /// Closes the pipe once everything is written.
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

    /// The descriptor for `poll` to watch; `None` while nothing is waiting.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().filter(|_| !self.waiting.is_empty()).map(AsFd::as_fd)
    }

    /// Call when `poll` reports the pipe writable.
    pub fn write(&mut self) {
        let Some(fd) = &self.fd else { return };
        match rustix::io::write(fd, &self.waiting) {
            Ok(count) => {
                self.waiting.drain(..count);
            }
            Err(Errno::INTR | Errno::AGAIN) => return,
            // The process has closed its input, which is not a failure.
            Err(_) => self.close(),
        }
        if self.close_when_empty && self.waiting.is_empty() {
            self.close();
        }
    }
}
