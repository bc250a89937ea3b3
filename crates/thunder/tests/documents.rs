//! Commands of the documents, as they are written, in a shell. A command that is added to a
//! document is run here too, unless `ELSEWHERE` says which other test runs it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(unix)]

mod common;
#[path = "documents/cluster.rs"]
mod on_a_cluster;
#[path = "documents/servers.rs"]
mod servers;
#[path = "documents/shell.rs"]
mod shell;

use common::Server;
use shell::{Shell, commands, run_elsewhere};

const ACCESS: &str = include_str!("../../../docs/access.md");
const CAPACITY: &str = include_str!("../../../docs/capacity.md");

#[test]
fn the_commands_of_the_access_document_work_as_written_on_a_server() {
    let shell = Shell::new();
    let begins = ["keys", "limits", "usage", "audit", "config", "backup", "restore"];
    let is_of_servers = |command: &String| begins.contains(&command.split(' ').next().unwrap());
    let mut commands = commands(ACCESS).into_iter().filter(is_of_servers);
    assert!(shell.run(&commands.next().unwrap()).starts_with("th-"), "the first key");
    let store = shell.folder().join("store");
    let _server = Server::start(&["builtin", "--store", store.to_str().unwrap()]);
    let backup = shell.folder().join("thunder.backup");
    let mut count = 0;
    for command in commands {
        let command = command
            .replace("/safe/thunder.backup", backup.to_str().unwrap())
            .replace("restore FILE", &format!("restore {}", backup.display()))
            .replace("NEW_FOLDER", "restored")
            .replace("MODEL", "builtin");
        let said = shell.run(&command);
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
        assert!(shell.folder().join(made).exists(), "{made}");
    }
}

#[test]
fn the_commands_of_the_planners_document_work_as_written() {
    let shell = Shell::new();
    let commands = commands(CAPACITY);
    assert!(commands.len() >= 6, "{commands:?}");
    for command in commands {
        let said = shell.run(&command);
        assert!(said.lines().count() >= 3 || command.contains(" > "), "thunder {command}: {said}");
    }
}

#[test]
fn the_commands_of_the_readme_work_as_written() {
    let shell = Shell::new();
    let server = shell.server("serve builtin --no-store");
    for command in commands(include_str!("../../../README.md")) {
        let is_of_a_cluster =
            ["up", "cluster ", "model load "].iter().any(|begin| command.starts_with(begin));
        if run_elsewhere(&command) || is_of_a_cluster || command.starts_with("serve ") {
            continue;
        }
        let said = match command.strip_prefix("chat") {
            Some(options) => shell.run(&format!("chat{options} </dev/null")),
            None => {
                shell.run(&shell.with_what_is_here(&command.replace("http://127.0.0.1:8000", &server.url)))
            }
        };
        let shows = match command.split(' ').next().unwrap() {
            "chat" => continue,
            "capacity" => "users",
            "plan" => "rank",
            _ => "",
        };
        assert!(said.contains(shows) && said.len() > 10, "thunder {command}: {said}");
    }
}

/// Documents with commands, and the test that runs them.
const DOCUMENTS: [(&str, &str); 13] = [
    ("access.md", "documents.rs"),
    ("api.md", "documents/servers.rs"),
    ("capacity.md", "documents.rs"),
    ("cluster.md", "documents/cluster.rs"),
    ("gpu.md", "bench_gpu.rs"),
    ("hosting.md", "documents/servers.rs"),
    ("macs.md", "desks.rs"),
    ("operations.md", "documents/servers.rs"),
    // Measurements of an hour and more, which `cargo xtask bench` runs as they are written.
    ("performance.md", "../../../xtask/src/bench.rs"),
    ("two-machines.md", "two_machines.rs"),
    // Without commands of `thunder` in code blocks today.
    ("dashboard.md", "documents.rs"),
    ("security.md", "documents.rs"),
    ("troubleshooting.md", "documents.rs"),
];

#[test]
fn every_document_with_commands_has_a_test_that_runs_them() {
    let repository = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for entry in std::fs::read_dir(repository.join("docs")).unwrap() {
        let path = entry.unwrap().path();
        let Some(name) = path.file_name().unwrap().to_str().filter(|name| name.ends_with(".md")) else {
            continue;
        };
        let has_commands = !commands(&std::fs::read_to_string(&path).unwrap()).is_empty();
        let found = DOCUMENTS.iter().find(|(document, _)| *document == name);
        assert!(found.is_some() || !has_commands, "docs/{name} has commands that no test runs");
        if let Some((_, by)) = found {
            assert!(repository.join("crates/thunder/tests").join(by).exists(), "{by} is to run docs/{name}");
            let is_without = ["dashboard.md", "security.md", "troubleshooting.md"].contains(&name);
            assert!(!(is_without && has_commands), "docs/{name} has commands now: let a test run them");
        }
    }
}
