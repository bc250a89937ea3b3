//! Two machines with two cables: both are measured, the better one is taken, and what changes is
//! measured again.

use serde_json::Value;

use crate::{Node, PROGRAM, Switch, approve, can_make_machines, wait};

/// The ways from a node to the other, as that node has measured them: its interface, the other's,
/// and bytes in a second.
fn paths(node: &Node) -> Vec<(String, String, u64)> {
    let status = node.status().unwrap_or_default();
    let own = status["members"].as_array().and_then(|members| members.first().cloned()).unwrap_or_default();
    let links = status["links"].as_array().cloned().unwrap_or_default();
    let link = links.into_iter().find(|link| link["from"] == own["short"]).unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let of = |path: &Value| {
        (text(&path["interface"]), text(&path["far_interface"]), path["bytes_s"].as_u64().unwrap())
    };
    link["paths"].as_array().map(|paths| paths.iter().map(of).collect()).unwrap_or_default()
}

fn interfaces(node: &Node) -> Vec<String> {
    paths(node).into_iter().map(|(near, ..)| near).collect()
}

/// Bytes that an interface has sent.
fn sent(node: &Node, interface: &str) -> u64 {
    // The machine sees the host's /sys, but its own /proc/net.
    let output = node.machine.command(&["cat", "/proc/net/dev"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix(&format!("{interface}:")));
    line.unwrap_or_else(|| panic!("{text}")).split_whitespace().nth(8).unwrap().parse().unwrap()
}

#[test]
fn each_cable_is_measured_and_the_better_one_carries_a_model() {
    let name = "each_cable_is_measured_and_the_better_one_carries_a_model";
    if !can_make_machines() {
        thunder_testing::skip(name, "it needs root and namespaces");
        return;
    }
    let (lan, cable) = (Switch::new().unwrap(), Switch::new().unwrap());
    let mut nodes = [("ant", "10.9.0.1/24"), ("bee", "10.9.0.2/24")]
        .map(|(name, address)| Node::new(&lan, name, &[address]));
    let slow = "tc qdisc add dev eth0 root tbf rate 200mbit burst 64k latency 50ms";
    nodes.iter().for_each(|node| node.machine.run(slow).unwrap());
    nodes[0].up(&[]);
    nodes[0].code();
    nodes[1].up(&["--no-discovery", "--join", "10.9.0.1:7470"]);
    wait("the knock", || nodes[0].sees_newcomer("bee"));
    approve(&nodes[0], &nodes[1].code());
    wait("one way", || nodes.iter().all(|node| interfaces(node) == ["eth0"]));
    // A cable is plugged in.
    for (node, address) in nodes.iter().zip(["10.77.0.1/24", "10.77.0.2/24"]) {
        let name = if address.ends_with("1/24") { "ant" } else { "bee" };
        cable.plug_into(name, &node.machine, "eth1", &[address]).unwrap();
    }
    let found = wait("two ways", || nodes.iter().all(|node| interfaces(node) == ["eth1", "eth0"]));
    println!("the new cable was measured on both ends after {:.1} s", found.as_secs_f64());
    let both = paths(&nodes[0]);
    assert!(both[0].2 > 2 * both[1].2, "{both:?}");
    assert_eq!(both[0].1, "eth1", "the other end's interface: {both:?}");
    // On request, with what several connections and ranks get over the better one.
    let output = nodes[1].machine.command(&[PROGRAM, "stats", "--network"]).output().unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && table.matches(", not taken").count() == 2, "{table}");
    let output = nodes[1].machine.command(&[PROGRAM, "stats", "--network", "--json"]).output().unwrap();
    let stats: Value = serde_json::from_slice(&output.stdout).unwrap();
    let links = stats["links"].as_array().unwrap();
    assert!(links.iter().all(|link| link["interface"] == "eth1"), "{stats}");
    assert!(links.iter().all(|link| link["several_bytes_s"].as_u64() > Some(100_000_000)), "{stats}");
    assert!(links.iter().any(|link| link["ranks"]["bytes_s"].as_u64() > Some(50_000_000)), "{stats}");
    // Ranks talk over the cable.
    let loaded = nodes[0].model(&["load", "builtin", "--nodes", "all", "--wait", "120"]);
    assert!(loaded.status.success(), "{}", String::from_utf8_lossy(&loaded.stderr));
    let before = ["eth0", "eth1"].map(|interface| sent(&nodes[0], interface));
    let ask = ["infer", "builtin", "The sea", "--max-tokens", "100", "--ignore-eos"];
    assert!(nodes[0].model(&ask).status.success());
    let after = ["eth0", "eth1"].map(|interface| sent(&nodes[0], interface));
    let [lan_bytes, cable_bytes] = [0, 1].map(|index| after[index] - before[index]);
    println!("100 tokens: {lan_bytes} bytes over the network, {cable_bytes} over the cable");
    assert!(cable_bytes > 4 * lan_bytes, "{lan_bytes} {cable_bytes}");
    // The cable is pulled out, and the model goes on over what is left.
    cable.set_cable("bee", false).unwrap();
    wait("one way again", || nodes.iter().all(|node| interfaces(node) == ["eth0"]));
    assert!(nodes[0].model(&ask).status.success());
    cable.set_cable("bee", true).unwrap();
    wait("two ways again", || nodes.iter().all(|node| interfaces(node) == ["eth1", "eth0"]));
}
