//! A rank's folder: its lock, and the names of its files.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

use super::DiskError;
use super::index::{FileKey, Index};
use crate::transfer::{BlockName, Part};

/// A server that was just killed may still be ending on its other ranks.
const LOCK_PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 3000 });
const LOCK_INTERVAL: Duration = Duration::from_millis(50);
/// Suffix of the name of a file that is being written.
pub(super) const UNFINISHED: &str = ".part";

/// A folder that only this process uses.
#[derive(Debug)]
pub(super) struct RankFolder {
    path: PathBuf,
    _lock: File,
}

fn of_rank(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}"))
}

fn lock_file(path: &Path) -> io::Result<File> {
    File::options().create(true).truncate(false).write(true).open(path.join("lock"))
}

/// A file's name: the block's name, the number of blocks before it, and the file's content.
pub(super) fn file_name(key: &FileKey, depth: u32) -> String {
    let name: String = key.name.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = match key.part {
        Part::Block => "block",
        Part::State => "state",
    };
    format!("{name}-{depth}.{part}")
}

fn from_file_name(name: &str) -> Option<(FileKey, u32)> {
    let (stem, part) = name.split_once('.')?;
    let part = match part {
        "block" => Part::Block,
        "state" => Part::State,
        _ => return None,
    };
    let (digits, depth) = stem.split_once('-')?;
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    if pairs.len() != 32 || !rest.is_empty() {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(pairs) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some((FileKey { name: BlockName(bytes), part }, depth.parse().ok()?))
}

impl RankFolder {
    /// Creates the folder if it does not exist, and locks it.
    pub fn open(folder: &Path, rank: usize) -> Result<Self, DiskError> {
        let path = of_rank(folder, rank);
        let failed = |reason| DiskError::Folder { folder: path.clone(), reason };
        make(&path).map_err(failed)?;
        let lock = lock_file(&path).map_err(failed)?;
        let until = Instant::now() + LOCK_PATIENCE;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    std::thread::sleep(LOCK_INTERVAL);
                }
                Err(TryLockError::WouldBlock) => return Err(DiskError::InUse(folder.to_owned())),
                Err(TryLockError::Error(error)) => return Err(failed(error)),
            }
        }
        Ok(Self { path, _lock: lock })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a block's file.
    pub fn file(&self, key: &FileKey, depth: u32) -> PathBuf {
        self.path.join(file_name(key, depth))
    }

    /// Removes a file.
    pub fn remove(&self, key: &FileKey, depth: u32) {
        // It may have been removed already.
        let _ = fs::remove_file(self.file(key, depth));
    }

    /// Adds all blocks to the index, and removes unfinished files. Leaves other files alone.
    pub fn list(&self, index: &mut Index) -> Result<(), DiskError> {
        let failed = |reason| DiskError::Folder { folder: self.path.clone(), reason };
        for entry in fs::read_dir(&self.path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.ends_with(UNFINISHED) {
                let _ = fs::remove_file(entry.path());
            }
            let Some((key, depth)) = from_file_name(name) else { continue };
            let Ok(metadata) = entry.metadata() else { continue };
            let used = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let used = used.map_or(0, |used| used.as_micros() as u64);
            index.insert(key, depth, metadata.len(), used);
        }
        Ok(())
    }
}

/// Creates a folder that only its owner can read, because the cache reveals prompts.
fn make(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// Removes the blocks of ranks from `first` on, which an engine with more ranks has left.
pub(super) fn remove_ranks_from(folder: &Path, first: usize) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let rank = name.to_str().and_then(|name| name.strip_prefix("rank-")?.parse::<usize>().ok());
        if rank.is_none_or(|rank| rank < first) {
            continue;
        }
        let path = entry.path();
        // Another server may use it.
        let Ok(lock) = lock_file(&path) else { continue };
        if lock.try_lock().is_err() {
            continue;
        }
        for file in fs::read_dir(&path).into_iter().flatten().flatten() {
            if file.file_name().to_str().and_then(from_file_name).is_some() {
                let _ = fs::remove_file(file.path());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_name_is_read_as_it_was_written() {
        for (part, depth) in [(Part::Block, 0), (Part::State, 4095)] {
            let key = FileKey { name: BlockName(std::array::from_fn(|byte| byte as u8 * 7)), part };
            assert_eq!(from_file_name(&file_name(&key, depth)), Some((key, depth)));
        }
        let good = file_name(&FileKey { name: BlockName([1; 32]), part: Part::Block }, 3);
        for wrong in
            ["", "lock", "notes.txt", &good[1..], &good.replace("block", "part"), &good.replace('-', "+")]
        {
            assert_eq!(from_file_name(wrong), None, "{wrong}");
        }
    }
}
