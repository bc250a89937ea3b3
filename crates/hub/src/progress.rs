//! Progress events of a pull.

use std::time::Duration;

/// Progress of a pull. Several files report in turn, from several threads.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PullEvent<'a> {
    /// The list of files is known.
    Start {
        /// Files to download.
        files: usize,
        /// Total size of these files in bytes.
        bytes: u64,
        /// Number of files that are already in the cache.
        present: usize,
    },
    /// More bytes of a file are on disk.
    Bytes {
        /// The file.
        file: &'a str,
        /// Bytes so far. Drops to 0 if the download must start again.
        done: u64,
        /// The file's size in bytes.
        total: u64,
    },
    /// The present source of a file: a peer's name, or the hub's address. Reported only if there
    /// are peers.
    Source {
        /// The file.
        file: &'a str,
        /// Who sends it.
        from: &'a str,
    },
    /// An attempt failed; the wait is over and the next attempt begins.
    Retry {
        /// The file.
        file: &'a str,
        /// Why the attempt failed.
        reason: &'a str,
        /// The wait before the next attempt.
        wait: Duration,
    },
    /// A file is complete and has the right checksum.
    Done {
        /// The file.
        file: &'a str,
    },
}
