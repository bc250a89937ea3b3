//! The thread that moves usage records from the journal to the store.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, TryLockError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::oneshot::{self, error::TryRecvError};

use super::{Inner, Numbered, Pending, Recorded, Retention, lock};
use crate::error::AccessError;
use crate::journal::{self, NextFile};
use crate::time::{DAY_MS, Now, Time};
use crate::usage::UsageRecord;

/// A power failure loses at most the records of this time.
const MOVE_EVERY: Duration = Duration::from_secs(1);
/// Time for a write of a few records, with room.
const WRITE_TIME: Duration = Duration::from_micros(100);
/// Maximum number of records that wait while the disk accepts none. They are only of answers that
/// were running when the disk failed, because new requests are refused.
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
        // Between two moves the thread does not keep the folder open.
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
                tracing::error!("old records are not removed: {error}");
            }
        }
    }
}

impl Inner {
    /// Writes a record to the journal, together with records that other threads add at the same
    /// time.
    pub(super) fn record(&self, record: UsageRecord) -> Recorded {
        let (done, mut recorded) = oneshot::channel();
        lock(&self.pending).push(Pending { record, done });
        self.write_pending();
        // Another thread may be writing this record. A task that is woken waits behind the other
        // requests of its thread, which takes longer than the write.
        let began = Instant::now();
        while recorded.try_recv() == Err(TryRecvError::Empty) {
            if began.elapsed() >= WRITE_TIME {
                return Recorded(Some(recorded));
            }
            std::hint::spin_loop();
        }
        Recorded(None)
    }

    /// Writes the waiting records, unless another thread has the journal: then that thread writes
    /// them.
    fn write_pending(&self) {
        while !lock(&self.pending).is_empty() {
            let journal = match self.journal.try_lock() {
                Ok(journal) => journal,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // The thread with the journal checks for records once more after it has released
                // the journal.
                Err(TryLockError::WouldBlock) => return,
            };
            self.write(journal, Vec::new());
        }
    }

    /// Writes the waiting records and `more` to the journal, after those that could not be written
    /// before.
    fn write(&self, mut journal: MutexGuard<'_, Numbered>, more: Vec<UsageRecord>) {
        let pending = std::mem::take(&mut *lock(&self.pending));
        let Numbered { journal: file, last, backlog } = &mut *journal;
        let mut waiting = Vec::with_capacity(pending.len());
        for Pending { record, done } in pending {
            backlog.push_back(record);
            waiting.push(done);
        }
        backlog.extend(more);
        for (record, number) in backlog.iter_mut().zip(*last + 1..) {
            record.number = number;
        }
        let failure = if backlog.is_empty() { None } else { file.append(&*backlog).err() };
        if failure.is_none() {
            *last += backlog.len() as u64;
            backlog.clear();
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
        for done in waiting {
            // An error: nobody waits.
            let _ = done.send(());
        }
    }

    pub(super) fn move_records(&self) -> Result<(), AccessError> {
        let _moving = lock(&self.moving);
        let refusals: Vec<UsageRecord> = std::mem::take(&mut *lock(&self.refusals)).into_values().collect();
        self.write(lock(&self.journal), refusals);
        let rotated = self.rotate();
        // Records that arrived while the lock above was taken.
        self.write_pending();
        let current = rotated.map_err(AccessError::system("write to", &self.folder))?;
        let files = journal::complete(&self.folder, current);
        for file in files.map_err(AccessError::system("read", &self.folder))? {
            let records = journal::read(&file).map_err(AccessError::system("read", &file))?;
            if !records.is_empty() {
                self.store.add_records(&records)?;
            }
            std::fs::remove_file(&file).map_err(AccessError::system("remove", &file))?;
        }
        Ok(())
    }

    /// Begins a new file of the journal if the present one has records. Returns the new number.
    /// Requests do not wait for the disk here. Call it under `moving`, one at a time.
    fn rotate(&self) -> io::Result<u64> {
        let (is_empty, generation) = {
            let journal = lock(&self.journal);
            (journal.journal.is_empty(), journal.journal.generation())
        };
        if is_empty {
            return Ok(generation);
        }
        let next = NextFile::create(&self.folder, generation)?;
        lock(&self.journal).journal.rotate(next);
        Ok(generation + 1)
    }

    fn forget(&self, now: Time) -> Result<(), AccessError> {
        let before = |days: u32| Time(now.0.saturating_sub(u64::from(days) * DAY_MS));
        let Retention { records_days, sums_days } = *lock(&self.retention);
        let (records, sums) = (before(records_days), before(sums_days));
        let removed = self.store.forget(records, sums)?;
        if removed > 0 {
            tracing::info!(removed, "usage records are older than they are kept");
        }
        let removed = self.prompts.forget(now)?;
        if removed > 0 {
            tracing::info!(days = removed, "prompts are older than they are kept");
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Err(error) = self.move_records() {
            // The records are moved when the folder is opened again.
            tracing::warn!("usage records stay in the journal: {error}");
        }
    }
}
