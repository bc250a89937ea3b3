//! Functions that differ between operating systems.

use std::{io, path::Path};

/// Free bytes on the file system of an existing folder.
#[cfg(unix)]
pub(crate) fn free_bytes(folder: &Path) -> io::Result<u64> {
    let system = rustix::fs::statvfs(folder)?;
    Ok(system.f_bavail.saturating_mul(system.f_frsize))
}

/// Not known on this system; a full disk causes a failed write.
#[cfg(not(unix))]
pub(crate) fn free_bytes(_folder: &Path) -> io::Result<u64> {
    Ok(u64::MAX)
}

/// Bytes that a file takes on the disk: holes take none.
#[cfg(unix)]
pub(crate) fn disk_bytes(metadata: &std::fs::Metadata) -> u64 {
    metadata.len().min(std::os::unix::fs::MetadataExt::blocks(metadata) * 512)
}

/// Bytes that a file takes on the disk, as far as is known.
#[cfg(not(unix))]
pub(crate) fn disk_bytes(metadata: &std::fs::Metadata) -> u64 {
    metadata.len()
}

/// Makes `path` a symbolic link to `target`, a path relative to the link.
#[cfg(unix)]
pub(crate) fn link(target: &Path, _blob: &Path, path: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, path)
}

/// Makes `path` a hard link to `blob`, because symbolic links need privileges on this system.
#[cfg(not(unix))]
pub(crate) fn link(_target: &Path, blob: &Path, path: &Path) -> io::Result<()> {
    std::fs::hard_link(blob, path)
}
