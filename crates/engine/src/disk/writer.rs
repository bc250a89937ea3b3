//! The thread that writes blocks while steps are computed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Shared;
use super::file::{self, HEAD_BYTES};
use super::folder::{UNFINISHED, file_name};
use super::index::FileKey;

/// Pause in writing after the disk was full or failed.
const PAUSE: Duration = Duration::from_secs(30);
/// If other programs fill the disk too, this many files are removed before the next try.
const FILES_MADE_ROOM_FOR: u64 = 4;

enum Job {
    Write { key: FileKey, depth: u32, used: u64, bytes: Vec<u8> },
    Touch { key: FileKey, depth: u32, used: u64 },
}

/// The queue of files to write. Dropping it waits until everything is written.
#[derive(Debug)]
pub(super) struct Writer {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

impl Writer {
    /// Starts the thread.
    pub fn start(folder: PathBuf, rank: u32, shared: Arc<Shared>) -> io::Result<Self> {
        let (jobs, receiver) = mpsc::channel();
        let work = Work { folder, rank, shared: shared.clone(), paused_until: None };
        let thread =
            std::thread::Builder::new().name("disk cache".into()).spawn(move || work.run(&receiver))?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread), shared })
    }

    /// Orders a file to be written.
    pub fn write(&self, key: FileKey, depth: u32, used: u64, bytes: Vec<u8>) {
        self.shared.waiting_bytes.fetch_add(bytes.len(), Ordering::Relaxed);
        self.send(Job::Write { key, depth, used, bytes });
    }

    /// Orders a file's time of use to be recorded.
    pub fn touch(&self, key: FileKey, depth: u32, used: u64) {
        self.send(Job::Touch { key, depth, used });
    }

    fn send(&self, job: Job) {
        // The thread ends only after the sender.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Work {
    folder: PathBuf,
    rank: u32,
    shared: Arc<Shared>,
    paused_until: Option<Instant>,
}

impl Work {
    fn run(mut self, jobs: &Receiver<Job>) {
        while let Ok(job) = jobs.recv() {
            match job {
                Job::Touch { key, depth, used } => self.touch(&key, depth, used),
                Job::Write { key, depth, used, bytes } => {
                    let written = self.write(key, depth, used, &bytes);
                    let counters = &self.shared.counters;
                    let counter = if written { &counters.written } else { &counters.dropped };
                    counter.fetch_add(1, Ordering::Relaxed);
                    self.shared.waiting_bytes.fetch_sub(bytes.len(), Ordering::Relaxed);
                }
            }
        }
    }

    fn touch(&self, key: &FileKey, depth: u32, used: u64) {
        let path = self.folder.join(file_name(key, depth));
        // The file may be gone. Only the order in which files are dropped after a restart depends
        // on its time.
        let _ =
            fs::File::options().append(true).open(path).and_then(|file| file.set_modified(file::time(used)));
    }

    /// Writes a file under another name and renames it, so that it is never incomplete.
    fn write(&mut self, key: FileKey, depth: u32, used: u64, bytes: &[u8]) -> bool {
        let size = (HEAD_BYTES + bytes.len()) as u64;
        let written = !self.is_paused() && self.make_room(size) && self.try_write(&key, (depth, used), bytes);
        let mut index = self.shared.index();
        if written {
            index.insert(key, depth, size, used);
            self.shared.note_bytes(&index);
        }
        index.end(&key);
        written
    }

    fn is_paused(&self) -> bool {
        self.paused_until.is_some_and(|until| Instant::now() < until)
    }

    /// Removes the least recently used files until `size` more bytes are within the limit.
    fn make_room(&self, size: u64) -> bool {
        // Done separately, so that the index is not locked while files are removed.
        let removed = self.shared.index().make_room(size);
        self.remove(removed.iter().flatten());
        removed.is_some()
    }

    fn remove<'a>(&self, files: impl Iterator<Item = &'a (FileKey, u32)>) {
        for (key, depth) in files {
            let _ = fs::remove_file(self.folder.join(file_name(key, *depth)));
        }
    }

    fn try_write(&mut self, key: &FileKey, (depth, used): (u32, u64), bytes: &[u8]) -> bool {
        let path = self.folder.join(file_name(key, depth));
        let unfinished = path.with_extension(format!("{}{UNFINISHED}", std::process::id()));
        let put = |unfinished: &Path| {
            file::write(unfinished, key, self.rank, used, bytes)?;
            fs::rename(unfinished, &path)
        };
        let mut outcome = put(&unfinished);
        if outcome.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::StorageFull) {
            let _ = fs::remove_file(&unfinished);
            let size = (HEAD_BYTES + bytes.len()) as u64;
            self.free(size * FILES_MADE_ROOM_FOR);
            outcome = put(&unfinished);
        }
        let Err(error) = outcome else { return true };
        let _ = fs::remove_file(&unfinished);
        tracing::warn!(
            "cannot write to {}: {error}; the prefix cache on disk takes nothing for {} s",
            self.folder.display(),
            PAUSE.as_secs()
        );
        self.paused_until = Some(Instant::now() + PAUSE);
        false
    }

    /// Removes the least recently used files, with `size` bytes in total.
    fn free(&self, size: u64) {
        let removed = self.shared.index().forget(size);
        self.remove(removed.iter());
    }
}
