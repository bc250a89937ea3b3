//! Prompts and answers, kept only where a policy says so: redacted, encrypted, and removed after
//! some days.

mod redact;
mod sealed;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::thread::JoinHandle;

use serde::{Deserialize, Serialize};

use crate::error::AccessError;
use crate::key::Key;
use crate::time::Time;
use crate::usage::{Dimensions, Filter, Outcome};

use redact::Redactor;
pub use redact::{BadPattern, Redaction};
use sealed::{Day, Master};

/// Folder of the encrypted files, in the data folder.
const FOLDER: &str = "prompts";
/// The key's file, unless another one is named.
const KEY: &str = "prompts.key";
/// Bytes of a request's texts that are kept; the rest is cut off.
const MOST_BYTES: usize = 1 << 20;
/// Texts that wait for the disk. More are not kept, and counted as lost.
const MOST_WAITING_BYTES: usize = 128 << 20;
/// Most names in a list of a policy.
const MOST_NAMES: usize = 1000;
/// Most days that a policy may keep texts.
const MOST_DAYS: u32 = 3650;

/// Whose prompts and answers are kept. By default nobody's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KeepPolicy {
    /// Everybody's.
    pub all: bool,
    /// Those of these keys, by name or id.
    pub keys: Vec<String>,
    /// Those of these teams.
    pub teams: Vec<String>,
    /// Those for these models, by full name or last part.
    pub models: Vec<String>,
    /// What is replaced before anything is written.
    pub redact: Vec<Redaction>,
    /// Further regular expressions whose matches are replaced.
    pub patterns: Vec<String>,
    /// Days that texts are kept.
    pub days: u32,
}

impl Default for KeepPolicy {
    fn default() -> Self {
        Self {
            all: false,
            keys: Vec::new(),
            teams: Vec::new(),
            models: Vec::new(),
            redact: Redaction::ALL.to_vec(),
            patterns: Vec::new(),
            days: 30,
        }
    }
}

/// A policy that cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadKeepPolicy {
    /// Too short or too long.
    #[error("`days` is {0}, but must be 1 to {MOST_DAYS}")]
    Days(u32),
    /// Too many names.
    #[error("`{list}` has {count} entries, {MOST_NAMES} are the most")]
    Many {
        /// The field.
        list: &'static str,
        /// Its entries.
        count: usize,
    },
    /// A pattern that is none.
    #[error(transparent)]
    Pattern(#[from] BadPattern),
}

impl KeepPolicy {
    /// Whether anything may be kept.
    pub fn is_on(&self) -> bool {
        self.all || !(self.keys.is_empty() && self.teams.is_empty() && self.models.is_empty())
    }

    /// Whether a request's texts are kept.
    fn covers(&self, key: Option<&Key>, model: &str) -> bool {
        let last = model.rsplit('/').next().unwrap_or(model);
        let names = |list: &[String], name: &str| list.iter().any(|one| one == name);
        let by_key = |key: &Key| {
            let team = key.team.as_deref();
            names(&self.keys, &key.name)
                || names(&self.keys, &key.id)
                || team.is_some_and(|team| names(&self.teams, team))
        };
        self.all || names(&self.models, model) || names(&self.models, last) || key.is_some_and(by_key)
    }

    fn check(&self) -> Result<Redactor, BadKeepPolicy> {
        if !(1..=MOST_DAYS).contains(&self.days) {
            return Err(BadKeepPolicy::Days(self.days));
        }
        for (list, names) in [("keys", &self.keys), ("teams", &self.teams), ("models", &self.models)] {
            if names.len() > MOST_NAMES {
                return Err(BadKeepPolicy::Many { list, count: names.len() });
            }
        }
        Ok(Redactor::new(&self.redact, &self.patterns)?)
    }
}

/// A text of a request or of its answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptText {
    /// Who says it: `system`, `user`, `assistant`, `tool`; `thinking` and `call` of the model;
    /// `prompt` without a conversation.
    pub role: String,
    /// The answer that it belongs to, if there are several; of a prompt, its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choice: Option<usize>,
    /// The text.
    pub text: String,
}

/// The prompt and the answer of one request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptPrompt {
    /// The response's id, as in its usage record.
    pub id: String,
    /// When it ended.
    pub time: Time,
    /// Name of its key.
    pub key: Option<String>,
    /// Id of its key.
    pub key_id: Option<String>,
    /// The key's owner.
    pub owner: Option<String>,
    /// The key's team.
    pub team: Option<String>,
    /// The model, by its full name.
    pub model: String,
    /// Path that it came by.
    pub api: String,
    /// How it ended.
    pub outcome: Outcome,
    /// What was asked.
    pub prompt: Vec<KeptText>,
    /// What was answered.
    pub answer: Vec<KeptText>,
    /// Texts were too long, and are not whole.
    #[serde(default)]
    pub is_cut: bool,
    /// Matches that were replaced before it was written.
    #[serde(default)]
    pub redacted: u64,
}

impl KeptPrompt {
    fn bytes(&self) -> usize {
        self.prompt.iter().chain(&self.answer).map(|text| text.text.len()).sum()
    }

    fn fits(&self, filter: &Filter) -> bool {
        filter.holds(self.time)
            && filter.fits(&Dimensions {
                key: self.key.clone(),
                key_id: self.key_id.clone(),
                owner: self.owner.clone(),
                team: self.team.clone(),
                model: self.model.clone(),
                node: None,
                outcome: self.outcome,
            })
    }

    /// Replaces what must not be written, then cuts what is too long.
    fn cleaned(mut self, redactor: &Redactor) -> Self {
        let mut left = MOST_BYTES;
        for text in self.prompt.iter_mut().chain(&mut self.answer) {
            let (clean, count) = redactor.clean(&text.text);
            text.text = clean;
            self.redacted += count;
            let end = text.text.floor_char_boundary(left);
            self.is_cut |= end < text.text.len();
            text.text.truncate(end);
            left -= end;
        }
        self
    }
}

/// A policy in force.
#[derive(Debug)]
struct Rule {
    policy: KeepPolicy,
    redactor: Redactor,
}

/// Says that a request's texts are kept, and how. The policy of the request's begin holds.
#[derive(Debug, Clone)]
pub struct Keeping(Arc<Rule>);

enum Job {
    Keep(Box<KeptPrompt>, Keeping),
    /// Everything before it is written when the answer comes.
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

/// What the writing thread needs.
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

    /// Names the file of the key, in place of the one in the data folder.
    pub fn use_key(&self, path: PathBuf) {
        // The first one counts: texts of two keys in one folder could not be read.
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

    /// Checks a policy, and that what it keeps can be encrypted.
    pub fn prepare(&self, policy: &KeepPolicy) -> Result<(), AccessError> {
        policy.check()?;
        if policy.is_on() {
            Master::open_or_create(self.shared.key_file(), &self.shared.folder)?;
        }
        Ok(())
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

    /// Keeps texts soon: another thread redacts, encrypts and writes them.
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

    /// The way to the writing thread, which starts with the first text.
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
            // An error: the thread has ended, and has written all.
            let _ = wait.recv();
        }
    }

    /// At most `limit` kept prompts, the newest first.
    pub fn read(&self, filter: &Filter, limit: usize) -> Result<Vec<KeptPrompt>, AccessError> {
        self.flush();
        let mut found: Vec<KeptPrompt> = Vec::new();
        let days = sealed::days(&self.shared.folder)?;
        if days.is_empty() {
            return Ok(found);
        }
        let master = Master::open(self.shared.key_file())?;
        let is_wanted = |day: &str| {
            filter.since.is_none_or(|since| *day >= *since.date())
                && filter.until.is_none_or(|until| *day <= *until.date())
        };
        for (day, path) in days.into_iter().rev().filter(|(day, _)| is_wanted(day)) {
            if found.len() >= limit {
                break;
            }
            // Records of a file are in the order of their ends: of those that fit, the last count.
            let mut newest: VecDeque<KeptPrompt> = VecDeque::new();
            sealed::read(&path, &day, &master, |kept| {
                if kept.fits(filter) {
                    newest.push_back(kept);
                    if newest.len() > limit - found.len() {
                        newest.pop_front();
                    }
                }
            })?;
            found.extend(newest.into_iter().rev());
        }
        Ok(found)
    }

    /// Removes texts of days that are not kept any longer; returns how many days.
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
        // The first, then fewer and fewer: a full disk must not be filled by its log.
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
                        // What a failed write left is found when the file is opened again.
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
