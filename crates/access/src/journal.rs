//! The newest usage records, before they are moved to the store.
//!
//! A record is written to a file before its answer ends, so it survives the end of the process at
//! any moment. Records of answers that end together need one system call. Once a second the file's
//! records are moved to the store, which waits for the disk. So a power failure loses at most the
//! last second.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::private;
use crate::usage::UsageRecord;

/// Length and checksum in front of a record.
const HEAD_BYTES: usize = 8;
/// A longer record is damaged.
const LONGEST_BYTES: usize = 64 << 10;

/// The file to which records are appended, and the files that wait to be moved.
#[derive(Debug)]
pub(crate) struct Journal {
    generation: u64,
    file: File,
    /// Bytes of whole records.
    bytes: u64,
}

impl Journal {
    /// Opens a new file in the folder, after the existing files.
    pub fn open(folder: &Path) -> io::Result<Self> {
        let generation = waiting(folder)?.last().map_or(1, |(last, _)| last + 1);
        let file = private::create_new(&path(folder, generation), true)?;
        Ok(Self { generation, file, bytes: 0 })
    }

    /// Appends records in one system call. If that fails, the file is unchanged.
    pub fn append<'a>(&mut self, records: impl IntoIterator<Item = &'a UsageRecord>) -> io::Result<()> {
        let mut bytes = Vec::new();
        records.into_iter().try_for_each(|record| encode(record, &mut bytes))?;
        if let Err(error) = self.file.write_all(&bytes) {
            self.file.set_len(self.bytes)?;
            return Err(error);
        }
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Number of the file that records are appended to.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether the file has no record.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Continues with a new file. Then records of all earlier files can be moved. This never waits
    /// for the disk: [`NextFile::create`] may wait while records are still appended here.
    pub fn rotate(&mut self, next: NextFile) {
        (self.generation, self.file, self.bytes) = (next.generation, next.file, 0);
    }
}

/// A new file of a journal.
#[derive(Debug)]
pub(crate) struct NextFile {
    generation: u64,
    file: File,
}

impl NextFile {
    /// Creates the file after the file with this number.
    pub fn create(folder: &Path, last: u64) -> io::Result<Self> {
        let generation = last + 1;
        let path = path(folder, generation);
        let file = match private::create_new(&path, true) {
            // A failed rotation may have left the file.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                File::options().append(true).open(&path)?
            }
            created => created?,
        };
        Ok(Self { generation, file })
    }
}

/// The files whose records can be moved: all before `current`, oldest first.
pub(crate) fn complete(folder: &Path, current: u64) -> io::Result<Vec<PathBuf>> {
    let files = waiting(folder)?.into_iter();
    Ok(files.filter(|(generation, _)| *generation < current).map(|(_, path)| path).collect())
}

fn path(folder: &Path, generation: u64) -> PathBuf {
    folder.join(format!("usage-{generation:012}.journal"))
}

/// The journal's files, oldest first.
fn waiting(folder: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("usage-")?.strip_suffix(".journal"));
        if let Some(generation) = number.and_then(|number| number.parse::<u64>().ok()) {
            found.push((generation, entry.path()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Adds a record with its header.
fn encode(record: &UsageRecord, bytes: &mut Vec<u8>) -> io::Result<()> {
    let start = bytes.len();
    let text = start + HEAD_BYTES;
    bytes.resize(text, 0);
    serde_json::to_writer(&mut *bytes, record)?;
    let length = bytes.len() - text;
    if length > LONGEST_BYTES {
        return Err(io::Error::other(format!(
            "a usage record has {length} bytes, {LONGEST_BYTES} are the most"
        )));
    }
    let check = check(&bytes[text..]);
    bytes[start..start + 4].copy_from_slice(&(length as u32).to_le_bytes());
    bytes[start + 4..text].copy_from_slice(&check);
    Ok(())
}

fn check(bytes: &[u8]) -> [u8; 4] {
    let hash = Sha256::digest(bytes);
    [hash[0], hash[1], hash[2], hash[3]]
}

/// The records of a journal's file, up to the first incomplete one, which was being written when
/// the process ended.
pub(crate) fn read(path: &Path) -> io::Result<Vec<UsageRecord>> {
    Ok(decode(&fs::read(path)?))
}

fn decode(mut bytes: &[u8]) -> Vec<UsageRecord> {
    let mut records = Vec::new();
    while let Some((head, rest)) = bytes.split_at_checked(HEAD_BYTES) {
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let Some((text, rest)) = rest.split_at_checked(length) else { break };
        if length > LONGEST_BYTES || check(text) != head[4..] {
            break;
        }
        let Ok(record) = serde_json::from_slice(text) else { break };
        records.push(record);
        bytes = rest;
    }
    records
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::time::Time;
    use crate::usage::Outcome;

    pub fn record(number: u64) -> UsageRecord {
        UsageRecord {
            number,
            id: format!("chatcmpl-{number}"),
            time: Time(1_795_392_000_000 + number * 1000),
            key: Some("ci".into()),
            key_id: Some("k_abcdefgh".into()),
            owner: None,
            team: Some("lab".into()),
            model: "org/model".into(),
            api: "/v1/chat/completions".into(),
            node: None,
            outcome: Outcome::Stop,
            status: 200,
            count: 1,
            prompt_tokens: 100,
            cached_tokens: 40,
            completion_tokens: 10,
            cost_nanos: 500,
            queue_us: 1,
            first_token_us: 20_000,
            duration_us: 100_000,
        }
    }

    #[test]
    fn records_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(folder.path()).unwrap();
        journal.append(&[record(1), record(2)]).unwrap();
        assert!(complete(folder.path(), journal.generation()).unwrap().is_empty());
        let next = NextFile::create(folder.path(), journal.generation()).unwrap();
        journal.rotate(next);
        assert!(journal.is_empty());
        journal.append(&[record(3)]).unwrap();
        let files = complete(folder.path(), journal.generation()).unwrap();
        assert_eq!(
            files.iter().map(|file| read(file).unwrap()).collect::<Vec<_>>(),
            [[record(1), record(2)]]
        );
        drop(journal);
        let again = Journal::open(folder.path()).unwrap();
        let files = complete(folder.path(), again.generation()).unwrap();
        assert_eq!(read(&files[1]).unwrap(), [record(3)]);
    }

    proptest! {
        /// A file that is truncated or damaged at any place still gives the records before that
        /// place.
        #[test]
        fn a_damaged_file_gives_what_is_before_the_damage(cut in 0usize..2000, flip in any::<u8>()) {
            let mut bytes = Vec::new();
            let ends: Vec<usize> = (1..=4).map(|number| {
                encode(&record(number), &mut bytes).unwrap();
                bytes.len()
            }).collect();
            let cut = cut % (bytes.len() + 1);
            if flip == 0 || cut == bytes.len() { bytes.truncate(cut) } else { bytes[cut] ^= flip }
            let whole = ends.iter().filter(|end| **end <= cut).count();
            let read = decode(&bytes);
            prop_assert_eq!(read.len(), whole);
            prop_assert!(read.iter().zip(1..).all(|(read, number)| *read == record(number)));
        }

        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode(&bytes);
        }
    }
}
