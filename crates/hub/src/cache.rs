//! Paths in huggingface_hub's cache:
//! `models--org--name/{refs/main, snapshots/<commit>/<file> -> ../../blobs/<etag>, blobs/<etag>}`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    client::RemoteFile,
    damage,
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
    /// `repo` must have passed `check_repo_name`.
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

    /// A blob that is still downloading. Not `<etag>.incomplete`, which huggingface_hub may be
    /// writing.
    pub(crate) fn part(&self, etag: &str) -> PathBuf {
        self.path().join("blobs").join(format!("{etag}.thunder.incomplete"))
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.root.join(".locks").join(&self.folder_name).join("thunder-pull.lock")
    }

    /// The commit of a revision, if the cache knows it.
    pub(crate) fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let text = fs::read_to_string(self.path().join("refs").join(revision)).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Records the commit of a revision.
    pub(crate) fn set_commit(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if is_commit(revision) {
            return Ok(());
        }
        write_atomically(&self.path().join("refs").join(revision), commit)
    }

    /// The list of files of a pull, with their lengths. It is written after all files are in the
    /// cache. Each quantization has its own list.
    fn manifest(&self, commit: &str, quantization: Option<&str>) -> PathBuf {
        let name =
            quantization.map_or_else(|| commit.to_owned(), |of| format!("{commit}.{}", of.to_uppercase()));
        self.path().join(".thunder").join(name)
    }

    pub(crate) fn set_complete(
        &self,
        commit: &str,
        quantization: Option<&str>,
        files: &[(&str, u64)],
    ) -> Result<(), HubError> {
        let lines: Vec<String> = files.iter().map(|(file, bytes)| format!("{file}\t{bytes}")).collect();
        write_atomically(&self.manifest(commit, quantization), &lines.join("\n"))
    }

    /// Whether a pull of this commit has finished here.
    pub(crate) fn was_pulled(&self, commit: &str, quantization: Option<&str>) -> bool {
        self.manifest(commit, quantization).is_file()
    }

    /// The files of a pull of this commit, if the pull finished, and all files still exist with
    /// their lengths and are not known to be damaged.
    pub(crate) fn complete(&self, commit: &str, quantization: Option<&str>) -> Option<Vec<String>> {
        let lines = fs::read_to_string(self.manifest(commit, quantization)).ok()?;
        let snapshot = self.snapshot(commit);
        let whole = |line: &str| {
            // Earlier versions wrote no lengths.
            let (file, bytes) =
                line.split_once('\t').map_or((line, None), |(file, bytes)| (file, Some(bytes)));
            let path = is_safe_path(file).then(|| snapshot.join(file))?;
            let length = fs::metadata(&path).ok().filter(fs::Metadata::is_file)?.len();
            let is_right = bytes.is_none_or(|bytes| bytes.parse() == Ok(length)) && !damage::is_known(&path);
            is_right.then(|| file.to_owned())
        };
        lines.lines().map(whole).collect()
    }

    /// Whether a file's blob is there, not known to be damaged.
    pub(crate) fn has_whole(&self, remote: &RemoteFile) -> bool {
        let blob = self.blob(&remote.etag);
        fs::metadata(&blob).is_ok_and(|it| it.len() == remote.size) && !damage::is_marked(&blob)
    }

    /// Links a snapshot's file to a blob.
    pub(crate) fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), HubError> {
        self.link_in(&self.snapshot(commit), file, &self.blob(etag))
    }

    /// Links a file of a folder in the repository's folder to one of its blobs.
    pub(crate) fn link_in(&self, folder: &Path, file: &str, blob: &Path) -> Result<(), HubError> {
        let path = folder.join(file);
        let root = self.path();
        // The path from the file's folder up to the repository's folder.
        let depth = path.strip_prefix(&root).map_or(0, |inner| inner.components().count());
        let target = PathBuf::from("../".repeat(depth.saturating_sub(1)))
            .join(blob.strip_prefix(&root).unwrap_or(blob));
        create_parent(&path)?;
        if fs::read_link(&path).is_ok_and(|current| current == target) {
            return Ok(());
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(HubError::io("replace", path)(error))
            }
            _ => platform::link(&target, blob, &path).map_err(HubError::io("create", path)),
        }
    }
}

/// Creates a file's parent folder.
pub(crate) fn create_parent(path: &Path) -> Result<(), HubError> {
    match path.parent() {
        Some(folder) => fs::create_dir_all(folder).map_err(HubError::io("create", folder)),
        None => Ok(()),
    }
}

/// Writes a file by renaming a temporary one, so that no reader sees it incomplete.
pub(crate) fn write_atomically(path: &Path, text: &str) -> Result<(), HubError> {
    create_parent(path)?;
    let temporary = path.with_extension("thunder.tmp");
    fs::write(&temporary, text).map_err(HubError::io("write", &temporary))?;
    fs::rename(&temporary, path).map_err(HubError::io("write", path))
}
