//! Keys, limits, usage and HTTPS of two nodes of a cluster, as an operator and users see them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(unix)]

mod common;
mod operating;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::collector::collector;
use common::{Ending, holds};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(60);

/// A node with its own data folder.
struct Node {
    folder: tempfile::TempDir,
    agent: Option<Ending>,
}

impl Node {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), agent: None }
    }

    /// The node's data folder, which the first command makes, closed to other users.
    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn thunder(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_thunder"));
        for name in ["THUNDER_API_KEY", "THUNDER_STORE", "THUNDER_URL", "THUNDER_RANK"] {
            command.env_remove(name);
        }
        command.args(words).env("THUNDER_DATA", self.data()).stdin(Stdio::null()).output().unwrap()
    }

    /// What a command prints; it must succeed.
    fn text(&self, words: &[&str]) -> String {
        let output = self.thunder(words);
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn up(&mut self, name: &str, options: &[&str]) {
        let fixed = ["up", "--name", name, "--listen", "127.0.0.1:0", "--port", "0", "--no-discovery"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_thunder"));
        command.args(fixed).args(options).env("THUNDER_DATA", self.data()).stdin(Stdio::null());
        command.env_remove("THUNDER_API_KEY").env_remove("THUNDER_STORE");
        // Everything that there is to say, to look for secrets in it.
        let log = std::fs::File::create(self.log()).unwrap();
        command.env("RUST_LOG", "trace").stdout(Stdio::null()).stderr(log);
        self.agent = Some(Ending(command.spawn().unwrap()));
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    fn status(&self) -> Option<Value> {
        let output = self.thunder(&["cluster", "status", "--json"]);
        serde_json::from_slice(&output.stdout).ok()
    }

    /// Where this node serves the API.
    fn api(&self) -> String {
        let mut api = None;
        wait("the API", || {
            let status = self.status().unwrap_or_default();
            let own = status["members"].as_array().into_iter().flatten().find(|m| m["id"] == status["me"]);
            api = own.and_then(|own| own["report"]["api"].as_str().map(str::to_owned));
            api.is_some()
        });
        let api = api.unwrap();
        if api.contains("://") { api } else { format!("http://{api}") }
    }

    fn certificate(&self) -> PathBuf {
        self.data().join("server/tls-cert.pem")
    }
}

fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(30));
    }
}

/// Status, head and body of a request.
fn ask(url: &str, key: &str, body: Option<&Value>, certificate: Option<&Path>) -> (u16, String, Value) {
    let mut command = Command::new("curl");
    command.args(["-sS", "-i", "--max-time", "60", "-H", &format!("authorization: Bearer {key}")]);
    if let Some(body) = body {
        command.args(["-H", "content-type: application/json", "-d", &body.to_string()]);
    }
    if let Some(certificate) = certificate {
        command.arg("--cacert").arg(certificate);
    }
    let output = command.arg(url).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{url}: {}", String::from_utf8_lossy(&output.stderr));
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{url}: {text}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_ascii_lowercase(), serde_json::from_str(body).unwrap_or_default())
}

/// A request's trace has spans of both ranks below these phases, with their nodes and, where they
/// are given, their tokens.
fn spans_of_ranks(sent: &str, request: &str, phases: &[(&str, Option<&str>)]) {
    let bodies = serde_json::Deserializer::from_str(sent).into_iter::<Value>();
    let of = |body: Value| body["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().cloned();
    let spans: Vec<Value> = bodies.filter_map(|body| of(body.unwrap())).flatten().collect();
    let value = |span: &Value, name: &str| {
        let found = span["attributes"].as_array().unwrap().iter().find(|one| one["key"] == name).cloned();
        found.map(|one| {
            one["value"]["intValue"].as_str().or(one["value"]["stringValue"].as_str()).unwrap().to_owned()
        })
    };
    let root = spans.iter().find(|span| span["name"] == request).unwrap();
    let parts = |of: &Value| -> Vec<&Value> {
        spans.iter().filter(|span| span["parentSpanId"] == of["spanId"]).collect()
    };
    for (name, tokens) in phases {
        let phase = parts(root).into_iter().find(|span| span["name"] == *name).unwrap();
        let ranks = parts(phase);
        let seen = |what| -> Vec<_> { ranks.iter().map(|rank| value(rank, what).unwrap()).collect() };
        assert_eq!(seen("thunder.rank"), ["0", "1"], "{ranks:?}");
        let mut nodes = seen("thunder.node");
        nodes.sort();
        assert_eq!(nodes, ["ant", "bee"]);
        assert!(seen("thunder.steps").iter().all(|taken| taken != "0"), "{ranks:?}");
        assert!(
            tokens.is_none_or(|tokens| seen("thunder.tokens").iter().all(|took| took == tokens)),
            "{ranks:?}"
        );
        assert!(seen("thunder.computed_us").iter().all(|us| us.parse::<u64>().unwrap() > 0), "{ranks:?}");
        assert!(seen("thunder.waited_us").iter().any(|us| us.parse::<u64>().unwrap() > 0), "{ranks:?}");
    }
}

/// A request to a node's gateway: its path, the key, and the body.
type Ask<'a> = dyn Fn(&str, &str, Option<&Value>) -> (u16, String, Value) + 'a;

/// A policy holds at every gateway; each node keeps its clients' texts with its own key, and any
/// node reads all of them.
fn kept_prompts(ant: &Node, bee: &Node, on_ant: &Ask<'_>, on_bee: &Ask<'_>, admin: &str) {
    let tenants = bee.text(&["keys", "create", "tenants", "--team", "tenants"]);
    wait("ant has the key", || on_ant("/v1/models", &tenants, None).0 == 200);
    ant.text(&["audit", "keep", "--team", "tenants", "--days", "7"]);
    wait("bee has the policy", || bee.text(&["audit", "keep"]).contains("tenants"));
    let chat = |said: &str, stream: bool| {
        let content = format!("{said} for ann@example.org");
        json!({
            "model": "builtin", "max_tokens": 3, "ignore_eos": true, "stream": stream,
            "messages": [{"role": "user", "content": content}],
        })
    };
    let path = "/v1/chat/completions";
    // The model's head is one of the two; the other node's gateway relays. Others are not kept.
    for (ask, said) in [(on_ant, "a letter by ant"), (on_bee, "a letter by bee")] {
        assert_eq!(ask(path, &tenants, Some(&chat(said, false))).0, 200);
        assert_eq!(ask(path, &tenants, Some(&chat(said, true))).0, 200);
        assert_eq!(ask(path, admin, Some(&chat("hidden", false))).0, 200);
    }
    assert_eq!(on_bee("/admin/prompts", &tenants, None).0, 403);
    for ask in [on_ant, on_bee] {
        let (status, _, page) = ask("/admin/prompts?key=tenants&limit=3", admin, None);
        assert_eq!((status, &page["missing"]), (200, &json!([])), "{page}");
        let (_, _, rest) =
            ask(&format!("/admin/prompts?before={}", page["next"].as_str().unwrap()), admin, None);
        let all = [&page, &rest].map(|page| page["prompts"].as_array().unwrap().clone()).concat();
        let seen: Vec<_> = all
            .iter()
            .map(|one| (one["node"].as_str().unwrap(), one["prompt"][0]["text"].as_str().unwrap()))
            .collect();
        let (by_ant, by_bee) = ("a letter by ant for [email]", "a letter by bee for [email]");
        assert_eq!(seen, [("bee", by_bee), ("bee", by_bee), ("ant", by_ant), ("ant", by_ant)]);
        assert!(all.iter().all(|one| one["answer"][0]["role"] == "assistant"), "{all:?}");
        // Of a stream and of a whole answer the same.
        assert_eq!((&all[0]["answer"], &all[2]["answer"]), (&all[1]["answer"], &all[3]["answer"]));
    }
    let text = bee.text(&["audit", "prompts", "--limit", "2"]);
    assert!(text.contains(" on bee\n  user: a letter by bee for [email]"), "{text}");
    // Each node has noted that its texts were read, and at which node.
    let noted = |node: &Node| node.text(&["audit", "--action", "prompts.read", "--format", "jsonl"]);
    wait("the audit log", || {
        let all = noted(ant);
        let of = |node: &str, at: &str| {
            all.lines().any(|line| {
                line.contains(&format!("\"node\":\"{node}\"")) && line.contains(&format!("\"at\":\"{at}\""))
            })
        };
        of("ant", "bee") && of("bee", "ant")
    });
    // Encrypted, each with its own key.
    let keys = [ant.data().join("server/prompts.key"), bee.folder.path().join("texts.key")];
    let [ants, bees] = keys.map(|path| std::fs::read_to_string(path).unwrap());
    assert_ne!(ants, bees);
    assert!(!bee.data().join("server/prompts.key").exists());
    for node in [ant, bee] {
        assert!(node.data().join("server/prompts").exists() && !holds(&node.data(), "letter"));
    }
    bee.text(&["audit", "keep", "--off"]);
    wait("ant has the policy", || !ant.text(&["audit", "keep"]).contains("tenants"));
}

#[test]
fn keys_limits_and_usage_are_the_clusters_at_every_nodes_gateway() {
    if Command::new("curl").arg("--version").output().is_err() {
        thunder_testing::skip(
            "keys_limits_and_usage_are_the_clusters_at_every_nodes_gateway",
            "it needs curl",
        );
        return;
    }
    let (mut ant, mut bee) = (Node::new(), Node::new());
    let (collector, traces) = collector();
    // Made before the first start: the cluster's from then on.
    let admin = ant.text(&["keys", "create", "boss", "--role", "admin"]);
    ant.up("ant", &["--tls"]);
    wait("ant", || ant.status().is_some());
    let address = ant.status().unwrap()["members"][0]["addresses"][0].as_str().unwrap().to_owned();
    // Its texts' key lies elsewhere.
    let key = bee.folder.path().join("texts.key");
    bee.up("bee", &["--join", &address, "--otlp", &collector, "--prompts-key", key.to_str().unwrap()]);
    let mut code = None;
    wait("a code", || {
        code = bee.status().and_then(|status| status["code"].as_str().map(str::to_owned));
        code.is_some()
    });
    wait("the knock", || ant.thunder(&["cluster", "approve", code.as_deref().unwrap()]).status.success());
    let (ant_api, bee_api) = (ant.api(), bee.api());
    assert!(ant_api.starts_with("https://127.0.0.1:"), "{ant_api}");
    let certificate = ant.certificate();
    let on_ant = |path: &str, key: &str, body: Option<&Value>| {
        ask(&format!("{ant_api}{path}"), key, body, Some(&certificate))
    };
    let on_bee =
        |path: &str, key: &str, body: Option<&Value>| ask(&format!("{bee_api}{path}"), key, body, None);
    wait("bee has the cluster's keys", || on_bee("/v1/models", &admin, None).0 == 200);
    assert_eq!((on_ant("/v1/models", "th-wrong", None).0, on_bee("/v1/models", "", None).0), (401, 401));

    // Any node makes keys for all.
    let secret = bee.text(&["keys", "create", "ci", "--team", "lab", "--requests-per-minute", "6"]);
    wait("ant has the key", || on_ant("/v1/models", &secret, None).0 == 200);
    assert_eq!(on_ant("/admin/keys", &secret, None).0, 403);
    assert_eq!(on_bee("/admin/cluster", &admin, None).0, 200);
    assert!(bee.text(&["keys", "list"]).contains("boss"));

    bee.text(&["model", "load", "builtin", "--nodes", "2"]);
    wait("the model", || ant.status().is_some_and(|status| status["models"][0]["ready"] == true));
    wait("the model", || bee.status().is_some_and(|status| status["models"][0]["ready"] == true));
    let question = json!({"model": "builtin", "prompt": "The sea", "max_tokens": 3, "ignore_eos": true});
    let (mut answered, mut refused) = (0, 0);
    for round in 0..5 {
        for asked in [on_ant("/v1/completions", &secret, Some(&question)), {
            let streamed = json!({"stream": true});
            let mut question = question.clone();
            question.as_object_mut().unwrap().extend(streamed.as_object().unwrap().clone());
            on_bee("/v1/completions", &secret, Some(&question))
        }] {
            match asked {
                (200, head, _) => {
                    answered += 1;
                    let left = format!("x-ratelimit-remaining-requests: {}", 6 - answered);
                    assert!(head.contains(&left), "{head}");
                }
                (429, head, body) => {
                    refused += 1;
                    assert_eq!(body["error"]["param"], "key.requests_per_minute");
                    assert!(head.contains("retry-after: "), "{head}");
                }
                (status, _, body) => panic!("round {round}: {status}: {body}"),
            }
        }
    }
    assert_eq!((answered, refused), (6, 4), "one limit for both gateways");

    // Each gateway has its own clients' records; any node reports all.
    let mut usage = Value::Null;
    wait("the refusals' records", || {
        usage = serde_json::from_str(&ant.text(&["usage", "--by", "key,node", "--format", "json"])).unwrap();
        usage["total"]["refused"] == 4
    });
    let total = &usage["total"];
    assert_eq!((&total["requests"], &total["completion_tokens"]), (&json!(6), &json!(18)), "{usage}");
    assert_eq!(usage["missing"], json!([]));
    let rows = bee.text(&["usage", "--requests", "--format", "csv"]);
    assert_eq!(rows.lines().filter(|line| line.contains(",length,200,")).count(), 6, "{rows}");
    let (_, _, me) = on_bee("/admin/me", &secret, None);
    assert_eq!(
        (&me["usage"]["today"]["requests"], &me["limits"][0]["used"]),
        (&json!(6), &json!(6.0)),
        "{me}"
    );

    // Acts are in the log of the node where they were made.
    let audit = ant.text(&["audit", "--format", "jsonl"]);
    assert!(audit.contains("\"node\":\"bee\"") && audit.lines().count() == 4, "{audit}");
    assert!(ant.text(&["audit", "--verify"]).contains("bee: 2 entries are intact"));
    for action in ["node.approve", "model.load"] {
        assert_eq!(ant.text(&["audit", "--action", action, "--format", "jsonl"]).lines().count(), 1);
    }

    // Texts that are only read are counted as well, at every gateway.
    let read = json!({"model": "builtin", "input": ["The sea", "The land"]});
    let (status, _, vectors) = on_bee("/v1/embeddings", &admin, Some(&read));
    assert_eq!((status, vectors["data"].as_array().map(Vec::len)), (200, Some(2)), "{vectors}");
    let took = vectors["usage"]["prompt_tokens"].as_u64().unwrap();
    let counted: Value =
        serde_json::from_str(&ant.text(&["usage", "--by", "key", "--format", "json"])).unwrap();
    let rows = counted["rows"].as_array().unwrap();
    let boss = rows.iter().find(|row| row["key"] == "boss").unwrap_or_else(|| panic!("{counted}"));
    assert!(took > 2 && boss["prompt_tokens"] == took && boss["completion_tokens"] == 0, "{counted}");
    // Bee's gateway has sent traces of its requests, with where their time went.
    wait("the traces", || {
        let traces = traces.lock().unwrap();
        let has = |part: &str| traces.contains(part);
        let parts = ["\"queue\"", "\"prefill\"", "\"decode\""];
        has("POST /v1/completions") && has("POST /v1/embeddings") && parts.iter().all(|part| has(part))
    });
    let sent = traces.lock().unwrap().clone();
    assert!(!sent.contains("The sea") && !sent.contains(&secret), "{sent}");
    spans_of_ranks(&sent, "POST /v1/completions", &[("prefill", None), ("decode", Some("3"))]);
    spans_of_ranks(&sent, "POST /v1/embeddings", &[("prefill", None)]);
    kept_prompts(&ant, &bee, &on_ant, &on_bee, &admin);

    // What helpers get, and what nodes log, has no secret and no text of a request.
    let bundle = ant.folder.path().join("bundle.json");
    ant.text(&["support", "bundle", bundle.to_str().unwrap()]);
    let bundle = std::fs::read_to_string(bundle).unwrap();
    let parts: Value = serde_json::from_str(&bundle).unwrap();
    assert_eq!(
        (&parts["health"]["status"], &parts["keys"]),
        (&json!("ok"), &json!({"active": 3})),
        "{bundle}"
    );
    assert!(parts["requests"]["records"].as_array().is_some_and(|records| records.len() > 5), "{bundle}");
    assert!(!bundle.contains("boss") && !bundle.contains("\"lab\""), "{bundle}");
    let logs = [&ant, &bee].map(|node| std::fs::read_to_string(node.log()).unwrap());
    assert!(logs.iter().all(|log| log.len() > 1000), "{logs:?}");
    for text in [&bundle, &logs[0], &logs[1]] {
        for hidden in [&admin, &secret, "The sea", "letter"] {
            assert!(!text.contains(hidden), "{hidden} is in {text}");
        }
    }

    // Revoked on one node, refused on the other.
    ant.text(&["keys", "revoke", "ci"]);
    wait("bee refuses the key", || {
        let (status, _, body) = on_bee("/v1/models", &secret, None);
        (status, body["error"]["code"].as_str()) == (401, Some("revoked_api_key"))
    });
    // A list without a node that is gone is refused, unless it may have holes; a table says so.
    drop(bee);
    let (_, _, page) = on_ant("/admin/prompts", &admin, None);
    assert_eq!(page["prompts"].as_array().map(Vec::len), Some(2), "{page}");
    assert!(page["missing"][0].as_str().is_some_and(|why| why.contains("bee")), "{page}");
    let whole = ant.thunder(&["audit", "prompts", "--format", "jsonl"]);
    assert!(String::from_utf8_lossy(&whole.stderr).contains("not complete"), "{whole:?}");
    assert_eq!(ant.text(&["audit", "prompts", "--format", "jsonl", "--partial"]).lines().count(), 2);
    wait("bee is down", || {
        let table = ant.thunder(&["usage"]);
        String::from_utf8_lossy(&table.stderr).contains("bee")
    });
    let whole = ant.thunder(&["usage", "--requests", "--format", "csv"]);
    assert!(String::from_utf8_lossy(&whole.stderr).contains("not complete"), "{whole:?}");
    let partial = ant.text(&["usage", "--requests", "--format", "csv", "--partial"]);
    assert!(partial.lines().count() >= 4, "{partial}");
    // A node that joins by a token, and one that is stopped, are in the log.
    let token = ant.text(&["cluster", "token"]);
    let mut cat = Node::new();
    cat.up("cat", &["--token", &token]);
    wait("cat has joined", || ant.text(&["audit", "--action", "node.join", "--partial"]).contains("cat"));
    let joined = ant.text(&["audit", "--action", "node.join", "--format", "jsonl", "--partial"]);
    assert!(joined.contains("\"actor\":\"token\"") && joined.contains("127.0.0.1:"), "{joined}");
    wait("cat has the keys", || {
        String::from_utf8_lossy(&cat.thunder(&["keys", "list"]).stdout).contains("boss")
    });
    cat.text(&["cluster", "stop"]);
    drop(cat.agent.take());
    assert!(cat.text(&["audit", "--format", "jsonl", "--partial"]).contains("\"cluster.stop\""));
    // Without an agent, the cluster's keys are read, and not changed.
    drop(ant.agent.take());
    assert!(ant.text(&["keys", "list"]).contains("boss"));
    let offline = ant.thunder(&["keys", "create", "late"]);
    assert!(String::from_utf8_lossy(&offline.stderr).contains("thunder up"), "{offline:?}");
}

/// What a request gets, and the connection, which stays open.
fn begun(api: &str, request: &str) -> TcpStream {
    let mut stream = TcpStream::connect(api.strip_prefix("http://").unwrap()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

fn said(mut stream: TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_nodes_gateway_takes_what_its_options_allow_and_a_reload_changes_them() {
    let mut node = Node::new();
    let page = "origin: https://chat.example\r\n";
    let file = node.folder.path().join("node.toml");
    let settings = |origin: &str, mib: u32| {
        let text = format!(
            "allow-origin = [\"{origin}\"]\nbody-limit = {mib}\nread-timeout = 4\nmax-connections = 1\n"
        );
        std::fs::write(&file, text).unwrap();
    };
    settings("https://chat.example", 1);
    node.up("ant", &["--config", file.to_str().unwrap()]);
    wait("the node", || node.status().is_some());
    let api = node.api();
    let health = format!("GET /health/live HTTP/1.1\r\nhost: localhost\r\n{page}\r\n");
    let reply = said(begun(&api, &health));
    assert!(reply.contains("access-control-allow-origin: https://chat.example\r\n"), "{reply}");
    let preflight = format!(
        "OPTIONS /v1/completions HTTP/1.1\r\nhost: localhost\r\n{page}access-control-request-method: POST\r\n\r\n"
    );
    let reply = said(begun(&api, &preflight));
    assert!(reply.starts_with("HTTP/1.1 200") && reply.contains("allow-methods: GET,POST"), "{reply}");
    // A body of 2 MiB of which nothing comes holds the only place until its time is over.
    let post = |mib: usize| {
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            mib << 20
        )
    };
    assert!(said(begun(&api, &post(2))).starts_with("HTTP/1.1 413"), "more than --body-limit");
    // The place of the request before may be free only in a moment.
    let slow = loop {
        let slow = begun(&api, &post(1));
        slow.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let is_refused = slow.peek(&mut [0]).is_ok();
        slow.set_read_timeout(Some(LIMIT)).unwrap();
        if !is_refused {
            break slow;
        }
    };
    wait("a full gateway", || said(begun(&api, &health)).starts_with("HTTP/1.1 503"));
    // A body that nobody reads must not take the refusal away.
    for _ in 0..20 {
        let reply = said(begun(&api, &(post(1) + &" ".repeat(1 << 20))));
        assert!(reply.starts_with("HTTP/1.1 503"), "{reply}");
    }
    let reply = said(slow);
    assert!(reply.starts_with("HTTP/1.1 408") && reply.contains("within 4s"), "{reply}");
    settings("https://other.example", 3);
    // The only place may be free only in a moment.
    let mut reloaded = String::new();
    wait("a reload", || {
        let output = node.thunder(&["config", "reload", "--json"]);
        let is_refused = String::from_utf8_lossy(&output.stderr).contains("too many requests at once");
        assert!(output.status.success() || is_refused, "{output:?}");
        reloaded = String::from_utf8(output.stdout).unwrap().trim().to_owned();
        output.status.success()
    });
    assert_eq!(reloaded, json!({"applied": ["allow-origin", "body-limit"], "restart": []}).to_string());
    let reply = said(begun(&api, &health));
    assert!(!reply.contains("allow-origin") && reply.contains("vary: origin"), "{reply}");
    assert!(said(begun(&api, &post(2))).starts_with("HTTP/1.1 408"), "--body-limit is 3 MiB now");
}
