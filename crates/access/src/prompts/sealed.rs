//! Encrypted files, one for each day.
//!
//! A record is its length (4 bytes), a nonce (12 bytes) and the output of AES-256-GCM. The day's
//! key is derived from the folder's key (HKDF-SHA-256), so random nonces never repeat in practice.
//! The record's number is authenticated too, so a removed, moved or changed record is detected.

use std::fs::{self, File};
use std::io::{BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, Salt};

use super::KeptPrompt;
use crate::error::AccessError;
use crate::private;
use crate::secret::{RandomError, hex};

const KEY_BYTES: usize = 32;
const LENGTH_BYTES: usize = 4;
/// A longer record is damaged. Texts have at most 1 MiB, and JSON may need 6 bytes for one byte.
const LONGEST_BYTES: usize = 8 << 20;
const SALT: &[u8] = b"thunderhead: kept prompts, 1";
const SUFFIX: &str = ".sealed";

/// The key from which the keys of all days are derived.
pub(super) struct Master([u8; KEY_BYTES]);

impl Master {
    /// Reads the key's file.
    pub fn open(path: &Path) -> Result<Self, AccessError> {
        let text =
            fs::read_to_string(path).map_err(AccessError::system("read the key of kept prompts", path))?;
        let text = text.trim();
        let mut bytes = [0; KEY_BYTES];
        let is_hex = text.len() == 2 * KEY_BYTES && text.is_ascii();
        let parsed = is_hex.then(|| {
            bytes.iter_mut().zip(0..).try_for_each(|(byte, place): (&mut u8, usize)| {
                *byte = u8::from_str_radix(text.get(2 * place..2 * place + 2)?, 16).ok()?;
                Some(())
            })
        });
        match parsed.flatten() {
            Some(()) => Ok(Self(bytes)),
            None => Err(bad(path, "a key is 64 hexadecimal digits".to_owned())),
        }
    }

    /// Reads the key's file, or creates it if nothing was encrypted before.
    pub fn open_or_create(path: &Path, folder: &Path) -> Result<Self, AccessError> {
        if path.exists() {
            return Self::open(path);
        }
        if !days(folder)?.is_empty() {
            let why = format!("it is not there, and {} has texts that it encrypted", folder.display());
            return Err(bad(path, why));
        }
        let mut bytes = [0; KEY_BYTES];
        getrandom::fill(&mut bytes).map_err(RandomError::from)?;
        let file = private::create_new(path, false);
        let text = format!("{}\n", hex(&bytes));
        let written =
            file.and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()));
        written.map_err(AccessError::system("make the key of kept prompts", path))?;
        Ok(Self(bytes))
    }

    fn of_day(&self, day: &str) -> Result<LessSafeKey, ring::error::Unspecified> {
        let secret = Salt::new(HKDF_SHA256, SALT).extract(&self.0);
        let info = [day.as_bytes()];
        Ok(LessSafeKey::new(UnboundKey::from(secret.expand(&info, &AES_256_GCM)?)))
    }
}

fn bad(path: &Path, why: String) -> AccessError {
    AccessError::Prompts { path: path.to_owned(), why }
}

/// The days that have texts, and their files, oldest first.
pub(super) fn days(folder: &Path) -> Result<Vec<(String, PathBuf)>, AccessError> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(AccessError::system("read", folder))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(AccessError::system("read", folder))?;
        let name = entry.file_name();
        if let Some(day) = name.to_str().and_then(|name| name.strip_suffix(SUFFIX)) {
            found.push((day.to_owned(), entry.path()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// A day's file, to which records are appended.
pub(super) struct Day {
    day: String,
    path: PathBuf,
    file: File,
    key: LessSafeKey,
    records: u64,
}

impl Day {
    pub fn open(folder: &Path, day: &str, master: &Master) -> Result<Self, AccessError> {
        private::make_folder(folder).map_err(AccessError::system("make", folder))?;
        let path = folder.join(format!("{day}{SUFFIX}"));
        let opened = match File::options().read(true).append(true).open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => private::create_new(&path, true),
            opened => opened,
        };
        let file = opened.map_err(AccessError::system("write to", &path))?;
        // A record that was being written when the process ended is incomplete.
        let (mut records, mut end) = (0, 0);
        each_record(&path, |sealed| {
            records += 1;
            end += (LENGTH_BYTES + sealed.len()) as u64;
            Ok(())
        })?;
        file.set_len(end).map_err(AccessError::system("write to", &path))?;
        let key = master.of_day(day).map_err(|_| bad(&path, "no key for it".to_owned()))?;
        Ok(Self { day: day.to_owned(), path, file, key, records })
    }

    pub fn is_of(&self, day: &str) -> bool {
        self.day == day
    }

    pub fn append(&mut self, kept: &KeptPrompt) -> Result<(), AccessError> {
        let failed = |why: &str| bad(&self.path, why.to_owned());
        let mut text = serde_json::to_vec(kept).map_err(|error| failed(&error.to_string()))?;
        let mut nonce = [0; NONCE_LEN];
        getrandom::fill(&mut nonce).map_err(RandomError::from)?;
        let number = Aad::from(self.records.to_le_bytes());
        let sealed =
            self.key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), number, &mut text);
        sealed.map_err(|_| failed("it cannot be encrypted"))?;
        let length = NONCE_LEN + text.len();
        if length > LONGEST_BYTES {
            return Err(failed("a record is too long"));
        }
        let mut record = Vec::with_capacity(LENGTH_BYTES + length);
        record.extend_from_slice(&(length as u32).to_le_bytes());
        record.extend_from_slice(&nonce);
        record.extend_from_slice(&text);
        self.file.write_all(&record).map_err(AccessError::system("write to", &self.path))?;
        self.records += 1;
        Ok(())
    }
}

/// Calls `take` with each complete record of a file, still encrypted.
fn each_record(
    path: &Path,
    mut take: impl FnMut(&mut Vec<u8>) -> Result<(), AccessError>,
) -> Result<(), AccessError> {
    let file = File::open(path).map_err(AccessError::system("read", path))?;
    let mut reader = BufReader::new(file);
    let mut record = Vec::new();
    loop {
        let mut length = [0; LENGTH_BYTES];
        let mut part = |bytes: &mut [u8]| match reader.read_exact(bytes) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(AccessError::system("read", path)(error)),
        };
        if !part(&mut length)? {
            return Ok(());
        }
        let length = u32::from_le_bytes(length) as usize;
        if !(NONCE_LEN..=LONGEST_BYTES).contains(&length) {
            return Err(bad(path, "a record's length is wrong: the file was changed".to_owned()));
        }
        record.resize(length, 0);
        if !part(&mut record)? {
            return Ok(());
        }
        take(&mut record)?;
    }
}

/// Decrypts all records of a day.
pub(super) fn read(
    path: &Path,
    day: &str,
    master: &Master,
    mut take: impl FnMut(KeptPrompt),
) -> Result<(), AccessError> {
    let key = master.of_day(day).map_err(|_| bad(path, "no key for it".to_owned()))?;
    let mut number = 0u64;
    each_record(path, |sealed| {
        let wrong = || bad(path, format!("record {number} was changed, or is of another key"));
        let (nonce, text) = sealed.split_at_mut(NONCE_LEN);
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| wrong())?;
        let text = key.open_in_place(nonce, Aad::from(number.to_le_bytes()), text).map_err(|_| wrong())?;
        take(serde_json::from_slice(text).map_err(|_| wrong())?);
        number += 1;
        Ok(())
    })
}
