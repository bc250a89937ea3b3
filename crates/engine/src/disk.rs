//! The prefix cache's second tier: blocks and states of prompts in files, which survive restarts.
//!
//! Each rank keeps its own shard's bytes in a folder of its own (`DIR/rank-N`), with one file for
//! each block. Rank 0's scheduler says what to write and to read; all ranks do the same. A block's
//! name is a hash of everything that its bytes depend on: the tokens, the adapter, and every rank's
//! model, shard, formats, CPU and program.
//!
//! A thread with a bounded queue writes the files. If it is behind, a block is not written.

mod file;
mod folder;
mod index;
mod writer;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest, Sha256};
use thunder_compute::step::KV_BLOCK_TOKENS;

use crate::scheduler::Stored;
use crate::transfer::{BlockName, NOWHERE, Part, Transfer};
use file::Bad;
use folder::RankFolder;
use index::{FileKey, Index};
use writer::Writer;

/// Maximum bytes that wait to be written. Beyond this, blocks are dropped, because the disk is
/// behind.
const MOST_WAITING_BYTES: usize = 64 << 20;

/// A rank's part of the cache on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskSpec {
    /// The folder of all ranks.
    pub folder: PathBuf,
    /// Maximum bytes of this rank's files.
    pub limit_bytes: u64,
    /// Identifies everything that this rank's bytes depend on, except the model and its adapters.
    pub identity: String,
    /// Bytes of a block on the rank with the largest blocks.
    pub block_bytes: usize,
    /// This rank removes the files of ranks that no longer exist.
    pub cleans: bool,
}

/// Why the folder of the cache cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// Another server uses it.
    #[error("--cache-dir {0}: another thunder uses it; give each server a folder of its own")]
    InUse(PathBuf),
    /// It cannot be created, read or locked.
    #[error("--cache-dir {folder}: {reason}")]
    Folder {
        /// The rank's folder.
        folder: PathBuf,
        /// The system's error.
        reason: io::Error,
    },
}

/// Counts of blocks since the start.
#[derive(Debug, Default)]
pub struct DiskCounters {
    /// Bytes of all files.
    pub bytes: AtomicU64,
    /// Blocks and states written.
    pub written: AtomicU64,
    /// Blocks and states that were not written, because the disk was behind, full or failed.
    pub dropped: AtomicU64,
    /// Files that were damaged, or do not belong to the cache.
    pub damaged: AtomicU64,
}

/// Number of counters in [`DiskCounters`].
pub(crate) const DISK_COUNTS: usize = 4;

impl DiskCounters {
    /// The current values, in the order of the fields.
    pub(crate) fn all(&self) -> [u64; DISK_COUNTS] {
        [&self.bytes, &self.written, &self.dropped, &self.damaged].map(|count| count.load(Ordering::Relaxed))
    }
}

#[derive(Debug)]
struct Shared {
    index: Mutex<Index>,
    counters: DiskCounters,
    waiting_bytes: AtomicUsize,
}

impl Shared {
    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_bytes(&self, index: &Index) {
        self.counters.bytes.store(index.bytes(), Ordering::Relaxed);
    }
}

/// One rank's blocks on disk.
#[derive(Debug)]
pub(crate) struct DiskCache {
    folder: RankFolder,
    rank: u32,
    shared: Arc<Shared>,
    writer: Writer,
    buffer: Vec<u8>,
}

/// Tells rank 0's scheduler which blocks are on rank 0's disk.
#[derive(Debug, Clone)]
pub(crate) struct DiskList(Arc<Shared>);

impl DiskList {
    /// True if the block or state is on rank 0's disk.
    pub fn holds(&self, name: &BlockName, part: Part) -> bool {
        self.0.index().holds(&FileKey { name: *name, part })
    }

    /// Counts of rank 0's blocks.
    pub fn counters(&self) -> &DiskCounters {
        &self.0.counters
    }
}

impl DiskCache {
    /// Opens the rank's folder and lists its files.
    ///
    /// # Errors
    /// When another server uses the folder, or it cannot be used.
    pub fn open(spec: &DiskSpec, rank: usize, ranks: usize) -> Result<Self, DiskError> {
        let folder = RankFolder::open(&spec.folder, rank)?;
        if spec.cleans {
            folder::remove_ranks_from(&spec.folder, ranks);
        }
        let mut index = Index::new(spec.limit_bytes);
        folder.list(&mut index)?;
        let surplus = index.make_room(0);
        let shared = Arc::new(Shared {
            counters: DiskCounters::default(),
            waiting_bytes: AtomicUsize::new(0),
            index: Mutex::new(index),
        });
        surplus.iter().flatten().for_each(|(key, depth)| folder.remove(key, *depth));
        shared.note_bytes(&shared.index());
        let writer = Writer::start(folder.path().to_owned(), rank as u32, shared.clone())
            .map_err(|reason| DiskError::Folder { folder: folder.path().to_owned(), reason })?;
        Ok(Self { folder, rank: rank as u32, shared, writer, buffer: Vec::new() })
    }

    /// For the scheduler.
    pub fn list(&self) -> DiskList {
        DiskList(self.shared.clone())
    }

    /// Records the use of a block, and orders it to be written if it is not on disk. `read` appends
    /// its bytes; it is not called if the block need not or cannot be written.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn store<E>(
        &mut self,
        transfer: &Transfer,
        read: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        let key = FileKey { name: transfer.name, part: transfer.part };
        let mut index = self.shared.index();
        if index.holds(&key) {
            index.touch(&key, transfer.used);
            drop(index);
            self.writer.touch(key, transfer.depth, transfer.used);
            return Ok(());
        }
        if transfer.place == NOWHERE || !index.begin(key) {
            return Ok(());
        }
        drop(index);
        if self.shared.waiting_bytes.load(Ordering::Relaxed) >= MOST_WAITING_BYTES {
            self.shared.counters.dropped.fetch_add(1, Ordering::Relaxed);
            self.shared.index().end(&key);
            return Ok(());
        }
        let mut bytes = Vec::new();
        if let Err(error) = read(&mut bytes) {
            self.shared.index().end(&key);
            return Err(error);
        }
        self.writer.write(key, transfer.depth, transfer.used, bytes);
        Ok(())
    }

    /// The bytes of a block; `None` if they are not on disk, or damaged. A damaged file is reported
    /// and removed.
    pub fn load(&mut self, transfer: &Transfer) -> Option<&[u8]> {
        let key = FileKey { name: transfer.name, part: transfer.part };
        if !self.shared.index().holds(&key) {
            return None;
        }
        let path = self.folder.file(&key, transfer.depth);
        match file::read(&path, &key, self.rank, &mut self.buffer) {
            Ok(()) => Some(&self.buffer),
            Err(bad) => {
                if !matches!(&bad, Bad::Unreadable(error) if error.kind() == io::ErrorKind::NotFound) {
                    self.refuse(&path, &bad);
                }
                self.forget(&key);
                None
            }
        }
    }

    /// Handles a file whose size does not fit the cache.
    pub fn refuse_size(&mut self, transfer: &Transfer) {
        let key = FileKey { name: transfer.name, part: transfer.part };
        let path = self.folder.file(&key, transfer.depth);
        self.refuse(&path, &Bad::Damaged("it has another size than a block"));
        self.forget(&key);
    }

    fn refuse(&self, path: &Path, bad: &Bad) {
        tracing::warn!("{} is not used, and removed: {bad}; its tokens are computed again", path.display());
        self.shared.counters.damaged.fetch_add(1, Ordering::Relaxed);
        // If the file stays, the next block with this name replaces it.
        let _ = std::fs::remove_file(path);
    }

    fn forget(&self, key: &FileKey) {
        let mut index = self.shared.index();
        index.remove(key);
        self.shared.note_bytes(&index);
    }
}

/// Names of blocks, on rank 0.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    /// The name before a prompt's first block, by adapter; 0: no adapter.
    roots: Vec<BlockName>,
}

impl Names {
    /// Names for an engine whose ranks have these identities, and whose adapters have these
    /// contents.
    pub fn new(identities: &[u8], adapters: &[[u8; 32]]) -> Self {
        let root = |adapter: &[u8]| {
            let mut hash = Sha256::new();
            hash.update(b"thunder's blocks, form 1");
            hash.update(identities);
            hash.update(adapter);
            BlockName(hash.finalize().into())
        };
        let of_adapters = adapters.iter().map(|adapter| root(adapter));
        Self { roots: std::iter::once(root(&[])).chain(of_adapters).collect() }
    }

    /// The names of a prompt's whole blocks.
    pub fn of(&self, tokens: &[u32], adapter: u32) -> Vec<BlockName> {
        let Some(mut before) = self.roots.get(adapter as usize).copied() else { return Vec::new() };
        let (blocks, _) = tokens.as_chunks();
        let name = |tokens: &[u32; KV_BLOCK_TOKENS]| {
            let mut hash = Sha256::new();
            hash.update(before.0);
            tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
            before = BlockName(hash.finalize().into());
            before
        };
        blocks.iter().map(name).collect()
    }
}

/// The disk interface of rank 0's scheduler.
#[derive(Debug)]
pub(crate) struct HeadDisk {
    list: DiskList,
    names: Names,
}

impl HeadDisk {
    pub fn new(list: DiskList, names: Names) -> Self {
        Self { list, names }
    }
}

impl Stored for HeadDisk {
    fn names(&self, tokens: &[u32], adapter: u32) -> Vec<BlockName> {
        self.names.of(tokens, adapter)
    }

    fn holds(&self, name: &BlockName, part: Part) -> bool {
        self.list.holds(name, part)
    }
}

#[cfg(test)]
mod tests;
