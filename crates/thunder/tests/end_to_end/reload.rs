//! Settings that change while a server runs.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::common::{Server, thunder};

/// A server with this configuration, in a session of its own as a service has it.
fn start(store: &Path, config: &str) -> Server {
    std::fs::create_dir_all(store).unwrap();
    std::fs::write(store.join("config.toml"), config).unwrap();
    let mut command = thunder(&["serve", "--port", "0", "--store", store.to_str().unwrap()]);
    // SAFETY: setsid may be called between fork and exec.
    unsafe {
        command.pre_exec(|| if libc::setsid() < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) })
    };
    Server::from(command)
}

fn reload(store: &Path) -> Result<Value, String> {
    let output = thunder(&["config", "reload", "--json"]).env("THUNDER_STORE", store).output().unwrap();
    if !output.status.success() {
        return Err(String::from_utf8(output.stderr).unwrap());
    }
    Ok(serde_json::from_slice(&output.stdout).unwrap())
}

/// Begins a completion with this model's name.
fn ask(address: &str, model: &str, tokens: usize, stream: bool) -> BufReader<TcpStream> {
    let body = json!({
        "model": model, "prompt": "What is a rank?", "max_tokens": tokens, "ignore_eos": true, "stream": stream
    });
    let body = body.to_string();
    let mut connection = TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    connection.write_all((head + &body).as_bytes()).unwrap();
    BufReader::new(connection)
}

/// The status of a completion of two tokens.
fn status(address: &str, model: &str) -> u16 {
    let mut line = String::new();
    ask(address, model, 2, false).read_line(&mut line).unwrap();
    line.split(' ').nth(1).unwrap_or_else(|| panic!("{line:?}")).parse().unwrap()
}

#[test]
fn new_settings_are_in_force_at_once_and_answers_in_flight_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let server = start(&store, "model = \"builtin\"\nalias = [\"one\"]\nkeep-requests = 7\n");
    let address = server.url("");
    assert_eq!((status(&address, "one"), status(&address, "two")), (200, 404));
    let mut stream = ask(&address, "one", 1500, true);
    let mut line = String::new();
    while !line.starts_with("data:") {
        line.clear();
        assert_ne!(stream.read_line(&mut line).unwrap(), 0, "it ends before its first token");
    }
    let config = "model = \"builtin\"\nalias = [\"two\"]\nkeep-requests = 9\nmax-batch = 3\n";
    std::fs::write(store.join("config.toml"), config).unwrap();
    let reloaded = reload(&store).unwrap();
    assert_eq!(reloaded, json!({"applied": ["keep-requests", "alias"], "restart": ["max-batch"]}));
    assert_eq!((status(&address, "one"), status(&address, "two")), (404, 200));
    // A wrong file changes nothing.
    std::fs::write(store.join("config.toml"), "model = \"builtin\"\nalias = [\"three\"]\nprot = 1\n")
        .unwrap();
    let error = reload(&store).unwrap_err();
    assert!(error.contains("prot"), "{error}");
    assert_eq!((status(&address, "three"), status(&address, "two")), (404, 200));
    // As a service manager asks.
    std::fs::write(store.join("config.toml"), "model = \"builtin\"\nalias = [\"four\"]\n").unwrap();
    server.signal(libc::SIGHUP);
    let began = Instant::now();
    while status(&address, "four") != 200 {
        assert!(began.elapsed() < Duration::from_secs(10), "{}", server.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "the answer breaks off: {rest}");
    assert!(rest.matches("data: {").count() >= 1000, "it was in flight all the time");
    let log = server.log();
    assert!(log.contains("in force now: ") && log.contains("alias"), "{log}");
    let mut audit = thunder(&["audit", "--action", "config.reload", "--format", "jsonl"]);
    let audit = audit.env("THUNDER_STORE", &store).output().unwrap();
    assert!(String::from_utf8_lossy(&audit.stdout).contains("max-batch"), "{audit:?}");
}

/// Sets a flag when dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn no_request_is_lost_by_reloads_under_load() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let server = start(&store, "model = \"builtin\"\n");
    let (address, ended, answered) = (server.url(""), AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    assert_eq!(status(&address, "default"), 200);
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // Also if this panics.
        let _end = Ends(&ended);
        let began = Instant::now();
        for round in 0.. {
            if round >= 30
                && (answered.load(Ordering::Relaxed) > 30 || began.elapsed() > Duration::from_secs(30))
            {
                break;
            }
            let config = format!("model = \"builtin\"\nread-timeout = {}\n", 30 + round);
            std::fs::write(store.join("config.toml"), config).unwrap();
            assert_eq!(reload(&store).unwrap()["applied"], json!(["read-timeout"]));
        }
    });
    assert!(answered.load(Ordering::Relaxed) > 30, "{answered:?} requests");
}

#[test]
fn another_machine_reloads_and_is_told_how_to_trust_a_new_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let server = start(&store, "model = \"builtin\"\n");
    let url = format!("http://{}", server.url(""));
    let reload_there = || {
        let output = thunder(&["config", "reload", "--url", &url, "--json"])
            .env("THUNDER_STORE", folder.path().join("none"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    assert_eq!(reload_there(), json!({"applied": [], "restart": []}));
    std::fs::write(store.join("config.toml"), "model = \"builtin\"\ntls = true\n").unwrap();
    let reloaded = reload_there();
    assert_eq!(reloaded["applied"], json!(["tls"]));
    let said = reloaded["certificate"].as_str().unwrap();
    assert!(said.contains("tls-cert.pem") && said.contains("SHA-256 fingerprint"), "{said}");
}

#[test]
fn without_a_server_there_is_nothing_to_reload() {
    let folder = tempfile::tempdir().unwrap();
    let error = reload(folder.path()).unwrap_err();
    assert!(error.contains("when it starts"), "{error}");
}
