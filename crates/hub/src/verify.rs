//! Checks the files of a model against their hashes in the cache.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use thunder_parts::Record;

use crate::checksum::Checksum;
use crate::damage;
use crate::error::HubError;
use crate::runs::verify_part;

/// Bytes read at once.
const PIECE_BYTES: usize = 1 << 20;

/// What a check found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verified {
    /// Files with the right hash.
    pub right: usize,
    /// Total bytes of the files that were read.
    pub bytes: u64,
    /// Files without a hash, because they are not links into the cache.
    pub unknown: Vec<PathBuf>,
    /// Files with a wrong hash. The next pull downloads them again.
    pub damaged: Vec<PathBuf>,
}

/// Checks all files of a model's folder, or one GGUF file. Calls `read` with the bytes of each
/// piece. Damaged files are marked, so that the next pull downloads them again.
///
/// # Errors
/// When a file cannot be read, or the mark of a file that is right again cannot be deleted.
pub fn verify(model: &Path, read: &dyn Fn(u64)) -> Result<Verified, HubError> {
    let mut verified = Verified::default();
    for file in files_of(model)? {
        verify_file(&file, &mut verified, read)?;
    }
    verified.unknown.sort();
    verified.damaged.sort();
    Ok(verified)
}

/// All files of a model's folder and its subfolders, or all parts of a GGUF file.
pub(crate) fn files_of(model: &Path) -> Result<Vec<PathBuf>, HubError> {
    if !model.is_dir() {
        return Ok(crate::gguf_parts(model));
    }
    let (mut files, mut folders) = (Vec::new(), vec![model.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(HubError::io("list", &folder))? {
            let path = entry.map_err(HubError::io("list", &folder))?.path();
            let kind = fs::symlink_metadata(&path).map_err(HubError::io("look at", &path))?;
            if kind.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    Ok(files)
}

fn verify_file(path: &Path, verified: &mut Verified, read: &dyn Fn(u64)) -> Result<(), HubError> {
    if let Some(record) = Record::of(path).map_err(HubError::io("read", Record::path_of(path)))? {
        let count = std::cell::Cell::new(0);
        let is_right = verify_part(path, &record, &|bytes| {
            count.set(count.get() + bytes);
            read(bytes);
        })?;
        verified.bytes += count.get();
        if is_right {
            verified.right += 1
        } else {
            verified.damaged.push(path.to_owned())
        }
        return Ok(());
    }
    let target = fs::read_link(path).ok();
    let etag = target.as_ref().and_then(|target| target.file_name()).and_then(|name| name.to_str());
    let failed = || HubError::io("read", path);
    let mut file = match File::open(path) {
        // The link exists, but the blob does not.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            verified.damaged.push(path.to_owned());
            return Ok(());
        }
        file => file.map_err(failed())?,
    };
    let size = file.metadata().map_err(failed())?.len();
    let mut checksum = Checksum::for_etag(etag.unwrap_or_default(), size);
    if matches!(checksum, Checksum::Unknown) {
        verified.unknown.push(path.to_owned());
        return Ok(());
    }
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let count = file.read(&mut piece).map_err(failed())?;
        if count == 0 {
            break;
        }
        checksum.update(&piece[..count]);
        verified.bytes += count as u64;
        read(count as u64);
    }
    let blob = damage::blob_of(path).unwrap_or_else(|| path.to_owned());
    if checksum.finish().is_some_and(|(_, hash)| Some(hash.as_str()) == etag) {
        verified.right += 1;
        return damage::unmark(&blob);
    }
    verified.damaged.push(path.to_owned());
    // Damage in a read-only cache is still reported; a pull could not repair it either.
    let _ = damage::mark(&blob);
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_changed_file_is_found_and_one_without_a_hash_is_named() {
        let cache = tempfile::tempdir().unwrap();
        let (blobs, snapshot) = (cache.path().join("blobs"), cache.path().join("snapshots/x"));
        fs::create_dir_all(&blobs).unwrap();
        fs::create_dir_all(snapshot.join("sub")).unwrap();
        // `printf hello | sha256sum` and `printf hello | git hash-object --stdin`.
        let sha256 = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
        let git = "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0";
        for (etag, file, up) in [(sha256, "weights", "../../"), (git, "sub/config", "../../../")] {
            fs::write(blobs.join(etag), "hello").unwrap();
            std::os::unix::fs::symlink(format!("{up}blobs/{etag}"), snapshot.join(file)).unwrap();
        }
        fs::write(snapshot.join("own"), "mine").unwrap();
        let found = verify(&snapshot, &|_| {}).unwrap();
        let expected =
            Verified { right: 2, bytes: 10, unknown: vec![snapshot.join("own")], damaged: Vec::new() };
        assert_eq!(found, expected);
        fs::write(blobs.join(sha256), "hellO").unwrap();
        fs::remove_file(blobs.join(git)).unwrap();
        let found = verify(&snapshot, &|_| {}).unwrap();
        assert_eq!(found.damaged, [snapshot.join("sub/config"), snapshot.join("weights")]);
        assert_eq!(found.right, 0);
        assert!(damage::is_known(&snapshot.join("weights")));
        fs::write(blobs.join(sha256), "hello").unwrap();
        assert_eq!(verify(&snapshot, &|_| {}).unwrap().right, 1);
        assert!(!damage::is_known(&snapshot.join("weights")), "it was mended by hand");
    }
}
