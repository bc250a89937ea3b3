//! Finding models by path and by name.
#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

use std::{fs, path::Path};

use thunder_hub::{HubError, Located, gguf_names_in, locate_in};

const COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

#[test]
fn a_folder_with_a_config_is_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let error = locate_in(path, folder.path()).unwrap_err().to_string();
    assert!(error.contains(path) && error.contains("no config.json"), "{error}");
    write(&folder.path().join("config.json"), "{}");
    let located = locate_in(path, folder.path()).unwrap();
    assert_eq!(located, Located { folder: folder.path().to_owned(), repo: None, commit: None });
    let file = folder.path().join("config.json");
    let error = locate_in(file.to_str().unwrap(), folder.path()).unwrap_err().to_string();
    assert!(error.contains("no GGUF file"), "{error}");
}

#[test]
fn a_name_is_found_in_a_cache_filled_by_other_programs() {
    let cache = tempfile::tempdir().unwrap();
    let repo = cache.path().join("models--org--name");
    let snapshot = repo.join("snapshots").join(COMMIT);
    write(&repo.join("refs/main"), COMMIT);
    write(&snapshot.join("config.json"), "{}");
    let missing = |cache: &Path| match locate_in("org/name", cache).unwrap_err() {
        HubError::Incomplete { missing, .. } => missing,
        other => panic!("{other}"),
    };
    assert_eq!(missing(cache.path()), "*.safetensors");
    write(&snapshot.join("model.safetensors.index.json"), r#"{"weight_map": {"a": "model-1.safetensors"}}"#);
    assert_eq!(missing(cache.path()), "model-1.safetensors");
    write(&snapshot.join("model-1.safetensors"), "x");
    let located = locate_in("org/name", cache.path()).unwrap();
    assert_eq!(located.folder, snapshot);
    assert_eq!(located.repo.as_deref(), Some("org/name"));
    assert_eq!(located.commit.as_deref(), Some(COMMIT));
    assert!(matches!(locate_in("org/name@v2", cache.path()), Err(HubError::NotFound { .. })));
    write(&repo.join("refs/v2"), COMMIT);
    assert_eq!(locate_in("org/name@v2", cache.path()).unwrap(), located);
}

#[test]
fn a_gguf_file_is_a_model_by_its_path_or_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let find = |path: &Path| locate_in(path.to_str().unwrap(), folder.path());
    write(&path("a-Q8_0-00001-of-00002.gguf"), "GGUF");
    write(&path("a-Q8_0-00002-of-00002.gguf"), "GGUF");
    write(&path("mmproj-F16.gguf"), "GGUF");
    assert_eq!(find(folder.path()).unwrap().folder, path("a-Q8_0-00001-of-00002.gguf"));
    let second = path("a-Q8_0-00002-of-00002.gguf");
    assert_eq!(find(&second).unwrap(), Located { folder: second, repo: None, commit: None });
    write(&path("a-Q4_K_M.gguf"), "GGUF");
    let error = find(folder.path()).unwrap_err().to_string();
    assert!(error.contains("Q4_K_M, Q8_0") && error.contains("give a file"), "{error}");
    assert_eq!(find(&path("a-Q4_K_M.gguf")).unwrap().folder, path("a-Q4_K_M.gguf"));
}

#[test]
fn a_quantization_is_found_in_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    let repo = cache.path().join("models--org--name");
    let snapshot = repo.join("snapshots").join(COMMIT);
    write(&repo.join("refs/main"), COMMIT);
    write(&snapshot.join("name-Q4_K_M.gguf"), "GGUF");
    let file = snapshot.join("name-Q4_K_M.gguf");
    for name in ["org/name", "org/name:Q4_K_M", "org/name:q4_k_m"] {
        let located = locate_in(name, cache.path()).unwrap();
        assert_eq!((located.folder.as_path(), located.repo.as_deref()), (file.as_path(), Some(name)));
    }
    write(&snapshot.join("Q8_0/name-Q8_0-00001-of-00002.gguf"), "GGUF");
    assert_eq!(gguf_names_in("org/name", cache.path()), ["org/name:Q8_0", "org/name:Q4_K_M"]);
    let error = |name| locate_in(name, cache.path()).unwrap_err().to_string();
    assert!(error("org/name").contains("several quantizations: name one, such as org/name:Q8_0"));
    assert!(error("org/name:Q8_0").contains("lacks Q8_0/name-Q8_0-00002-of-00002.gguf"));
    let missing = error("org/name:Q6_K");
    assert!(missing.contains("Q6_K") && missing.contains("thunder model pull org/name:Q6_K"), "{missing}");
}

#[test]
fn a_missing_model_names_both_places_and_the_command_to_run() {
    let cache = tempfile::tempdir().unwrap();
    let error = locate_in("org/nothing", cache.path()).unwrap_err().to_string();
    let in_cache = cache.path().join("models--org--nothing");
    assert!(error.contains("thunder model pull org/nothing"), "{error}");
    assert!(error.contains(in_cache.to_str().unwrap()) && error.contains("/org/nothing"), "{error}");
    for bad in ["./no/such/folder", "/no/such/folder", "a b", "../x", "org/name@../../x"] {
        let error = locate_in(bad, cache.path()).unwrap_err();
        assert!(matches!(error, HubError::BadName { .. }), "{error}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_path_need_not_be_text() {
    use std::os::unix::ffi::OsStrExt;
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join(std::ffi::OsStr::from_bytes(b"mod\xe8le"));
    write(&folder.join("config.json"), "{}");
    assert_eq!(locate_in(&folder, place.path()).unwrap().folder, folder);
    let error = locate_in(folder.join("none"), place.path()).unwrap_err();
    assert!(matches!(error, HubError::BadName { .. }), "{error}");
}
