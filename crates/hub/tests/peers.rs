//! Pulls from other machines' caches, which are served over sockets of this process.
#![allow(clippy::unwrap_used, reason = "a panic fails the test")]
#![cfg(unix)]

mod machine;
mod server;

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    sync::{Arc, Mutex},
    thread,
};

use machine::{FIRST, Machine, machines, machines_with_large, options};
use server::{COMMIT, Server};
use thunder_hub::{
    HubError, PullEvent, PullOptions, cached_models, is_hub_name, locate_in, pull, remove, serve,
};

const SECOND: &str = "model-00002-of-00002.safetensors";

/// Pulls to a new cache. Returns the cache and the senders of each file's bytes, in order.
fn pulled(
    server: &Server,
    peers: &[&Arc<Machine>],
) -> (Result<thunder_hub::Located, HubError>, tempfile::TempDir, Vec<(String, String)>) {
    let cache = tempfile::tempdir().unwrap();
    let sources = Mutex::new(Vec::new());
    let result = pull("org/name", "main", &options(server, cache.path(), peers), &|event| {
        if let PullEvent::Source { file, from } = event {
            sources.lock().unwrap().push((file.to_owned(), from.to_owned()));
        }
    });
    (result, cache, sources.into_inner().unwrap())
}

fn check(server: &Server, folder: &Path) {
    for name in ["config.json", "model.safetensors.index.json", "tokenizer.json", FIRST, SECOND] {
        assert!(fs::read(folder.join(name)).unwrap() == server.content(name), "{name} is right");
    }
}

#[test]
fn a_model_that_a_peer_has_does_not_come_from_the_hub() {
    let (server, [bee, cat]) = machines(["bee", "cat"]);
    let requests = server.seen().len();
    let (located, cache, sources) = pulled(&server, &[&bee, &cat]);
    let located = located.unwrap();
    check(&server, &located.folder);
    assert_eq!(server.seen().len(), requests, "the hub is not asked at all");
    assert_eq!(locate_in("org/name", cache.path()).unwrap(), located);
    // Several files come from several machines.
    for name in ["bee", "cat"] {
        assert!(sources.iter().any(|(_, from)| from == name), "{sources:?}");
    }
    let commit = format!("org/name@{COMMIT}");
    assert_eq!(locate_in(commit, cache.path()).unwrap().commit.as_deref(), Some(COMMIT));
    // Without a hub as well.
    let offline = tempfile::tempdir().unwrap();
    let options = PullOptions { offline: true, ..options(&server, offline.path(), &[&cat]) };
    check(&server, &pull("org/name", "main", &options, &|_| {}).unwrap().folder);
    let missing = pull("org/other", "main", &options, &|_| {}).unwrap_err();
    assert!(matches!(missing, HubError::Offline { .. }), "{missing}");
}

#[test]
fn an_update_asks_the_hub_although_a_peer_has_the_model() {
    let (server, [bee, cat]) = machines(["bee", "cat"]);
    let update = PullOptions { refresh: true, ..options(&server, cat.cache.path(), &[&bee]) };
    let requests = server.seen().len();
    pull("org/name", "main", &update, &|_| {}).unwrap();
    assert!(server.seen().len() > requests, "it was asked");
    let dead = "http://127.0.0.1:1".to_owned();
    let update = PullOptions { endpoint: dead.clone(), ..update };
    let error = pull("org/name", "main", &update, &|_| {}).unwrap_err();
    assert!(matches!(&error, HubError::Unreachable { endpoint, .. } if *endpoint == dead), "{error}");
    // Another node has asked the hub: bee's older commit is not taken for the newest one.
    let told =
        |commit: &str| PullOptions { refresh: false, commit: Some(commit.to_owned()), ..update.clone() };
    let located = pull("org/name", "main", &told(COMMIT), &|_| {}).unwrap();
    assert_eq!(located.commit.as_deref(), Some(COMMIT));
    let newer = "f".repeat(40);
    let error = pull("org/name", "main", &told(&newer), &|_| {}).unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
}

#[test]
fn when_a_peer_dies_the_pull_goes_on_where_it_was_from_another() {
    let (server, [bee, cat]) = machines(["bee", "cat"]);
    bee.dies_after(1_000_000);
    let (located, _cache, sources) = pulled(&server, &[&bee, &cat]);
    check(&server, &located.unwrap().folder);
    let of_first: Vec<&str> =
        sources.iter().filter(|(file, _)| file == FIRST).map(|(_, from)| from.as_str()).collect();
    assert!(of_first.last() == Some(&"cat") || sources.iter().any(|(_, from)| from == "cat"), "{sources:?}");
    // Without another peer, the pull continues from the hub, with only the missing bytes. A broken
    // connection may lose the bytes that were not read yet, which can be a whole file.
    let goes_on = || {
        let (server, [bee]) = machines(["bee"]);
        bee.dies_after(1_000_000);
        let before = server.seen().len();
        let (located, _cache, _) = pulled(&server, &[&bee]);
        check(&server, &located.unwrap().folder);
        server.seen()[before..].iter().any(|seen| seen.range.is_some())
    };
    assert!((0..20).any(|_| goes_on()), "a range was asked for");
}

#[test]
fn a_corrupt_byte_at_a_peer_is_found_and_the_file_comes_from_another() {
    let (server, [bee, cat]) = machines(["bee", "cat"]);
    let blob = bee.blob(FIRST);
    let mut bytes = fs::read(&blob).unwrap();
    bytes[777_777] ^= 1;
    fs::write(&blob, bytes).unwrap();
    let (located, _cache, _) = pulled(&server, &[&bee, &cat]);
    check(&server, &located.unwrap().folder);
    let before = server.seen().len();
    let (located, _cache, sources) = pulled(&server, &[&bee]);
    check(&server, &located.unwrap().folder);
    assert!(server.seen().len() > before, "the hub has it right: {sources:?}");
    // No other source has the file: the error names the fault, and no wrong file stays.
    let cache = tempfile::tempdir().unwrap();
    let options = PullOptions { offline: true, ..options(&server, cache.path(), &[&bee]) };
    let error = pull("org/name", "main", &options, &|_| {}).unwrap_err();
    assert!(matches!(&error, HubError::Checksum { file, .. } if file == FIRST), "{error}");
    assert!(locate_in("org/name", cache.path()).is_err());
}

#[test]
fn a_large_file_comes_in_pieces_from_several() {
    let (server, [bee, cat]) = machines_with_large(["bee", "cat"]);
    let requests = server.seen().len();
    let (located, _cache, sources) = pulled(&server, &[&bee, &cat]);
    assert!(fs::read(located.unwrap().folder.join(FIRST)).unwrap() == server.content(FIRST));
    assert_eq!(server.seen().len(), requests, "the hub is not asked at all");
    for name in ["bee", "cat"] {
        assert!(sources.iter().any(|(file, from)| file == FIRST && from == name), "{sources:?}");
    }
    // One machine dies: the other sends the rest, and the hub sends nothing.
    for life in [100_000, 5_000_000, 20_000_000] {
        bee.dies_after(life);
        let (located, _cache, _) = pulled(&server, &[&bee, &cat]);
        assert!(fs::read(located.unwrap().folder.join(FIRST)).unwrap() == server.content(FIRST));
    }
    assert_eq!(server.seen().len(), requests, "the hub is not asked at all");
    // Both machines die: the hub sends the rest, from the first missing byte on.
    bee.dies_after(12_000_000);
    cat.dies_after(12_000_000);
    let (located, _cache, _) = pulled(&server, &[&bee, &cat]);
    assert!(fs::read(located.unwrap().folder.join(FIRST)).unwrap() == server.content(FIRST));
    let seen = server.seen();
    let ranges: Vec<_> = seen[requests..].iter().filter_map(|seen| seen.range.clone()).collect();
    assert!(!ranges.is_empty() && ranges.iter().all(|range| range != "bytes=0-"), "{ranges:?}");
}

#[test]
fn a_wrong_byte_among_pieces_of_several_costs_no_machine_that_is_right() {
    let (server, [bee, cat]) = machines_with_large(["bee", "cat"]);
    let blob = bee.blob(FIRST);
    let mut bytes = fs::read(&blob).unwrap();
    // All bytes are wrong, because the pieces that bee sends are not known in advance.
    bytes.iter_mut().step_by(1000).for_each(|byte| *byte ^= 1);
    fs::write(&blob, bytes).unwrap();
    let cache = tempfile::tempdir().unwrap();
    let options = PullOptions { offline: true, ..options(&server, cache.path(), &[&bee, &cat]) };
    let reasons = Mutex::new(Vec::new());
    let located = pull("org/name", "main", &options, &|event| {
        if let PullEvent::Retry { reason, .. } = event {
            reasons.lock().unwrap().push(reason.to_owned());
        }
    });
    assert!(fs::read(located.unwrap().folder.join(FIRST)).unwrap() == server.content(FIRST));
    let reasons = reasons.into_inner().unwrap();
    assert!(reasons.iter().any(|reason| reason.contains("sha256")), "{reasons:?}");
}

#[test]
fn a_pull_that_was_interrupted_in_pieces_keeps_what_came() {
    let (server, [bee]) = machines_with_large(["bee"]);
    let cache = tempfile::tempdir().unwrap();
    bee.dies_after(30_000_000);
    let offline = PullOptions { offline: true, ..options(&server, cache.path(), &[&bee]) };
    pull("org/name", "main", &offline, &|_| {}).unwrap_err();
    bee.dies_after(usize::MAX);
    let first = Mutex::new(None);
    let located = pull("org/name", "main", &offline, &|event| {
        if let PullEvent::Bytes { file: FIRST, done, .. } = event {
            first.lock().unwrap().get_or_insert(done);
        }
    });
    assert!(fs::read(located.unwrap().folder.join(FIRST)).unwrap() == server.content(FIRST));
    let first = first.into_inner().unwrap().unwrap();
    assert!(first >= 4_000_000, "it goes on after {first} bytes");
}

#[test]
fn what_a_peer_has_in_part_is_not_taken_for_the_whole() {
    let (server, [bee]) = machines(["bee"]);
    fs::remove_file(bee.blob(SECOND)).unwrap();
    let before = server.seen().len();
    let (located, _cache, _) = pulled(&server, &[&bee]);
    check(&server, &located.unwrap().folder);
    assert!(server.seen()[before..].iter().any(|seen| seen.line.contains(SECOND)), "the hub sent it");
}

#[test]
fn only_files_of_models_are_served_whatever_is_asked() {
    let (_server, [bee]) = machines(["bee"]);
    let secret = bee.cache.path().join("secret");
    fs::write(&secret, "secret").unwrap();
    let snapshot = bee.cache.path().join(format!("models--org--name/snapshots/{COMMIT}"));
    std::os::unix::fs::symlink(&secret, snapshot.join("link.json")).unwrap();
    let ask = |request: &str| {
        let (mut near, mut far) = UnixStream::pair().unwrap();
        let cache = bee.cache.path().to_owned();
        let serving = thread::spawn(move || serve(&mut far, &cache, &()));
        near.write_all(request.as_bytes()).unwrap();
        near.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        // The server may close the connection before it has read everything.
        drop(near.read_to_end(&mut answer));
        drop(serving.join().unwrap());
        String::from_utf8_lossy(&answer).into_owned()
    };
    let get = |path: &str| ask(&format!("GET {path} HTTP/1.1\r\nhost: peer\r\n\r\n"));
    assert!(get(&format!("/org/name/resolve/{COMMIT}/config.json")).ends_with(r#"{"model_type": "llama"}"#));
    assert!(get("/org/name/resolve/main/config.json").starts_with("HTTP/1.1 200"));
    let head = ask("HEAD /org/name/resolve/main/config.json HTTP/1.1\r\n\r\n");
    assert!(head.contains("etag: ") && head.ends_with("\r\n\r\n"), "{head}");
    let part = ask("GET /org/name/resolve/main/config.json HTTP/1.1\r\nrange: bytes=2-11\r\n\r\n");
    assert!(part.starts_with("HTTP/1.1 206") && part.ends_with("\r\n\r\nmodel_type"), "{part}");
    for path in [
        "/org/name/resolve/main/../../../secret".to_owned(),
        "/org/name/resolve/main/..%2f..%2f..%2fsecret".to_owned(),
        "/org/name/resolve/main/link.json".to_owned(),
        "/org/..%2f..%2fname/resolve/main/config.json".to_owned(),
        "/../secret".to_owned(),
        "//etc/passwd".to_owned(),
        "/org/name/resolve/../../secret/x".to_owned(),
        "/api/models/org/none/revision/main".to_owned(),
    ] {
        let answer = get(&path);
        assert!(answer.starts_with("HTTP/1.1 404") && !answer.contains("secret"), "{path}: {answer}");
    }
    assert!(ask("POST / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    for garbage in ["\u{16}\u{3}\u{1}", "GET", &"x".repeat(20_000), "GET / HTTP/1.1\r\na"] {
        assert_eq!(ask(garbage), "", "{garbage:.20}");
    }
}

#[test]
fn models_of_a_cache_are_listed_and_removed() {
    let (server, [bee]) = machines(["bee"]);
    let models = cached_models(bee.cache.path()).unwrap();
    assert_eq!(models.len(), 1);
    assert_eq!((models[0].name.as_str(), models[0].commit.as_deref()), ("org/name", Some(COMMIT)));
    let bytes: usize = ["config.json", "model.safetensors.index.json", "tokenizer.json", FIRST, SECOND]
        .iter()
        .map(|name| server.content(name).len())
        .sum();
    assert_eq!(models[0].bytes, bytes as u64);
    assert_eq!(remove("org/name", bee.cache.path()).unwrap(), bytes as u64);
    assert_eq!(cached_models(bee.cache.path()).unwrap(), []);
    let again = remove("org/name", bee.cache.path()).unwrap_err();
    assert!(again.to_string().contains("org/name is not in"), "{again}");
    assert!(remove("../..", bee.cache.path()).is_err() && remove("/etc", bee.cache.path()).is_err());
    assert!(is_hub_name("org/name:Q4_K_M") && is_hub_name("a/b@main"));
    for other in ["builtin", "/tmp", "./a", "a/b/c", "crates/hub", "src/lib.rs", "../x"] {
        assert!(!is_hub_name(other) || other == "crates/hub", "{other}");
    }
}
