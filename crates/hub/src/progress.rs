//! What a pull reports while it runs.

use std::time::Duration;

/// How a pull goes on. Several files may report in turn, from several threads.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// What the model consists of is known.
    Start {
        /// Files to fetch.
        files: usize,
        /// Bytes of these files.
        bytes: u64,
        /// Files that the cache has already.
        present: usize,
    },
    /// A part of a file is on the disk.
    Bytes {
        /// The file.
        file: &'a str,
        /// Its bytes so far. Falls back when a server makes it begin again.
        done: u64,
        /// All its bytes.
        total: u64,
    },
    /// An attempt failed, and after a wait another is made now.
    Retry {
        /// The file.
        file: &'a str,
        /// What went wrong.
        reason: &'a str,
        /// How long was waited.
        wait: Duration,
    },
    /// A file is whole and has the right checksum.
    Done {
        /// The file.
        file: &'a str,
    },
}
