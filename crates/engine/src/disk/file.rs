//! A block's file: a header that describes it, and the bytes.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::index::FileKey;
use crate::transfer::Part;

/// `[magic 8][name 32][rank 4][part 4][bytes 8][CRC-32 of the bytes 4][CRC-32 of the head 4]`,
/// little-endian.
pub(super) const HEAD_BYTES: usize = 64;
/// The last byte is the format's version.
const MAGIC: &[u8; 8] = b"thunkv\0\x01";

/// Why a file is not used.
#[derive(Debug)]
pub(super) enum Bad {
    Unreadable(io::Error),
    Damaged(&'static str),
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(error) => write!(f, "{error}"),
            Self::Damaged(reason) => f.write_str(reason),
        }
    }
}

fn head(key: &FileKey, rank: u32, bytes: &[u8]) -> [u8; HEAD_BYTES] {
    let part = match key.part {
        Part::Block => 0u32,
        Part::State => 1,
    };
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(MAGIC);
    head[8..40].copy_from_slice(&key.name.0);
    head[40..44].copy_from_slice(&rank.to_le_bytes());
    head[44..48].copy_from_slice(&part.to_le_bytes());
    head[48..56].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    head[56..60].copy_from_slice(&crc32fast::hash(bytes).to_le_bytes());
    let of_head = crc32fast::hash(&head[..60]);
    head[60..].copy_from_slice(&of_head.to_le_bytes());
    head
}

/// Writes a new file. `used` is in microseconds since 1970 and becomes the file's modification
/// time.
pub(super) fn write(path: &Path, key: &FileKey, rank: u32, used: u64, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(&head(key, rank, bytes))?;
    file.write_all(bytes)?;
    // Only the order in which files are dropped after a restart depends on this.
    let _ = file.set_modified(time(used));
    Ok(())
}

/// The time of a use.
pub(super) fn time(used: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_micros(used)
}

/// Reads a file's bytes, and checks that they were written for this block on this rank.
pub(super) fn read(path: &Path, key: &FileKey, rank: u32, bytes: &mut Vec<u8>) -> Result<(), Bad> {
    bytes.clear();
    let mut file = File::open(path).map_err(Bad::Unreadable)?;
    let length = file.metadata().map_err(Bad::Unreadable)?.len();
    let mut found = [0; HEAD_BYTES];
    let Some(rest) = length.checked_sub(HEAD_BYTES as u64) else {
        return Err(Bad::Damaged("it is too short"));
    };
    file.read_exact(&mut found).map_err(Bad::Unreadable)?;
    if found[..8] != *MAGIC {
        return Err(Bad::Damaged("it is not a block of the prefix cache, or of another version"));
    }
    if found[48..56] != rest.to_le_bytes() {
        return Err(Bad::Damaged("its length is not the one written"));
    }
    bytes.resize(rest as usize, 0);
    file.read_exact(bytes).map_err(Bad::Unreadable)?;
    match found == head(key, rank, bytes) {
        true => Ok(()),
        false if found[8..48] != head(key, rank, &[])[8..48] => {
            Err(Bad::Damaged("it is another block's or another rank's file"))
        }
        false => Err(Bad::Damaged("its checksum is wrong")),
    }
}
