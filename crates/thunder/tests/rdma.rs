//! Nodes with RDMA devices, as an operator sees their links. Runs where
//! `tools/rdma-vm/run --ranks 2` or more makes the devices.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(target_os = "linux")]

mod common;

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::Ending;
use serde_json::Value;

/// For each step: the machine is emulated.
const LIMIT: Duration = Duration::from_secs(60);

/// A node at one end of a link.
struct Node {
    name: &'static str,
    folder: tempfile::TempDir,
    address: String,
    device: String,
    agent: Option<Ending>,
}

impl Node {
    /// The node of rank `rank`, at the first link between ranks 0 and 1.
    fn new(name: &'static str, rank: &str) -> Self {
        let links = std::fs::read_to_string(std::env::var("RDMA_LINKS").unwrap()).unwrap();
        let own = links.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|end| {
            // RANK PEER LINK DEVICE IP PEER_DEVICE PEER_IP
            end[0] == rank && ["0", "1"].contains(&end[1]) && end[2] == "0"
        });
        let own = own.unwrap_or_else(|| panic!("no link of rank {rank}: {links}"));
        let (device, address) = (own[3].to_owned(), own[4].to_owned());
        Self { name, folder: tempfile::tempdir().unwrap(), address, device, agent: None }
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_thunder"));
        command.args(words).env("THUNDER_DATA", self.data()).stdin(Stdio::null());
        // Both are on one machine: as hosts of their own they share no memory.
        command.env("THUNDER_HOST", self.name);
        command.env("THUNDER_CABLES", format!("{}/30={}", self.network(), self.device));
        command
    }

    /// Where its agent listens. Both ends of the link are addresses of one machine, so a connection
    /// does not come from the node's own one: it listens on all.
    fn listen(&self) -> &'static str {
        if self.name == "ant" { "0.0.0.0:7470" } else { "0.0.0.0:7471" }
    }

    /// The network of the link, which has two addresses.
    fn network(&self) -> String {
        let (begin, _) = self.address.rsplit_once('.').unwrap();
        format!("{begin}.0")
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    fn text(&self, words: &[&str]) -> String {
        let output = self.run(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {words:?}: {said}\n{}", self.name, self.log());
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn up(&mut self, options: &[&str]) {
        let fixed = ["up", "--name", self.name, "--listen", self.listen(), "--port", "0", "--no-discovery"];
        let log = std::fs::File::create(self.folder.path().join("log")).unwrap();
        let mut command = self.command(&[&fixed, options].concat());
        self.agent = Some(Ending(command.stdout(Stdio::null()).stderr(log).spawn().unwrap()));
    }

    fn members_up(&self) -> usize {
        let status: Value =
            serde_json::from_slice(&self.run(&["cluster", "status", "--json"]).stdout).unwrap_or_default();
        status["members"].as_array().into_iter().flatten().filter(|member| member["up"] == true).count()
    }
}

fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
#[ignore = "it needs RDMA devices: ./test rdma"]
fn stats_of_the_network_call_a_link_rdma_and_say_how_fast_it_is() {
    let (mut ant, mut bee) = (Node::new("ant", "0"), Node::new("bee", "1"));
    ant.up(&[]);
    wait("ant", || ant.members_up() == 1);
    let token = ant.text(&["cluster", "token"]);
    bee.up(&["--join", &format!("{}:7470", ant.address), "--token", &token]);
    wait("both nodes", || ant.members_up() == 2 && bee.members_up() == 2);
    let (began, table) = (Instant::now(), ant.text(&["stats", "--network"]));
    println!("after {:?}:\n{table}", began.elapsed());
    let logs = || ant.text(&["cluster", "logs"]);
    let named = table.lines().filter(|line| line.contains("RDMA (") && line.contains("rdma: "));
    assert_eq!(named.count(), 2, "both directions: {table}\n{}", logs());
    let stats: Value = serde_json::from_str(&ant.text(&["stats", "--json"])).unwrap();
    let links = stats["links"].as_array().unwrap();
    let ranks: Vec<&Value> =
        links.iter().map(|link| &link["ranks"]).filter(|ranks| ranks.is_object()).collect();
    assert_eq!((links.len(), ranks.len()), (2, 2), "ranks measure both directions at once: {links:?}");
    let number = |name: &str| ranks[0][name].as_u64().unwrap();
    assert_eq!(ranks[0]["over"], "rdma", "{links:?}");
    assert!((1_000..1_000_000_000).contains(&number("latency_ns")), "{links:?}");
    assert!(number("bytes_s") > 1_000_000, "{links:?}");
}
