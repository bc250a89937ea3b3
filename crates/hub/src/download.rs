//! Downloads one file into the cache. Resumes an earlier attempt and verifies the checksum.

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _, Write as _},
    mem,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use ureq::{
    Body,
    http::{Response, header},
};

use crate::{
    cache::{RepoFolder, create_parent},
    client::{Client, RemoteFile},
    error::HubError,
    failure::Failure,
    hasher::Hasher,
    pieces,
    progress::PullEvent,
    sources::{Sources, Turns},
    syncer::Syncer,
};

/// Number of bytes to read and hash at a time.
const BUFFER_BYTES: usize = 1 << 18;

/// State shared by all downloads of a pull.
pub(crate) struct Download<'a> {
    pub(crate) sources: &'a Sources,
    pub(crate) folder: &'a RepoFolder,
    pub(crate) repo: &'a str,
    pub(crate) revision: &'a str,
    pub(crate) commit: &'a str,
    pub(crate) progress: &'a (dyn Fn(PullEvent<'_>) + Sync),
    /// Set when any file of the pull has failed.
    pub(crate) stop: &'a AtomicBool,
    /// Connections for each large file from peers.
    pub(crate) streams: usize,
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
    /// A failure at the server or on the way; may be retried.
    Remote(Failure),
    /// A failure on this machine; ends the pull.
    Local(HubError),
}

impl From<HubError> for AttemptError {
    fn from(error: HubError) -> Self {
        Self::Local(error)
    }
}

/// A part file that is being filled.
struct Part {
    file: File,
    hasher: Hasher,
    /// Bytes that are written and hashed.
    done: u64,
    buffer: Vec<u8>,
    syncer: Syncer,
}

impl Part {
    /// Appends the first `filled` bytes of `piece`. Afterwards `piece` is another buffer of the
    /// same length.
    fn append(&mut self, piece: &mut Vec<u8>, filled: usize) -> io::Result<()> {
        self.file.write_all(&piece[..filled])?;
        self.syncer.wrote(&self.file, filled as u64);
        self.hasher.update(piece, filled);
        self.done += filled as u64;
        Ok(())
    }

    /// Appends the first `filled` bytes of its own buffer.
    fn append_own(&mut self, filled: usize) -> io::Result<()> {
        let mut buffer = mem::take(&mut self.buffer);
        let appended = self.append(&mut buffer, filled);
        self.buffer = buffer;
        appended
    }
}

impl Download<'_> {
    /// Downloads a file's content into its blob; `number` spreads files over peers. Returns early,
    /// without an error, if another file failed. If the bytes from peers have a wrong checksum, the
    /// file is downloaded again from the other sources.
    pub(crate) fn blob(&self, number: usize, file: &str, remote: &RemoteFile) -> Result<(), HubError> {
        if self.complete(file, remote)? {
            return Ok(());
        }
        let (mut without, mut in_pieces) = (Vec::new(), true);
        loop {
            let mut turns = Turns::new(&self.sources.clients, number, &without);
            let failed = match self.try_blob(file, remote, &mut turns, in_pieces) {
                Err(error @ HubError::Checksum { .. }) => error,
                other => return other,
            };
            let used = turns.used;
            if in_pieces && used.len() > 1 {
                // One source after the other, to find out whose bytes are wrong.
                in_pieces = false;
                let reason = format!("{failed} (from {})", used.join(" and "));
                (self.progress)(PullEvent::Retry { file, reason: &reason, wait: Duration::ZERO });
                continue;
            }
            let rest = Turns::new(&self.sources.clients, 0, &[&without[..], &used[..]].concat());
            if used.is_empty() || rest.is_empty() {
                return Err(failed);
            }
            let reason = format!("{failed} (from {})", used.join(" and "));
            (self.progress)(PullEvent::Retry { file, reason: &reason, wait: Duration::ZERO });
            without.extend(used);
        }
    }

    fn try_blob(
        &self,
        file: &str,
        remote: &RemoteFile,
        turns: &mut Turns<'_>,
        in_pieces: bool,
    ) -> Result<(), HubError> {
        let path = self.folder.part(&remote.etag);
        create_parent(&path)?;
        let open = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let mut part = Part {
            file: open.map_err(HubError::io("open", &path))?,
            hasher: Hasher::new(&remote.etag, remote.size),
            done: 0,
            buffer: vec![0; BUFFER_BYTES],
            syncer: Syncer::default(),
        };
        self.resume(&mut part, file, remote)?;
        let peers = turns.peers();
        if in_pieces && !peers.is_empty() && remote.size - part.done >= pieces::LEAST_BYTES {
            let start = part.done;
            let (used, written) = self.in_pieces(&peers, file, remote, start, |piece| {
                let filled = piece.len();
                part.append(piece, filled).map_err(HubError::io("write", &path))?;
                (self.progress)(PullEvent::Bytes { file, done: part.done, total: remote.size });
                Ok(())
            });
            written?;
            turns.used.extend(used);
            if self.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
        while part.done < remote.size {
            let before = part.done;
            let client = turns.client();
            if self.sources.clients.len() > 1 {
                (self.progress)(PullEvent::Source { file, from: &client.name });
            }
            let ended = self.attempt(client, &mut part, file, remote);
            if part.done > before {
                // The number of attempts that gain bytes is not limited.
                turns.gained();
            }
            let failure = match ended {
                Ok(AttemptEnd::Complete) => break,
                Ok(AttemptEnd::Stopped) => return Ok(()),
                Err(AttemptError::Local(error)) => return Err(error),
                Err(AttemptError::Remote(failure)) => failure,
            };
            let reason = failure.reason.clone();
            match turns.failed(failure) {
                Ok(wait) => (self.progress)(PullEvent::Retry { file, reason: &reason, wait }),
                Err((failure, failed)) => {
                    return Err(client.error(self.repo, self.revision, file, failure, failed));
                }
            }
            if self.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
        part.syncer.finish(&part.file).map_err(HubError::io("write", &path))?;
        drop(part.file);
        if let Some((algorithm, actual)) = part.hasher.finish().filter(|(_, actual)| *actual != remote.etag) {
            fs::remove_file(&path).map_err(HubError::io("delete", &path))?;
            let (repo, file, expected) = (self.repo.into(), file.into(), remote.etag.clone());
            return Err(HubError::Checksum { repo, file, algorithm, expected, actual });
        }
        let blob = self.folder.blob(&remote.etag);
        fs::rename(&path, &blob).map_err(HubError::io("rename", &path))?;
        (self.progress)(PullEvent::Done { file });
        Ok(())
    }

    /// Hashes the bytes from an earlier pull.
    fn resume(&self, part: &mut Part, file: &str, remote: &RemoteFile) -> Result<(), HubError> {
        let path = self.folder.part(&remote.etag);
        loop {
            let read = part.file.read(&mut part.buffer).map_err(HubError::io("read", &path))?;
            part.done += read as u64;
            if read == 0 {
                break;
            }
            part.hasher.update(&mut part.buffer, read);
        }
        if part.done > remote.size {
            self.restart(part, remote)?;
        }
        (self.progress)(PullEvent::Bytes { file, done: part.done, total: remote.size });
        Ok(())
    }

    /// Empties the part file.
    fn restart(&self, part: &mut Part, remote: &RemoteFile) -> Result<(), HubError> {
        let path = self.folder.part(&remote.etag);
        part.file.set_len(0).and_then(|()| part.file.rewind()).map_err(HubError::io("write", path))?;
        part.hasher = Hasher::new(&remote.etag, remote.size);
        part.done = 0;
        Ok(())
    }

    /// Requests the bytes that are missing and appends them to the part file.
    fn attempt(
        &self,
        client: &Client,
        part: &mut Part,
        file: &str,
        remote: &RemoteFile,
    ) -> Result<AttemptEnd, AttemptError> {
        let response =
            client.content(self.repo, self.commit, file, part.done, None).map_err(AttemptError::Remote)?;
        let resumes = response.status().as_u16() == 206;
        if resumes && content_range(&response) != Some((part.done, remote.size)) {
            let reason = format!(
                "asked for bytes from {} of {}, but the server sent a different range",
                part.done, remote.size
            );
            return Err(AttemptError::Remote(Failure::permanent(reason)));
        }
        if !resumes && part.done > 0 {
            // The server does not support ranges (or, with 416, has a shorter file): start over.
            self.restart(part, remote)?;
        }
        if response.status().as_u16() == 416 {
            let reason = "the server has fewer bytes than it reported";
            return Err(AttemptError::Remote(Failure::transient(reason)));
        }
        let mut body = response.into_body().into_reader();
        while part.done < remote.size {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(AttemptEnd::Stopped);
            }
            let left = usize::try_from(remote.size - part.done).unwrap_or(usize::MAX);
            let wanted = left.min(part.buffer.len());
            let read = body
                .read(&mut part.buffer[..wanted])
                .map_err(|error| broken(part.done, remote.size, &error))?;
            if read == 0 {
                return Err(broken(part.done, remote.size, &"the server closed it"));
            }
            let written = part.append_own(read);
            written.map_err(HubError::io("write", self.folder.part(&remote.etag)))?;
            (self.progress)(PullEvent::Bytes { file, done: part.done, total: remote.size });
        }
        Ok(AttemptEnd::Complete)
    }
}

fn broken(done: u64, size: u64, reason: &dyn fmt::Display) -> AttemptError {
    let reason = format!("the connection broke after {done} of {size} bytes: {reason}");
    AttemptError::Remote(Failure::transient(reason))
}

/// The first byte and the total length in `Content-Range`, such as `bytes 5-9/10`.
pub(crate) fn content_range(response: &Response<Body>) -> Option<(u64, u64)> {
    let text = response.headers().get(header::CONTENT_RANGE)?.to_str().ok()?;
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, total.parse().ok()?))
}
