//! Models go from node to node: loaded where they are not, and as fast as the link.

use std::process::Stdio;
use std::time::Instant;

use serde_json::Value;

use crate::{Node, PROGRAM, Switch, approve, can_make_machines, three_nodes, wait};

/// Puts a folder's files into a node's Hugging Face cache, as a pull leaves them.
pub fn put_model(node: &Node, repo: &str, folder: &str) {
    let repo = repo.replace('/', "--");
    let script = format!(
        "set -e; cache=/root/.cache/huggingface/hub/models--{repo}; commit=0123456789abcdef0123456789abcdef01234567
         mkdir -p $cache/blobs $cache/refs $cache/snapshots/$commit; printf $commit >$cache/refs/main
         for file in {folder}/*; do
             hash=$(sha256sum $file | cut -d' ' -f1); cp $file $cache/blobs/$hash
             ln -s ../../blobs/$hash $cache/snapshots/$commit/$(basename $file)
         done"
    );
    node.machine.run(&script).unwrap();
}

/// Bytes of models that a node has sent to others.
pub fn sent(node: &Node) -> u64 {
    node.status().unwrap()["sent_bytes"].as_u64().unwrap()
}

/// Lets a node send 100 Mbit/s: 79 MB take some 6 seconds. False where the kernel limits no rates;
/// then the test is skipped.
pub fn limit_rate(test: &str, node: &Node) -> bool {
    let limit = "tc qdisc replace dev eth0 root tbf rate 100mbit burst 1mb latency 50ms";
    let is_limited = node.machine.run(limit).is_ok();
    if !is_limited {
        thunder_testing::skip(test, "this kernel limits no rates");
    }
    is_limited
}

pub fn json_of(output: std::process::Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_model_that_one_node_has_is_loaded_on_all() {
    if !can_make_machines() {
        thunder_testing::skip("a_model_that_one_node_has_is_loaded_on_all", "it needs root and namespaces");
        return;
    }
    let switch = Switch::new().unwrap();
    let addresses: [&[&str]; 3] = [&["10.9.0.1/24"], &["10.9.0.2/24"], &["10.9.0.3/24"]];
    let nodes = three_nodes(&switch, "weights", addresses);
    put_model(&nodes[2], "org/tiny", thunder_testing::builtin_model().to_str().unwrap());
    // The headers for a plan come from cat as well.
    let plan =
        nodes[0].machine.command(&[PROGRAM, "cluster", "plan", "org/tiny", "--json"]).output().unwrap();
    let plan = json_of(plan);
    assert!(plan["pick"]["index"].is_u64(), "{plan}");
    let loaded = nodes[0].model(&["load", "org/tiny", "--nodes", "all", "--wait", "60"]);
    let said = String::from_utf8_lossy(&loaded.stderr).into_owned();
    assert!(loaded.status.success(), "{said}");
    // No node has a hub: what the others have came from cat. (Its bars are seen where the group's
    // head is asked.)
    assert!(said.contains("is ready on"), "{said}");
    wait("three ranks", || nodes[1].ready_on().is_some_and(|ranks| ranks.len() == 3));
    let list = json_of(nodes[1].model(&["list", "--nodes", "all", "--json"]));
    for name in crate::NAMES {
        assert_eq!(list["nodes"][name][0]["name"], "org/tiny", "{list}");
    }
    let verified = json_of(nodes[1].model(&["verify", "org/tiny", "--nodes", "ant,bee", "--json"]));
    assert_eq!(verified["nodes"].as_array().map(Vec::len), Some(2), "{verified}");
    assert!(nodes[0].model(&["unload", "org/tiny"]).status.success());
    let removed = json_of(nodes[0].model(&["remove", "org/tiny", "--nodes", "bee", "--json"]));
    assert!(removed["removed"]["bee"].as_u64().is_some_and(|bytes| bytes > 1 << 20), "{removed}");
    let detail = json_of(nodes[0].model(&["status", "--json"]));
    assert_eq!(detail["models"], serde_json::json!([]));
}

#[test]
fn a_pull_goes_on_from_another_node_when_the_sender_is_killed() {
    let name = "a_pull_goes_on_from_another_node_when_the_sender_is_killed";
    if !can_make_machines() {
        thunder_testing::skip(name, "it needs root and namespaces");
        return;
    }
    let switch = Switch::new().unwrap();
    let addresses: [&[&str]; 3] = [&["10.9.0.1/24"], &["10.9.0.2/24"], &["10.9.0.3/24"]];
    let mut nodes = three_nodes(&switch, "killed", addresses);
    for index in [0, 1] {
        let make = "mkdir -p /root/big && cd /root/big && echo {} >config.json && \
                    seq 10000000 >model.safetensors";
        nodes[index].machine.run(make).unwrap();
        put_model(&nodes[index], "org/big", "/root/big");
        if !limit_rate(name, &nodes[index]) {
            return;
        }
    }
    let mut pull =
        nodes[2].machine.command(&[PROGRAM, "model", "pull", "org/big", "--nodes", "cat", "--json"]);
    let pull = pull.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let part = |nodes: &[Node; 3]| nodes[2].status().map(|status| status["tasks"][0]["nodes"][0].clone());
    wait("some megabytes", || part(&nodes).is_some_and(|part| part["done"].as_u64() > Some(5_000_000)));
    let from = part(&nodes).unwrap()["from"].clone();
    let big_sender = from.as_array().unwrap().last().unwrap().as_str().unwrap().to_owned();
    // Both may have sent a file; the one whose counter grows sends the large one.
    let before = [sent(&nodes[0]), sent(&nodes[1])];
    let sender = usize::from(before[1] > before[0]);
    nodes[sender].agent = None;
    let output = pull.wait_with_output().unwrap();
    let pulled = json_of(output);
    let node = &pulled["nodes"][0];
    println!("killed {} (last named {big_sender}): {pulled}", crate::NAMES[sender]);
    assert_eq!(node["from"].as_array().map(Vec::len), Some(2), "{pulled}");
    // It went on where it was: the other did not send all of it.
    let rest = sent(&nodes[1 - sender]) - before[1 - sender];
    assert!(rest < 75_000_000, "{rest} bytes came from the other");
    let verified = json_of(nodes[2].model(&["verify", "org/big", "--nodes", "cat", "--json"]));
    assert!(verified["nodes"][0]["state"]["done"].is_string(), "{verified}");
}

/// `THUNDER_LONG=1` runs it: it takes a gigabyte of memory, and is about speed. Prints the link's
/// bandwidth as `thunder stats --network` measures it, and that of a pull.
#[test]
fn a_pull_fills_four_fifths_of_the_link() {
    if !thunder_testing::is_long() || !can_make_machines() {
        let why = "it needs THUNDER_LONG=1, root and namespaces";
        thunder_testing::skip("a_pull_fills_four_fifths_of_the_link", why);
        return;
    }
    let switch = Switch::new().unwrap();
    let mut nodes = [("ant", "10.9.0.1/24"), ("bee", "10.9.0.2/24")]
        .map(|(name, address)| Node::new(&switch, name, &[address]));
    nodes[0].up(&["--no-discovery"]);
    nodes[0].code();
    nodes[1].up(&["--no-discovery", "--join", "10.9.0.1:7470"]);
    wait("the knock", || nodes[0].sees_newcomer("bee"));
    approve(&nodes[0], &nodes[1].code());
    wait("both", || nodes.iter().all(|node| node.reached().len() == 2));
    let make = "mkdir -p /root/big && cd /root/big && echo {} >config.json && head -c 800000000 /dev/urandom \
                >model.safetensors";
    nodes[0].machine.run(make).unwrap();
    put_model(&nodes[0], "org/big", "/root/big");
    nodes[0].machine.run("rm -r /root/big").unwrap();
    for shape in ["", "10gbit", "1gbit"] {
        if !shape.is_empty() {
            // Where the kernel has no netem, a token bucket limits the rate too.
            let script = format!(
                "tc qdisc replace dev eth0 root netem rate {shape} limit 20000 2>/dev/null ||
                 tc qdisc replace dev eth0 root tbf rate {shape} burst 4mb latency 50ms"
            );
            if let Some(error) = nodes.iter().find_map(|node| node.machine.run(&script).err()) {
                println!("{shape}: this kernel limits no rates ({error})");
                continue;
            }
        }
        let measured = nodes[0].machine.command(&[PROGRAM, "stats", "--network", "--json"]).output().unwrap();
        let links = json_of(measured);
        let status = nodes[0].status().unwrap();
        let from_ant = status["links"]
            .as_array()
            .unwrap()
            .iter()
            .find(|link| link["from"] == status["members"][0]["short"]);
        let from_ant = from_ant.unwrap_or_else(|| panic!("{links}"));
        let [one, link] = ["bytes_s", "most_bytes_s"].map(|key| from_ant[key].as_f64().unwrap());
        let began = Instant::now();
        let pulled = json_of(nodes[0].model(&["pull", "org/big", "--nodes", "bee", "--json"]));
        let seconds = pulled["seconds"].as_f64().unwrap();
        let bytes = pulled["nodes"][0]["done"].as_f64().unwrap();
        assert!(bytes > 8e8 && began.elapsed().as_secs_f64() >= seconds, "{pulled}");
        println!(
            "{}: one connection carries {:.0} MB/s by TLS, several {:.0} MB/s, the pull {:.0} MB/s: {:.0} %",
            if shape.is_empty() { "no limit" } else { shape },
            one / 1e6,
            link / 1e6,
            bytes / seconds / 1e6,
            100.0 * bytes / seconds / link
        );
        // Few cores cannot encrypt and check as fast as a fast link carries.
        let has_cores = std::thread::available_parallelism().is_ok_and(|cores| cores.get() >= 4);
        let bound = if has_cores || shape == "1gbit" { link } else { link.min(one) };
        assert!(bytes / seconds > 0.5 * bound, "far below the link");
        assert!(nodes[0].model(&["remove", "org/big", "--nodes", "bee"]).status.success());
    }
}
