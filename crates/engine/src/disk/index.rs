//! A rank's files: which exist, how large they are, and when they were last used.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};

use crate::transfer::{BlockName, Part};

/// Identifies a file in its folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct FileKey {
    pub name: BlockName,
    pub part: Part,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    bytes: u64,
    used: u64,
    depth: u32,
}

impl Entry {
    /// Among blocks of one use, the end of a prompt is dropped before its beginning, without which
    /// the end is useless.
    fn place(self, key: FileKey) -> (u64, Reverse<u32>, FileKey) {
        (self.used, Reverse(self.depth), key)
    }
}

/// The files of a rank's folder.
#[derive(Debug)]
pub(super) struct Index {
    files: HashMap<FileKey, Entry>,
    /// The same, least recently used first.
    by_use: BTreeSet<(u64, Reverse<u32>, FileKey)>,
    /// Files that wait to be written.
    begun: HashSet<FileKey>,
    bytes: u64,
    limit_bytes: u64,
}

impl Index {
    /// No files yet. Together they may take `limit_bytes` bytes.
    pub fn new(limit_bytes: u64) -> Self {
        let (files, by_use, begun) = Default::default();
        Self { files, by_use, begun, bytes: 0, limit_bytes }
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True if there is such a file.
    pub fn holds(&self, key: &FileKey) -> bool {
        self.files.contains_key(key)
    }

    /// Records a file that will be written. Returns false if it is already waiting.
    pub fn begin(&mut self, key: FileKey) -> bool {
        self.begun.insert(key)
    }

    /// Records that a file was written, or will not be.
    pub fn end(&mut self, key: &FileKey) {
        self.begun.remove(key);
    }

    /// Records a file in the folder.
    pub fn insert(&mut self, key: FileKey, depth: u32, bytes: u64, used: u64) {
        self.remove(&key);
        let entry = Entry { bytes, used, depth };
        self.files.insert(key, entry);
        self.by_use.insert(entry.place(key));
        self.bytes += bytes;
    }

    /// Records that a file was used. `used` is larger for later uses.
    pub fn touch(&mut self, key: &FileKey, used: u64) {
        if let Some(entry) = self.files.get_mut(key)
            && entry.used < used
        {
            self.by_use.remove(&entry.place(*key));
            entry.used = used;
            self.by_use.insert(entry.place(*key));
        }
    }

    /// Removes a file from the index.
    pub fn remove(&mut self, key: &FileKey) {
        if let Some(entry) = self.files.remove(key) {
            self.by_use.remove(&entry.place(*key));
            self.bytes -= entry.bytes;
        }
    }

    /// Removes the least recently used files from the index until `bytes` more may be written.
    /// Returns them with their depths; `None` if the limit is too small for the bytes.
    pub fn make_room(&mut self, bytes: u64) -> Option<Vec<(FileKey, u32)>> {
        let room = self.limit_bytes.checked_sub(bytes)?;
        Some(self.forget(self.bytes.saturating_sub(room)))
    }

    /// Removes the least recently used files from the index, with `bytes` in total or more. Returns
    /// them with their depths.
    pub fn forget(&mut self, bytes: u64) -> Vec<(FileKey, u32)> {
        let (mut removed, before) = (Vec::new(), self.bytes);
        while before - self.bytes < bytes {
            let Some(&(_, Reverse(depth), key)) = self.by_use.first() else { break };
            self.remove(&key);
            removed.push((key, depth));
        }
        removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> FileKey {
        FileKey { name: BlockName([number; 32]), part: Part::Block }
    }

    fn removed(index: &mut Index, bytes: u64) -> Vec<u8> {
        index.make_room(bytes).expect("room").iter().map(|(key, _)| key.name.0[0]).collect()
    }

    #[test]
    fn the_end_of_the_longest_unused_prompt_makes_room_first() {
        let mut index = Index::new(50);
        for (number, depth, used) in [(1, 0, 7), (2, 1, 7), (3, 0, 5), (4, 1, 5), (5, 2, 5)] {
            index.insert(key(number), depth, 10, used);
        }
        assert_eq!((index.bytes(), removed(&mut index, 0)), (50, vec![]));
        assert_eq!(removed(&mut index, 15), [5, 4]);
        index.touch(&key(3), 9);
        assert_eq!(removed(&mut index, 25), [2]);
        assert_eq!(index.make_room(51), None, "more than all files may take");
        assert!(index.holds(&key(1)) && index.holds(&key(3)));
        assert_eq!(removed(&mut index, 50), [1, 3]);
    }

    #[test]
    fn a_file_is_counted_once_and_begun_once() {
        let mut index = Index::new(50);
        assert!(index.begin(key(1)) && !index.begin(key(1)));
        index.end(&key(1));
        assert!(index.begin(key(1)));
        index.insert(key(1), 0, 10, 1);
        index.insert(key(1), 0, 20, 2);
        assert_eq!(index.bytes(), 20);
        index.touch(&key(1), 1);
        index.insert(key(2), 0, 10, 3);
        assert_eq!(removed(&mut index, 40), [1], "an earlier use changes nothing");
        index.remove(&key(2));
        assert_eq!((index.bytes(), index.by_use.len()), (0, 0));
    }
}
