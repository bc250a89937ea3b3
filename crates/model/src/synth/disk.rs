//! Free disk space.

use std::{io, path::Path};

/// Free bytes on the file system of an existing folder.
#[cfg(unix)]
pub(super) fn free_bytes(folder: &Path) -> io::Result<u64> {
    let system = rustix::fs::statvfs(folder)?;
    Ok(system.f_bavail.saturating_mul(system.f_frsize))
}

/// Unknown on this system; writing to a full disk fails then.
#[cfg(not(unix))]
pub(super) fn free_bytes(_folder: &Path) -> io::Result<u64> {
    Ok(u64::MAX)
}
