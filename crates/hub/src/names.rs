//! Checks names from users and servers before they become paths.

use std::path::{Component, Path};

use crate::error::HubError;

/// Checks a repository's name: `org/name`, or only `name` for the oldest ones. The error says what
/// is wrong.
pub(crate) fn check_repo_name(repo: &str) -> Result<(), String> {
    let parts: Vec<&str> = repo.split('/').collect();
    if parts.len() > 2 {
        return Err("the name has more than one slash".into());
    }
    for part in parts {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if part.is_empty() || part.len() > 96 || !part.chars().all(allowed) {
            return Err("each part must have 1 to 96 letters, digits, hyphens, underscores or dots".into());
        }
        if part.starts_with(['-', '.'])
            || part.ends_with(['-', '.'])
            || part.contains("--")
            || part.contains("..")
        {
            return Err("no part may begin or end with - or ., or contain -- or ..".into());
        }
    }
    Ok(())
}

/// A repository's name, and the quantization after a colon: `org/name:Q4_K_M`.
pub(crate) fn split_quantization(name: &str) -> Result<(&str, Option<&str>), String> {
    match name.split_once(':') {
        None => Ok((name, None)),
        Some((repo, quantization)) => {
            let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            match quantization.is_empty() || !quantization.chars().all(allowed) {
                true => Err(format!("{quantization:?} is not a quantization, such as Q4_K_M")),
                false => Ok((repo, Some(quantization))),
            }
        }
    }
}

/// The repository and the quantization in a name, after checks of it and of the revisions.
pub(crate) fn checked_name<'a>(
    name: &'a str,
    revisions: &[&str],
) -> Result<(&'a str, Option<&'a str>), HubError> {
    let bad_name = |reason: String| HubError::BadRepoName { name: name.into(), reason };
    let (repo, quantization) = split_quantization(name).map_err(bad_name)?;
    check_repo_name(repo).map_err(bad_name)?;
    match revisions.iter().find(|revision| !is_safe_path(revision)) {
        None => Ok((repo, quantization)),
        Some(wrong) => Err(bad_name(format!("{wrong:?} is not a revision"))),
    }
}

/// True if a text has the form of a name on the hub with an organization (`org/name`,
/// `org/name:QUANTIZATION`, `org/name@revision`) and is not an existing path.
pub fn is_hub_name(text: &str) -> bool {
    let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
    let is_name = |(repo, _): (&str, _)| repo.contains('/') && check_repo_name(repo).is_ok();
    split_quantization(name).is_ok_and(is_name) && is_safe_path(revision) && !Path::new(text).exists()
}

/// True if a relative path from a server stays inside the folder that it is joined to.
pub(crate) fn is_safe_path(path: &str) -> bool {
    // `Path` accepts `//` and `/./`, which the hub never sends. A colon means a drive on Windows.
    let parts_named = path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    parts_named
        && !path.contains(['\\', ':'])
        && !path.chars().any(char::is_control)
        && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)))
}

/// True if a string is a full commit hash.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantization_follows_a_colon() {
        assert_eq!(split_quantization("a/b"), Ok(("a/b", None)));
        assert_eq!(split_quantization("a/b:Q4_K_M"), Ok(("a/b", Some("Q4_K_M"))));
        for bad in ["a/b:", "a/b:../x", "a/b:Q4 0", "a/b:x:y"] {
            assert!(split_quantization(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn unsafe_names_and_paths_are_refused() {
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
