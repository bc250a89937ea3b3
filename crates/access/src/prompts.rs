//! Prompts and answers that a policy keeps: redacted, encrypted, and removed after some days.

mod gather;
mod kept;
mod page;
mod policy;
mod redact;
mod sealed;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::thread::JoinHandle;

use crate::error::AccessError;
use crate::key::Key;
use crate::time::Time;

pub use gather::{Gathering, KeptPart};
pub use kept::{KeptPrompt, KeptText};
pub use page::{BadPlace, KeptPage, Place, PromptsAsk};
pub use policy::{BadKeepPolicy, KeepPolicy};
use redact::Redactor;
pub use redact::{BadPattern, Redaction};
use sealed::{Day, Master};

/// Folder of the encrypted files, in the data folder.
const FOLDER: &str = "prompts";
/// The key's file, unless another one is named.
const KEY: &str = "prompts.key";
/// Maximum number of texts that wait for the disk. More are dropped and counted as lost.
const MOST_WAITING_BYTES: usize = 128 << 20;
/// Maximum bytes of texts in one reading: the texts of a whole cluster must fit into memory.
const MOST_READ_BYTES: usize = 8 << 20;

/// A policy in force.
#[derive(Debug)]
struct Rule {
    policy: KeepPolicy,
    redactor: Redactor,
}

/// Marks a request whose texts are kept, by the policy at the request's begin.
#[derive(Debug, Clone)]
pub struct Keeping(Arc<Rule>);

enum Job {
    Keep(Box<KeptPrompt>, Keeping),
    /// When the reply arrives, everything before it has been written.
    Flush(Sender<()>),
}

struct Writer {
    jobs: Sender<Job>,
    thread: JoinHandle<()>,
}

/// The kept texts of a data folder.
pub(crate) struct Prompts {
    shared: Arc<Shared>,
    rule: RwLock<Arc<Rule>>,
    writer: Mutex<Option<Writer>>,
}

/// State of the writing thread.
struct Shared {
    folder: PathBuf,
    /// The key's file, if it is not in the data folder.
    key: OnceLock<PathBuf>,
    default_key: PathBuf,
    waiting_bytes: AtomicUsize,
    lost: AtomicU64,
}

impl std::fmt::Debug for Prompts {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Prompts").field("folder", &self.shared.folder).finish_non_exhaustive()
    }
}

impl Prompts {
    /// Kept texts of a data folder, by a policy that was checked when it was set.
    pub fn new(folder: &Path, policy: KeepPolicy) -> Result<Self, BadKeepPolicy> {
        let redactor = policy.check()?;
        let shared = Shared {
            folder: folder.join(FOLDER),
            key: OnceLock::new(),
            default_key: folder.join(KEY),
            waiting_bytes: AtomicUsize::new(0),
            lost: AtomicU64::new(0),
        };
        let rule = RwLock::new(Arc::new(Rule { policy, redactor }));
        Ok(Self { shared: Arc::new(shared), rule, writer: Mutex::default() })
    }

    /// Sets the file of the key, instead of the one in the data folder.
    pub fn use_key(&self, path: PathBuf) {
        // Only the first call counts, because texts of two keys in one folder could not be read.
        let _ = self.shared.key.set(path);
    }

    fn rule(&self) -> Arc<Rule> {
        self.rule.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn policy(&self) -> KeepPolicy {
        self.rule().policy.clone()
    }

    /// Texts that could not be kept since the start.
    pub fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// Checks a policy, and that its texts can be encrypted.
    pub fn prepare(&self, policy: &KeepPolicy) -> Result<(), AccessError> {
        policy.check()?;
        if policy.is_on() {
            Master::open_or_create(self.shared.key_file(), &self.shared.folder)?;
        }
        Ok(())
    }

    /// Follows another server's policy from now on. With a policy that this version does not
    /// understand, nothing more is kept, and nothing is removed.
    pub fn follow(&self, policy: KeepPolicy) {
        let followed = self.set(policy).or_else(|error| {
            tracing::error!("prompts are not kept, the policy cannot be followed: {error}");
            self.set(KeepPolicy::unknown())
        });
        // Every version can follow a policy without patterns.
        debug_assert!(followed.is_ok());
    }

    /// Follows a policy from now on.
    pub fn set(&self, policy: KeepPolicy) -> Result<(), AccessError> {
        let redactor = policy.check()?;
        let rule = Arc::new(Rule { policy, redactor });
        *self.rule.write().unwrap_or_else(PoisonError::into_inner) = rule;
        Ok(())
    }

    /// Whether a request's texts are kept.
    pub fn keeps(&self, key: Option<&Key>, model: &str) -> Option<Keeping> {
        let rule = self.rule();
        rule.policy.covers(key, model).then_some(Keeping(rule))
    }

    /// Counts a request whose texts could not be kept.
    pub fn lose(&self, why: &str) {
        self.shared.note_loss(why);
    }

    /// Queues texts for another thread, which redacts, encrypts and writes them.
    pub fn keep(&self, keeping: &Keeping, kept: KeptPrompt) {
        let bytes = kept.bytes();
        let waiting = self.shared.waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
        let is_sent = waiting <= MOST_WAITING_BYTES
            && self.jobs().is_some_and(|jobs| jobs.send(Job::Keep(Box::new(kept), keeping.clone())).is_ok());
        if !is_sent {
            self.shared.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.shared.note_loss("the disk is behind");
        }
    }

    /// The channel to the writing thread, which starts with the first text.
    fn jobs(&self) -> Option<Sender<Job>> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if writer.is_none() {
            let (jobs, work) = channel();
            let shared = self.shared.clone();
            let thread =
                std::thread::Builder::new().name("prompts".into()).spawn(move || shared.write(&work));
            *writer = Some(Writer { jobs, thread: thread.ok()? });
        }
        writer.as_ref().map(|writer| writer.jobs.clone())
    }

    /// Waits until all texts so far are written.
    fn flush(&self) {
        let jobs =
            self.writer.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|one| one.jobs.clone());
        let Some(jobs) = jobs else { return };
        let (done, wait) = channel();
        if jobs.send(Job::Flush(done)).is_ok() {
            // An error means that the thread has ended, after it wrote everything.
            let _ = wait.recv();
        }
    }

    /// Kept prompts, the newest first: as many as requested and as fit into [`MOST_READ_BYTES`],
    /// but at least one.
    pub fn read(&self, ask: &PromptsAsk) -> Result<KeptPage, AccessError> {
        self.flush();
        let mut page = KeptPage::default();
        let days = sealed::days(&self.shared.folder)?;
        if days.is_empty() {
            return Ok(page);
        }
        let master = Master::open(self.shared.key_file())?;
        let mut read_bytes = 0;
        for (day, path) in days.into_iter().rev().filter(|(day, _)| ask.may_be_of(day)) {
            if page.prompts.len() >= ask.limit || page.has_more {
                page.has_more = true;
                break;
            }
            // Records of a file are in the order of writing, which is almost the order of their
            // places.
            let (mut newest, mut number) = (BTreeMap::new(), 0u64);
            sealed::read(&path, &day, &master, |kept| {
                if !ask.fits(&kept) {
                    return;
                }
                number += 1;
                read_bytes += kept.bytes();
                newest.insert((kept.place(), number), kept);
                loop {
                    let count = page.prompts.len() + newest.len();
                    let is_full = count > ask.limit || (read_bytes > MOST_READ_BYTES && count > 1);
                    let Some((_, oldest)) = is_full.then(|| newest.pop_first()).flatten() else { break };
                    read_bytes -= oldest.bytes();
                    page.has_more = true;
                }
            })?;
            page.prompts.extend(newest.into_values().rev());
        }
        Ok(page)
    }

    /// Removes the texts of expired days. Returns the number of days.
    pub fn forget(&self, now: Time) -> Result<usize, AccessError> {
        let days = u64::from(self.policy().days);
        let first = Time(now.0.saturating_sub(days * crate::time::DAY_MS)).date();
        let mut removed = 0;
        for (day, path) in sealed::days(&self.shared.folder)? {
            if day < first {
                std::fs::remove_file(&path).map_err(AccessError::system("remove", &path))?;
                removed += 1;
            }
        }
        Ok(removed)
    }
}

impl Shared {
    fn key_file(&self) -> &Path {
        self.key.get().unwrap_or(&self.default_key)
    }

    fn note_loss(&self, why: &str) {
        let lost = self.lost.fetch_add(1, Ordering::Relaxed);
        // Logs the first loss, then less and less often: on a full disk, the log must stay small.
        if (lost + 1).is_power_of_two() {
            tracing::error!(lost = lost + 1, "a prompt that the policy keeps was not kept: {why}");
        }
    }

    /// The writing thread.
    fn write(&self, work: &Receiver<Job>) {
        let mut open: Option<Day> = None;
        for job in work {
            match job {
                Job::Keep(kept, Keeping(rule)) => {
                    let bytes = kept.bytes();
                    let kept = kept.cleaned(&rule.redactor);
                    let written = self.day(&mut open, kept.time).and_then(|day| day.append(&kept));
                    if let Err(error) = written {
                        // The rest of a failed write is handled when the file is opened again.
                        open = None;
                        self.note_loss(&error.to_string());
                    }
                    self.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
                }
                Job::Flush(done) => drop(done.send(())),
            }
        }
    }

    /// The file of a moment's day.
    fn day<'a>(&self, open: &'a mut Option<Day>, time: Time) -> Result<&'a mut Day, AccessError> {
        let date = time.date();
        if open.as_ref().is_some_and(|day| !day.is_of(&date)) {
            *open = None;
        }
        match open {
            Some(day) => Ok(day),
            None => {
                let master = Master::open_or_create(self.key_file(), &self.folder)?;
                Ok(open.insert(Day::open(&self.folder, &date, &master)?))
            }
        }
    }
}

impl Drop for Prompts {
    fn drop(&mut self) {
        let writer = self.writer.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Writer { jobs, thread }) = writer {
            drop(jobs);
            // A panic there was logged.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
#[path = "prompts_tests.rs"]
mod tests;
