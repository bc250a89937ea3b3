//! Commands of the documents that nothing else runs: as they are written, in a shell.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(unix)]

mod common;

use std::path::Path;
use std::process::{Command, Stdio};

use common::Server;

const ACCESS: &str = include_str!("../../../docs/access.md");
const CAPACITY: &str = include_str!("../../../docs/capacity.md");

/// The lines of a document's code blocks that begin so, each once, in their order.
fn commands(document: &str, begins: &[&str]) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for line in document.lines().filter_map(|line| line.strip_prefix("    thunder ")) {
        let command = line.split(" #").next().unwrap().trim().to_owned();
        let words: Vec<&str> = command.split(' ').collect();
        if begins.contains(&words[0]) && !found.contains(&command) {
            found.push(command);
        }
    }
    found
}

/// What a command prints in a shell that finds `thunder` on its path; it must succeed.
fn run(command: &str, folder: &Path) -> String {
    let path = format!("{}:{}", folder.join("bin").display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-ec", &format!("thunder {command}")]).current_dir(folder).env("PATH", path);
    for name in ["THUNDER_API_KEY", "THUNDER_URL", "THUNDER_RANK"] {
        shell.env_remove(name);
    }
    shell.env("THUNDER_STORE", folder.join("store")).env("THUNDER_DATA", folder.join("node"));
    let output = shell.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "thunder {command}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// A folder in which a shell finds `thunder`.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("bin")).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_thunder"), folder.path().join("bin/thunder")).unwrap();
    folder
}

#[test]
fn the_commands_of_the_access_document_work_as_written_on_a_server() {
    let folder = folder();
    let begins = ["keys", "limits", "usage", "audit", "config", "backup", "restore"];
    let mut commands = commands(ACCESS, &begins).into_iter();
    assert!(run(&commands.next().unwrap(), folder.path()).starts_with("th-"), "the first key");
    let store = folder.path().join("store");
    let _server = Server::start(&["builtin", "--store", store.to_str().unwrap()]);
    let backup = folder.path().join("thunder.backup");
    let mut count = 0;
    for command in commands {
        let command = command
            .replace("/safe/thunder.backup", backup.to_str().unwrap())
            .replace("restore FILE", &format!("restore {}", backup.display()))
            .replace("NEW_FOLDER", "restored")
            .replace("MODEL", "builtin");
        let said = run(&command, folder.path());
        match command.as_str() {
            // The other key was revoked just before.
            "keys list" => assert!(said.contains("boss") && !said.contains("research"), "{said}"),
            "limits currency EUR" => assert!(said.contains("EUR") && said.contains("5000000"), "{said}"),
            "audit --verify" => assert!(said.contains("entries are intact"), "{said}"),
            "audit keep" => assert!(said.contains("\"all\": true") && said.contains("P-"), "{said}"),
            "config show" => assert!(said.contains("max-batch"), "{said}"),
            _ => {}
        }
        count += 1;
    }
    assert!(count >= 22, "{count} commands: code blocks are not where this test looks");
    for made in ["november.csv", "thunder.backup", "restored/access.redb", "store/config.toml"] {
        assert!(folder.path().join(made).exists(), "{made}");
    }
}

#[test]
fn the_commands_of_the_planners_document_work_as_written() {
    let folder = folder();
    let commands = commands(CAPACITY, &["capacity", "bench"]);
    assert!(commands.len() >= 6, "{commands:?}");
    for command in commands {
        let said = run(&command, folder.path());
        assert!(said.lines().count() >= 3 || command.contains(" > "), "thunder {command}: {said}");
    }
}
