//! Where the cache has parts of models, and what is there of their files.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use thunder_parts::{Ranges, Record};

use crate::{
    cache::RepoFolder,
    client::RemoteFile,
    error::HubError,
    gguf::is_gguf,
    names::{checked_name, is_safe_path},
};

/// A part of a model in a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartOfModel {
    /// The folder, or the first GGUF file. It opens like the model's.
    pub path: PathBuf,
    /// The commit.
    pub commit: String,
    /// Bytes of its files that are there.
    pub present: u64,
    /// Bytes of its files.
    pub total: u64,
}

/// The part of a model in a cache, if there is one; `name` may end in `@` and a revision.
pub fn part_in(name: &str, cache: &Path) -> Option<PartOfModel> {
    let (name, revision) = name.split_once('@').unwrap_or((name, "main"));
    let (repo, quantization) = checked_name(name, &[revision]).ok()?;
    let folder = RepoFolder::new(cache, repo);
    let commit = folder.part_commit(revision, quantization)?;
    part_at(&folder.part_folder(&commit, quantization), commit)
}

/// The part whose links are in a folder.
fn part_at(folder: &Path, commit: String) -> Option<PartOfModel> {
    let files = crate::verify::files_of(folder).ok()?;
    let (mut present, mut total) = (0, 0);
    for file in &files {
        let size = fs::metadata(file).ok()?.len();
        total += size;
        present += Record::of(file).ok()?.map_or(size, |record| record.present().bytes());
    }
    let gguf = files.iter().filter(|file| is_gguf(file)).min();
    let path = gguf.cloned().unwrap_or_else(|| folder.to_owned());
    (!files.is_empty()).then_some(PartOfModel { path, commit, present, total })
}

/// Names of the models that a repository has parts of in a cache.
pub(crate) fn part_names(repo: &str, cache: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(RepoFolder::new(cache, repo).parts()).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let of = |name: String| match name.split_once('.') {
        Some((_, quantization)) => Some(format!("{repo}:{quantization}")),
        None => (name != "refs").then(|| repo.to_owned()),
    };
    names.filter_map(of).collect()
}

/// What is there of a file of this size.
pub(crate) fn present(path: &Path, size: u64) -> Result<Ranges, HubError> {
    let has_size = fs::metadata(path).is_ok_and(|metadata| metadata.len() == size);
    let record = Record::of(path).map_err(HubError::io("read", Record::path_of(path)))?;
    Ok(record.filter(|_| has_size).map(|record| record.present()).unwrap_or_default())
}

impl RepoFolder {
    /// The folder of folders of links to parts.
    pub(crate) fn parts(&self) -> PathBuf {
        self.path().join(".thunder").join("parts")
    }

    /// The links to the part of a commit.
    pub(crate) fn part_folder(&self, commit: &str, quantization: Option<&str>) -> PathBuf {
        self.parts().join(with_quantization(commit, quantization))
    }

    /// A weight file that is there in part.
    pub(crate) fn partial(&self, etag: &str) -> PathBuf {
        self.blob(&format!("{etag}.thunder.part"))
    }

    /// Bytes that are there in part of a file.
    pub(crate) fn partial_bytes(&self, remote: &RemoteFile) -> u64 {
        present(&self.partial(&remote.etag), remote.size).map_or(0, |present| present.bytes())
    }

    fn part_ref(&self, revision: &str, quantization: Option<&str>) -> PathBuf {
        self.parts().join("refs").join(with_quantization(revision, quantization))
    }

    fn part_commit(&self, revision: &str, quantization: Option<&str>) -> Option<String> {
        if !is_safe_path(revision) {
            return None;
        }
        let text = fs::read_to_string(self.part_ref(revision, quantization)).ok();
        // A commit is a revision too.
        let commit = text.map_or_else(|| revision.to_owned(), |text| text.trim().to_owned());
        crate::names::is_commit(&commit).then_some(commit)
    }

    pub(crate) fn set_part_commit(
        &self,
        revision: &str,
        quantization: Option<&str>,
        commit: &str,
    ) -> Result<(), HubError> {
        crate::cache::write_atomically(&self.part_ref(revision, quantization), commit)
    }

    /// Forgets the part of a commit that is whole now.
    pub(crate) fn forget_part(&self, commit: &str, quantization: Option<&str>) -> Result<(), HubError> {
        let folder = self.part_folder(commit, quantization);
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(HubError::io("delete", folder)(error))
            }
            _ => Ok(()),
        }
    }
}

fn with_quantization(name: &str, quantization: Option<&str>) -> String {
    quantization.map_or_else(|| name.to_owned(), |of| format!("{name}.{}", of.to_uppercase()))
}
