//! Where things lie in the cache of huggingface_hub:
//! `models--org--name/{refs/main, snapshots/<commit>/<file> -> ../../blobs/<etag>, blobs/<etag>}`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    error::HubError,
    names::{is_commit, is_safe_path},
    platform,
};

/// One repository's folder in the cache.
#[derive(Debug, Clone)]
pub(crate) struct RepoFolder {
    root: PathBuf,
    folder_name: String,
}

impl RepoFolder {
    /// `repo` has been checked.
    pub(crate) fn new(root: &Path, repo: &str) -> Self {
        Self { root: root.to_owned(), folder_name: format!("models--{}", repo.replace('/', "--")) }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.root.join(&self.folder_name)
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.path().join("snapshots").join(commit)
    }

    pub(crate) fn blob(&self, etag: &str) -> PathBuf {
        self.path().join("blobs").join(etag)
    }

    /// What has come of a blob. Not `<etag>.incomplete`, which huggingface_hub may be writing.
    pub(crate) fn part(&self, etag: &str) -> PathBuf {
        self.path().join("blobs").join(format!("{etag}.thunder.incomplete"))
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.root.join(".locks").join(&self.folder_name).join("thunder-pull.lock")
    }

    /// The commit that a revision stands for here, if it is known.
    pub(crate) fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let text = fs::read_to_string(self.path().join("refs").join(revision)).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Notes what a revision stands for.
    pub(crate) fn set_commit(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if is_commit(revision) {
            return Ok(());
        }
        write_whole(&self.path().join("refs").join(revision), commit)
    }

    /// The list of the files that a pull of this commit fetched; it is there once all of them are.
    fn manifest(&self, commit: &str) -> PathBuf {
        self.path().join(".thunder").join(commit)
    }

    pub(crate) fn set_complete(&self, commit: &str, files: &[&str]) -> Result<(), HubError> {
        write_whole(&self.manifest(commit), &files.join("\n"))
    }

    /// Whether a pull of this commit was finished and all its files are still there.
    pub(crate) fn is_complete(&self, commit: &str) -> bool {
        let Ok(files) = fs::read_to_string(self.manifest(commit)) else { return false };
        let snapshot = self.snapshot(commit);
        files.lines().all(|file| is_safe_path(file) && snapshot.join(file).is_file())
    }

    /// Makes a snapshot's file stand for a blob.
    pub(crate) fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(file);
        // Up from the file's folder to that of the repository.
        let up = "../".repeat(file.split('/').count() + 1);
        let target = PathBuf::from(format!("{up}blobs/{etag}"));
        create_parent(&path)?;
        if fs::read_link(&path).is_ok_and(|current| current == target) {
            return Ok(());
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(HubError::io("replace", path)(error))
            }
            _ => platform::link(&target, &self.blob(etag), &path).map_err(HubError::io("create", path)),
        }
    }
}

/// Creates the folder of a file.
pub(crate) fn create_parent(path: &Path) -> Result<(), HubError> {
    match path.parent() {
        Some(folder) => fs::create_dir_all(folder).map_err(HubError::io("create", folder)),
        None => Ok(()),
    }
}

/// Writes a file so that it is never seen half written.
fn write_whole(path: &Path, text: &str) -> Result<(), HubError> {
    create_parent(path)?;
    let temporary = path.with_extension("thunder.tmp");
    fs::write(&temporary, text).map_err(HubError::io("write", &temporary))?;
    fs::rename(&temporary, path).map_err(HubError::io("write", path))
}
