//! Memory-mapped weight files.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::{Mmap, UncheckedAdvice};
use sha2::{Digest, Sha256};
use thunder_compute::FilePages;
use thunder_parts::{Ranges, Record};

use super::watched_file::WatchedFile;
use crate::error::ModelError;

/// A page fault also maps what the kernel has cached in one piece around the page, up to 2 MiB.
/// Ranks that read windows of many tensors would keep the edges of all of them, so releasing drops
/// this much on both sides.
const MAPPED_AROUND_BYTES: usize = 2 << 20;

/// A fingerprint samples the contents of this many tensors: enough to distinguish fine-tunes of one
/// model without reading the whole model.
const SAMPLED_TENSORS: usize = 64;
/// Bytes that a fingerprint samples of a tensor.
const SAMPLE_BYTES: usize = 256;

/// Files, by the order in which they were mapped.
#[derive(Debug, Default)]
pub struct MappedFiles {
    maps: Vec<Mapped>,
    /// File and bytes of what was read besides matrices.
    noted: Mutex<BTreeSet<(usize, usize, usize)>>,
}

#[derive(Debug)]
struct Mapped {
    /// Declared before the map, so that it is dropped first.
    _watched: WatchedFile,
    map: Mmap,
    file: File,
    path: PathBuf,
    /// The present ranges, if some are missing.
    present: Option<Ranges>,
}

impl MappedFiles {
    /// Maps another file and returns its number.
    ///
    /// # Errors
    /// When it cannot be opened; `what` says what it is for.
    pub(crate) fn add(&mut self, path: &Path, what: &'static str) -> Result<usize, ModelError> {
        let io = |error| ModelError::io(path, what, error);
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is read-only. If another process truncates the file meanwhile, reading it
        // ends this process; `WatchedFile` says why.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let watched = WatchedFile::new(&map, path);
        let present = Record::of(path).map_err(io)?.map(|record| record.present());
        self.maps.push(Mapped { _watched: watched, map, file, path: path.to_owned(), present });
        Ok(self.maps.len() - 1)
    }

    /// Files that are mapped.
    pub(crate) fn count(&self) -> usize {
        self.maps.len()
    }

    /// For each file the path, the length and, if some is missing, the present ranges.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&Path, u64, Option<&Ranges>)> {
        self.maps.iter().map(|it| (&*it.path, it.map.len() as u64, it.present.as_ref()))
    }

    /// Records that `bytes` of a file, which are not a matrix, are read. Returns false if they are
    /// missing: a node may have only the headers of a model, or what one of its ranks reads, and
    /// the rest of the file is zeros.
    pub(crate) fn note(&self, bytes: &[u8]) -> bool {
        let Some((file, range)) = self.find(bytes) else { return true };
        self.noted.lock().unwrap_or_else(PoisonError::into_inner).insert((file, range.start, range.end));
        let (start, end) = (range.start as u64, range.end as u64);
        self.maps[file].present.as_ref().is_none_or(|present| present.contains(&(start..end)))
    }

    /// A copy of bytes that are not a matrix, and whether they are present: see [`Self::note`].
    /// Nothing stays mapped: around each of many norms, the system would map up to 2 MiB.
    pub(crate) fn noted_copy(&self, bytes: &[u8]) -> (Vec<u8>, bool) {
        let mut copy = vec![0; bytes.len()];
        self.read(bytes, &mut copy);
        (copy, self.note(bytes))
    }

    /// What was recorded since the last call, or since the files were mapped.
    pub(crate) fn take_noted(&self) -> Vec<(usize, Range<u64>)> {
        let noted = std::mem::take(&mut *self.noted.lock().unwrap_or_else(PoisonError::into_inner));
        noted.into_iter().map(|(file, start, end)| (file, start as u64..end as u64)).collect()
    }

    /// All bytes of a file.
    pub(crate) fn file(&self, number: usize) -> &[u8] {
        &self.maps[number].map
    }

    /// A hash of the tensors' descriptions and of samples of their contents. `tensors` are in an
    /// order that all ranks agree on.
    pub(crate) fn fingerprint(&self, tensors: &[(String, &[u8])]) -> [u8; 32] {
        let between = tensors.len().div_ceil(SAMPLED_TENSORS).max(1);
        let mut hasher = Sha256::new();
        for (index, (description, bytes)) in tensors.iter().enumerate() {
            hasher.update(description);
            if index % between == 0 {
                let middle = &bytes[bytes.len() / 2..];
                let sample = &middle[..middle.len().min(SAMPLE_BYTES)];
                self.note(sample);
                hasher.update(sample);
                self.release(sample);
            }
        }
        hasher.finalize().into()
    }

    /// The file that holds `bytes`, and their range in it.
    fn place(&self, bytes: &[u8]) -> Option<(&Mapped, Range<usize>)> {
        self.find(bytes).map(|(file, range)| (&self.maps[file], range))
    }

    /// The number of the file that holds `bytes`, and their range in it.
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<(usize, Range<usize>)> {
        let start = bytes.as_ptr() as usize;
        self.maps.iter().enumerate().find_map(|(file, Mapped { map, .. })| {
            let first = start.checked_sub(map.as_ptr() as usize).filter(|first| *first < map.len())?;
            Some((file, first..first + bytes.len()))
        })
    }
}

/// Replaces missing integers: different ones in each row, as in tables of experts.
pub(crate) fn absent_indices(shape: &[usize]) -> Vec<u32> {
    let width = shape.last().copied().unwrap_or(1).max(1);
    (0..shape.iter().product::<usize>()).map(|at| (at % width) as u32).collect()
}

impl FilePages for MappedFiles {
    fn read(&self, bytes: &[u8], to: &mut [u8]) {
        let read = self.place(bytes).map(|(mapped, range)| mapped.file.read_exact_at(to, range.start as u64));
        // The file became shorter. Reading the mapping ends the process, and `WatchedFile` says
        // why.
        if !matches!(read, Some(Ok(()))) {
            to.copy_from_slice(bytes);
        }
    }

    /// Maps the pages in one call. Faults for a few pages each take twice as long.
    fn need(&self, bytes: &[u8]) {
        #[cfg(target_os = "linux")]
        if let Some((Mapped { map, .. }, range)) = self.place(bytes) {
            // Linux before 5.14 does not know this advice and maps the pages when they are read.
            drop(map.advise_range(Advice::PopulateRead, range.start, range.len()));
        }
        #[cfg(not(target_os = "linux"))]
        let _ = bytes;
    }

    /// Drops the pages from this process. They stay in the system's cache for other ranks.
    fn release(&self, bytes: &[u8]) {
        let Some((Mapped { map, .. }, range)) = self.place(bytes) else { return };
        let from = range.start.saturating_sub(MAPPED_AROUND_BYTES);
        let to = (range.end + MAPPED_AROUND_BYTES).min(map.len());
        // SAFETY: the map is a clean, read-only view of a file, so dropped pages are read again
        // when touched.
        let dropped = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, from, to - from) };
        // If the advice is refused, the system decides when to drop the pages.
        drop(dropped);
    }
}
