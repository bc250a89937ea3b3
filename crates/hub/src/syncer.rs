//! Writes a file's bytes to the disk while more bytes arrive, so that the end waits only for the
//! last ones. If the disk is slower than the link, the disk still determines the time.

use std::{
    fs::File,
    io,
    sync::mpsc::{SyncSender, sync_channel},
    thread::{self, JoinHandle},
};

/// Number of bytes of one write to the disk. A smaller number would interrupt the disk more often.
const PORTION_BYTES: u64 = 64 << 20;

/// Writes a file to the disk in portions. Small files never start the thread.
#[derive(Default)]
pub(crate) struct Syncer {
    /// Bytes that were not reported to the thread yet.
    waiting: u64,
    thread: Option<(SyncSender<()>, JoinHandle<io::Result<()>>)>,
}

impl Syncer {
    /// Notes that the file has grown by this many bytes.
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
            // If the queue is full, the next portion includes these bytes.
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

/// The thread, unless the system could not start one; then `finish` does all the work.
fn start(file: &File) -> Option<(SyncSender<()>, JoinHandle<io::Result<()>>)> {
    let file = file.try_clone().ok()?;
    let (portions, wanted) = sync_channel(1);
    let work = move || wanted.iter().try_for_each(|()| file.sync_data());
    let thread = thread::Builder::new().name("sync".into()).spawn(work).ok()?;
    Some((portions, thread))
}
