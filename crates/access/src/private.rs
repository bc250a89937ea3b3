//! Files and folders that only the store's owner can open.
//!
//! Commands open the store when no server has it. Those of root (`sudo thunder keys list`) must not
//! leave a file there that the server's user cannot read.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, fchown, lchown};
use std::path::Path;

/// Makes a folder, and those above it, that only the owner can enter. Made by root, they belong to
/// the owner of the folder that they are in.
///
/// # Errors
/// When the system refuses.
pub fn make_folder(path: &Path) -> io::Result<()> {
    let Some(above) = above(path) else { return Ok(()) };
    if path.is_dir() {
        return Ok(());
    }
    make_folder(above)?;
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => return Ok(()),
        made => made?,
    }
    match other_owner(&fs::symlink_metadata(path)?, above)? {
        Some((user, group)) => lchown(path, Some(user), Some(group)),
        None => Ok(()),
    }
}

/// Makes a file, opened as the options say, that only its owner can read. Made by root, it belongs
/// to the folder's owner.
///
/// # Errors
/// When the file exists, or the system refuses.
pub fn create_new(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    // Only what is new may change its owner: the folder's owner could have put a link to a file of
    // root here.
    let file = options.create_new(true).mode(0o600).open(path)?;
    if let Some(above) = above(path)
        && let Some((user, group)) = other_owner(&file.metadata()?, above)?
    {
        fchown(&file, Some(user), Some(group))?;
    }
    Ok(file)
}

/// The folder that has the path; `None` for the root and for nothing.
fn above(path: &Path) -> Option<&Path> {
    let above = path.parent()?;
    Some(if above.as_os_str().is_empty() { Path::new(".") } else { above })
}

/// User and group of the folder, if root has made something there and it is another's.
fn other_owner(made: &fs::Metadata, folder: &Path) -> io::Result<Option<(u32, u32)>> {
    let owner = fs::metadata(folder)?;
    Ok((made.uid() == 0 && owner.uid() != 0).then(|| (owner.uid(), owner.gid())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_is_private_and_new() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("a/b");
        make_folder(&inner).unwrap();
        make_folder(&inner).unwrap();
        let path = inner.join("file");
        create_new(File::options().write(true), &path).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&folder.path().join("a")), mode(&inner), mode(&path)), (0o700, 0o700, 0o600));
        let again = create_new(File::options().write(true), &path).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(make_folder(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn what_root_makes_belongs_to_the_folders_owner() {
        let folder = tempfile::tempdir().unwrap();
        if fs::metadata(folder.path()).unwrap().uid() != 0 {
            return;
        }
        lchown(folder.path(), Some(4711), Some(4712)).unwrap();
        let inner = folder.path().join("a/b");
        make_folder(&inner).unwrap();
        let path = inner.join("file");
        create_new(File::options().write(true), &path).unwrap();
        for path in [&folder.path().join("a"), &inner, &path] {
            let metadata = fs::metadata(path).unwrap();
            assert_eq!((metadata.uid(), metadata.gid()), (4711, 4712), "{}", path.display());
        }
    }
}
