//! `thunder mac` between two network namespaces with veth pairs for cables: checked, drawn, set
//! up, measured by `thunder bench comm`, undone.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(target_os = "linux")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::machine::{Machine, Process, can_make_machines};
use common::thunder;
use serde_json::Value;

const NAMES: [&str; 2] = ["left", "right"];
const UUIDS: [&str; 2] = ["d6030000-0080-7518-2391-a4e51a82e819", "c7010000-0070-6418-a3f5-1c0b52d1f102"];

/// `/sys/bus/thunderbolt` of a machine with one cable, whose interface is `cable0`.
/// The cable says 10 Gbit/s, because less than a tenth of that is an error.
fn write_tree(root: &Path, own: &str, other: &str) {
    let devices = root.join("sys/bus/thunderbolt/devices");
    fs::create_dir_all(devices.join("0-1.0/net/cable0")).unwrap();
    fs::create_dir_all(root.join("sys/module/thunderbolt_net")).unwrap();
    fs::create_dir_all(root.join("etc")).unwrap();
    for (name, text) in [
        ("0-0/unique_id", own),
        ("0-0/generation", "4"),
        ("0-1/unique_id", other),
        ("0-1/rx_speed", "10.0 Gb/s"),
        ("0-1/rx_lanes", "1"),
    ] {
        fs::create_dir_all(devices.join(name).parent().unwrap()).unwrap();
        fs::write(devices.join(name), text).unwrap();
    }
}

/// A program that takes ssh's arguments and enters a namespace.
fn write_ssh(folder: &Path, machines: &[Machine; 2]) -> String {
    let cases: String = NAMES
        .iter()
        .zip(machines)
        .map(|(name, machine)| format!("  {name}) id={} ;;\n", machine.id()))
        .collect();
    let script = format!(
        "#!/bin/sh\nwhile [ $# -gt 0 ]; do\n  case $1 in -o) shift 2 ;; -*) shift ;; *) break ;; esac\ndone\ncase $1 in\n{cases}\
         \x20 *) echo \"no host $1\" >&2; exit 255 ;;\nesac\nTHUNDER_ROOT={}/$1\nexport THUNDER_ROOT\nshift\n\
         exec nsenter --target $id --net --uts -- sh -c \"$*\"\n",
        folder.display()
    );
    let path = folder.join("enter");
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

fn addresses(machine: &Machine) -> String {
    let output = machine
        .command(&[
            "sh",
            "-c",
            "ip -o -4 address show; ip -o link show | sed 's/NO-CARRIER,//;s/state [A-Z]*//'",
        ])
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Bytes that an interface of a machine has sent.
fn sent(machine: &Machine, interface: &str) -> u64 {
    let output = machine.command(&["ip", "-s", "-json", "link", "show", interface]).output().unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    found[0]["stats64"]["tx"]["bytes"].as_u64().unwrap()
}

/// Ranks that `thunder launch` starts from the host file use the cable; without it, Ethernet.
fn launch_takes_the_cable_then_ethernet(machines: &[Machine; 2], hosts: &str, ssh: &str) {
    let program = env!("CARGO_BIN_EXE_thunder");
    let carried = |way: &str| {
        let before = ["cable0", "lan0"].map(|interface| sent(&machines[0], interface));
        let launch =
            ["launch", "--hostfile", hosts, "--backend", "tcp", "--no-prefix", "--ssh", ssh, "--", program];
        let bench = ["bench", "comm", "--json", "--op", "all_reduce", "--sizes", "4194304", "--time", "50"];
        let output = thunder(&[&launch[..], &bench].concat()).output().unwrap();
        assert!(output.status.success(), "{way}: {}", String::from_utf8_lossy(&output.stderr));
        let after = ["cable0", "lan0"].map(|interface| sent(&machines[0], interface));
        [after[0] - before[0], after[1] - before[1]]
    };
    let [cable, lan] = carried("over the cable");
    println!("with the cable: {cable} bytes over it, {lan} over Ethernet");
    assert!(cable > 8 << 20 && lan < 1 << 20, "{cable} over the cable, {lan} over Ethernet");
    machines[0].run("ip link set cable0 down").unwrap();
    let [cable, lan] = carried("over Ethernet");
    println!("without the cable: {cable} bytes over it, {lan} over Ethernet");
    assert!(lan > 8 << 20 && cable == 0, "{cable} over the cable, {lan} over Ethernet");
    machines[0].run("ip link set cable0 up").unwrap();
}

/// Two node agents that reach each other over the cable alone check and measure it without ssh.
fn through_the_agents(folder: &Path, machines: &[Machine; 2]) {
    let data = NAMES.map(|name| folder.join(format!("node-{name}")).display().to_string());
    let mut agents: Vec<Process> = Vec::new();
    let run = |node: usize, words: &[&str]| {
        let output = thunder(words).env("THUNDER_DATA", &data[node]).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), String::from_utf8(output.stdout).unwrap(), error)
    };
    for (index, name) in NAMES.iter().enumerate() {
        let token = if index == 0 { String::new() } else { run(0, &["cluster", "token"]).1 };
        let listen = format!("10.84.72.{}:7470", index + 1);
        let program = env!("CARGO_BIN_EXE_thunder");
        let mut words =
            vec![program, "up", "--no-discovery", "--listen", &listen, "--port", "0", "--name", name];
        if index > 0 {
            words.extend(["--token", token.trim()]);
        }
        let mut command = machines[index].command(&words);
        command.env("THUNDER_DATA", &data[index]).env("THUNDER_ROOT", folder.join(name));
        agents.push(Process(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()));
        let began = Instant::now();
        let is_up = |node: &usize| run(*node, &["cluster", "health"]).0;
        let is_in = || run(0, &["cluster", "status", "--json"]).1.contains(&format!("\"name\":\"{name}\""));
        while !((0..=index).all(|node| is_up(&node)) && is_in()) {
            assert!(began.elapsed() < Duration::from_secs(30), "{name} does not come up");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    // A member hears a new node's addresses from its next description of itself, every 5 s.
    let began = Instant::now();
    while !run(0, &["mac", "check", "--nodes=right"]).1.starts_with("right  ") {
        assert!(began.elapsed() < Duration::from_secs(30), "left does not reach right");
        std::thread::sleep(Duration::from_millis(200));
    }
    let (_, check, error) = run(1, &["mac", "check", "--json"]);
    let check: Value = serde_json::from_str(&check).unwrap_or_else(|_| panic!("{check}{error}"));
    assert_eq!(check["desk"]["cables"].as_array().unwrap().len(), 1, "{check}");
    let (fine, measured, error) = run(0, &["mac", "verify", "--nodes", "--json", "--time", "20"]);
    let measured: Value = serde_json::from_str(&measured).unwrap_or_else(|_| panic!("{measured}{error}"));
    assert!(fine && measured["cables"][0]["measured_gbits"].as_f64().unwrap() > 0.1, "{measured}");
    // The second node asks the first, which holds the cable's first end.
    let (fine, table, error) = run(1, &["mac", "verify", "--nodes=left,right", "--time", "20"]);
    assert!(fine && table.contains("left port 0-1 → right port 0-1"), "{table}{error}");
    // Their ranks are told of the cable.
    let (fine, _, error) = run(0, &["model", "load", "builtin", "--nodes", "all"]);
    assert!(fine, "{error}");
    let told = |agent: &Process| {
        common::children(agent.0.id()).into_iter().any(|rank| {
            let variables = fs::read(format!("/proc/{rank}/environ")).unwrap_or_default();
            let mut variables = variables.split(|byte| *byte == 0);
            variables.any(|variable| variable == b"THUNDER_CABLES=10.84.72.0/30")
        })
    };
    let began = Instant::now();
    while !agents.iter().all(told) {
        assert!(began.elapsed() < Duration::from_secs(30), "a rank without THUNDER_CABLES");
        std::thread::sleep(Duration::from_millis(50));
    }
    let (_, plan, error) = run(0, &["plan", "--ranks", "2", "--nodes=left,right"]);
    assert!(plan.contains("rank 0 (left) – rank 1 (right): TCP over the cable, 10 Gbit/s"), "{plan}{error}");
}

#[test]
fn a_cable_between_two_machines_is_set_up_measured_and_undone() {
    if !can_make_machines() {
        thunder_testing::skip("cables", "this user or system cannot make network namespaces");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let machines = NAMES.map(|name| Machine::new(name).unwrap());
    for (index, name) in NAMES.iter().enumerate() {
        write_tree(&folder.path().join(name), UUIDS[index], UUIDS[1 - index]);
    }
    machines[0]
        .run(&format!("ip link add cable0 type veth peer name cable0 netns {}", machines[1].id()))
        .unwrap();
    machines[0].run("ip link set cable0 up").unwrap();
    machines[1].run("ip link set cable0 up").unwrap();
    // Both are in an Ethernet too.
    machines[0]
        .run(&format!("ip link add lan0 type veth peer name lan0 netns {}", machines[1].id()))
        .unwrap();
    for (index, machine) in machines.iter().enumerate() {
        let script = format!("ip address add 192.168.77.{}/24 dev lan0 && ip link set lan0 up", index + 1);
        machine.run(&script).unwrap();
    }
    let before = machines.each_ref().map(addresses);
    let ssh = write_ssh(folder.path(), &machines);
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (record, hosts) = (file("record.json"), file("hosts.json"));
    let run = |action: &str, more: &[&str]| {
        let desk = ["mac", action, "--hosts", "left,right", "--ssh", &ssh];
        let output = thunder(&[&desk, more].concat()).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), String::from_utf8(output.stdout).unwrap(), error)
    };

    let (fine, check, error) = run("check", &["--json"]);
    let check: Value = serde_json::from_str(&check).unwrap_or_else(|_| panic!("{check}{error}"));
    let codes: Vec<&str> = check["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|finding| finding["code"].as_str().unwrap())
        .collect();
    assert!(!fine && codes.contains(&"no-address"), "{codes:?}");
    let (_, graph, _) = run("graph", &[]);
    assert!(graph.contains("port 0-1 (cable0) ─── 10 Gbit/s ─── right port 0-1  TCP"), "{graph}");

    let (fine, plan, error) = run("setup", &["--dry-run"]);
    assert!(fine && plan.contains("sudo ip address add 10.84.72.1/30 dev cable0"), "{plan}{error}");
    assert_eq!(machines.each_ref().map(addresses), before, "--dry-run changes nothing");
    let setup = ["--yes", "--record", &record, "--hostfile", &hosts, "--time", "20"];
    let (fine, done, error) = run("setup", &setup);
    assert!(fine && done.contains("left port 0-1 → right port 0-1"), "{done}{error}");
    assert!(addresses(&machines[1]).contains("10.84.72.2/30"));
    let (fine, measured, error) = run("verify", &["--json", "--time", "20"]);
    let measured: Value = serde_json::from_str(&measured).unwrap_or_else(|_| panic!("{measured}{error}"));
    assert!(fine && measured["cables"][0]["measured_gbits"].as_f64().unwrap() > 0.1, "{measured}");
    let (fine, again, error) = run("setup", &[&setup[..], &["--no-verify"]].concat());
    assert!(fine && again.contains("nothing to do"), "{again}{error}");

    through_the_agents(folder.path(), &machines);
    launch_takes_the_cable_then_ethernet(&machines, &hosts, &ssh);

    let plan = thunder(&["plan", "--ranks", "2", "--hostfile", &hosts]).output().unwrap();
    let plan = String::from_utf8(plan.stdout).unwrap();
    assert!(plan.contains("rank 0 (left) – rank 1 (right): TCP over the cable, 10 Gbit/s"), "{plan}");

    let (fine, undone, error) = run("undo", &["--yes", "--record", &record]);
    assert!(fine && undone.contains("Everything is as it was"), "{undone}{error}");
    assert_eq!(machines.each_ref().map(addresses), before);
    let left = NAMES.iter().any(|name| folder.path().join(name).join("etc/thunderhead").exists());
    assert!(!left && !Path::new(&hosts).exists() && !Path::new(&record).exists());
}
