//! A node gets what its rank reads of a model, and no more.

use std::process::Stdio;

use serde_json::Value;

use crate::common::converted::convert;
use crate::weights::{json_of, limit_rate, put_model, sent};
use crate::{Node, PROGRAM, Switch, approve, can_make_machines, wait};

/// Two nodes of one cluster.
fn two_nodes(switch: &Switch) -> [Node; 2] {
    let mut nodes = [("ant", "10.9.0.1/24"), ("bee", "10.9.0.2/24")]
        .map(|(name, address)| Node::new(switch, name, &[address]));
    nodes[0].up(&["--no-discovery"]);
    nodes[0].code();
    nodes[1].up(&["--no-discovery", "--join", "10.9.0.1:7470"]);
    wait("the knock", || nodes[0].sees_newcomer("bee"));
    approve(&nodes[0], &nodes[1].code());
    wait("both", || nodes.iter().all(|node| node.reached().len() == 2));
    nodes
}

fn load(node: &Node, words: &[&str]) {
    let loaded = node.model(&[&["load"], words, &["--wait", "120"]].concat());
    assert!(loaded.status.success(), "{}", String::from_utf8_lossy(&loaded.stderr));
}

fn infer(node: &Node, model: &str) -> String {
    let answer = node.model(&["infer", model, "What does a lighthouse do?", "--max-tokens", "40"]);
    assert!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
    String::from_utf8(answer.stdout).unwrap()
}

/// What a node has of the only model.
fn stored(node: &Node, name: &str) -> Value {
    let list = json_of(node.model(&["list", "--nodes", name, "--json"]));
    list["nodes"][name][0].clone()
}

/// Bytes on the disk of a node's cache.
fn disk_bytes(node: &Node) -> u64 {
    let used = node.machine.command(&["du", "-sk", "/root/.cache/huggingface/hub"]).output().unwrap();
    let used = String::from_utf8(used.stdout).unwrap();
    used.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn a_second_node_gets_only_what_its_rank_reads() {
    let name = "a_second_node_gets_only_what_its_rank_reads";
    if !can_make_machines() {
        thunder_testing::skip(name, "it needs root and namespaces");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    convert(&folder.path().join("thunderhead-F32.gguf"));
    let builtin = thunder_testing::builtin_model();
    for (model, files) in [("org/tiny", builtin.as_path()), ("org/gguf:F32", folder.path())] {
        let switch = Switch::new().unwrap();
        let nodes = two_nodes(&switch);
        put_model(&nodes[0], model.trim_end_matches(":F32"), files.to_str().unwrap());
        load(&nodes[0], &[model, "--nodes", "ant"]);
        let alone = infer(&nodes[0], model);
        assert!(nodes[0].model(&["unload", model]).status.success());
        assert_eq!(stored(&nodes[1], "bee"), Value::Null);
        load(&nodes[0], &[model, "--split", "ant=2,bee=1"]);
        assert_eq!(infer(&nodes[1], model), alone, "{model}");
        let whole = stored(&nodes[0], "ant")["bytes"].as_u64().unwrap();
        let part = stored(&nodes[1], "bee");
        let (bytes, on_disk) = (part["bytes"].as_u64().unwrap(), disk_bytes(&nodes[1]));
        println!("{model}: {bytes} of {whole} bytes, {on_disk} on the disk, {} were sent", sent(&nodes[0]));
        assert_eq!((&part["name"], part["part_of"].as_u64()), (&Value::from(model), Some(whole)));
        // A third of most matrices; rows below 1 KiB come whole, and the disk has whole pages.
        assert!(
            bytes < whole * 7 / 10 && on_disk < whole * 4 / 5,
            "{bytes} of {whole}, {on_disk} on the disk"
        );
        // Headers come first: of a GGUF file 32 MiB, which is all of this one.
        let headers = if files == builtin { 100_000 } else { whole };
        assert!(sent(&nodes[0]) < bytes + headers, "{} bytes were sent", sent(&nodes[0]));
        let detail = nodes[0].model(&["status", "--detail"]);
        let detail = String::from_utf8(detail.stdout).unwrap();
        let names_part = |line: &str| line.contains(" on bee: ") && line.contains(", part: ");
        assert!(detail.lines().any(names_part), "{detail}");
        let list = String::from_utf8(nodes[1].model(&["list"]).stdout).unwrap();
        assert!(list.contains("part: "), "{list}");
        let verified = json_of(nodes[0].model(&["verify", model, "--nodes", "bee", "--json"]));
        let said = verified["nodes"][0]["state"]["done"].as_str().unwrap().to_owned();
        assert!(said.contains("part: "), "{verified}");
        // Another split fetches what it lacks, and the same one nothing.
        assert!(nodes[0].model(&["unload", model]).status.success());
        let before = sent(&nodes[0]);
        load(&nodes[0], &[model, "--split", "ant=2,bee=1"]);
        assert_eq!((infer(&nodes[1], model), sent(&nodes[0])), (alone.clone(), before));
        assert!(nodes[0].model(&["unload", model]).status.success());
        load(&nodes[0], &[model, "--split", "ant=1,bee=1"]);
        assert_eq!(infer(&nodes[1], model), alone);
        let more = stored(&nodes[1], "bee")["bytes"].as_u64().unwrap();
        assert!(more > bytes && more < whole, "{bytes}, then {more} of {whole}");
        // Nobody can use it alone: it says so.
        let run = nodes[1].machine.command(&[PROGRAM, "run", model, "Hello"]).output().unwrap();
        let said = String::from_utf8_lossy(&run.stderr).into_owned();
        assert!(!run.status.success() && said.contains("holds a part of the model"), "{said}");
        assert!(nodes[0].model(&["unload", model]).status.success());
        // A pull makes it whole, with what is there.
        let before = sent(&nodes[0]);
        json_of(nodes[0].model(&["pull", model, "--nodes", "bee", "--json"]));
        assert!(sent(&nodes[0]) - before < whole - more + 1_000_000, "what was there came again");
        let now = stored(&nodes[1], "bee");
        assert_eq!((now["bytes"].as_u64(), &now["part_of"]), (Some(whole), &Value::Null), "{now}");
        json_of(nodes[0].model(&["verify", model, "--nodes", "bee", "--json"]));
        json_of(nodes[0].model(&["remove", model, "--nodes", "bee", "--json"]));
        assert_eq!(stored(&nodes[1], "bee"), Value::Null);
    }
}

#[test]
fn a_node_that_is_killed_while_it_fetches_goes_on_where_it_was() {
    let name = "a_node_that_is_killed_while_it_fetches_goes_on_where_it_was";
    if !can_make_machines() {
        thunder_testing::skip(name, "it needs root and namespaces");
        return;
    }
    let switch = Switch::new().unwrap();
    let mut nodes = two_nodes(&switch);
    let make = format!("{PROGRAM} model synth --arch qwen3-0.6b --layers 6 /root/big");
    nodes[0].machine.run(&make).unwrap();
    put_model(&nodes[0], "org/big", "/root/big");
    if !limit_rate(name, &nodes[0]) {
        return;
    }
    let words = ["load", "org/big", "--split", "ant=1,bee=1", "--on-loss", "wait", "--wait", "120"];
    let words = [&[PROGRAM, "model"][..], &words, &["--", "--context", "256"]].concat();
    let mut load = nodes[0].machine.command(&words);
    let load = load.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    // Eight pieces of 4 MiB come at once, and the record names them after 16 MiB.
    wait("some megabytes", || sent(&nodes[0]) > 60_000_000);
    nodes[1].agent = None;
    let before = sent(&nodes[0]);
    wait("its loss", || nodes[0].reached() == ["ant"]);
    nodes[1].up(&["--no-discovery"]);
    let loaded = load.wait_with_output().unwrap();
    assert!(loaded.status.success(), "{}", String::from_utf8_lossy(&loaded.stderr));
    wait("two ranks", || nodes[0].ready_on().is_some_and(|ranks| ranks.len() == 2));
    let (part, sent) = (stored(&nodes[1], "bee")["bytes"].as_u64().unwrap(), sent(&nodes[0]));
    println!("{sent} bytes were sent for {part}, {before} of them before the kill");
    assert!(sent < before + part - 8_000_000, "nothing of {before} bytes was used: {sent} for {part}");
    json_of(nodes[0].model(&["verify", "org/big", "--nodes", "bee", "--json"]));
}
