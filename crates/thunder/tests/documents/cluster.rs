//! Commands of the documents for a cluster, as they are written, on three nodes of this machine.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::shell::{MODEL_OF_HUB, Shell, Started, commands, run_elsewhere};

const CLUSTER: &str = include_str!("../../../../docs/cluster.md");
const HOSTING: &str = include_str!("../../../../docs/hosting.md");
const OPERATIONS: &str = include_str!("../../../../docs/operations.md");
const LIMIT: Duration = Duration::from_secs(60);

/// Nodes by name. The first one is where commands are typed.
struct Nodes {
    shell: Shell,
    agents: Vec<(&'static str, Started)>,
    /// Where the first node listens.
    address: String,
}

impl Nodes {
    fn status(&self, node: &str) -> Value {
        serde_json::from_str(&self.shell.run_on(node, "cluster status --json")).unwrap()
    }

    fn wait(&self, what: &str, done: impl Fn(&Value) -> bool) {
        let began = Instant::now();
        while !done(&self.status("mini")) {
            assert!(began.elapsed() < LIMIT, "{what}: {}", self.status("mini"));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn wait_for_nodes(&self, count: usize) {
        self.wait("the nodes", |status| {
            let members = status["members"].as_array().unwrap();
            members.len() == count && members.iter().all(|member| member["up"] == true)
        });
    }

    /// Starts an agent with the document's command.
    fn up(&mut self, name: &'static str, command: &str) -> String {
        let fixed = format!("--name {name} --listen 127.0.0.1:0 --no-discovery");
        let (agent, said) = self.shell.start(name, &format!("{command} {fixed}"), "listens on");
        self.agents.push((name, agent));
        said
    }

    /// Runs a command on the first node, with a model that is there. What was loaded before is
    /// unloaded first.
    fn run(&self, command: &str) -> String {
        if command.starts_with("model load") && !self.status("mini")["models"].as_array().unwrap().is_empty()
        {
            let name = self.status("mini")["models"][0]["name"].as_str().unwrap().to_owned();
            self.shell.run_on("mini", &format!("model unload {name}"));
            self.wait("nothing is loaded", |status| status["models"].as_array().unwrap().is_empty());
        }
        let [large, small] = ["large", "small"].map(|name| self.shell.model(name).display().to_string());
        let here = command.replace("mlx-community/Qwen3-0.6B-4bit", "builtin");
        let here = here.replace("qwen3-32b", &large).replace("qwen3-0.6b", &small);
        let said = self.shell.run_on("mini", &here);
        // A drained node's models move.
        if ["model load", "cluster drain", "cluster resume"].iter().any(|begin| command.starts_with(begin)) {
            self.wait("the model", |status| status["models"][0]["ready"] == true);
        }
        said
    }
}

/// Commands in a table's first column.
fn of_tables(document: &str) -> impl Iterator<Item = String> {
    document.lines().filter_map(|line| Some(line.strip_prefix("| `thunder ")?.split_once('`')?.0.to_owned()))
}

#[test]
fn the_commands_of_the_cluster_documents_work_as_written() {
    let mut nodes = Nodes { shell: Shell::new(), agents: Vec::new(), address: String::new() };
    let blocks = |document| commands(document).into_iter().filter(|command| !run_elsewhere(command));
    let all: Vec<String> = blocks(CLUSTER).chain(blocks(HOSTING)).chain(blocks(OPERATIONS)).collect();
    let (forms, others): (Vec<String>, Vec<String>) = all.into_iter().partition(|command| {
        let joins = ["up", "cluster approve", "cluster token"];
        joins.iter().any(|begin| command.starts_with(begin))
    });
    // A cluster is formed as the documents say: by a code, and by a token.
    let said = nodes.up("mini", &forms[0]);
    assert_eq!(forms[0], "up");
    let listens = said.split("listens on ").nth(1).unwrap_or_else(|| panic!("{said}"));
    nodes.address = listens.split(';').next().unwrap().trim().to_owned();
    let mut code = String::new();
    for command in &forms[1..] {
        let address = nodes.address.clone();
        match command.split(' ').collect::<Vec<_>>()[..] {
            ["up", "--join", _] => {
                nodes.up("studio", &format!("up --join {address}"));
                let began = Instant::now();
                while nodes.status("studio")["code"].as_str().is_none() {
                    assert!(began.elapsed() < LIMIT, "no code");
                    std::thread::sleep(Duration::from_millis(50));
                }
                code = nodes.status("studio")["code"].as_str().unwrap().to_owned();
                nodes.wait("the knock", |status| !status["newcomers"].as_array().unwrap().is_empty());
                nodes.shell.run_on("mini", &format!("cluster approve {code}"));
                nodes.wait_for_nodes(2);
            }
            ["cluster", "token", ..] => {
                let token = nodes.shell.run_on("mini", command).trim().to_owned();
                nodes.up("book", &format!("up --join {address} --token {token}"));
                nodes.wait_for_nodes(3);
            }
            // Part of the two above.
            ["up"] | ["up", "--token", _] | ["cluster", "approve", _] => {}
            // A node that is served off the machine: the hosting guide's last step, at the end.
            ["up", "--host", "0.0.0.0", "--tls"] => {}
            _ => panic!("how is thunder {command} run?"),
        }
    }
    assert!(!code.is_empty() && nodes.agents.len() == 3, "{code}");

    for command in others {
        match command.split(' ').next().unwrap() {
            // Of servers: the other test.
            "serve" | "keys" => {}
            _ if command.ends_with("--watch") => {
                // Not on a terminal it prints a status every second, until it is ended.
                let said = nodes.shell.run_on("mini", &command.replace(" --watch", ""));
                assert!(said.contains("studio"), "{said}");
            }
            _ => {
                let said = nodes.run(&command);
                let shows = match command.as_str() {
                    "cluster plan builtin" => "tokens/s",
                    "cluster plan builtin --for throughput --json" => "\"layouts\"",
                    _ => "",
                };
                assert!(said.contains(shows), "thunder {command}: {said}");
            }
        }
    }

    nodes.shell.fill_hub();
    let mut with_files = Vec::new();
    for command in of_tables(CLUSTER) {
        let here = command.replace("MODEL", "builtin").replace("[NODE]", "studio").replace("NODE", "studio");
        match here.split(' ').collect::<Vec<_>>()[..] {
            ["cluster", "approve" | "remove" | "leave" | "start", ..] | ["service", ..] => {}
            ["model", work @ ("pull" | "verify" | "update" | "remove"), ..] => {
                with_files.push(work.to_owned());
                if work == "remove" {
                    // In the same cell of the table as the update of one model.
                    nodes.run("model update --all --nodes all");
                }
                nodes.run(&here.replace("NAME", MODEL_OF_HUB));
            }
            _ => drop(nodes.run(&here)),
        }
    }
    assert_eq!(with_files, ["pull", "verify", "update", "remove"]);
    // At the end, what ends nodes.
    nodes.shell.run_on("mini", "cluster remove studio");
    nodes.wait_for_nodes(2);
    nodes.shell.run_on("book", "cluster leave");
    nodes.wait_for_nodes(1);
    for key in commands(HOSTING).into_iter().filter(|command| command.starts_with("keys")) {
        assert!(nodes.shell.run_on("mini", &key).starts_with("th-"), "{key}");
    }
    nodes.agents.clear();
    let said = nodes.up("mini", "up --host 0.0.0.0 --tls");
    assert!(said.contains("https://"), "{said}");
}
