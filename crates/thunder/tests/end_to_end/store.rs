//! Keys, usage, audit, backup and configuration as an operator uses them.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::common::{Server, holds, thunder};

fn run(args: &[&str], store: &Path) -> Output {
    let output = thunder(args).env("THUNDER_STORE", store).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn json_of(args: &[&str], store: &Path) -> Value {
    serde_json::from_slice(&run(args, store).stdout).unwrap()
}

fn text_of(args: &[&str], store: &Path) -> String {
    String::from_utf8(run(args, store).stdout).unwrap().trim().to_owned()
}

/// The status of a completion of two tokens.
fn complete(server: &Server, key: &str) -> u16 {
    let url = server.url("");
    let body = json!({"model": "default", "prompt": "What is a rank?", "max_tokens": 2, "ignore_eos": true})
        .to_string();
    let mut stream = TcpStream::connect(&url).unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.0\r\nhost: {url}\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer[9..12].parse().unwrap()
}

#[test]
fn keys_usage_and_audit_of_a_server_that_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let store_arg = store.to_str().unwrap();
    // Without a server the commands open the store themselves.
    let admin = text_of(&["keys", "create", "boss", "--role", "admin"], &store);
    assert!(admin.starts_with("th-"), "{admin}");
    let limit = ["--requests-per-minute", "4", "--team", "lab", "--expires", "30d"];
    let mut answered = 0;
    let mut secret = String::new();
    for round in 0..3 {
        let server = Server::start(&["builtin", "--store", store_arg]);
        if round == 0 {
            secret = text_of(&[&["keys", "create", "ci"][..], &limit].concat(), &store);
            let twice = thunder(&["serve", "--port", "0", "--store", store_arg, "builtin"]).output().unwrap();
            assert!(String::from_utf8_lossy(&twice.stderr).contains("--no-store"), "{twice:?}");
        }
        assert_eq!((complete(&server, "wrong"), complete(&server, "")), (401, 401));
        let own = complete(&server, &secret);
        let other = complete(&server, &admin);
        answered += u64::from(own == 200) + u64::from(other == 200);
        assert_eq!((own, other), (200, 200));
        // SIGKILL, when the answers are out.
        server.signal(libc::SIGKILL);
    }
    let usage = json_of(&["usage", "--by", "key", "--format", "json"], &store);
    assert_eq!(
        (&usage["total"]["requests"], &usage["total"]["completion_tokens"]),
        (&json!(answered), &json!(answered * 2))
    );
    let rows = text_of(&["usage", "--requests", "--format", "csv"], &store);
    assert_eq!(rows.lines().count() as u64, answered + 1, "{rows}");
    let head = text_of(&["audit", "--verify"], &store);
    assert!(head.starts_with("2 entries are intact"), "{head}");
    let backup = folder.path().join("backup");
    run(&["backup", backup.to_str().unwrap()], &store);
    let restored = folder.path().join("restored");
    run(&["restore", backup.to_str().unwrap()], &restored);
    let keys = json_of(&["keys", "list", "--json"], &restored);
    assert_eq!(keys["keys"].as_array().unwrap().len(), 2);
    let entries = text_of(&["audit", "--verify"], &restored);
    assert!(entries.starts_with("4 entries"), "backup and restore are acts: {entries}");
    let again = thunder(&["backup", backup.to_str().unwrap()]).env("THUNDER_STORE", &store).output().unwrap();
    assert!(String::from_utf8_lossy(&again.stderr).contains("name a new file"), "{again:?}");
    // A name with a typing error is no store, and does not become one.
    let mistyped = folder.path().join("stroe");
    for command in [vec!["keys", "list"], vec!["audit", "--verify"], vec!["backup", "new"]] {
        let refused = thunder(&command).env("THUNDER_STORE", &mistyped).output().unwrap();
        assert!(String::from_utf8_lossy(&refused.stderr).contains("has no store"), "{refused:?}");
    }
    assert!(!mistyped.exists());
    let bundle = folder.path().join("bundle");
    run(&["support", "bundle", bundle.to_str().unwrap()], &store);
    let text = std::fs::read_to_string(&bundle).unwrap();
    for hidden in [&secret["th-".len() + 9..], &admin["th-".len() + 9..], "boss", "\"lab\""] {
        assert!(!text.contains(hidden), "{hidden} is in the bundle");
    }
}

#[test]
fn prompts_are_kept_by_a_policy_only_and_need_their_key() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let key_file = folder.path().join("elsewhere");
    text_of(&["keys", "create", "boss", "--role", "admin"], &store);
    let secret = text_of(&["keys", "create", "ci", "--team", "lab"], &store);
    let store_arg = store.to_str().unwrap();
    let server =
        Server::start(&["builtin", "--store", store_arg, "--prompts-key", key_file.to_str().unwrap()]);
    assert_eq!(complete(&server, &secret), 200);
    assert_eq!(text_of(&["audit", "prompts"], &store), "", "nothing is kept by default");
    assert!(!key_file.exists() && !store.join("prompts").exists());
    let policy =
        text_of(&["audit", "keep", "--team", "lab", "--redact", "none", "--pattern", "rank"], &store);
    assert!(policy.contains("\"lab\"") && policy.contains("\"days\": 30"), "{policy}");
    assert_eq!(complete(&server, &secret), 200);
    let kept = text_of(&["audit", "prompts", "--key", "ci"], &store);
    assert!(kept.contains("prompt: What is a [redacted]?") && kept.contains("assistant: "), "{kept}");
    assert!(key_file.exists() && !store.join("prompts.key").exists());
    drop(server);
    assert!(store.join("prompts").exists() && !holds(&store, "What is a"), "the texts are encrypted");
    // Without a server: the key is asked for, and the earlier reading is in the log.
    let without = thunder(&["audit", "prompts"]).env("THUNDER_STORE", &store).output().unwrap();
    assert!(!without.status.success());
    let with = thunder(&["audit", "prompts"])
        .env("THUNDER_STORE", &store)
        .env("THUNDER_PROMPTS_KEY", &key_file)
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&with.stdout).contains("[redacted]"), "{with:?}");
    let audit = text_of(&["audit", "--action", "prompts.read", "--format", "jsonl"], &store);
    assert_eq!(audit.lines().count(), 3, "{audit}");
    run(&["audit", "keep", "--off"], &store);
    assert!(text_of(&["audit", "keep"], &store).contains("\"all\": false"));
}

#[test]
fn a_limit_holds_and_settings_come_from_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    run(&["config", "init"], &store);
    let file = store.join("config.toml");
    std::fs::write(&file, "model = \"builtin\"\nmax-batch = 2\nkeep-requests = 7\n").unwrap();
    assert!(text_of(&["config", "check"], &store).ends_with("is right"));
    assert!(
        text_of(&["config", "show"], &store)
            .lines()
            .any(|line| line.starts_with("max-batch") && line.ends_with("file"))
    );
    let secret = text_of(&["keys", "create", "ci", "--requests-per-minute", "3"], &store);
    let server = Server::start(&["--store", store.to_str().unwrap()]);
    let statuses: Vec<u16> = (0..5).map(|_| complete(&server, &secret)).collect();
    assert_eq!(statuses, [200, 200, 200, 429, 429]);
    // Through the running server; the limit holds for the next request.
    run(&["keys", "change", "ci", "--requests-per-minute", "9"], &store);
    assert_eq!(complete(&server, &secret), 200);
    run(&["keys", "change", "ci", "--expires", "90d", "--team", "lab"], &store);
    run(&["keys", "change", "ci", "--clear", "requests-per-minute,expires,team"], &store);
    let key = &json_of(&["keys", "show", "ci", "--json"], &store)["key"];
    assert!(["expires", "team"].iter().all(|name| key[name].is_null()), "{key}");
    assert!(key["limits"]["requests_per_minute"].is_null(), "{key}");
    run(&["keys", "revoke", "ci"], &store);
    assert_eq!(complete(&server, &secret), 401);
    let refused = json_of(&["usage", "--by", "outcome", "--format", "json"], &store);
    assert_eq!(refused["total"]["refused"], 2, "{refused}");
    std::fs::write(&file, "max-batches = 2\n").unwrap();
    let wrong = thunder(&["config", "check"]).env("THUNDER_STORE", &store).output().unwrap();
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("max-batches"), "{wrong:?}");
}

/// What a stranger types: each is taken and explained, or refused with its name.
#[test]
fn what_an_operator_types_wrong_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let said = |args: &[&str]| {
        let output = thunder(args).env("THUNDER_STORE", &store).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    // A store without a server knows no models.
    let (is_made, words) = said(&["keys", "create", "early", "--model", "nosuch"]);
    assert!(is_made && !words.contains("warning"), "{words}");
    let sign_in = ["--oidc-issuer", "http://127.0.0.1:1", "--oidc-client", "thunder"];
    let server =
        Server::start(&[&["builtin", "--store", store.to_str().unwrap()][..], &sign_in[..]].concat());
    let began = Instant::now();
    while !server.log().contains("nobody can sign in now") {
        assert!(began.elapsed() < Duration::from_secs(20), "{}", server.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(server.log().contains("http://127.0.0.1:1/"), "{}", server.log());
    // Models that nobody serves.
    let (is_made, words) = said(&["keys", "create", "ci", "--model", "nosuch"]);
    assert!(is_made && words.contains("\"nosuch\"") && words.contains("builtin"), "{words}");
    let made = json_of(&["keys", "create", "json", "--model", "nosuch", "--json"], &store);
    assert!(made["warnings"][0].as_str().unwrap().contains("nosuch"), "{made}");
    let (is_made, words) = said(&["keys", "create", "ok", "--model", "builtin"]);
    assert!(is_made && !words.contains("warning"), "{words}");
    let (_, words) = said(&["keys", "change", "ok", "--model", "builtin", "--model", "other"]);
    assert!(words.contains("\"other\"") && !words.contains("no model \"builtin\""), "{words}");
    // A secret that ends at once.
    let former = text_of(&["keys", "rotate", "ok"], &store);
    let (is_rotated, words) = said(&["keys", "rotate", "ok", "--grace", "0s"]);
    assert!(is_rotated && words.contains("the former secret has ended"), "{words}");
    assert_eq!(complete(&server, &former), 401);
    // What changes nothing is no act.
    let updates = || {
        let log = json_of(&["audit", "--json"], &store);
        let acts = log["entries"].as_array().unwrap().iter();
        acts.filter(|act| act["action"] == "key.update" || act["action"] == "limits.set").count()
    };
    let before = updates();
    run(&["keys", "change", "ok", "--team", "lab"], &store);
    run(&["limits", "team", "lab", "--requests-per-minute", "9"], &store);
    assert_eq!(updates(), before + 2);
    run(&["keys", "change", "ok", "--team", "lab"], &store);
    run(&["keys", "change", "ok"], &store);
    run(&["limits", "team", "lab", "--requests-per-minute", "9", "--json"], &store);
    run(&["limits", "team", "nobody"], &store);
    assert_eq!(updates(), before + 2);
    let verified = json_of(&["audit", "--verify", "--json"], &store);
    assert!(verified["intact"] == true && verified["head"].is_string(), "{verified}");
    // Reports.
    assert_eq!(run(&["usage", "--requests", "--key", "ok", "--format", "jsonl"], &store).stdout, b"");
    assert_eq!(json_of(&["usage", "--since", "7d", "--json"], &store)["total"]["requests"], 0);
    for (args, name) in [
        (["--key", "zzz"], "no key \"zzz\""),
        (["--team", "zzz"], "no team \"zzz\""),
        (["--since", "2100-01-01"], "is empty"),
        (["--until", "2000-01-01"], "is empty"),
        (["--since", "yesterday"], "an age like 7d"),
    ] {
        let (is_fine, words) = said(&[&["usage"][..], &args].concat());
        assert!(!is_fine && words.contains(name), "{args:?}: {words}");
    }
    let (is_set, words) = said(&["limits", "model", "builtin", "--price-input", "-1", "--price-output", "1"]);
    assert!(!is_set && words.contains("`input` is -1, but must be 0 to"), "{words}");
    // Every form of the settings is there for programs.
    std::fs::write(store.join("config.toml"), "max-batch = 2\n").unwrap();
    assert_eq!(json_of(&["config", "check", "--json"], &store)["right"], true);
    let settings = json_of(&["config", "show", "--json"], &store)["settings"].clone();
    let is_ours = |setting: &&Value| setting["name"] == "max-batch" && setting["source"] == "file";
    assert!(settings.as_array().unwrap().iter().any(|setting| is_ours(&setting)), "{settings}");
    let backup = folder.path().join("backup");
    assert_eq!(json_of(&["backup", backup.to_str().unwrap(), "--json"], &store)["keys"], 4);
    let restored = folder.path().join("restored");
    assert_eq!(json_of(&["restore", backup.to_str().unwrap(), "--json"], &restored)["keys"], 4);
    // A change has no defaults.
    let help = text_of(&["keys", "change", "--help"], &store);
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("--expires <TIME> When the key expires"), "{help}");
    for default in ["[default: never]", "[default: all]", "[default: user]"] {
        assert!(!help.contains(default), "{default}: {help}");
    }
}

#[test]
fn no_secret_is_in_a_log_of_everything() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let secret = text_of(&["keys", "create", "ci"], &store);
    let log = folder.path().join("log");
    let mut child = thunder(&["serve", "builtin", "--port", "0", "--store", store.to_str().unwrap()])
        .env("RUST_LOG", "trace")
        .env("THUNDER_LOG_FORMAT", "json")
        .env("THUNDER_API_KEY", "another-secret-key")
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let read = || std::fs::read_to_string(&log).unwrap();
    let began = Instant::now();
    let address = loop {
        assert!(began.elapsed() < Duration::from_secs(60), "{}", read());
        let text = read();
        let found = text
            .lines()
            .find_map(|line| line.split_once("http://")?.1.split_once("/v1"))
            .map(|found| found.0.to_owned());
        match found {
            Some(address) => break address,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    for key in [secret.as_str(), "another-secret-key", "wrong-secret-key"] {
        let mut stream = TcpStream::connect(&address).unwrap();
        let head =
            format!("GET /admin/me HTTP/1.0\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
    }
    run(&["keys", "rotate", "ci"], &store);
    // SAFETY: our own child, not yet waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    child.wait().unwrap();
    let text = read();
    let lines: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert!(lines.iter().any(|line| line["action"] == "key.rotate"), "{text}");
    assert!(lines.iter().any(|line| line["path"] == "/admin/me" && line["status"] == 401), "{text}");
    for hidden in [&secret["th-".len() + 9..], "another-secret", "wrong-secret"] {
        assert!(!text.contains(hidden), "{hidden} is in the log");
    }
}

/// Prometheus' own tool reads the alert rules, and fires them when it should.
#[test]
fn promtool_accepts_the_alert_rules() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/prometheus");
    for arguments in [["check", "rules", "thunder.rules.yml"], ["test", "rules", "thunder.rules.test.yml"]] {
        match std::process::Command::new("promtool").args(arguments).current_dir(&folder).output() {
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stdout).into_owned()
                    + &String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success() && text.contains("SUCCESS"), "{arguments:?}: {text}");
            }
            Err(_) => thunder_testing::skip("promtool_accepts_the_alert_rules", "promtool is not installed"),
        }
    }
}
