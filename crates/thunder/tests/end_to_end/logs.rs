//! Logs in JSON: every line of standard error is an object.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::common::{Ending, Server, post, thunder};

fn all_json(log: &str) -> Vec<Value> {
    let line = |line: &str| serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}"));
    log.lines().map(line).collect()
}

#[test]
fn a_server_whose_log_is_json_says_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let log = folder.path().join("log");
    let words = ["serve", "builtin", "--ranks", "2", "--port", "0", "--store", store.to_str().unwrap()];
    let mut command = thunder(&words);
    command.env("THUNDER_LOG_FORMAT", "json").env("RUST_LOG", "debug");
    let mut server = Server::from(command);
    let (status, _) =
        post(&server.url("/v1/completions"), &serde_json::json!({"prompt": "hi", "max_tokens": 2}));
    assert_eq!(status, 400, "the model is missing");
    server.signal(libc::SIGTERM);
    let (_, said) = server.wait(Duration::from_secs(20));
    let lines = all_json(&said);
    assert!(
        lines.iter().any(|line| line["message"].as_str().unwrap().contains("answers in flight")),
        "{said}"
    );
    assert!(lines.iter().all(|line| line["time"].is_string() && line["level"].is_string()), "{said}");
    // A node, whose ranks write to the same place.
    let mut up =
        thunder(&["up", "--listen", "127.0.0.1:0", "--port", "0", "--no-discovery", "--name", "ant"]);
    up.env("THUNDER_LOG_FORMAT", "json")
        .env("RUST_LOG", "debug")
        .env("THUNDER_DATA", folder.path().join("data"));
    up.stdout(Stdio::null()).stderr(std::fs::File::create(&log).unwrap());
    let node = Ending(up.spawn().unwrap());
    let began = Instant::now();
    let load =
        || thunder(&["model", "load", "builtin"]).env("THUNDER_DATA", folder.path().join("data")).output();
    while !load().unwrap().status.success() {
        assert!(began.elapsed() < Duration::from_secs(30), "{}", std::fs::read_to_string(&log).unwrap());
        std::thread::sleep(Duration::from_millis(50));
    }
    while !std::fs::read_to_string(&log).unwrap().contains("builtin is ready on ant") {
        assert!(began.elapsed() < Duration::from_secs(60), "{}", std::fs::read_to_string(&log).unwrap());
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(node);
    assert!(all_json(&std::fs::read_to_string(&log).unwrap()).len() > 3);
    // What is wrong before the start, too.
    for words in [&["serve", "--port", "x"][..], &["serve", "--host", "0.0.0.0", "--port", "0", "--no-store"]]
    {
        let output = thunder(words).env("THUNDER_LOG_FORMAT", "json").output().unwrap();
        let said = all_json(std::str::from_utf8(&output.stderr).unwrap());
        assert!(said.last().is_some_and(|line| line["level"] == "ERROR"), "{said:?}");
    }
}
