//! The contents of a cache: its complete models, and their files.

use std::{collections::BTreeSet, fs, path::Path};

use thunder_parts::Record;

use crate::{
    cache::RepoFolder,
    error::HubError,
    gguf,
    locate::{gguf_files, gguf_names_in, locate_in, missing_file},
    part_folder::{part_in, part_names},
    platform,
    verify::files_of,
};

/// A model in a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedModel {
    /// org/name, or org/name:QUANTIZATION.
    pub name: String,
    /// The commit of `main`, if the model is complete.
    pub commit: Option<String>,
    /// Bytes of its files.
    pub bytes: u64,
    /// A file that is missing, if the model is not complete.
    pub missing: Option<String>,
    /// Bytes of all its files, if `bytes` of them are there for some ranks.
    pub part_of: Option<u64>,
}

/// The models of a cache, sorted by name. A repository of GGUF files has a model for each
/// quantization.
///
/// # Errors
/// When the cache cannot be read. One that is not there is empty.
pub fn cached_models(cache: &Path) -> Result<Vec<CachedModel>, HubError> {
    let entries = match fs::read_dir(cache) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(HubError::io("list", cache)(error)),
    };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    // A folder name has `--` for the slash; repository names contain no `--`.
    let repos = names.filter_map(|name| Some(name.strip_prefix("models--")?.replacen("--", "/", 1)));
    let models = repos.flat_map(|repo| {
        let parts = part_names(&repo, cache);
        let mut names: BTreeSet<String> = gguf_names_in(&repo, cache).into_iter().chain(parts).collect();
        if names.is_empty() {
            names.insert(repo);
        }
        names
    });
    let mut models: Vec<CachedModel> = models.filter_map(|name| cached_model(cache, name)).collect();
    models.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(models)
}

/// A model of a cache; `None` if the cache has only other revisions of the repository, or files
/// that are not a model's.
fn cached_model(cache: &Path, name: String) -> Option<CachedModel> {
    match locate_in(&name, cache) {
        Ok(located) => {
            let bytes = model_bytes(&located.folder);
            Some(CachedModel { name, commit: located.commit, bytes, missing: None, part_of: None })
        }
        Err(_) if part_in(&name, cache).is_some() => cached_part(cache, &name),
        Err(HubError::Incomplete { missing, folder, .. }) => {
            let bytes = model_bytes(&folder);
            Some(CachedModel { name, commit: None, bytes, missing: Some(missing), part_of: None })
        }
        Err(_) => None,
    }
}

fn cached_part(cache: &Path, name: &str) -> Option<CachedModel> {
    let part = part_in(name, cache)?;
    let (name, bytes, part_of) = (name.to_owned(), part.present, Some(part.total));
    Some(CachedModel { name, commit: None, bytes, missing: None, part_of })
}

/// Bytes of a folder's files, or of all parts of a GGUF model, following links.
fn model_bytes(model: &Path) -> u64 {
    let length = |path: &Path| fs::metadata(path).ok().filter(fs::Metadata::is_file).map_or(0, |it| it.len());
    if model.is_file() {
        return crate::gguf_parts(model).iter().map(|file| length(file)).sum();
    }
    let entries = fs::read_dir(model).into_iter().flatten().flatten();
    entries.map(|entry| length(&entry.path())).sum()
}

/// The files of a snapshot that may be sent to others. Only complete models are sent; otherwise the
/// client would treat an incomplete one as complete.
pub(crate) fn served_files(snapshot: &Path) -> Vec<String> {
    let gguf_files = gguf_files(snapshot);
    let models = gguf::models(gguf_files.iter().map(String::as_str));
    let complete = models.into_iter().filter(|model| model.missing_part().is_none());
    let mut files: Vec<String> = complete.flat_map(|model| model.files).collect();
    if missing_file(snapshot).is_none() || !files.is_empty() {
        let entries = fs::read_dir(snapshot).into_iter().flatten().flatten();
        let is_whole = missing_file(snapshot).is_none();
        let plain = entries.filter(|entry| entry.path().is_file());
        let names = plain.filter_map(|entry| entry.file_name().into_string().ok());
        files.extend(
            names.filter(|name| {
                !gguf::is_gguf(name.as_str()) && (is_whole || !name.ends_with(".safetensors"))
            }),
        );
    }
    files.sort();
    files
}

/// Removes a model from a cache: its repository's folder, or the files of one quantization. Returns
/// the freed bytes.
///
/// # Errors
/// When the model is not in the cache, or a file cannot be deleted.
pub fn remove(name: &str, cache: &Path) -> Result<u64, HubError> {
    let (repo, quantization) = crate::names::checked_name(name, &[])?;
    let folder = RepoFolder::new(cache, repo);
    if !folder.path().is_dir() {
        return Err(HubError::NotInCache { name: name.to_owned(), cache: cache.to_owned() });
    }
    let _lock = crate::pull::lock(&folder, repo)?;
    let before = disk_bytes(&folder.path().join("blobs"));
    let parts = part_names(repo, cache);
    let others: BTreeSet<String> = gguf_names_in(repo, cache).into_iter().chain(parts).collect();
    let is_only = others.len() <= 1;
    match quantization.filter(|_| !is_only) {
        None => fs::remove_dir_all(folder.path()).map_err(HubError::io("delete", folder.path()))?,
        Some(quantization) => {
            let not_there = || HubError::NotInCache { name: name.to_owned(), cache: cache.to_owned() };
            if remove_parts(&folder, quantization)? && !gguf_names_in(repo, cache).iter().any(|it| it == name)
            {
                return Ok(before.saturating_sub(disk_bytes(&folder.path().join("blobs"))));
            }
            let commit = folder.commit("main").ok_or_else(not_there)?;
            let snapshot = folder.snapshot(&commit);
            let files = gguf_files(&snapshot);
            let models = gguf::models(files.iter().map(String::as_str));
            let model = gguf::choose(&models, Some(quantization)).map_err(|_| not_there())?;
            for file in &model.files {
                let link = snapshot.join(file);
                let blob = fs::canonicalize(&link).map_err(HubError::io("look at", &link))?;
                fs::remove_file(&link).map_err(HubError::io("delete", &link))?;
                fs::remove_file(&blob).map_err(HubError::io("delete", &blob))?;
            }
        }
    }
    Ok(before.saturating_sub(disk_bytes(&folder.path().join("blobs"))))
}

/// Deletes what is there in part of a quantization. Returns whether there was some.
fn remove_parts(folder: &RepoFolder, quantization: &str) -> Result<bool, HubError> {
    let end = format!(".{}", quantization.to_uppercase());
    let entries = fs::read_dir(folder.parts()).into_iter().flatten().flatten();
    let mut removed = false;
    for part in entries.map(|entry| entry.path()).filter(|it| it.to_string_lossy().ends_with(&end)) {
        for link in files_of(&part)? {
            let Ok(blob) = fs::canonicalize(&link) else { continue };
            if blob.to_string_lossy().ends_with(".thunder.part") {
                let record = Record::path_of(&blob);
                // In this order: without a record the file would count as whole.
                fs::remove_file(&blob).map_err(HubError::io("delete", blob))?;
                fs::remove_file(&record).map_err(HubError::io("delete", record))?;
            }
        }
        fs::remove_dir_all(&part).map_err(HubError::io("delete", part))?;
        removed = true;
    }
    Ok(removed)
}

/// Bytes on the disk of the files of a folder.
fn disk_bytes(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|metadata| platform::disk_bytes(&metadata)).sum()
}
