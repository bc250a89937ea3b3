//! A node as its operator runs it: backups, health, metrics, acts.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use serde_json::{Value, json};

use super::{Node, ask, wait};

/// Whether the test can run here.
fn has_curl(test: &str) -> bool {
    let has = Command::new("curl").arg("--version").output().is_ok();
    if !has {
        thunder_testing::skip(test, "it needs curl");
    }
    has
}

/// The body of a GET, as text.
fn text(url: &str, key: &str) -> (u16, String) {
    let header = format!("authorization: Bearer {key}");
    let output = Command::new("curl").args(["-sS", "-w", "%{http_code}", "-H", &header, url]).output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    let (body, status) = text.split_at(text.len() - 3);
    (status.parse().unwrap(), body.to_owned())
}

#[test]
fn a_node_restored_from_a_backup_asks_for_its_keys() {
    if !has_curl("a_node_restored_from_a_backup_asks_for_its_keys") {
        return;
    }
    let mut ant = Node::new();
    let admin = ant.text(&["keys", "create", "boss", "--role", "admin"]);
    ant.text(&["limits", "team", "lab", "--requests-per-minute", "5"]);
    ant.text(&["config", "init", "--node"]);
    ant.up("ant", &[]);
    let models = format!("{}/v1/models", ant.api());
    assert_eq!((ask(&models, "", None, None).0, ask(&models, &admin, None, None).0), (401, 200));
    let mut new = Node::new();
    let backup = new.folder.path().join("backup");
    let said = ant.text(&["backup", backup.to_str().unwrap()]);
    assert!(said.contains("1 keys") && said.contains("1 files"), "{said}");
    drop(ant);
    // A folder that was made for it, as `mkdir` makes one.
    std::fs::create_dir(new.data()).unwrap();
    std::fs::set_permissions(new.data(), std::fs::Permissions::from_mode(0o755)).unwrap();
    assert!(new.text(&["restore", backup.to_str().unwrap()]).contains("1 keys"));
    assert!(new.data().join("server/node.toml").exists());
    for round in 0..2 {
        new.up("ant", &[]);
        let api = new.api();
        for path in ["/v1/models", "/admin/keys", "/metrics"] {
            for key in ["", "th-wrong"] {
                assert_eq!(ask(&format!("{api}{path}"), key, None, None).0, 401, "{round} {path} {key}");
            }
            assert_eq!(ask(&format!("{api}{path}"), &admin, None, None).0, 200, "{round} {path}");
        }
        let made = ask(&format!("{api}/admin/keys"), "", Some(&json!({"name": "x", "role": "admin"})), None);
        assert_eq!(made.0, 401);
        assert!(new.text(&["keys", "list"]).contains("boss"));
        assert!(new.text(&["limits", "show"]).contains("lab"));
        if round == 0 {
            // The node forgets its cluster, and not its keys.
            new.text(&["cluster", "leave"]);
        }
        drop(new.agent.take());
    }
}

#[test]
fn a_node_tells_its_health_and_its_metrics_whatever_is_loaded() {
    if !has_curl("a_node_tells_its_health_and_its_metrics_whatever_is_loaded") {
        return;
    }
    let mut ant = Node::new();
    let key = ant.text(&["keys", "create", "prometheus"]);
    let limited = ant.text(&["keys", "create", "ci", "--team", "lab"]);
    let narrow = ant.text(&["keys", "create", "narrow", "--model", "second"]);
    ant.text(&["limits", "team", "lab", "--requests-per-minute", "1"]);
    ant.up("ant", &[]);
    let api = ant.api();
    let get = |path: &str, key: &str| text(&format!("{api}{path}"), key);
    // Without a model.
    assert_eq!(get("/health/live", "").0, 200);
    let (status, why) = get("/health/ready", "");
    assert!(status == 503 && why.contains("no model is loaded"), "{status} {why}");
    assert_eq!(get("/metrics", "").0, 401);
    let (status, metrics) = get("/metrics", &key);
    assert_eq!(status, 200, "{metrics}");
    assert!(metrics.contains("thunder:gateway_requests_open 0\n"), "{metrics}");
    assert!(metrics.contains("thunder:gateway_requests_total{outcome=\"stop\"} 0\n"), "{metrics}");
    let (status, document) = get("/openapi.json", "");
    let document: Value = serde_json::from_str(&document).unwrap_or_default();
    assert!(status == 200 && document["paths"]["/v1/chat/completions"].is_object(), "{status} {document}");
    assert_eq!(get("/api/version", &key).0, 200);
    // With two.
    let second = ant.folder.path().join("second");
    std::os::unix::fs::symlink(thunder_testing::builtin_model(), &second).unwrap();
    for model in ["builtin", second.to_str().unwrap()] {
        ant.text(&["model", "load", model, "--", "--context", "512"]);
    }
    wait("the models", || {
        let status = ant.status().unwrap_or_default();
        let models = status["models"].as_array().cloned().unwrap_or_default();
        models.len() == 2 && models.iter().all(|model| model["ready"] == true)
    });
    assert_eq!(get("/health/ready", "").0, 200);
    commands_say_what_to_do_and_have_json(&ant);
    assert_eq!(get("/v1/models/second", &key).0, 200);
    assert_eq!(get("/v1/models/se%63ond", &key).0, 200, "as clients escape a name");
    // A key sees the models that it may use, and no other name.
    let named = |path: &str, key: &str| {
        let (status, list) = get(path, key);
        let list: Value = serde_json::from_str(&list).unwrap_or_else(|_| panic!("{path} {status} {list}"));
        let models = list.get("data").or(list.get("models")).and_then(Value::as_array).cloned();
        models.unwrap_or_default().len()
    };
    for path in ["/v1/models", "/api/tags", "/api/ps"] {
        assert_eq!((named(path, &key), named(path, &narrow)), (2, 1), "{path}");
    }
    assert_eq!((get("/v1/models/second", &narrow).0, get("/v1/models/builtin", &narrow).0), (200, 403));
    let (status, unknown) = get("/v1/models/none", &narrow);
    assert!(
        status == 404 && unknown.contains("second") && !unknown.contains("builtin"),
        "{status} {unknown}"
    );
    let question = json!({"model": "builtin", "prompt": "The sea", "max_tokens": 3, "ignore_eos": true});
    let generated = |metrics: &str| -> u64 {
        let line = metrics
            .lines()
            .find_map(|line| line.strip_prefix("vllm:generation_tokens_total{model_name=\"builtin\"} "));
        line.unwrap_or_else(|| panic!("{metrics}")).parse().unwrap()
    };
    // Each group has answered its canary.
    let before = generated(&get("/metrics", &key).1);
    let complete = |key: &str| ask(&format!("{api}/v1/completions"), key, Some(&question), None);
    assert_eq!((complete(&key).0, complete(&limited).0), (200, 200));
    // The team's limit, as a node refuses it.
    let (status, head, body) = complete(&limited);
    assert_eq!((status, &body["error"]["param"]), (429, &json!("team.requests_per_minute")), "{body}");
    for line in
        ["x-ratelimit-limit-requests: 1\r\n", "x-ratelimit-remaining-requests: 0\r\n", "retry-after: "]
    {
        assert!(head.contains(line), "{line}: {head}");
    }
    assert!(head.contains("x-ratelimit-reset-requests: "), "{head}");
    let metrics = get("/metrics", &key).1;
    for line in [
        "thunder:model_ready{model_name=\"builtin\"} 1\n",
        "thunder:model_ranks{model_name=\"builtin\",state=\"ready\"} 1\n",
        "thunder:gateway_requests_total{outcome=\"length\"} 2\n",
        "thunder:requests_refused_total{scope=\"team\",limit=\"requests_per_minute\"} 1\n",
        "vllm:num_requests_running{model_name=\"builtin\"} 0.0\n",
        &format!("vllm:num_requests_running{{model_name=\"{}\"}} 0.0\n", second.display()),
        "# EOF\n",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    assert_eq!(generated(&metrics) - before, 6);
    assert_eq!(metrics.matches("# TYPE thunder:requests_refused ").count(), 1, "{metrics}");
}

fn commands_say_what_to_do_and_have_json(ant: &Node) {
    let refused = |node: &Node, words: &[&str]| {
        let output = node.thunder(words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{words:?}: {said}");
        said
    };
    let without_key = refused(ant, &["model", "infer", "builtin", "The sea"]);
    assert!(without_key.contains("--api-key or THUNDER_API_KEY"), "{without_key}");
    let second = refused(ant, &["up", "--listen", "127.0.0.1:0", "--port", "0", "--no-discovery"]);
    assert!(second.contains("an agent runs already with the data folder"), "{second}");
    let wrong = refused(&Node::new(), &["cluster", "start", "--", "--port", "0", "--bogus"]);
    assert!(wrong.contains("unexpected argument '--bogus'"), "{wrong}");
    let json = |words: &[&str]| -> Value { serde_json::from_str(&ant.text(words)).unwrap() };
    assert_eq!(json(&["cluster", "health", "--json"]), json!({"healthy": true, "problems": []}));
    let token = json(&["cluster", "token", "--expires", "5s", "--json"]);
    assert!(token["token"].is_string() && token["expires_in_s"] == 5, "{token}");
    let resumed = json!({"node": "ant", "state": "resumed", "spread": true});
    assert_eq!(json(&["cluster", "resume", "ant", "--json"]), resumed);
}

/// Asks with a method, a key and a body; the status, and the error's code.
fn status_of(api: &str, method: &str, path: &str, key: Option<&str>, body: Option<&Value>) -> (u16, Value) {
    let mut command = Command::new("curl");
    command.args(["-sS", "-w", "%{http_code}", "--max-time", "60", "-X", method]);
    if let Some(key) = key {
        command.args(["-H", &format!("authorization: Bearer {key}")]);
    }
    if let Some(body) = body {
        command.args(["-H", "content-type: application/json", "-d", &body.to_string()]);
    }
    let output = command.arg(format!("{api}{path}")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (body, status) = text.split_at(text.len() - 3);
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    (status.parse().unwrap(), body["error"]["code"].clone())
}

/// As `every_route_asks_for_the_right_key` of the crate `server`, at a node.
#[test]
fn every_route_of_a_node_asks_for_the_right_key() {
    if !has_curl("every_route_of_a_node_asks_for_the_right_key") {
        return;
    }
    let mut ant = Node::new();
    let admin = ant.text(&["keys", "create", "admin", "--role", "admin"]);
    let user = ant.text(&["keys", "create", "user", "--team", "a"]);
    let expired = ant.text(&["keys", "create", "old", "--role", "admin", "--expires", "1s"]);
    let revoked = ant.text(&["keys", "create", "gone", "--role", "admin"]);
    ant.text(&["keys", "revoke", "gone"]);
    ant.text(&["keys", "create", "victim"]);
    ant.up("ant", &["--api-key", "fixed"]);
    let api = ant.api();
    let document: Value = serde_json::from_str(&text(&format!("{api}/openapi.json"), "").1).unwrap();
    // A model, for the paths that ask one.
    ant.text(&["model", "load", "builtin", "--", "--context", "512"]);
    wait("the model", || ant.status().is_some_and(|status| status["models"][0]["ready"] == true));
    let (mut writes, mut routes) = (0, 0);
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            routes += 1;
            let method = method.to_uppercase();
            let path = path.replace("{name}", "victim").replace("{id}", "some");
            let body = operation.get("requestBody").map(|body| {
                let mut body = body["content"]["application/json"]["example"].clone();
                if path.starts_with("/v1") || path.starts_with("/api") {
                    body["model"] = "builtin".into();
                }
                body
            });
            let is_open = ["/health", "/health/live", "/health/ready", "/openapi.json"]
                .contains(&path.as_str())
                || operation["x-open"] == true;
            let ask = |key: Option<&str>| status_of(&api, &method, &path, key, body.as_ref());
            let refusals = [
                (None, "invalid_api_key"),
                (Some("wrong"), "invalid_api_key"),
                (Some(expired.as_str()), "expired_api_key"),
                (Some(revoked.as_str()), "revoked_api_key"),
            ];
            for (key, code) in refusals {
                let (status, given) = ask(key);
                match is_open {
                    true => assert!(![401, 403].contains(&status), "{method} {path} {status}"),
                    false => assert_eq!((status, given), (401, json!(code)), "{method} {path} {key:?}"),
                }
            }
            let is_admins = operation["x-role"] == "admin";
            writes += usize::from(is_admins && method != "GET");
            if is_admins {
                for key in [user.as_str(), "fixed"] {
                    assert_eq!(ask(Some(key)), (403, json!("admin_key_required")), "{method} {path}");
                }
            } else if method == "GET" {
                // A key of --api-key has no usage of its own.
                let (status, code) = ask(Some(user.as_str()));
                assert!(![401, 403].contains(&status), "{method} {path} {status} {code}");
            }
            // What an administrator may do is done where it cannot harm what is asked next.
            if is_admins && method == "GET" {
                let (status, code) = ask(Some(&admin));
                assert!(status < 400 || status == 404, "{method} {path} {status} {code}");
            }
        }
    }
    assert!(routes > 60 && writes >= 15, "{routes} routes, {writes} writes of administrators");
    let (status, _) = status_of(
        &api,
        "POST",
        "/admin/cluster/drain",
        Some(&admin),
        Some(&json!({"node": "ant", "drained": true})),
    );
    assert_eq!(status, 200);
    // Each act is in the audit log, with who did it.
    let pull = json!({"model": "x/none"});
    let (pulled, _) = status_of(&api, "POST", "/admin/downloads", Some(&admin), Some(&pull));
    ant.text(&["cluster", "resume", "ant"]);
    ant.text(&["cluster", "token"]);
    ant.text(&["model", "unload", "builtin"]);
    let audit = ant.text(&["audit", "--format", "jsonl"]);
    let entries: Vec<Value> = audit.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |action: &str| entries.iter().find(|entry| entry["action"] == action);
    for (action, subject, actor) in [
        ("model.load", json!("builtin"), "local"),
        ("node.drain", json!("ant"), "(admin)"),
        ("node.resume", json!("ant"), "local"),
        ("cluster.token", Value::Null, "local"),
        ("model.unload", json!("builtin"), "local"),
    ] {
        let entry = of(action).unwrap_or_else(|| panic!("{action}: {audit}"));
        assert_eq!((&entry["subject"], &entry["node"]), (&subject, &json!("ant")), "{entry}");
        assert!(entry["actor"].as_str().is_some_and(|given| given.ends_with(actor)), "{entry}");
    }
    assert_eq!(of("model.pull").is_some(), pulled == 200, "{audit}");
    // What the command line may do to nodes and their disks, an administrator may by HTTP.
    let act = |path: &str, body: Value| ask(&format!("{api}{path}"), &admin, Some(&body), None);
    let (status, _, made) = act("/admin/cluster/token", json!({"life_s": 60}));
    let token = made["token"].as_str().unwrap().to_owned();
    assert_eq!(status, 200);
    let (status, _, begun) = act("/admin/models/verify", json!({"model": "x/none", "nodes": ["ant"]}));
    assert!(status == 200 && begun["task"].is_u64(), "{status} {begun}");
    let (status, _, refused) = act("/admin/models/delete", json!({"model": "x/none"}));
    assert!(status == 409 && refused["error"]["message"].as_str().unwrap().contains("ant"), "{refused}");
    let (status, _, log) = ask(&format!("{api}/admin/cluster/logs?node=ant&lines=1"), &admin, None, None);
    assert_eq!((status, log["lines"].as_array().map(Vec::len)), (200, Some(1)), "{log}");
    assert_eq!(ask(&format!("{api}/admin/cluster/logs?lines=x"), &admin, None, None).0, 400);
    assert_eq!(ask(&format!("{api}/admin/cluster"), &admin, None, None).2["problems"], json!([]));
    let audit = ant.text(&["audit", "--format", "jsonl"]);
    assert!(audit.contains("model.verify") && !audit.contains(&token), "{audit}");
    assert!(!audit.contains("thunder-token"), "{audit}");
    assert_eq!(act("/admin/cluster/stop", json!({})).0, 200);
    let mut agent = ant.agent.take().unwrap();
    wait("the agent's end", || agent.0.try_wait().unwrap().is_some());
}

#[test]
fn a_support_bundle_of_a_node_names_machines_and_no_people() {
    if !has_curl("a_support_bundle_of_a_node_names_machines_and_no_people") {
        return;
    }
    let mut ant = Node::new();
    ant.text(&[
        "keys",
        "create",
        "boss",
        "--role",
        "admin",
        "--owner",
        "ann@acmelaw.example",
        "--team",
        "lawyers",
    ]);
    ant.text(&["limits", "team", "lawyers", "--requests-per-minute", "5"]);
    ant.text(&["config", "init", "--node"]);
    let issuer = ["--oidc-issuer", "https://login.acmelaw.example", "--oidc-client", "acmelaw-client"];
    let who = ["--oidc-allow", "@acmelaw.example", "--oidc-admin", "ann@acmelaw.example"];
    ant.up("ant-the-machine", &[&issuer[..], &who[..]].concat());
    ant.api();
    let bundle = ant.folder.path().join("bundle.json");
    ant.text(&["support", "bundle", bundle.to_str().unwrap()]);
    let text = std::fs::read_to_string(bundle).unwrap();
    for hidden in ["acmelaw", "lawyers", "ann@", "boss", ant.status().unwrap()["code"].as_str().unwrap()] {
        assert!(!text.contains(hidden), "{hidden}: {text}");
    }
    let bundle: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(bundle["settings"]["command"], "thunder up", "{text}");
    assert_eq!(bundle["cluster"]["members"][0]["name"], "ant-the-machine", "{text}");
    assert_eq!(bundle["limits"]["teams"]["team 1"]["limits"]["requests_per_minute"], 5, "{text}");
    assert!(bundle["files"]["node.toml"].is_array() && bundle["metrics"].is_string(), "{text}");
}
