//! Finds a model's folder by path or by name.

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    cache::RepoFolder,
    environment::cache_root,
    error::HubError,
    names::{check_repo_name, is_safe_path},
};

/// A model's folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// The folder with the config.json.
    pub folder: PathBuf,
    /// org/name, if the model is in the cache.
    pub repo: Option<String>,
    /// The commit, if the model is in the cache.
    pub commit: Option<String>,
}

/// Finds a model: a folder with a config.json, or org/name (or org/name@revision) in the Hugging
/// Face cache. Never uses the network.
///
/// # Errors
/// When it is in neither place (the error names both), or when the model in the cache lacks files.
pub fn locate(name_or_path: impl AsRef<OsStr>) -> Result<Located, HubError> {
    locate_in(name_or_path, &cache_root())
}

/// [`locate`] in the given cache.
///
/// # Errors
/// As [`locate`].
pub fn locate_in(name_or_path: impl AsRef<OsStr>, cache: &Path) -> Result<Located, HubError> {
    let path = Path::new(name_or_path.as_ref());
    if path.join("config.json").is_file() {
        return Ok(Located { folder: path.to_owned(), repo: None, commit: None });
    }
    // A path may be any bytes. A name has no sign that replaces what is not UTF-8.
    let name_or_path = &*name_or_path.as_ref().to_string_lossy();
    let (repo, revision) = name_or_path.split_once('@').unwrap_or((name_or_path, "main"));
    let name_fault = match check_repo_name(repo) {
        _ if repo.starts_with(['/', '.', '~']) => Some("there is no such folder".to_owned()),
        Ok(()) if is_safe_path(revision) => None,
        Ok(()) => Some(format!("{revision:?} is not a revision")),
        Err(reason) => Some(reason),
    };
    if name_fault.is_none()
        && let Some(found) = in_cache(repo, revision, cache)
    {
        return found;
    }
    let not_a_model =
        |reason: &str| Err(HubError::NotAModel { path: path.to_owned(), reason: reason.into() });
    if has_gguf(path) {
        return not_a_model(GGUF_IS_NOT_READ);
    }
    if path.is_dir() {
        return not_a_model("this folder has no config.json; give a model's folder");
    }
    if path.is_file() {
        return not_a_model("this is a file; give its folder");
    }
    let (name, folder) = (name_or_path.to_owned(), absolute(path));
    Err(match name_fault {
        Some(reason) => HubError::BadName { name, folder, reason },
        None => HubError::NotFound { name, folder, cache: RepoFolder::new(cache, repo).path() },
    })
}

/// The absolute path, for messages: it shows from which folder a relative path was taken.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// What to say of a model in llama.cpp's format.
pub(crate) const GGUF_IS_NOT_READ: &str =
    "GGUF is not read yet: pull the MLX or safetensors version of the model";

pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"))
}

/// True for a GGUF file, or a folder with one.
fn has_gguf(path: &Path) -> bool {
    let mut entries = fs::read_dir(path).into_iter().flatten().flatten();
    path.is_file() && is_gguf(path) || entries.any(|entry| is_gguf(&entry.path()))
}

/// Looks in the cache; `None` if it does not have this revision.
fn in_cache(repo: &str, revision: &str, cache: &Path) -> Option<Result<Located, HubError>> {
    let repo_folder = RepoFolder::new(cache, repo);
    let commit = repo_folder.commit(revision).filter(|commit| repo_folder.snapshot(commit).is_dir())?;
    let folder = repo_folder.snapshot(&commit);
    Some(match missing_file(&folder) {
        Some(_) if has_gguf(&folder) => {
            Err(HubError::NotAModel { path: folder, reason: GGUF_IS_NOT_READ.into() })
        }
        Some(missing) => Err(HubError::Incomplete { repo: repo.into(), folder, missing }),
        None => Ok(Located { folder, repo: Some(repo.into()), commit: Some(commit) }),
    })
}

/// A file that is missing from a model folder, because other programs fill the cache file by file.
fn missing_file(folder: &Path) -> Option<String> {
    if !folder.join("config.json").is_file() {
        return Some("config.json".into());
    }
    let index = fs::read(folder.join("model.safetensors.index.json")).ok();
    let index: Option<Value> = index.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    if let Some(map) = index.as_ref().and_then(|index| index["weight_map"].as_object()) {
        let files = map.values().filter_map(Value::as_str);
        return files.into_iter().find(|file| !folder.join(file).is_file()).map(str::to_owned);
    }
    let mut entries = fs::read_dir(folder).ok().into_iter().flatten().flatten();
    let has_weights = entries.any(|entry| {
        entry.path().extension().is_some_and(|end| end == "safetensors") && entry.path().is_file()
    });
    (!has_weights).then(|| "*.safetensors".into())
}
