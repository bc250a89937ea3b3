//! The record of a setup's changes, written before each command.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::machine::System;
use crate::plan::Action;

/// The format's version.
const VERSION: u32 = 1;

/// The changes of each machine, oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// The changes.
    pub entries: Vec<Entry>,
    /// Files on the machine that keeps the record.
    pub files: Vec<LocalFile>,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The machine's name.
    pub machine: String,
    /// Its system, which decides the commands.
    pub system: System,
    /// The change.
    pub action: Action,
    /// How far it is.
    pub state: State,
}

/// How far a change is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Its command has not been started.
    Planned,
    /// Its command was started, and its result is not known.
    Begun,
    /// Its command succeeded.
    Done,
    /// It has been undone, or was never in effect.
    Undone,
}

/// A file that setup has written on the machine that keeps the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalFile {
    /// Its path.
    pub path: PathBuf,
    /// Its previous content; `None` if it did not exist.
    pub before: Option<String>,
}

/// The record cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// A file operation failed.
    #[error("the record {path} cannot be {what}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The operation.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// It is not a record of this version.
    #[error(
        "{path} is not a record of this thunder ({why}): undo it with the version that wrote it, or move the file away"
    )]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Another process uses it.
    #[error("another thunder works with {0}: wait until it has ended")]
    Busy(PathBuf),
}

impl Default for Record {
    fn default() -> Self {
        Self { version: VERSION, entries: Vec::new(), files: Vec::new() }
    }
}

impl Record {
    /// Whether nothing is left to undo.
    pub fn is_undone(&self) -> bool {
        self.files.is_empty() && self.entries.iter().all(|entry| matches!(entry.state, State::Undone))
    }

    /// Names of the machines with something to undo, in their first order.
    pub fn machines(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for entry in
            self.entries.iter().filter(|entry| !matches!(entry.state, State::Undone | State::Planned))
        {
            if !names.contains(&entry.machine) {
                names.push(entry.machine.clone());
            }
        }
        names
    }
}

/// The file of a record. Only one process at a time can open it.
#[derive(Debug)]
pub struct RecordFile {
    path: PathBuf,
    _lock: File,
}

impl RecordFile {
    /// Locks the file at `path`, and creates its folder.
    ///
    /// # Errors
    /// When another process has it, or the folder cannot be made.
    pub fn open(path: &Path) -> Result<Self, RecordError> {
        let error = |what| move |source| RecordError::File { path: path.to_owned(), what, source };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(error("put into its folder"))?;
        }
        let lock = File::create(path.with_extension("lock")).map_err(error("locked"))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(RecordError::Busy(path.to_owned())),
            Err(TryLockError::Error(source)) => Err(error("locked")(source)),
        }
    }

    /// The record; an empty one if there is no file.
    ///
    /// # Errors
    /// When the file cannot be read, or is of another version.
    pub fn load(&self) -> Result<Record, RecordError> {
        let path = || self.path.clone();
        let text = match fs::read_to_string(&self.path) {
            Ok(text) => text,
            Err(source) if source.kind() == std::io::ErrorKind::NotFound => return Ok(Record::default()),
            Err(source) => return Err(RecordError::File { path: path(), what: "read", source }),
        };
        let malformed = |why: String| RecordError::Malformed { path: path(), why };
        let record: Record = serde_json::from_str(&text).map_err(|error| malformed(error.to_string()))?;
        if record.version == VERSION {
            Ok(record)
        } else {
            Err(malformed(format!("version {}", record.version)))
        }
    }

    /// Writes the record so that a crash leaves the old or the new one; removes the file when
    /// nothing is left to undo.
    ///
    /// # Errors
    /// When it cannot be written. Nothing may be done to a machine then.
    pub fn save(&self, record: &Record) -> Result<(), RecordError> {
        let error = |what| move |source| RecordError::File { path: self.path.clone(), what, source };
        if record.is_undone() {
            return match fs::remove_file(&self.path) {
                Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(error("removed")(source)),
                _ => Ok(()),
            };
        }
        let text = serde_json::to_string_pretty(record).map_err(|source| error("written")(source.into()))?;
        let fresh = self.path.with_extension("new");
        let write = || {
            let mut file = File::create(&fresh)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&fresh, &self.path)?;
            // The rename is on the disk only after the folder is synced.
            self.path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
        };
        write().map_err(error("written"))
    }
}
