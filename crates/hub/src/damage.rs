//! Files that a check found damaged. Each has a mark next to its blob, so that the next pull
//! downloads the file again.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use crate::{
    cache::RepoFolder, error::HubError, locate::Located, names::split_quantization, verify::files_of,
};

/// Whether a pull can repair a model of a cache: a check found a damaged file, a file has another
/// length than after its pull, or a link is broken.
///
/// # Errors
/// When the model's folder cannot be listed.
pub fn is_damaged(model: &Located, cache: &Path) -> Result<bool, HubError> {
    let pulled =
        model.repo.as_deref().and_then(|name| split_quantization(name).ok()).zip(model.commit.as_ref());
    if let Some(((repo, quantization), commit)) = pulled {
        let folder = RepoFolder::new(cache, repo);
        if folder.was_pulled(commit, quantization) && folder.complete(commit, quantization).is_none() {
            return Ok(true);
        }
    }
    let is_damaged = |file: &PathBuf| is_known(file) || file.is_symlink() && !file.exists();
    Ok(files_of(&model.folder)?.iter().any(is_damaged))
}

/// Whether the blob that a snapshot's file links to is marked.
pub(crate) fn is_known(file: &Path) -> bool {
    blob_of(file).is_some_and(|blob| is_marked(&blob))
}

/// The blob of a snapshot's file; `None` if the file is not a link.
pub(crate) fn blob_of(file: &Path) -> Option<PathBuf> {
    Some(file.parent()?.join(fs::read_link(file).ok()?))
}

/// Whether a blob is marked.
pub(crate) fn is_marked(blob: &Path) -> bool {
    mark_of(blob).exists()
}

/// Marks a blob.
pub(crate) fn mark(blob: &Path) -> Result<(), HubError> {
    let mark = mark_of(blob);
    File::create(&mark).map(drop).map_err(HubError::io("create", mark))
}

/// Removes a blob's mark, if it has one.
pub(crate) fn unmark(blob: &Path) -> Result<(), HubError> {
    let mark = mark_of(blob);
    match fs::remove_file(&mark) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(HubError::io("delete", mark)(error)),
        _ => Ok(()),
    }
}

fn mark_of(blob: &Path) -> PathBuf {
    let mut name = OsString::from(blob);
    name.push(".thunder.damaged");
    name.into()
}
