//! `thunder serve --cache-dir`: prompts are read from disk after a restart, also after `kill -9`.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{Server, metric, post, thunder};
use serde_json::json;

fn start(folder: &Path, more: &[&str]) -> Server {
    let folder = folder.to_str().unwrap();
    let always = [
        "builtin",
        "--ranks",
        "2",
        "--threads",
        "1",
        "--max-batch",
        "2",
        "--no-store",
        "--cache-dir",
        folder,
    ];
    Server::start(&[&always, more].concat())
}

/// A prompt of some hundred tokens.
fn prompt(number: usize) -> String {
    (0..60).map(|word| format!("{number} word{word} ")).collect()
}

/// The answer, and the prompt tokens that were cached.
fn ask(server: &Server, number: usize) -> (String, u64) {
    let body = json!({"model": "default", "prompt": prompt(number), "max_tokens": 8, "temperature": 0});
    let (status, answer) = post(&server.url("/v1/completions"), &body);
    assert_eq!(status, 200, "{answer}");
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
    (answer["choices"][0]["text"].as_str().unwrap().to_owned(), cached)
}

/// The files of a rank's blocks.
fn files(folder: &Path, rank: usize) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder.join(format!("rank-{rank}"))).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "block"));
    files
}

/// Waits until both ranks have written as many blocks.
fn written(folder: &Path) -> usize {
    let until = Instant::now() + Duration::from_secs(20);
    let mut before = 0;
    loop {
        let counts = [0, 1].map(|rank| files(folder, rank).len());
        if counts[0] == counts[1] && counts[0] > 0 && counts[0] == before {
            return before;
        }
        before = counts[0];
        assert!(Instant::now() < until, "{counts:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn prompts_survive_restarts_and_damage_never_shows() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = start(folder.path(), &[]);
    let (first, cached) = ask(&server, 1);
    assert_eq!(cached, 0);
    server.signal(libc::SIGTERM);
    assert!(server.wait(Duration::from_secs(20)).0.success());
    let blocks = written(folder.path());
    assert!(blocks >= 4, "{blocks} blocks");

    // In memory is nothing, on disk is all but the last block, which gives the next token.
    let server = start(folder.path(), &[]);
    let (text, cached) = ask(&server, 1);
    assert!(text == first && cached >= 32 * (blocks as u64 - 1), "{text:?}, {cached} tokens cached");
    assert_eq!(metric(&server, "thunder:disk_cache_tokens_total"), cached as f64);
    assert!(metric(&server, "thunder:disk_cache_bytes") > 0.0);
    ask(&server, 2);
    written(folder.path());

    // A second server on the folder is refused, and the first one goes on.
    let place = folder.path().to_str().unwrap();
    let second = thunder(&["run", "builtin", "hello", "--cache-dir", place]).output().unwrap();
    let error = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success() && error.contains("another thunder uses it"), "{error}");
    assert_eq!(ask(&server, 1).0, first);
    // Killed, not ended.
    drop(server);

    // A byte of each block of rank 1 is changed: told of, removed, computed again, written again.
    for file in files(folder.path(), 1) {
        let mut bytes = fs::read(&file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
        fs::write(&file, bytes).unwrap();
    }
    let server = start(folder.path(), &[]);
    assert_eq!(ask(&server, 1), (first.clone(), 0));
    assert_eq!(metric(&server, "thunder:disk_cache_tokens_total"), 0.0);
    let began = Instant::now();
    while !(server.log().contains("rank-1") && server.log().contains("checksum is wrong")) {
        assert!(began.elapsed() < Duration::from_secs(30), "{}", server.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    written(folder.path());
    drop(server);
    let server = start(folder.path(), &[]);
    let (text, cached) = ask(&server, 1);
    assert!(text == first && cached >= 32 * (blocks as u64 - 1), "{text:?}, {cached} tokens cached");
}

#[test]
fn the_folder_stays_within_its_size() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(folder.path(), &["--cache-size", "2M"]);
    let texts: Vec<String> = (0..12).map(|number| ask(&server, number).0).collect();
    written(folder.path());
    let size =
        |rank| files(folder.path(), rank).iter().map(|file| fs::metadata(file).unwrap().len()).sum::<u64>();
    let sizes = [size(0), size(1)];
    assert!(sizes.iter().all(|size| (1 << 19..=1 << 20).contains(size)), "{sizes:?} bytes");
    drop(server);
    let server = start(folder.path(), &["--cache-size", "2M"]);
    let (text, cached) = ask(&server, 11);
    assert!(text == texts[11] && cached > 0, "the last prompt is there, {cached} tokens");
    assert_eq!(ask(&server, 0), (texts[0].clone(), 0), "the first one is not");
}

#[test]
fn what_cannot_be_used_is_an_error_before_anything_is_loaded() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let place = file.path().to_str().unwrap();
    for (arguments, words) in [
        (vec!["--cache-dir", place], "--cache-dir"),
        (vec!["--cache-dir", "/tmp", "--no-prefix-cache"], "cannot be used with"),
        (vec!["--cache-dir", "/tmp", "--cache-size", "7"], "write a number with a unit"),
    ] {
        let output = thunder(&[&["run", "builtin", "hello"], &arguments[..]].concat()).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(words), "{arguments:?}: {error}");
    }
}
