//! Downloads one file into the cache. Resumes an earlier attempt and verifies the checksum.

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
    client::{Client, RemoteFile},
    error::HubError,
    failure::Failure,
    progress::PullEvent,
};

/// Bytes read and hashed at a time.
const BUFFER_BYTES: usize = 1 << 18;

/// What all downloads of a pull share.
pub(crate) struct Download<'a> {
    pub(crate) client: &'a Client,
    pub(crate) folder: &'a RepoFolder,
    pub(crate) repo: &'a str,
    pub(crate) revision: &'a str,
    pub(crate) commit: &'a str,
    pub(crate) progress: &'a (dyn Fn(PullEvent<'_>) + Sync),
    /// Set when any file of the pull has failed.
    pub(crate) stop: &'a AtomicBool,
}

/// How an attempt without an error ended.
enum AttemptEnd {
    /// All bytes are on disk.
    Complete,
    /// Another file of the pull failed.
    Stopped,
}

/// Why an attempt failed.
enum AttemptError {
    /// At the server or on the way; may be retried.
    Remote(Failure),
    /// On this machine; ends the pull.
    Local(HubError),
}

impl From<HubError> for AttemptError {
    fn from(error: HubError) -> Self {
        Self::Local(error)
    }
}

impl Download<'_> {
    /// Downloads a file's content into its blob. Returns early, without an error, if another file
    /// failed.
    pub(crate) fn blob(&self, file: &str, remote: &RemoteFile) -> Result<(), HubError> {
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
        let mut done = self.resume(&mut part, file, remote, &mut checksum)?;
        let mut failed = 0;
        while done < remote.size {
            let before = done;
            let failure = match self.attempt(&mut part, file, remote, &mut checksum, &mut done) {
                Ok(AttemptEnd::Complete) => break,
                Ok(AttemptEnd::Stopped) => return Ok(()),
                Err(AttemptError::Local(error)) => return Err(error),
                Err(AttemptError::Remote(failure)) => failure,
            };
            // Attempts that gain bytes have no limit in number.
            failed = if done > before { 1 } else { failed + 1 };
            match self.client.wait_before_retry(&failure, failed) {
                Some(wait) => (self.progress)(PullEvent::Retry { file, reason: &failure.reason, wait }),
                None => return Err(self.client.error(self.repo, self.revision, file, failure, failed)),
            }
            if self.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
        part.sync_all().map_err(HubError::io("write", &path))?;
        drop(part);
        if let Some((algorithm, actual)) = checksum.finish().filter(|(_, actual)| *actual != remote.etag) {
            fs::remove_file(&path).map_err(HubError::io("delete", &path))?;
            let (repo, file, expected) = (self.repo.into(), file.into(), remote.etag.clone());
            return Err(HubError::Checksum { repo, file, algorithm, expected, actual });
        }
        let blob = self.folder.blob(&remote.etag);
        fs::rename(&path, &blob).map_err(HubError::io("rename", &path))?;
        (self.progress)(PullEvent::Done { file });
        Ok(())
    }

    /// Hashes the bytes that an earlier pull left and returns their number.
    fn resume(
        &self,
        part: &mut File,
        file: &str,
        remote: &RemoteFile,
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
        (self.progress)(PullEvent::Bytes { file, done, total: remote.size });
        Ok(done)
    }

    /// Empties the part file.
    fn restart(&self, part: &mut File, remote: &RemoteFile) -> Result<(), HubError> {
        let path = self.folder.part(&remote.etag);
        part.set_len(0).and_then(|()| part.rewind()).map_err(HubError::io("write", path))
    }

    /// Requests the bytes from `done` on and appends them to the part file.
    fn attempt(
        &self,
        part: &mut File,
        file: &str,
        remote: &RemoteFile,
        checksum: &mut Checksum,
        done: &mut u64,
    ) -> Result<AttemptEnd, AttemptError> {
        let response =
            self.client.content(self.repo, self.commit, file, *done).map_err(AttemptError::Remote)?;
        let resumes = response.status().as_u16() == 206;
        if resumes && content_range(&response) != Some((*done, remote.size)) {
            let reason = format!(
                "asked for bytes from {done} of {}, but the server sent a different range",
                remote.size
            );
            return Err(AttemptError::Remote(Failure::permanent(reason)));
        }
        if !resumes && *done > 0 {
            // The server does not support ranges (or, with 416, has a shorter file): start over.
            *done = 0;
            *checksum = Checksum::for_etag(&remote.etag, remote.size);
            self.restart(part, remote)?;
        }
        if response.status().as_u16() == 416 {
            let reason = "the server has fewer bytes than it reported";
            return Err(AttemptError::Remote(Failure::transient(reason)));
        }
        let mut body = response.into_body().into_reader();
        let mut buffer = vec![0; BUFFER_BYTES];
        while *done < remote.size {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(AttemptEnd::Stopped);
            }
            let wanted = usize::try_from(remote.size - *done).unwrap_or(usize::MAX).min(buffer.len());
            let read =
                body.read(&mut buffer[..wanted]).map_err(|error| broken(*done, remote.size, &error))?;
            if read == 0 {
                return Err(broken(*done, remote.size, &"the server closed it"));
            }
            part.write_all(&buffer[..read]).map_err(HubError::io("write", self.folder.part(&remote.etag)))?;
            checksum.update(&buffer[..read]);
            *done += read as u64;
            (self.progress)(PullEvent::Bytes { file, done: *done, total: remote.size });
        }
        Ok(AttemptEnd::Complete)
    }
}

fn broken(done: u64, size: u64, reason: &dyn fmt::Display) -> AttemptError {
    let reason = format!("the connection broke after {done} of {size} bytes: {reason}");
    AttemptError::Remote(Failure::transient(reason))
}

/// The first byte and the total length in `Content-Range`, such as `bytes 5-9/10`.
fn content_range(response: &Response<Body>) -> Option<(u64, u64)> {
    let text = response.headers().get(header::CONTENT_RANGE)?.to_str().ok()?;
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, total.parse().ok()?))
}
