//! What differs between systems.

use std::{io, path::Path};

/// Bytes that may still be written to the file system of an existing folder.
#[cfg(unix)]
pub(super) fn free_bytes(folder: &Path) -> io::Result<u64> {
    let system = rustix::fs::statvfs(folder)?;
    Ok(system.f_bavail.saturating_mul(system.f_frsize))
}

/// Not known here: the writing itself will fail.
#[cfg(not(unix))]
pub(super) fn free_bytes(_folder: &Path) -> io::Result<u64> {
    Ok(u64::MAX)
}
