//! The cache's folder and the token, by huggingface_hub's environment variables.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The cache's folder: HF_HUB_CACHE; or `hub` in HF_HOME; or `huggingface/hub` in XDG_CACHE_HOME or
/// ~/.cache. The first that is set is used.
pub fn cache_root() -> PathBuf {
    cache_root_from(&env)
}

/// An environment variable; empty ones count as unset.
pub(crate) fn env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// [`cache_root`] with the given environment.
fn cache_root_from(env: &dyn Fn(&str) -> Option<String>) -> PathBuf {
    match env("HF_HUB_CACHE").or_else(|| env("HUGGINGFACE_HUB_CACHE")) {
        Some(path) => with_home(&path, env),
        None => hf_home(env).join("hub"),
    }
}

/// The folder that holds the cache and the token.
fn hf_home(env: &dyn Fn(&str) -> Option<String>) -> PathBuf {
    match (env("HF_HOME"), env("XDG_CACHE_HOME")) {
        (Some(path), _) => with_home(&path, env),
        (None, Some(path)) => with_home(&path, env).join("huggingface"),
        (None, None) => with_home("~/.cache/huggingface", env),
    }
}

/// Replaces a leading `~/` by the home folder.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn root(variables: &[(&str, &str)]) -> PathBuf {
        cache_root_from(&|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_cache_is_in_huggingface_hubs_folder() {
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
}
