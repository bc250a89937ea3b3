//! One file's content into the cache: goes on where an earlier attempt stopped, and checks what it got.

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io::{Read as _, Seek as _, Write as _},
    sync::atomic::{AtomicBool, Ordering},
};

use ureq::{
    Body,
    http::{Response, header},
};

use crate::{
    cache::{RepoFolder, create_parent},
    checksum::Checksum,
    client::{Client, Remote},
    error::HubError,
    failure::Failure,
    progress::Event,
};

/// Bytes that are read and hashed at a time.
const BUFFER_BYTES: usize = 1 << 18;

/// What all downloads of a pull have in common.
pub(crate) struct Download<'a> {
    pub(crate) client: &'a Client,
    pub(crate) folder: &'a RepoFolder,
    pub(crate) repo: &'a str,
    pub(crate) revision: &'a str,
    pub(crate) commit: &'a str,
    pub(crate) progress: &'a (dyn Fn(Event<'_>) + Sync),
    /// Set once another file has failed.
    pub(crate) stop: &'a AtomicBool,
}

/// How one attempt ended.
enum Attempt {
    /// All bytes have come.
    Whole,
    /// Another file failed.
    Stopped,
}

/// Why one attempt did not end well.
enum Fault {
    Remote(Failure),
    Local(HubError),
}

impl From<HubError> for Fault {
    fn from(error: HubError) -> Self {
        Self::Local(error)
    }
}

impl Download<'_> {
    /// Fetches a file's content into its blob. `Ok(false)` if it was stopped for another's failure.
    pub(crate) fn blob(&self, file: &str, remote: &Remote) -> Result<bool, HubError> {
        let path = self.folder.part(&remote.etag);
        create_parent(&path)?;
        let mut part = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(HubError::io("open", &path))?;
        let mut checksum = Checksum::for_etag(&remote.etag, remote.size);
        let mut done = self.take_up(&mut part, file, remote, &mut checksum)?;
        let mut failed = 0;
        while done < remote.size {
            let before = done;
            let failure = match self.attempt(&mut part, file, remote, &mut checksum, &mut done) {
                Ok(Attempt::Whole) => break,
                Ok(Attempt::Stopped) => return Ok(false),
                Err(Fault::Local(error)) => return Err(error),
                Err(Fault::Remote(failure)) => failure,
            };
            // Attempts that gain bytes may go on for as long as they do.
            failed = if done > before { 1 } else { failed + 1 };
            match self.client.wait_before_retry(&failure, failed) {
                Some(wait) => (self.progress)(Event::Retry { file, reason: &failure.reason, wait }),
                None => return Err(self.client.error(self.repo, self.revision, file, failure, failed)),
            }
            if self.stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
        }
        part.sync_all().map_err(HubError::io("write", &path))?;
        drop(part);
        if let Some((kind, actual)) = checksum.finish().filter(|(_, actual)| *actual != remote.etag) {
            fs::remove_file(&path).map_err(HubError::io("delete", &path))?;
            let (repo, file, expected) = (self.repo.into(), file.into(), remote.etag.clone());
            return Err(HubError::Checksum { repo, file, kind, expected, actual });
        }
        let blob = self.folder.blob(&remote.etag);
        fs::rename(&path, &blob).map_err(HubError::io("rename", &path))?;
        (self.progress)(Event::Done { file });
        Ok(true)
    }

    /// Hashes what an earlier pull left, and returns how much that is.
    fn take_up(
        &self,
        part: &mut File,
        file: &str,
        remote: &Remote,
        checksum: &mut Checksum,
    ) -> Result<u64, HubError> {
        let path = self.folder.part(&remote.etag);
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut done = 0;
        loop {
            let read = part.read(&mut buffer).map_err(HubError::io("read", &path))?;
            done += read as u64;
            if read == 0 {
                break;
            }
            checksum.update(&buffer[..read]);
        }
        if done > remote.size {
            *checksum = Checksum::for_etag(&remote.etag, remote.size);
            self.restart(part, remote)?;
            done = 0;
        }
        (self.progress)(Event::Bytes { file, done, total: remote.size });
        Ok(done)
    }

    fn restart(&self, part: &mut File, remote: &Remote) -> Result<(), HubError> {
        let path = self.folder.part(&remote.etag);
        part.set_len(0).and_then(|()| part.rewind()).map_err(HubError::io("write", path))
    }

    /// Asks for the bytes from `done` on and appends them.
    fn attempt(
        &self,
        part: &mut File,
        file: &str,
        remote: &Remote,
        checksum: &mut Checksum,
        done: &mut u64,
    ) -> Result<Attempt, Fault> {
        let response = self.client.content(self.repo, self.commit, file, *done).map_err(Fault::Remote)?;
        let goes_on = response.status().as_u16() == 206;
        if goes_on && content_range(&response) != Some((*done, remote.size)) {
            let reason = format!("asked for bytes from {done} of {}, it sent others", remote.size);
            return Err(Fault::Remote(Failure::lasting(reason)));
        }
        if !goes_on && *done > 0 {
            // This server does not know ranges (or, with 416, has a shorter file): from the beginning.
            *done = 0;
            *checksum = Checksum::for_etag(&remote.etag, remote.size);
            self.restart(part, remote)?;
        }
        if response.status().as_u16() == 416 {
            return Err(Fault::Remote(Failure::passing("it has fewer bytes than it says")));
        }
        let mut body = response.into_body().into_reader();
        let mut buffer = vec![0; BUFFER_BYTES];
        while *done < remote.size {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(Attempt::Stopped);
            }
            let wanted = usize::try_from(remote.size - *done).unwrap_or(usize::MAX).min(buffer.len());
            let read =
                body.read(&mut buffer[..wanted]).map_err(|error| broken(*done, remote.size, &error))?;
            if read == 0 {
                return Err(broken(*done, remote.size, &"it was closed"));
            }
            part.write_all(&buffer[..read]).map_err(HubError::io("write", self.folder.part(&remote.etag)))?;
            checksum.update(&buffer[..read]);
            *done += read as u64;
            (self.progress)(Event::Bytes { file, done: *done, total: remote.size });
        }
        Ok(Attempt::Whole)
    }
}

fn broken(done: u64, size: u64, reason: &dyn fmt::Display) -> Fault {
    Fault::Remote(Failure::passing(format!("the connection broke after {done} of {size} bytes: {reason}")))
}

/// The first byte and the whole length that `Content-Range: bytes 5-9/10` names.
fn content_range(response: &Response<Body>) -> Option<(u64, u64)> {
    let text = response.headers().get(header::CONTENT_RANGE)?.to_str().ok()?;
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, total.parse().ok()?))
}
