//! Where things lie in the cache of huggingface_hub:
//! `models--org--name/{refs/main, snapshots/<commit>/<file> -> ../../blobs/<etag>, blobs/<etag>}`.

use std::{
    fs, io,
    path::{Component, Path, PathBuf},
};

use crate::{HubError, platform};

/// The cache's folder: HF_HUB_CACHE, or `hub` in HF_HOME, or `huggingface/hub` in XDG_CACHE_HOME or ~/.cache.
pub fn cache_root() -> PathBuf {
    cache_root_from(&env)
}

/// An environment variable; empty ones count as unset.
pub(crate) fn env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// [`cache_root`] with a given environment.
fn cache_root_from(env: &dyn Fn(&str) -> Option<String>) -> PathBuf {
    match env("HF_HUB_CACHE").or_else(|| env("HUGGINGFACE_HUB_CACHE")) {
        Some(path) => with_home(&path, env),
        None => hf_home(env).join("hub"),
    }
}

/// The folder with the cache and the token.
fn hf_home(env: &dyn Fn(&str) -> Option<String>) -> PathBuf {
    match (env("HF_HOME"), env("XDG_CACHE_HOME")) {
        (Some(path), _) => with_home(&path, env),
        (None, Some(path)) => with_home(&path, env).join("huggingface"),
        (None, None) => with_home("~/.cache/huggingface", env),
    }
}

fn with_home(path: &str, env: &dyn Fn(&str) -> Option<String>) -> PathBuf {
    match (path.strip_prefix("~/"), env("HOME")) {
        (Some(rest), Some(home)) => Path::new(&home).join(rest),
        _ => PathBuf::from(path),
    }
}

/// The token: HF_TOKEN, or the file that `hf auth login` writes.
pub(crate) fn token_from(env: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let token = env("HF_TOKEN").or_else(|| env("HUGGING_FACE_HUB_TOKEN")).or_else(|| {
        let path =
            env("HF_TOKEN_PATH").map_or_else(|| hf_home(env).join("token"), |path| with_home(&path, env));
        fs::read_to_string(path).ok()
    })?;
    Some(token.trim().to_owned()).filter(|token| !token.is_empty())
}

/// Why a string is not a repository's name (`org/name`, or `name` alone for the oldest ones).
pub(crate) fn check_repo_name(repo: &str) -> Result<(), String> {
    let parts: Vec<&str> = repo.split('/').collect();
    if parts.len() > 2 {
        return Err("it has more than one slash".into());
    }
    for part in parts {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if part.is_empty() || part.len() > 96 || !part.chars().all(allowed) {
            return Err("each part has 1 to 96 letters, digits, hyphens, underscores and dots".into());
        }
        if part.starts_with(['-', '.'])
            || part.ends_with(['-', '.'])
            || part.contains("--")
            || part.contains("..")
        {
            return Err("no part begins or ends with - or ., or has -- or .. inside".into());
        }
    }
    Ok(())
}

/// Whether a relative path from outside stays inside the folder that it is joined to.
pub(crate) fn is_safe_path(path: &str) -> bool {
    // Path's own parser forgives `//` and `/./`, which the server would not send; and a colon is a drive on Windows.
    let parts_named = path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    parts_named
        && !path.contains(['\\', ':'])
        && !path.chars().any(char::is_control)
        && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

/// Whether a string is a whole commit hash.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

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

#[cfg(test)]
mod tests {
    use super::*;

    fn root(variables: &[(&str, &str)]) -> PathBuf {
        cache_root_from(&|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_cache_is_where_huggingface_hub_has_it() {
        assert_eq!(root(&[("HOME", "/h")]), Path::new("/h/.cache/huggingface/hub"));
        assert_eq!(root(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
        assert_eq!(root(&[("HF_HOME", "/f"), ("XDG_CACHE_HOME", "/x")]), Path::new("/f/hub"));
        assert_eq!(root(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/f")]), Path::new("/c"));
        assert_eq!(root(&[("HF_HUB_CACHE", "~/c"), ("HOME", "/h")]), Path::new("/h/c"));
    }

    #[test]
    fn the_token_comes_from_its_variable_or_its_file() {
        let home = tempfile::tempdir().expect("a folder");
        let path = home.path().display().to_string();
        let with = |token: Option<&str>| {
            let token = token.map(str::to_owned);
            token_from(&|name| match name {
                "HF_TOKEN" => token.clone(),
                "HF_HOME" => Some(path.clone()),
                _ => None,
            })
        };
        assert_eq!(with(None), None);
        fs::write(home.path().join("token"), "hf_file\n").expect("written");
        assert_eq!(with(None).as_deref(), Some("hf_file"));
        assert_eq!(with(Some(" hf_variable ")).as_deref(), Some("hf_variable"));
    }

    #[test]
    fn names_and_paths_are_checked() {
        for good in ["org/name", "gpt2", "mlx-community/Qwen3-0.6B-4bit", "a_b/c.d"] {
            assert_eq!(check_repo_name(good), Ok(()), "{good}");
        }
        for bad in
            ["", "/", "a/", "/a", "a/b/c", "../x", "a/..", "a b/c", "-a/b", "a/b.", "a--b/c", "a/b?c", "ü/x"]
        {
            assert!(check_repo_name(bad).is_err(), "{bad}");
        }
        for good in ["config.json", "a/b.json", "..a", "a..b", "refs/pr/1"] {
            assert!(is_safe_path(good), "{good}");
        }
        for bad in ["", "/etc/x", "../x", "a/../x", "a//b", "./a", "a/.", "a\\b", "C:x", "a\0b", "a\nb", "a/"]
        {
            assert!(!is_safe_path(bad), "{bad:?}");
        }
    }
}
