//! What differs between systems.

use std::{io, path::Path};

/// Bytes that may still be written to the file system of an existing folder.
#[cfg(unix)]
pub(crate) fn free_bytes(folder: &Path) -> io::Result<u64> {
    let system = rustix::fs::statvfs(folder)?;
    Ok(system.f_bavail.saturating_mul(system.f_frsize))
}

/// Not known here: the writing itself will fail.
#[cfg(not(unix))]
pub(crate) fn free_bytes(_folder: &Path) -> io::Result<u64> {
    Ok(u64::MAX)
}

/// Makes `path` a link to `target`, which is relative to it.
#[cfg(unix)]
pub(crate) fn link(target: &Path, _blob: &Path, path: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, path)
}

/// Links need privileges elsewhere; a second name for the blob does not.
#[cfg(not(unix))]
pub(crate) fn link(_target: &Path, blob: &Path, path: &Path) -> io::Result<()> {
    std::fs::hard_link(blob, path)
}
