//! A cluster that is updated node by node while it answers. The version that a program tells is set
//! by a variable, so that two versions need no second build.

use std::process::Stdio;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::Value;

use crate::common::machine::{Machine, Process};
use crate::{NAMES, Node, PROGRAM, Switch, can_make_machines, common, complete_on, three_nodes, wait};

/// This program's version with another minor number.
fn version(minors_later: u64) -> String {
    let own = env!("CARGO_PKG_VERSION");
    let numbers: Vec<u64> = own.split('.').take(2).map(|number| number.parse().unwrap()).collect();
    format!("{}.{}.0", numbers[0], numbers[1] + minors_later)
}

/// Starts an agent that says it is of a version.
fn up(machine: &Machine, version: &str) -> Process {
    let mut command = machine.command(&[PROGRAM, "up"]);
    command.env("THUNDER_TEST_VERSION", version).stdout(Stdio::null()).stderr(Stdio::null());
    Process(command.spawn().unwrap())
}

/// The version that a node tells, as another sees it.
fn version_of(status: &Value, name: &str) -> String {
    let members = status["members"].as_array().cloned().unwrap_or_default();
    let member = members.iter().find(|member| member["name"] == name);
    member.and_then(|member| member["report"]["version"].as_str().map(str::to_owned)).unwrap_or_default()
}

#[test]
fn a_cluster_is_updated_node_by_node_while_it_answers_and_a_version_too_far_is_refused() {
    let name = "a_cluster_is_updated_node_by_node_while_it_answers_and_a_version_too_far_is_refused";
    let has_curl = std::process::Command::new("curl").arg("--version").output().is_ok();
    if !can_make_machines() || !has_curl {
        thunder_testing::skip(name, "it needs root, namespaces and curl");
        return;
    }
    let switch = Switch::new().unwrap();
    let addresses: [&[&str]; 3] = [&["10.9.0.1/24"], &["10.9.0.2/24"], &["10.9.0.3/24"]];
    let mut nodes = three_nodes(&switch, "updates", addresses);
    let loaded = nodes[0].model(&["load", "builtin", "--nodes", "2", "--wait", "120"]);
    assert!(loaded.status.success(), "{}", String::from_utf8_lossy(&loaded.stderr));
    wait("ready everywhere", || nodes.iter().all(|node| node.ready_on().is_some()));
    let text = nodes[0].complete(40);
    let next = version(1);
    let (asked, ends, answers) = (Mutex::new(1), AtomicBool::new(false), AtomicUsize::new(0));
    let mut agents = nodes.each_mut().map(|node| node.agent.take());
    let nodes: &[Node; 3] = &nodes;
    std::thread::scope(|scope| {
        // Clients of a node that is not being updated: their connections end with it.
        for _ in 0..2 {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    let on = *asked.lock().unwrap();
                    assert_eq!(complete_on(&nodes[on].machine, 40), text, "asked on {}", NAMES[on]);
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let updated = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for index in 0..3 {
                let other = (index + 1) % 3;
                *asked.lock().unwrap() = other;
                // Those that were asked before have their answers.
                let before = answers.load(Ordering::Relaxed);
                wait("the clients have moved", || answers.load(Ordering::Relaxed) >= before + 4);
                let done = nodes[other].cluster(&["drain", NAMES[index]]);
                assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
                let agent = agents[index].take().unwrap();
                wait("the drained node is free", || common::children(agent.0.id()).is_empty());
                assert!(nodes[index].cluster(&["stop"]).status.success());
                drop(agent);
                agents[index] = Some(up(&nodes[index].machine, &next));
                wait("the updated node is back", || {
                    let status = nodes[other].status().unwrap_or_default();
                    version_of(&status, NAMES[index]) == next && nodes[other].reached() == NAMES
                });
                assert!(nodes[other].cluster(&["resume", NAMES[index]]).status.success());
                wait("the model answers", || nodes[other].ready_on().is_some());
            }
        }));
        ends.store(true, Ordering::Relaxed);
        updated.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    wait("a group of two again", || nodes[0].ready_on().is_some_and(|ranks| ranks.len() == 2));
    println!("{} answers while three nodes were updated, all right", answers.load(Ordering::Relaxed));
    let status = nodes[0].status().unwrap();
    assert!(NAMES.iter().all(|name| version_of(&status, name) == next), "{status}");
    wait("health", || nodes[0].cluster(&["health"]).status.success());

    // Two minor versions further: the others refuse it, say why, and go on.
    let far = version(3);
    assert!(nodes[2].cluster(&["stop"]).status.success());
    agents[2] = Some(up(&nodes[2].machine, &far));
    let why = format!("cat is refused: version {far} and version {next} do not work together");
    let mut said = String::new();
    wait("it is refused", || {
        let health = nodes[0].cluster(&["health"]);
        said = String::from_utf8_lossy(&health.stdout).into_owned();
        health.status.code() == Some(1) && said.contains(&why)
    });
    assert!(said.contains("update the older one"), "{said}");
    let status = nodes[0].status().unwrap();
    let members = status["members"].as_array().unwrap();
    let refused = members.iter().find(|member| member["name"] == "cat").unwrap();
    assert_eq!(refused["refused"], far.as_str(), "{status}");
    wait("the model answers", || nodes[0].ready_on().is_some());
    assert_eq!(nodes[0].complete(40), text);
    // Nor does a new node of that version get in; it says so, and ends.
    let token = nodes[0].cluster(&["token"]);
    let stranger = Node::new(&switch, "dog", &["10.9.0.4/24"]);
    let token = String::from_utf8(token.stdout).unwrap();
    let mut command = stranger.machine.command(&[PROGRAM, "up", "--token", token.trim()]);
    command.env("THUNDER_TEST_VERSION", &far);
    let refused = command.output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("do not work together"), "{said}");
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(nodes[0].status().unwrap()["members"].as_array().map(Vec::len), Some(3));
}
