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
    gguf::{self, Choice},
    names::{self, check_repo_name, is_safe_path},
};

/// Where a model is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// The folder with the config.json, or the GGUF file; the first one if the model is split.
    pub folder: PathBuf,
    /// org/name, or org/name:QUANTIZATION, if the model is in the cache.
    pub repo: Option<String>,
    /// The commit, if the model is in the cache.
    pub commit: Option<String>,
}

/// Finds a model: a folder with a config.json, a GGUF file, a folder with one, or org/name (or
/// org/name:QUANTIZATION, org/name@revision) in the Hugging Face cache. Never uses the network.
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
    let at = |folder: PathBuf| Located { folder, repo: None, commit: None };
    if path.join("config.json").is_file() || path.is_file() && gguf::is_gguf(path) {
        return Ok(at(path.to_owned()));
    }
    // A path may contain any bytes. A name contains no replacement character for invalid UTF-8.
    let name_or_path = &*name_or_path.as_ref().to_string_lossy();
    let (name, revision) = name_or_path.split_once('@').unwrap_or((name_or_path, "main"));
    let parsed = names::split_quantization(name).and_then(|(repo, quantization)| {
        if repo.starts_with(['/', '.', '~']) {
            return Err("there is no such folder".to_owned());
        }
        check_repo_name(repo)?;
        match is_safe_path(revision) {
            true => Ok((repo, quantization)),
            false => Err(format!("{revision:?} is not a revision")),
        }
    });
    if let Ok((repo, quantization)) = parsed
        && let Some(found) = in_cache(repo, quantization, revision, cache)
    {
        return found;
    }
    if path.is_dir() {
        let not_a_model = |reason: String| HubError::NotAModel { path: path.to_owned(), reason };
        return match gguf::choose(&gguf::models(gguf_files(path).iter().map(String::as_str)), None) {
            Ok(model) => Ok(at(path.join(&model.files[0]))),
            Err(Choice::None(_)) => Err(not_a_model(
                "this folder has no config.json and no GGUF file; give a model's folder".into(),
            )),
            Err(Choice::Several(names)) => Err(not_a_model(format!(
                "this folder has several GGUF models ({}); give a file",
                names.join(", ")
            ))),
        };
    }
    if path.is_file() {
        let reason = "this file is no GGUF file; give a model's folder or a file that ends in .gguf".into();
        return Err(HubError::NotAModel { path: path.to_owned(), reason });
    }
    let (name, folder) = (name_or_path.to_owned(), absolute(path));
    Err(match parsed {
        Err(reason) => HubError::BadName { name, folder, reason },
        Ok((repo, _)) => HubError::NotFound { name, folder, cache: RepoFolder::new(cache, repo).path() },
    })
}

/// The absolute path, for messages: it shows from which folder a relative path was taken.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Looks in the cache; `None` if it does not have this revision.
fn in_cache(
    repo: &str,
    quantization: Option<&str>,
    revision: &str,
    cache: &Path,
) -> Option<Result<Located, HubError>> {
    let repo_folder = RepoFolder::new(cache, repo);
    let commit = repo_folder.commit(revision).filter(|commit| repo_folder.snapshot(commit).is_dir())?;
    let folder = repo_folder.snapshot(&commit);
    let models = gguf::models(gguf_files(&folder).iter().map(String::as_str));
    let missing = missing_file(&folder);
    if quantization.is_none() && (missing.is_none() || models.is_empty()) {
        return Some(match missing {
            Some(missing) => Err(HubError::Incomplete { repo: repo.into(), folder, missing }),
            None => Ok(Located { folder, repo: Some(repo.into()), commit: Some(commit) }),
        });
    }
    let name = quantization.map_or_else(|| repo.to_owned(), |quantization| format!("{repo}:{quantization}"));
    Some(match gguf::choose(&models, quantization) {
        Ok(model) => match model.missing_part() {
            Some(missing) => Err(HubError::Incomplete { repo: name, folder, missing }),
            None => {
                Ok(Located { folder: folder.join(&model.files[0]), repo: Some(name), commit: Some(commit) })
            }
        },
        Err(Choice::None(_)) => {
            let missing = format!("a GGUF file of {}", quantization.unwrap_or_default());
            Err(HubError::Incomplete { repo: name, folder, missing })
        }
        Err(Choice::Several(quantizations)) => {
            Err(HubError::SeveralQuantizations { repo: repo.into(), quantizations })
        }
    })
}

/// Names like org/name:QUANTIZATION of a repository's GGUF models in a cache.
pub fn gguf_names_in(repo: &str, cache: &Path) -> Vec<String> {
    let repo_folder = RepoFolder::new(cache, repo);
    let Some(commit) = repo_folder.commit("main") else { return Vec::new() };
    let models = gguf::models(gguf_files(&repo_folder.snapshot(&commit)).iter().map(String::as_str));
    models.iter().map(|model| format!("{repo}:{}", model.quantization())).collect()
}

/// GGUF files of a folder and its subfolders, relative to it. Broken links are left out.
pub(crate) fn gguf_files(folder: &Path) -> Vec<String> {
    let names = |folder: &Path| -> Vec<String> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    };
    let mut files = Vec::new();
    for name in names(folder) {
        let path = folder.join(&name);
        if path.is_dir() {
            files.extend(names(&path).into_iter().map(|inner| format!("{name}/{inner}")));
        } else {
            files.push(name);
        }
    }
    files.retain(|file| gguf::is_gguf(file.as_str()) && folder.join(file).is_file());
    files
}

/// A missing file of a model folder. Other programs fill the cache file by file.
pub(crate) fn missing_file(folder: &Path) -> Option<String> {
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
