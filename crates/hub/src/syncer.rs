//! Gives a file's bytes to the disk while more of them come, so that the end waits for the last
//! ones only. A disk that is slower than the link still decides how long all takes.

use std::{
    fs::File,
    io,
    sync::mpsc::{SyncSender, sync_channel},
    thread::{self, JoinHandle},
};

/// Bytes after which the disk gets them. Fewer would interrupt the disk more often.
const PORTION_BYTES: u64 = 64 << 20;

/// Writes a file to the disk in portions. Small files never start the thread.
#[derive(Default)]
pub(crate) struct Syncer {
    /// Bytes that the thread was not told of.
    waiting: u64,
    thread: Option<(SyncSender<()>, JoinHandle<io::Result<()>>)>,
}

impl Syncer {
    /// Notes that the file has this many bytes more.
    pub(crate) fn wrote(&mut self, file: &File, bytes: u64) {
        self.waiting += bytes;
        if self.waiting < PORTION_BYTES {
            return;
        }
        self.waiting = 0;
        if self.thread.is_none() {
            self.thread = start(file);
        }
        if let Some((portions, _)) = &self.thread {
            // One that is full takes these bytes with its next portion.
            let _ = portions.try_send(());
        }
    }

    /// Returns when all bytes are on the disk.
    ///
    /// # Errors
    /// When the disk has failed, also for an earlier portion: the system says so only once.
    pub(crate) fn finish(self, file: &File) -> io::Result<()> {
        if let Some((portions, thread)) = self.thread {
            drop(portions);
            match thread.join() {
                Ok(synced) => synced?,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        file.sync_all()
    }
}

/// The thread, unless the system has none to give; then `finish` does all of it.
fn start(file: &File) -> Option<(SyncSender<()>, JoinHandle<io::Result<()>>)> {
    let file = file.try_clone().ok()?;
    let (portions, wanted) = sync_channel(1);
    let work = move || wanted.iter().try_for_each(|()| file.sync_data());
    let thread = thread::Builder::new().name("sync".into()).spawn(work).ok()?;
    Some((portions, thread))
}
