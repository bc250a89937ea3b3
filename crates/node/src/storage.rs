//! The files of a node's data folder. Only the owner can read them. After a crash, a file has
//! either its old or its new content, never a part.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The store of keys and limits in a data folder. It may exist before the node.
pub const STORE: &str = "server";
/// Larger files of a data folder are not read; no file that a node writes comes near this size.
const LARGEST_FILE_BYTES: u64 = 16 << 20;

/// Why the data folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The system refused.
    #[error("cannot {what} {path}: {why}")]
    System {
        /// The attempted operation.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        why: io::Error,
    },
    /// The folder contains files of another program, and other users have access to it.
    #[error(
        "{path} has other files and is open to other users: a node's folder is closed to them, so name an empty or a new \
         folder"
    )]
    NotOurs {
        /// The folder.
        path: PathBuf,
    },
    /// Other users can read or change the file.
    #[error(
        "{path} can be read or changed by other users (mode {mode:03o}): whoever read it can pose as this node; \
         `chmod 600` it if nobody has, else remove it and join again"
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The content of a file is invalid.
    #[error("{path} is damaged: {why}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// Another agent uses the folder.
    #[error(
        "an agent runs already with the data folder {path}: `thunder cluster` talks to it, `thunder cluster stop` \
         ends it; another --data makes a second node"
    )]
    InUse {
        /// The folder.
        path: PathBuf,
    },
}

/// A node's data folder. The folder is locked while this exists.
#[derive(Debug)]
pub struct DataFolder {
    path: PathBuf,
    _lock: File,
}

impl DataFolder {
    /// Opens a folder, and creates it if it does not exist.
    ///
    /// # Errors
    /// If it cannot be created, or another process has it open.
    pub fn open(path: &Path) -> Result<Self, StorageError> {
        make_private_folder(path)?;
        let file = path.join("lock");
        let failed = |what| {
            let path = file.clone();
            move |why| StorageError::System { what, path, why }
        };
        let lock = File::options().create(true).truncate(false).write(true).open(&file);
        let lock = lock.map_err(failed("open"))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), _lock: lock }),
            Err(fs::TryLockError::WouldBlock) => Err(StorageError::InUse { path: path.to_owned() }),
            Err(fs::TryLockError::Error(why)) => Err(failed("lock")(why)),
        }
    }

    /// Whether a process has this folder open.
    pub fn is_open(path: &Path) -> bool {
        let lock = File::options().write(true).open(path.join("lock"));
        lock.is_ok_and(|lock| matches!(lock.try_lock(), Err(fs::TryLockError::WouldBlock)))
    }

    /// Path of a file in the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Reads a file; `None` if it does not exist.
    ///
    /// # Errors
    /// If it cannot be read, is too large, or other users have access to it.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, StorageError> {
        let path = self.file(name);
        let failed = |why| StorageError::System { what: "read", path: path.clone(), why };
        let metadata = match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => metadata.map_err(failed)?,
        };
        let mode = metadata.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(StorageError::Exposed { path, mode });
        }
        if metadata.len() > LARGEST_FILE_BYTES {
            let why = format!("{} bytes are more than this program writes", metadata.len());
            return Err(StorageError::Damaged { path, why });
        }
        fs::read(&path).map(Some).map_err(failed)
    }

    /// Replaces a file. The new content is on the disk when this returns.
    ///
    /// # Errors
    /// If the system refuses; the old content is kept then.
    pub fn write(&self, name: &str, content: &[u8]) -> Result<(), StorageError> {
        let path = self.file(name);
        let failed = |why| StorageError::System { what: "write", path: path.clone(), why };
        // `tempfile` makes files that only the owner can read.
        let mut new = tempfile::NamedTempFile::new_in(&self.path).map_err(failed)?;
        new.write_all(content).and_then(|()| new.as_file().sync_all()).map_err(failed)?;
        new.persist(&path).map_err(|error| failed(error.error))?;
        File::open(&self.path).and_then(|folder| folder.sync_all()).map_err(failed)
    }

    /// Removes a file, if it exists.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn remove(&self, name: &str) -> Result<(), StorageError> {
        let path = self.file(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(|why| StorageError::System { what: "remove", path, why }),
        }
    }
}

fn make_private_folder(path: &Path) -> Result<(), StorageError> {
    let failed = |what| move |why| StorageError::System { what, path: path.to_owned(), why };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed("make the folder"))?;
    let failed_to_look = failed("look at the folder");
    let is_open = fs::metadata(path).map_err(failed_to_look)?.permissions().mode() & 0o077 != 0;
    let is_ours = path.join(crate::identity::FILE).exists();
    let mut entries = fs::read_dir(path).map_err(failed("look at the folder"))?;
    let is_used = entries.any(|entry| entry.map_or(true, |entry| entry.file_name() != STORE));
    if is_open && is_used && !is_ours {
        return Err(StorageError::NotOurs { path: path.to_owned() });
    }
    // The folder may have existed before, with other permissions.
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(failed("protect the folder"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn files_are_private_whole_and_of_one_agent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        let data = DataFolder::open(&path).unwrap();
        assert!(matches!(DataFolder::open(&path), Err(StorageError::InUse { .. })));
        assert_eq!(data.read("x").unwrap(), None);
        data.write("x", b"old").unwrap();
        data.write("x", b"new").unwrap();
        assert_eq!(data.read("x").unwrap().unwrap(), b"new");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(&data.file("x"))), (0o700, 0o600));
        let left: Vec<_> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "{left:?}");
        drop(data);
        DataFolder::open(&path).unwrap();
    }

    #[test]
    fn a_folder_that_others_use_is_refused_and_one_with_a_store_alone_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let mode = || fs::metadata(folder.path()).unwrap().permissions().mode() & 0o777;
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(folder.path().join("server")).unwrap();
        fs::write(folder.path().join("notes"), "").unwrap();
        assert!(matches!(DataFolder::open(folder.path()), Err(StorageError::NotOurs { .. })));
        assert_eq!(mode(), 0o755);
        fs::remove_file(folder.path().join("notes")).unwrap();
        DataFolder::open(folder.path()).unwrap();
        assert_eq!(mode(), 0o700);
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let data = DataFolder::open(folder.path()).unwrap();
        data.write("key", b"secret").unwrap();
        fs::set_permissions(data.file("key"), fs::Permissions::from_mode(0o640)).unwrap();
        let error = data.read("key").unwrap_err().to_string();
        assert!(error.contains("640") && error.contains("chmod 600"), "{error}");
    }
}
