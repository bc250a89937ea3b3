//! Files and folders that only the store's owner can open.
//!
//! Commands open the store when no server has it. Those of root (`sudo thunder keys list`) must not
//! leave a file there that the server's user cannot read.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Gid, Mode, OFlags, Uid, fchown, fstat, mkdirat, open, openat};

/// Makes a folder, and those above it, that only the owner can enter. Made by root, they belong to
/// the owner of the folder that they are in.
///
/// # Errors
/// When the system refuses.
pub fn make_folder(path: &Path) -> io::Result<()> {
    let (Some(above), Some(name)) = (above(path), path.file_name()) else { return Ok(()) };
    if path.is_dir() {
        return Ok(());
    }
    make_folder(above)?;
    let above = open_folder(above)?;
    match mkdirat(&above, name, Mode::RWXU) {
        Err(rustix::io::Errno::EXIST) if path.is_dir() => return Ok(()),
        made => made?,
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    give(openat(&above, name, flags, Mode::empty())?, &above).map(drop)
}

/// Makes a file that only its owner can read, and opens it to be read and written, or to be
/// appended to. Made by root, it belongs to the folder's owner.
///
/// # Errors
/// When the file exists, or the system refuses.
pub fn create_new(path: &Path, appends: bool) -> io::Result<File> {
    let (Some(above), Some(name)) = (above(path), path.file_name()) else {
        return Err(io::ErrorKind::InvalidFilename.into());
    };
    let above = open_folder(above)?;
    // Only what is new may change its owner: the folder's owner could have put a link to a file of
    // root here.
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let flags = if appends { flags | OFlags::APPEND } else { flags };
    let file = openat(&above, name, flags, Mode::RUSR | Mode::WUSR)?;
    give(file, &above).map(File::from)
}

/// The folder that has the path; `None` for the root and for nothing.
fn above(path: &Path) -> Option<&Path> {
    let above = path.parent()?;
    Some(if above.as_os_str().is_empty() { Path::new(".") } else { above })
}

fn open_folder(path: &Path) -> io::Result<OwnedFd> {
    Ok(open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Gives what root has made in a folder of another user to that user. Both are open, so that nobody
/// can put other files in their place meanwhile.
fn give(made: OwnedFd, folder: impl AsFd) -> io::Result<OwnedFd> {
    let owner = fstat(folder)?;
    if fstat(&made)?.st_uid == 0 && owner.st_uid != 0 {
        fchown(&made, Some(Uid::from_raw(owner.st_uid)), Some(Gid::from_raw(owner.st_gid)))?;
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, lchown};

    use super::*;

    #[test]
    fn what_is_made_is_private_and_new() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("a/b");
        make_folder(&inner).unwrap();
        make_folder(&inner).unwrap();
        let path = inner.join("file");
        create_new(&path, false).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&folder.path().join("a")), mode(&inner), mode(&path)), (0o700, 0o700, 0o600));
        for appends in [false, true] {
            let again = create_new(&path, appends).unwrap_err();
            assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        }
        assert_eq!(make_folder(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert!(create_new(&inner.join(".."), false).is_err());
    }

    #[test]
    fn what_root_makes_belongs_to_the_folders_owner() {
        let folder = tempfile::tempdir().unwrap();
        if fs::metadata(folder.path()).unwrap().uid() != 0 {
            eprintln!("not tested: this user is not root");
            return;
        }
        lchown(folder.path(), Some(4711), Some(4712)).unwrap();
        let inner = folder.path().join("a/b");
        make_folder(&inner).unwrap();
        let path = inner.join("file");
        create_new(&path, true).unwrap();
        for path in [&folder.path().join("a"), &inner, &path] {
            let metadata = fs::metadata(path).unwrap();
            assert_eq!((metadata.uid(), metadata.gid()), (4711, 4712), "{}", path.display());
        }
        // A link is not followed, whoever owns its target.
        let other = folder.path().join("other");
        std::os::unix::fs::symlink("/dev/null", &other).unwrap();
        assert!(create_new(&other, false).is_err() && make_folder(&other).is_err());
    }
}
