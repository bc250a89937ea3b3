//! The thread that moves usage records from the journal to the store.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{Inner, Numbered, lock};
use crate::error::AccessError;
use crate::journal;
use crate::time::{DAY_MS, Now, Time};
use crate::usage::UsageRecord;

/// A loss of power loses at most the records of this time.
const MOVE_EVERY: Duration = Duration::from_secs(1);
/// Records that wait for a disk that takes none. Only answers that were under way when it failed
/// are among them: new requests are refused.
const MOST_WAITING: usize = 10_000;
/// How often old records are removed.
const FORGET_EVERY: Duration = Duration::from_secs(3600);

/// Starts the thread, which ends with `inner`.
pub(super) fn start(inner: &Arc<Inner>) -> io::Result<()> {
    let weak = Arc::downgrade(inner);
    std::thread::Builder::new().name("usage".into()).spawn(move || run(&weak)).map(drop)
}

fn run(weak: &Weak<Inner>) {
    let mut forgot: Option<Instant> = None;
    let mut failed = false;
    loop {
        // Between two moves the thread holds no claim on the folder.
        std::thread::sleep(MOVE_EVERY);
        let Some(inner) = weak.upgrade() else { return };
        match inner.move_records() {
            Ok(()) => failed = false,
            Err(error) if !failed => {
                failed = true;
                tracing::error!("usage records stay in the journal for now: {error}");
            }
            Err(_) => {}
        }
        if forgot.is_none_or(|at| at.elapsed() >= FORGET_EVERY) {
            forgot = Some(Instant::now());
            if let Err(error) = inner.forget(Now::read().time) {
                tracing::error!("old usage records are not removed: {error}");
            }
        }
    }
}

impl Inner {
    /// Writes records to the journal, after those that could not be written before.
    pub(super) fn append(&self, records: impl IntoIterator<Item = UsageRecord>) {
        let mut journal = lock(&self.journal);
        let Numbered { journal: file, last, backlog } = &mut *journal;
        backlog.extend(records);
        let mut failure = None;
        while let Some(record) = backlog.front_mut() {
            record.number = *last + 1;
            if let Err(why) = file.append(record) {
                failure = Some(why);
                break;
            }
            *last += 1;
            backlog.pop_front();
        }
        let lost = backlog.len().saturating_sub(MOST_WAITING);
        backlog.drain(..lost);
        drop(journal);
        let folder = self.folder.display();
        if lost > 0 {
            tracing::error!(lost, "usage records are lost: {folder} cannot be written");
        }
        let was_failing = self.is_failing.swap(failure.is_some(), Ordering::Relaxed);
        if let Some(why) = failure
            && !was_failing
        {
            tracing::error!(
                "cannot record usage in {folder}: {why}; requests are refused until it can be written"
            );
        }
    }

    pub(super) fn move_records(&self) -> Result<(), AccessError> {
        let _moving = lock(&self.moving);
        let refusals = std::mem::take(&mut *lock(&self.refusals));
        self.append(refusals.into_values());
        let files = {
            let mut journal = lock(&self.journal);
            journal.journal.rotate().and_then(|()| journal.journal.complete())
        };
        let files = files.map_err(AccessError::system("write to", &self.folder))?;
        for file in files {
            let records = journal::read(&file).map_err(AccessError::system("read", &file))?;
            if !records.is_empty() {
                self.store.add_records(&records)?;
            }
            std::fs::remove_file(&file).map_err(AccessError::system("remove", &file))?;
        }
        Ok(())
    }

    fn forget(&self, now: Time) -> Result<(), AccessError> {
        let before = |days: u32| Time(now.0.saturating_sub(u64::from(days) * DAY_MS));
        let (records, sums) = (before(self.retention.records_days), before(self.retention.sums_days));
        let removed = self.store.forget(records, sums)?;
        if removed > 0 {
            tracing::info!(removed, "usage records are older than they are kept");
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Err(error) = self.move_records() {
            // They are moved when the folder is opened again.
            tracing::warn!("usage records stay in the journal: {error}");
        }
    }
}
