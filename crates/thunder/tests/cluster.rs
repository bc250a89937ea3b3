//! `thunder up` and `thunder cluster` on machines that are network namespaces.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(target_os = "linux")]

mod common;
mod faults;
mod parts;
mod rolling;
mod strangers;
mod two_cables;
mod weights;

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use common::machine::{Machine, Process, Switch, can_make_machines};
use serde_json::{Value, json};

const PROGRAM: &str = env!("CARGO_BIN_EXE_thunder");
const LIMIT: Duration = Duration::from_secs(30);
/// Time for a new node to be found by multicast. On a quiet machine it takes less than 2 s.
const FOUND_WITHIN: Duration = Duration::from_secs(5);
/// Time for a model to answer again after a loss, besides the time that it takes to load.
const BACK_WITHIN: Duration = Duration::from_secs(5);

/// A library that agents load before they start, if there is one.
static PRELOAD: OnceLock<PathBuf> = OnceLock::new();

/// A machine with `thunder up`.
struct Node {
    machine: Machine,
    agent: Option<Process>,
}

impl Node {
    fn new(switch: &Switch, name: &str, addresses: &[&str]) -> Self {
        let machine = Machine::new(name).unwrap();
        switch.plug(name, &machine, addresses).unwrap();
        Self { machine, agent: None }
    }

    fn up(&mut self, options: &[&str]) {
        let mut command = self.machine.command(&[&[PROGRAM, "up"], options].concat());
        if let Some(library) = PRELOAD.get() {
            command.env("LD_PRELOAD", library);
        }
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        self.agent = Some(Process(child));
    }

    fn cluster(&self, words: &[&str]) -> Output {
        self.machine.command(&[&[PROGRAM, "cluster"], words].concat()).output().unwrap()
    }

    /// The status; `None` until the agent answers.
    fn status(&self) -> Option<Value> {
        let output = self.cluster(&["status", "--json"]);
        output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
    }

    fn code(&self) -> String {
        let mut code = None;
        wait("a code", || {
            code = self.status().and_then(|status| status["code"].as_str().map(str::to_owned));
            code.is_some()
        });
        code.unwrap()
    }

    /// Names of the members that answer, sorted.
    fn reached(&self) -> Vec<String> {
        let status = self.status().unwrap_or_default();
        let members = status["members"].as_array().cloned().unwrap_or_default();
        let up = members.iter().filter(|member| member["up"] == true);
        let mut names: Vec<_> = up.map(|member| member["name"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    }

    fn sees_newcomer(&self, name: &str) -> bool {
        let status = self.status().unwrap_or_default();
        let newcomers = status["newcomers"].as_array().cloned().unwrap_or_default();
        newcomers.iter().any(|newcomer| newcomer["name"] == name)
    }
}

fn wait(what: &str, mut done: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
    began.elapsed()
}

fn approve(on: &Node, code: &str) {
    let output = on.cluster(&["approve", code]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Starts three nodes that find each other by multicast alone, and puts them into one cluster.
/// Prints how long the last took to be found.
fn three_nodes(switch: &Switch, kind: &str, addresses: [&[&str]; 3]) -> [Node; 3] {
    let names = ["ant", "bee", "cat"];
    let mut nodes = [0, 1, 2].map(|index| Node::new(switch, names[index], addresses[index]));
    nodes[0].up(&[]);
    nodes[0].code();
    for index in 1..3 {
        nodes[index].up(&[]);
        let began = Instant::now();
        wait("the new node is found", || nodes[0].sees_newcomer(names[index]));
        let found = began.elapsed();
        println!("{kind}: {} was found after {:.2} s", names[index], found.as_secs_f64());
        assert!(found < FOUND_WITHIN, "{kind}: {} was found after {found:?}", names[index]);
        approve(&nodes[index - 1], &nodes[index].code());
    }
    let all = wait("all reach all", || nodes.iter().all(|node| node.reached() == names));
    println!("{kind}: all reached all {:.2} s after the last approval", all.as_secs_f64());
    nodes
}

#[test]
fn nodes_find_each_other_whatever_their_addresses() {
    if !can_make_machines() {
        thunder_testing::skip(
            "nodes_find_each_other_whatever_their_addresses",
            "it needs root and namespaces",
        );
        return;
    }
    let kinds: [(&str, [&[&str]; 3]); 3] = [
        ("private addresses", [&["10.9.0.1/24"], &["10.9.0.2/24"], &["10.9.0.3/24"]]),
        ("169.254 addresses", [&["169.254.7.1/16"], &["169.254.9.2/16"], &["169.254.11.3/16"]]),
        ("fe80 addresses only", [&[], &[], &[]]),
    ];
    for (kind, addresses) in kinds {
        let switch = Switch::new().unwrap();
        let mut nodes = three_nodes(&switch, kind, addresses);
        // Each node hears within moments that the others reach each other, too.
        wait("health", || nodes.iter().all(|node| node.cluster(&["health"]).status.success()));
        // The node that began the cluster is killed.
        nodes[0].agent = None;
        let noticed = wait("the death", || nodes[1..].iter().all(|node| node.reached() == ["bee", "cat"]));
        println!("{kind}: a killed node was noticed after {:.2} s", noticed.as_secs_f64());
        assert!(noticed < Duration::from_secs(5), "{noticed:?}");
        let health = nodes[1].cluster(&["health"]);
        assert_eq!(health.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&health.stdout).contains("ant does not answer"));
        nodes[0].up(&[]);
        let back = wait("the node is back", || nodes.iter().all(|node| node.reached().len() == 3));
        println!("{kind}: a node that came back was in after {:.2} s", back.as_secs_f64());
        // Ranks reach each other at the same addresses.
        let mut loaded = None;
        // Without routable addresses, the node that came back has to be found again first.
        wait("a load on all", || {
            let words = ["load", "builtin", "--nodes", "all", "--wait", "60", "--json"];
            let load = nodes[1].model(&words);
            println!("{kind}: {}", String::from_utf8_lossy(&load.stderr));
            loaded = load.status.success().then_some(load.stdout);
            loaded.is_some()
        });
        let loaded: Value = serde_json::from_slice(&loaded.unwrap()).unwrap();
        assert_eq!(loaded["groups"][0].as_array().map(Vec::len), Some(3), "{loaded}");
        assert_eq!(nodes[2].ready_on().map(|ranks| ranks.len()), Some(3), "{kind}");
        if addresses[0].is_empty() {
            wrong_loads_are_refused_or_explained(&nodes);
        }
    }
}

/// What cannot work takes the place of nothing, and what fails says why for as long as it does.
fn wrong_loads_are_refused_or_explained(nodes: &[Node; 3]) {
    for (words, why) in [
        (&["builtin", "--", "--contxt", "5"][..], "unexpected argument '--contxt' found"),
        (&["builtin", "--nodes", "2", "--", "--context", "10000000"], "10000000"),
        (&["builtin", "--nodes", "2", "--", "--port", "3"], "'--port <PORT>'"),
        (&["builtin", "--", "--ranks", "3"], "a cluster has a rank on each node"),
        (&["builtin", "--nodes", "ant", "--split", "bee=1"], "bee has a share, but"),
        (&["/nonexistent", "--nodes", "2"], "/nonexistent"),
        (&["", "--nodes", "2"], "model"),
    ] {
        let refused = nodes[1].model(&[&["load"], words].concat());
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(why), "{words:?}: {said}");
    }
    let status = nodes[1].status().unwrap();
    assert_eq!(status["models"].as_array().map(Vec::len), Some(1), "{status}");
    assert_eq!(nodes[1].ready_on().map(|ranks| ranks.len()), Some(3), "{status}");
    let failed = nodes[1].model(&["load", "builtin", "--nodes", "ant", "--", "--device", "gpu:5"]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && said.contains("gpu:5"), "{said}");
    wait("the reason", || {
        let health = nodes[2].cluster(&["health"]);
        let said = String::from_utf8_lossy(&health.stdout).into_owned();
        said.contains("starting again, because it failed on ant: ") && said.contains("gpu:5")
    });
}

#[test]
fn both_sides_of_a_cut_go_on_and_agree_afterwards() {
    if !can_make_machines() {
        thunder_testing::skip(
            "both_sides_of_a_cut_go_on_and_agree_afterwards",
            "it needs root and namespaces",
        );
        return;
    }
    let switch = Switch::new().unwrap();
    let addresses: [&[&str]; 3] = [&["10.9.0.1/24"], &["10.9.0.2/24"], &["10.9.0.3/24"]];
    let nodes = three_nodes(&switch, "a cut", addresses);
    switch.set_cable("ant", false).unwrap();
    let noticed = wait("the cut", || {
        nodes[0].reached() == ["ant"] && nodes[1..].iter().all(|node| node.reached() == ["bee", "cat"])
    });
    println!("a cut was noticed on both sides after {:.2} s", noticed.as_secs_f64());
    assert!(noticed < Duration::from_secs(5), "{noticed:?}");
    // Each side changes something.
    let lonely = nodes[0].cluster(&["drain", "ant"]);
    assert!(String::from_utf8_lossy(&lonely.stderr).contains("no other node has heard"));
    assert!(nodes[1].cluster(&["drain", "cat"]).status.success());
    switch.set_cable("ant", true).unwrap();
    let drained = |node: &Node| {
        let members = node.status().unwrap()["members"].as_array().cloned().unwrap();
        let drained = members.iter().filter(|member| member["drained"] == true);
        drained.map(|member| member["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let healed = wait("one document", || {
        nodes.iter().all(|node| {
            let mut names = drained(node);
            names.sort();
            names == ["ant", "cat"] && node.reached().len() == 3
        })
    });
    println!("both sides agreed {:.2} s after the cut was mended", healed.as_secs_f64());
}

#[test]
fn a_node_joins_by_address_or_token_where_multicast_is_off() {
    if !can_make_machines() {
        thunder_testing::skip(
            "a_node_joins_by_address_or_token_where_multicast_is_off",
            "it needs root and namespaces",
        );
        return;
    }
    let switch = Switch::new().unwrap();
    let mut nodes = [("ant", "10.9.0.1/24"), ("bee", "10.9.0.2/24"), ("cat", "10.9.0.3/24")]
        .map(|(name, address)| Node::new(&switch, name, &[address]));
    nodes[0].up(&["--no-discovery"]);
    nodes[0].code();
    nodes[1].up(&["--no-discovery", "--join", "10.9.0.1:7470"]);
    wait("the knock", || nodes[0].sees_newcomer("bee"));
    approve(&nodes[0], &nodes[1].code());
    let token = nodes[1].cluster(&["token", "--expires", "5m"]);
    let token = String::from_utf8(token.stdout).unwrap();
    nodes[2].up(&["--no-discovery", "--token", token.trim()]);
    let all = wait("all reach all", || nodes.iter().all(|node| node.reached().len() == 3));
    println!("with a token a node was in after {:.2} s", all.as_secs_f64());
    // The token is used: another node says so and ends, instead of running on by itself.
    let dog = Node::new(&switch, "dog", &["10.9.0.4/24"]);
    let up = [PROGRAM, "up", "--no-discovery", "--token", token.trim()];
    let refused = dog.machine.command(&up).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("the token was used before"), "{said}");
    let nonsense = dog.machine.command(&[PROGRAM, "up", "--join", "nonsense"]).output().unwrap();
    let said = String::from_utf8_lossy(&nonsense.stderr).into_owned();
    assert!(nonsense.status.code() == Some(2) && said.contains("write HOST:PORT"), "{said}");
    let too_many = nodes[0].model(&["load", "builtin", "--nodes", "9"]);
    let said = String::from_utf8_lossy(&too_many.stderr).into_owned();
    assert!(!too_many.status.success() && said.contains("9 nodes are asked for, and 3 may"), "{said}");
    assert!(nodes[0].cluster(&["remove", "cat"]).status.success());
    wait("cat is told", || nodes[2].status().is_some_and(|status| status["removed"] == true));
    let text = String::from_utf8(nodes[2].cluster(&["status"]).stdout).unwrap();
    assert!(text.contains("was removed"), "{text}");
    let asked = nodes[2].model(&["infer", "builtin", "Hello"]);
    let said = String::from_utf8_lossy(&asked.stderr).into_owned();
    assert!(!asked.status.success() && said.contains("was removed from its cluster"), "{said}");
    assert!(nodes[0].cluster(&["stop"]).status.success());
    assert!(nodes[0].status().is_none(), "the agent has ended when the command does");
    let error = nodes[0].cluster(&["status"]);
    assert!(String::from_utf8_lossy(&error.stderr).contains("thunder up"));
}

impl Node {
    fn model(&self, words: &[&str]) -> Output {
        self.machine.command(&[&[PROGRAM, "model"], words].concat()).output().unwrap()
    }

    /// Asks this node's API for a completion, and returns the text.
    fn complete(&self, max_tokens: usize) -> String {
        complete_on(&self.machine, max_tokens)
    }

    /// Names of the nodes of the loaded model's ranks, once it is ready.
    fn ready_on(&self) -> Option<Vec<String>> {
        let status = self.status()?;
        let model = &status["models"][0];
        let ranks = model["ranks"].as_array()?;
        let names = ranks.iter().map(|rank| rank["node"].as_str().unwrap().to_owned());
        (model["ready"] == true).then(|| names.collect())
    }

    /// Asks this node's API for a stream in the background; curl writes it to a file.
    fn stream(&self, path: &str, body: &Value, to: &Path) -> Process {
        let (url, body) = (format!("http://127.0.0.1:8000{path}"), body.to_string());
        let json = "content-type: application/json";
        let to = to.to_str().unwrap();
        let words = ["curl", "-sSN", "--max-time", "120", "-o", to, "-H", json, "-d", &body, &url];
        Process(self.machine.command(&words).spawn().unwrap())
    }
}

/// Asks the API of a machine's node for a completion, and returns the text.
fn complete_on(machine: &Machine, max_tokens: usize) -> String {
    let body = format!(
        r#"{{"model":"builtin","prompt":"The sea","max_tokens":{max_tokens},"temperature":0,"ignore_eos":true}}"#
    );
    let url = "http://127.0.0.1:8000/v1/completions";
    let json = "content-type: application/json";
    let words = ["curl", "-sS", "--max-time", "120", "-H", json, "-d", &body, url];
    let output = machine.command(&words).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let answer: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{text}")).to_owned()
}

/// Text of a stream of any API, so far.
fn text_of(stream: &str) -> String {
    let data = stream
        .lines()
        .filter_map(|line| line.strip_prefix("data: ").or(line.strip_prefix('{').map(|_| line)));
    let event = |data: &str| {
        let event: Value = serde_json::from_str(data).ok()?;
        let places = [
            &event["choices"][0]["text"],
            &event["choices"][0]["delta"]["content"],
            // Anthropic's deltas, and those of the Responses API.
            &event["delta"]["text"],
            if event["type"] == "response.output_text.delta" { &event["delta"] } else { &Value::Null },
            &event["message"]["content"],
        ];
        places.iter().find_map(|place| place.as_str().map(str::to_owned))
    };
    data.filter_map(event).collect()
}

fn file(path: &Path) -> String {
    // The last character may have been written in part.
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}

const NAMES: [&str; 3] = ["ant", "bee", "cat"];

fn index_of(name: &str) -> usize {
    NAMES.iter().position(|known| *known == name).unwrap()
}

/// Kills a node as a power cut does. Returns its index.
fn kill(nodes: &mut [Node; 3], switch: &Switch, name: &str) -> usize {
    switch.set_cable(name, false).unwrap();
    nodes[index_of(name)].agent = None;
    index_of(name)
}

/// Brings a killed node back.
fn revive(nodes: &mut [Node; 3], switch: &Switch, index: usize) {
    switch.set_cable(NAMES[index], true).unwrap();
    nodes[index].up(&[]);
    wait("three nodes", || nodes.iter().all(|node| node.reached().len() == 3));
}

/// A group of two of three nodes answers; its head is killed with its machine while streams of all
/// APIs are in flight on another node. Two ranks have the same bits as two others.
#[test]
fn answers_in_flight_go_on_when_the_head_dies() {
    let has_curl = std::process::Command::new("curl").arg("--version").output().is_ok();
    if !can_make_machines() || !has_curl {
        let why = "it needs root, namespaces and curl";
        thunder_testing::skip("answers_in_flight_go_on_when_the_head_dies", why);
        return;
    }
    let switch = Switch::new().unwrap();
    let addresses: [&[&str]; 3] = [&["10.9.0.1/24"], &["10.9.0.2/24"], &["10.9.0.3/24"]];
    let mut nodes = three_nodes(&switch, "streams", addresses);
    let loaded = nodes[1].model(&["load", "builtin", "--nodes", "2", "--wait", "120"]);
    assert!(loaded.status.success(), "{}", String::from_utf8_lossy(&loaded.stderr));
    let mut ranks = Vec::new();
    wait("ready everywhere", || {
        ranks = nodes[0].ready_on().unwrap_or_default();
        nodes.iter().all(|node| node.ready_on().is_some())
    });
    assert_eq!(ranks.len(), 2, "{ranks:?}");
    let asked = index_of(&ranks[1]);
    let ask = json!([{"role": "user", "content": "What happens when a machine dies?"}]);
    let long = 1200;
    let requests = [
        (
            "/v1/completions",
            json!({"prompt": "The sea", "max_tokens": long, "ignore_eos": true, "temperature": 0}),
        ),
        // Sampled without a seed: the first head's draws go on.
        (
            "/v1/chat/completions",
            json!({"messages": ask, "max_tokens": long, "ignore_eos": true, "temperature": 1}),
        ),
        ("/v1/messages", json!({"messages": ask, "max_tokens": 100, "temperature": 0})),
        ("/v1/responses", json!({"input": "Hello", "temperature": 0})),
        ("/api/chat", json!({"messages": ask, "options": {"num_predict": 60, "temperature": 0}})),
    ];
    let folder = tempfile::tempdir().unwrap();
    let begin = |round: &str| -> Vec<(PathBuf, Process)> {
        let one = |(index, (path, body)): (usize, &(&str, Value))| {
            let mut body = body.clone();
            (body["model"], body["stream"]) = ("builtin".into(), true.into());
            let to = folder.path().join(format!("{round}-{index}"));
            let process = nodes[asked].stream(path, &body, &to);
            (to, process)
        };
        requests.iter().enumerate().map(one).collect()
    };
    let finish = |streams: &mut Vec<(PathBuf, Process)>| -> Vec<String> {
        streams.iter_mut().for_each(|(_, process)| assert!(process.0.wait().unwrap().success()));
        streams.iter().map(|(to, _)| file(to)).collect()
    };
    let undisturbed = finish(&mut begin("whole"));
    let mut streams = begin("disturbed");
    wait("some of the long answer", || text_of(&file(&streams[0].0)).len() > 200);
    let head = ranks[0].clone();
    let killed_at = Instant::now();
    let before = text_of(&file(&streams[0].0)).len();
    let down = kill(&mut nodes, &switch, &head);
    wait("the answer goes on", || text_of(&file(&streams[0].0)).len() > before + 400);
    println!("the streams went on {:.1} s after the head was killed", killed_at.elapsed().as_secs_f64());
    let disturbed = finish(&mut streams);
    for (index, ((path, _), (disturbed, undisturbed))) in
        requests.iter().zip(disturbed.iter().zip(&undisturbed)).enumerate()
    {
        assert!(!disturbed.contains("\"error\":{"), "{path}: {disturbed}");
        // The sampled answer has another seed each time.
        if index == 1 {
            let tokens = disturbed.matches("data: {").count();
            assert!(tokens > long - 100 && disturbed.contains("[DONE]"), "{tokens} pieces");
        } else {
            assert_eq!(
                text_of(disturbed),
                text_of(undisturbed),
                "{path}: the same text as without the fault"
            );
        }
    }
    assert!(disturbed[0].contains(": the model is formed again"), "the client is told");
    // Work is moved off a drained node without an error either.
    revive(&mut nodes, &switch, down);
    let mut ranks = Vec::new();
    wait("the model on two nodes", || {
        ranks = nodes[asked].ready_on().unwrap_or_default();
        ranks.len() == 2
    });
    let target = index_of(ranks.iter().find(|name| **name != NAMES[asked]).unwrap());
    let body = json!({"model": "builtin", "prompt": "The sea", "max_tokens": long, "ignore_eos": true, "temperature": 0, "stream": true});
    let to = folder.path().join("drained");
    let mut stream = nodes[asked].stream("/v1/completions", &body, &to);
    wait("some of the answer", || text_of(&file(&to)).len() > 200);
    assert!(nodes[down].cluster(&["drain", NAMES[target]]).status.success());
    assert!(stream.0.wait().unwrap().success());
    assert_eq!(text_of(&file(&to)), text_of(&undisturbed[0]), "drained");
    wait("the drained node is free", || {
        nodes[asked].ready_on().is_some_and(|ranks| !ranks.contains(&NAMES[target].to_owned()))
            && common::children(nodes[target].agent.as_ref().unwrap().0.id()).is_empty()
    });
    let logs = nodes[down].cluster(&["logs", NAMES[asked]]);
    let logs = String::from_utf8_lossy(&logs.stdout).into_owned();
    assert!(logs.contains("has to go on elsewhere") && logs.contains("is down"), "{logs}");
}

#[test]
fn the_demo_kills_a_head_and_the_answer_goes_on() {
    let output = common::thunder(&["cluster", "demo", "--json"]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    println!("{result}");
    assert_eq!((&result["same_text"], result["ranks"].as_array().map(Vec::len)), (&json!(true), Some(3)));
    assert_eq!(result["ranks_now"].as_array().map(Vec::len), Some(2));
}

/// The head of a model is killed with its machine while a request is in flight.
#[test]
fn a_model_on_three_nodes_goes_on_when_its_head_dies() {
    let has_curl = std::process::Command::new("curl").arg("--version").output().is_ok();
    if !can_make_machines() || !has_curl {
        let why = "it needs root, namespaces and curl";
        thunder_testing::skip("a_model_on_three_nodes_goes_on_when_its_head_dies", why);
        return;
    }
    let switch = Switch::new().unwrap();
    let addresses: [&[&str]; 3] = [&["10.9.0.1/24"], &["10.9.0.2/24"], &["10.9.0.3/24"]];
    let mut nodes = three_nodes(&switch, "a model", addresses);
    let load_began = Instant::now();
    let loaded = nodes[1].model(&["load", "builtin", "--nodes", "all", "--wait", "120"]);
    let load_time = load_began.elapsed();
    let said = String::from_utf8_lossy(&loaded.stderr).into_owned();
    assert!(loaded.status.success(), "{said}");
    println!("{said}");
    let mut ranks = Vec::new();
    wait("ready everywhere", || {
        ranks = nodes[0].ready_on().unwrap_or_default();
        nodes.iter().all(|node| node.ready_on().is_some())
    });
    assert_eq!(ranks.len(), 3, "{ranks:?}");
    // Every node answers, with the same text.
    let texts: Vec<String> = nodes.iter().map(|node| node.complete(40)).collect();
    assert!(texts[0].len() > 20 && texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    let long = nodes[0].complete(400);
    let head = ["ant", "bee", "cat"].iter().position(|name| *name == ranks[0]).unwrap();
    let asked = (head + 1) % 3;
    let (answer, killed_at) = std::thread::scope(|scope| {
        let asking = scope.spawn(|| nodes[asked].complete(400));
        std::thread::sleep(Duration::from_millis(150));
        // SAFETY: our own child, not yet waited for. Its guard ends the rank.
        unsafe { libc::kill(nodes[head].agent.as_ref().unwrap().0.id() as i32, libc::SIGKILL) };
        switch.set_cable(&ranks[0], false).unwrap();
        let killed_at = Instant::now();
        (asking.join().unwrap(), killed_at)
    });
    println!("the answer came {:.1} s after the head was killed", killed_at.elapsed().as_secs_f64());
    wait("a group of the others", || nodes[asked].ready_on().is_some_and(|ranks| ranks.len() == 2));
    // The answer that was in flight is part of it.
    let back = killed_at.elapsed();
    assert!(back < load_time + BACK_WITHIN, "back after {back:?}; loading took {load_time:?}");
    // The text is nonsense with near ties, which two ranks may break differently than three.
    assert_eq!(answer.chars().take(100).collect::<String>(), long.chars().take(100).collect::<String>());
    println!("all was back {back:?} after the loss; the first load took {load_time:?}");
    // The machine comes back, and the model is loaded on all again.
    switch.set_cable(&ranks[0], true).unwrap();
    nodes[head].agent = None;
    nodes[head].up(&[]);
    wait("three nodes", || nodes.iter().all(|node| node.reached().len() == 3));
    assert!(nodes[head].model(&["load", "builtin", "--nodes", "all", "--wait", "120"]).status.success());
    wait("three ranks", || nodes[asked].ready_on().is_some_and(|ranks| ranks.len() == 3));
    // The agent's children are its rank and the rank's guard.
    let children_of = |node: &Node| common::children(node.agent.as_ref().unwrap().0.id());
    assert_eq!(children_of(&nodes[0]).len(), 2);
    assert!(nodes[0].model(&["unload", "builtin"]).status.success());
    wait("no model", || {
        nodes.iter().all(|node| node.status().is_some_and(|s| s["models"] == serde_json::json!([])))
    });
    wait("no rank", || children_of(&nodes[0]).is_empty());
    let missing = nodes[0].model(&["load", "no/such-model"]);
    let said = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(!missing.status.success() && said.contains("no/such-model"), "{said}");
}

/// A copy of a model whose 4-bit weights are others: as after a fault of a disk or of memory.
fn copy_with_other_weights(from: &Path, to: &Path) {
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        let mut bytes = std::fs::read(file.path()).unwrap();
        if file.file_name().to_string_lossy().ends_with(".safetensors") {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
            for tensor in header.as_object().unwrap().values().filter(|tensor| tensor["dtype"] == "U32") {
                let [begin, end] = [0, 1].map(|at| tensor["data_offsets"][at].as_u64().unwrap() as usize);
                // Ranks compare samples from the middle of tensors when they form a group.
                let end = begin + (end - begin) / 3;
                bytes[8 + length..][begin..end].iter_mut().for_each(|byte| *byte ^= 0x5a);
            }
        }
        std::fs::write(to.join(file.file_name()), bytes).unwrap();
    }
}

/// Names of the nodes of each group, by the group's name.
fn groups(node: &Node) -> Vec<(String, Vec<String>)> {
    let status = node.status().unwrap_or_default();
    let models = status["models"].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let group = |model: &Value| {
        let ranks = model["ranks"].as_array().unwrap();
        (text(&model["name"]), ranks.iter().map(|rank| text(&rank["node"])).collect())
    };
    models.iter().filter(|model| model["ready"] == true).map(group).collect()
}

#[test]
fn models_are_planned_replicated_unloaded_when_idle_and_proved_before_they_are_announced() {
    let name = "models_are_planned_replicated_unloaded_when_idle_and_proved_before_they_are_announced";
    let has_curl = std::process::Command::new("curl").arg("--version").output().is_ok();
    if !can_make_machines() || !has_curl {
        thunder_testing::skip(name, "it needs root, namespaces and curl");
        return;
    }
    let switch = Switch::new().unwrap();
    let addresses: [&[&str]; 3] = [&["10.9.0.1/24"], &["10.9.0.2/24"], &["10.9.0.3/24"]];
    let nodes = three_nodes(&switch, "plans", addresses);
    // Nodes measure themselves and their links for the first plan.
    let planned = nodes[1].cluster(&["plan", "builtin", "--json"]);
    assert!(planned.status.success(), "{}", String::from_utf8_lossy(&planned.stderr));
    let plan: Value = serde_json::from_slice(&planned.stdout).unwrap();
    let speeds =
        plan["nodes"].as_array().unwrap().iter().map(|node| node["speed"]["memory_bytes_s"].as_f64());
    assert!(speeds.clone().count() == 3 && speeds.flatten().all(|speed| speed > 1e8), "{plan}");
    // They run on one kernel, so they also measured it together. A further plan keeps the figures.
    let figures = |plan: &Value, field: &str| {
        let nodes = plan["nodes"].as_array().unwrap().iter();
        nodes.map(|node| node[field]["memory_bytes_s"].as_f64().expect(field)).collect::<Vec<_>>()
    };
    let planned_so = |options: &[&str]| {
        let planned = nodes[0].cluster(&[&["plan", "builtin", "--json"], options].concat());
        assert!(planned.status.success(), "{}", String::from_utf8_lossy(&planned.stderr));
        serde_json::from_slice::<Value>(&planned.stdout).unwrap()
    };
    let (kept, again) = (planned_so(&["--split", "bee=3,ant=1"]), planned_so(&["--again"]));
    for field in ["speed", "together"] {
        let (first, kept, again) = (figures(&plan, field), figures(&kept, field), figures(&again, field));
        let sorted = |mut speeds: Vec<f64>| {
            speeds.sort_by(f64::total_cmp);
            speeds
        };
        assert_eq!(sorted(first.clone()), sorted(kept), "{field}");
        assert!(again.iter().all(|speed| !first.contains(speed)), "{field}: {first:?} {again:?}");
    }
    let given = kept["layouts"].as_array().unwrap();
    assert_eq!(given.len(), 2, "tensor and pipeline: {kept}");
    assert_eq!(given[0]["groups"][0]["weights"], json!([3, 1]), "{kept}");
    let layouts = plan["layouts"].as_array().unwrap();
    // Each set of nodes: 3 alone, 4 tensor, 4 pipeline; 2 and 3 replicas.
    assert_eq!(layouts.len(), 13, "{plan}");
    let pick = &layouts[plan["pick"]["index"].as_u64().unwrap() as usize];
    assert!(pick["why_not"].is_null() && pick["decode_tokens_s"].as_f64().unwrap() > 1.0, "{pick}");
    assert_eq!(pick["groups"].as_array().unwrap().len(), 1, "a single answer needs no replicas: {pick}");
    // Two replicas on nodes of their own, under one name.
    let loaded =
        nodes[0].model(&["load", "builtin", "--replicas", "2", "--idle-unload", "4s", "--wait", "120"]);
    let said = String::from_utf8_lossy(&loaded.stderr).into_owned();
    assert!(loaded.status.success() && said.contains("2 replicas"), "{said}");
    let both = groups(&nodes[0]);
    assert_eq!(both.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["builtin", "builtin#2"]);
    assert!(both[0].1.iter().all(|node| !both[1].1.contains(node)), "{both:?}");
    let texts: Vec<String> = nodes.iter().map(|node| node.complete(20)).collect();
    assert!(texts[0].len() > 10 && texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    let too_many = nodes[0].model(&["load", "builtin", "--replicas", "4", "--nodes", "1"]);
    assert!(String::from_utf8_lossy(&too_many.stderr).contains("4 replicas"), "{too_many:?}");
    // Without requests they are unloaded, and their memory is free; the next request loads one.
    wait("both sleep", || {
        let status = nodes[2].status().unwrap_or_default();
        status["models"].as_array().is_some_and(|models| models.iter().all(|model| model["asleep"] == true))
    });
    let has_ranks = |node: &Node| !common::children(node.agent.as_ref().unwrap().0.id()).is_empty();
    wait("no rank runs", || !nodes.iter().any(has_ranks));
    assert!(nodes[0].cluster(&["health"]).status.success(), "a model that sleeps is healthy");
    assert_eq!(nodes[2].complete(20), texts[0]);
    assert_eq!(groups(&nodes[2]).len(), 1, "one was enough");
    let refused = nodes[0].model(&["unload", "builtin#2"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is a replica"), "{refused:?}");
    assert!(nodes[0].model(&["unload", "builtin"]).status.success());
    wait("no model", || nodes.iter().all(|node| node.status().is_some_and(|s| s["models"] == json!([]))));

    // One node computes with other weights.
    let path = common::thunder(&["model", "path", "builtin"]).output().unwrap();
    let builtin = PathBuf::from(String::from_utf8(path.stdout).unwrap().trim());
    let folder = tempfile::tempdir().unwrap();
    let (good, wrong) = (folder.path().join("model"), folder.path().join("wrong"));
    [&good, &wrong].iter().for_each(|path| std::fs::create_dir(path).unwrap());
    for file in std::fs::read_dir(&builtin).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), good.join(file.file_name())).unwrap();
    }
    copy_with_other_weights(&builtin, &wrong);
    let (good, wrong) = (good.display().to_string(), wrong.display().to_string());
    nodes[1].machine.run(&format!("mount --bind {wrong} {good}")).unwrap();
    let loaded = nodes[0].model(&["load", &good, "--nodes", "all", "--wait", "120"]);
    let said = String::from_utf8_lossy(&loaded.stderr).into_owned();
    assert!(!loaded.status.success() && said.contains("on bee computes wrongly"), "{said}");
    assert!(groups(&nodes[0]).is_empty(), "it is not announced");
    assert!(nodes[0].model(&["unload", &good]).status.success());
    wait("no rank is left", || !nodes.iter().any(has_ranks));
    nodes[1].machine.run(&format!("umount {good}")).unwrap();
    let loaded = nodes[0].model(&["load", &good, "--nodes", "all", "--wait", "120"]);
    assert!(loaded.status.success(), "{}", String::from_utf8_lossy(&loaded.stderr));
    assert_eq!(groups(&nodes[0]).first().map(|(_, nodes)| nodes.len()), Some(3));
}

/// With `--on-loss wait` a model stays on its nodes. A request waits until the lost one is there
/// again; unloading is no fault in the log.
#[test]
fn a_model_that_waits_for_its_node_is_not_placed_elsewhere() {
    let has_curl = std::process::Command::new("curl").arg("--version").output().is_ok();
    if !can_make_machines() || !has_curl {
        let why = "it needs root, namespaces and curl";
        thunder_testing::skip("a_model_that_waits_for_its_node_is_not_placed_elsewhere", why);
        return;
    }
    let switch = Switch::new().unwrap();
    let addresses: [&[&str]; 3] = [&["10.9.0.1/24"], &["10.9.0.2/24"], &["10.9.0.3/24"]];
    let mut nodes = three_nodes(&switch, "waits", addresses);
    let load = ["load", "builtin", "--split", "bee=2,cat=1", "--on-loss", "wait", "--wait", "120"];
    let loaded = nodes[0].model(&load);
    assert!(loaded.status.success(), "{}", String::from_utf8_lossy(&loaded.stderr));
    let said = |node: &Node, words: &[&str]| {
        String::from_utf8_lossy(&node.machine.command(&[&[PROGRAM], words].concat()).output().unwrap().stdout)
            .into_owned()
    };
    let detail = said(&nodes[0], &["model", "status", "--detail"]);
    assert!(detail.contains("waits for the node"), "{detail}");
    wait("the ranks' states", || {
        let detail = said(&nodes[0], &["model", "status", "--detail"]);
        // The plan says which of the two is the head.
        ["bee", "cat"].into_iter().zip(["cat", "bee"]).any(|(head, other)| {
            let head = detail.contains(&format!("rank 0 on {head}: ready"));
            head && detail.contains(&format!("rank 1 on {other}: running"))
        })
    });
    let text = nodes[0].complete(40);
    let lost = kill(&mut nodes, &switch, "cat");
    wait("the model waits", || said(&nodes[0], &["cluster", "status"]).contains("waits for cat"));
    let health = said(&nodes[0], &["cluster", "health"]);
    assert!(health.contains("builtin is not ready: waits for cat"), "{health}");
    let status = nodes[0].status().unwrap();
    assert_eq!(status["models"][0]["on_loss"], "wait", "{status}");
    assert_eq!(status["models"][0]["lost"], json!(["cat"]), "{status}");
    let (answer, agent) = std::thread::scope(|scope| {
        let asking = scope.spawn(|| nodes[0].complete(40));
        // It would have been placed anew by now.
        std::thread::sleep(Duration::from_secs(4));
        assert_eq!(nodes[0].ready_on(), None);
        switch.set_cable(NAMES[lost], true).unwrap();
        let up = nodes[lost].machine.command(&[PROGRAM, "up"]).stderr(Stdio::null()).spawn().unwrap();
        (asking.join().unwrap(), Process(up))
    });
    nodes[lost].agent = Some(agent);
    assert_eq!(answer, text);
    wait("its nodes", || {
        nodes[0].ready_on().is_some_and(|mut ranks| {
            ranks.sort();
            ranks == ["bee", "cat"]
        })
    });
    // A node that is removed for good is not waited for.
    kill(&mut nodes, &switch, "cat");
    wait("the model waits", || said(&nodes[0], &["cluster", "status"]).contains("waits for cat"));
    assert!(nodes[0].cluster(&["remove", "cat"]).status.success());
    wait("another group", || nodes[0].ready_on().is_some_and(|ranks| !ranks.contains(&"cat".to_owned())));
    // What a rank says of the others' end is no fault when the model is unloaded.
    let load = ["load", "builtin", "--nodes", "all", "--wait", "120"];
    assert!(nodes[0].model(&load).status.success());
    let last = |node: &Node| {
        let lines = said(node, &["cluster", "logs", "--json"]);
        lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()?["number"].as_u64()).max()
    };
    let before: Vec<_> = nodes[..2].iter().map(last).collect();
    assert!(nodes[0].model(&["unload", "builtin"]).status.success());
    wait("no rank", || {
        nodes[..2].iter().all(|node| common::children(node.agent.as_ref().unwrap().0.id()).is_empty())
    });
    std::thread::sleep(Duration::from_secs(1));
    for (node, before) in nodes[..2].iter().zip(before) {
        let lines = said(node, &["cluster", "logs", "--json"]);
        let new = lines.lines().filter(|line| {
            let line: Value = serde_json::from_str(line).unwrap_or_default();
            line["number"].as_u64() > before
        });
        new.for_each(|line| assert!(!line.contains("error: "), "{line}"));
    }
}

#[test]
fn two_stages_of_two_nodes_answer_and_one_stage_less_goes_on() {
    let has_curl = std::process::Command::new("curl").arg("--version").output().is_ok();
    if !can_make_machines() || !has_curl {
        let why = "it needs root, namespaces and curl";
        thunder_testing::skip("two_stages_of_two_nodes_answer_and_one_stage_less_goes_on", why);
        return;
    }
    let switch = Switch::new().unwrap();
    let addresses: [&[&str]; 3] = [&["10.9.0.1/24"], &["10.9.0.2/24"], &["10.9.0.3/24"]];
    let mut nodes = Vec::from(three_nodes(&switch, "stages", addresses));
    let mut dog = Node::new(&switch, "dog", &["10.9.0.4/24"]);
    dog.up(&[]);
    let code = dog.code();
    wait("the fourth node is found", || nodes[0].sees_newcomer("dog"));
    approve(&nodes[0], &code);
    nodes.push(dog);
    wait("all reach all", || nodes.iter().all(|node| node.reached().len() == 4));
    let load = |words: &[&str]| {
        let loaded = nodes[1].model(&[&["load", "builtin", "--wait", "120"], words].concat());
        (loaded.status.success(), String::from_utf8_lossy(&loaded.stderr).into_owned())
    };
    let (is_loaded, said) = load(&["--nodes", "3", "--", "--stages", "2"]);
    assert!(!is_loaded && said.contains("--stages 2 does not divide 3 nodes"), "{said}");
    let (is_loaded, said) = load(&["--nodes", "ant"]);
    assert!(is_loaded, "{said}");
    let alone = nodes[0].complete(60);
    for words in [&["--nodes", "all"][..], &["--split", "ant=3,bee=1,cat=2,dog=1"]] {
        let (is_loaded, said) = load(&[words, &["--", "--stages", "2"]].concat());
        assert!(is_loaded, "{said}");
        wait("four ranks", || nodes[2].ready_on().is_some_and(|ranks| ranks.len() == 4));
        assert_eq!(nodes[2].complete(60), alone, "{words:?}");
    }
    // Three nodes are left: a stage of each of two goes on.
    nodes[2].agent = None;
    wait("a group of two", || nodes[0].ready_on().is_some_and(|ranks| ranks.len() == 2));
    assert_eq!(nodes[0].complete(60), alone);
}
