//! The newest usage records, on their way to the store.
//!
//! A record is written to a file with one system call before its answer ends, so it survives the
//! end of the process at any moment. Once a second the file's records are moved to the store, which
//! waits for the disk; so a loss of power loses at most the last second.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::usage::UsageRecord;

/// Length and check in front of a record.
const HEAD_BYTES: usize = 8;
/// Longer records are damage.
const LONGEST_BYTES: usize = 64 << 10;

/// The file that records are appended to, and those that wait to be moved.
#[derive(Debug)]
pub(crate) struct Journal {
    folder: PathBuf,
    generation: u64,
    file: File,
    /// Bytes of whole records.
    bytes: u64,
}

impl Journal {
    /// Opens a new file in the folder, after those that are there.
    pub fn open(folder: &Path) -> io::Result<Self> {
        let generation = waiting(folder)?.last().map_or(1, |(last, _)| last + 1);
        let file = create(&path(folder, generation))?;
        Ok(Self { folder: folder.to_owned(), generation, file, bytes: 0 })
    }

    /// Appends a record. If that fails, nothing of it is left in the file.
    pub fn append(&mut self, record: &UsageRecord) -> io::Result<()> {
        let bytes = encode(record)?;
        if let Err(error) = self.file.write_all(&bytes) {
            self.file.set_len(self.bytes)?;
            return Err(error);
        }
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Begins a new file if this one has records. Those of all earlier files can be moved then.
    pub fn rotate(&mut self) -> io::Result<()> {
        if self.bytes > 0 {
            let generation = self.generation + 1;
            self.file = create(&path(&self.folder, generation))?;
            (self.generation, self.bytes) = (generation, 0);
        }
        Ok(())
    }

    /// The files whose records can be moved, oldest first.
    pub fn complete(&self) -> io::Result<Vec<PathBuf>> {
        let files = waiting(&self.folder)?.into_iter();
        Ok(files.filter(|(generation, _)| *generation < self.generation).map(|(_, path)| path).collect())
    }
}

fn create(path: &Path) -> io::Result<File> {
    File::options().append(true).create_new(true).mode(0o600).open(path)
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

fn encode(record: &UsageRecord) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; HEAD_BYTES];
    serde_json::to_writer(&mut bytes, record)?;
    let length = bytes.len() - HEAD_BYTES;
    if length > LONGEST_BYTES {
        return Err(io::Error::other(format!(
            "a usage record has {length} bytes, {LONGEST_BYTES} are the most"
        )));
    }
    let check = check(&bytes[HEAD_BYTES..]);
    bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
    bytes[4..HEAD_BYTES].copy_from_slice(&check);
    Ok(bytes)
}

fn check(bytes: &[u8]) -> [u8; 4] {
    let hash = Sha256::digest(bytes);
    [hash[0], hash[1], hash[2], hash[3]]
}

/// The records of a journal's file: all up to the first that is not whole, which was being written
/// when the process ended.
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
        journal.append(&record(1)).unwrap();
        journal.append(&record(2)).unwrap();
        assert!(journal.complete().unwrap().is_empty());
        journal.rotate().unwrap();
        journal.append(&record(3)).unwrap();
        let files = journal.complete().unwrap();
        assert_eq!(
            files.iter().map(|file| read(file).unwrap()).collect::<Vec<_>>(),
            [[record(1), record(2)]]
        );
        drop(journal);
        let again = Journal::open(folder.path()).unwrap();
        assert_eq!(read(&again.complete().unwrap()[1]).unwrap(), [record(3)]);
    }

    proptest! {
        /// A file that ends or is damaged anywhere still gives the records before that place.
        #[test]
        fn a_damaged_file_gives_what_is_before_the_damage(cut in 0usize..2000, flip in any::<u8>()) {
            let mut bytes: Vec<u8> = (1..=4).flat_map(|number| encode(&record(number)).unwrap()).collect();
            let ends: Vec<usize> = (1..=4).scan(0, |end, number| {
                *end += encode(&record(number)).unwrap().len();
                Some(*end)
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
