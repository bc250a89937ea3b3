//! A server on 127.0.0.1 that imitates the hub and, on a second port, the host that the hub
//! redirects to for large files. Tests inject faults.

#![allow(dead_code, reason = "each test file uses a part of this")]

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io::{BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use sha1::Digest as _;
use thunder_testing::Random;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A fault in the next response with a file's content, or with the list of files (named "list").
#[derive(Clone, Debug)]
pub enum Fault {
    /// Closes the connection after this number of bytes.
    Drop(usize),
    /// Sends an HTTP status, with the hub's error code unless empty.
    Status(u16, &'static str),
    /// Sends this number of bytes, then nothing for this time.
    Stall(usize, Duration),
    /// Sends other bytes of the same length.
    Garble,
    /// Sends the whole file when a range was requested.
    IgnoreRange,
    /// Sends another range than the requested one.
    WrongRange,
    /// Waits before the response.
    Delay(Duration),
}

/// A request that the server received.
#[derive(Clone, Debug)]
pub struct Seen {
    pub host: &'static str,
    pub line: String,
    pub authorization: Option<String>,
    pub range: Option<String>,
}

pub struct Server {
    pub endpoint: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Name to content, and whether it is a large file.
    files: Mutex<BTreeMap<String, (Vec<u8>, bool)>>,
    faults: Mutex<HashMap<String, VecDeque<Fault>>>,
    /// If set, the status and error code of every response of the hub.
    closed: Mutex<Option<(u16, &'static str)>>,
    /// If set, requests to the hub without this token are refused.
    token: Mutex<Option<String>>,
    /// False sizes to report for files.
    false_sizes: Mutex<HashMap<String, u64>>,
    seen: Mutex<Vec<Seen>>,
    busy: AtomicUsize,
    most_busy: AtomicUsize,
    cdn: Mutex<String>,
}

impl Server {
    /// A server with a small model: two weight files, the files they need, and files that a pull
    /// must skip.
    pub fn with_model() -> Self {
        let noise = |seed, length| Random::new(seed).bytes(length);
        let server = Self::start();
        server.add("config.json", br#"{"model_type": "llama"}"#.to_vec(), false);
        server.add("tokenizer.json", noise(1, 5000), false);
        let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
        server.add("model.safetensors.index.json", index.into(), false);
        server.add("model-00001-of-00002.safetensors", noise(2, 1_500_000), true);
        server.add("model-00002-of-00002.safetensors", noise(3, 900_001), true);
        server.add("README.md", b"# read me".to_vec(), false);
        server.add("pytorch_model.bin", noise(4, 1000), true);
        server
    }

    fn start() -> Self {
        let state = Arc::new(State::default());
        let hub = TcpListener::bind("127.0.0.1:0").unwrap();
        let cdn = TcpListener::bind("127.0.0.1:0").unwrap();
        *state.cdn.lock().unwrap() = format!("http://{}", cdn.local_addr().unwrap());
        let endpoint = format!("http://{}", hub.local_addr().unwrap());
        for (listener, name) in [(hub, "hub"), (cdn, "cdn")] {
            let state = Arc::clone(&state);
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let state = Arc::clone(&state);
                    // The error of a client that disconnects ends this thread only.
                    thread::spawn(move || state.serve(stream, name));
                }
            });
        }
        Self { endpoint, state }
    }

    pub fn add(&self, name: &str, content: Vec<u8>, large: bool) {
        self.state.files.lock().unwrap().insert(name.into(), (content, large));
    }

    pub fn content(&self, name: &str) -> Vec<u8> {
        self.state.files.lock().unwrap()[name].0.clone()
    }

    pub fn fault(&self, name: &str, fault: Fault) {
        self.state.faults.lock().unwrap().entry(name.into()).or_default().push_back(fault);
    }

    pub fn close(&self, status: u16, code: &'static str) {
        *self.state.closed.lock().unwrap() = Some((status, code));
    }

    pub fn require_token(&self, token: &str) {
        *self.state.token.lock().unwrap() = Some(token.into());
    }

    pub fn report_size(&self, name: &str, size: u64) {
        self.state.false_sizes.lock().unwrap().insert(name.into(), size);
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.state.seen.lock().unwrap().clone()
    }

    pub fn most_at_once(&self) -> usize {
        self.state.most_busy.load(Ordering::SeqCst)
    }

    pub fn etag(&self, name: &str) -> String {
        let files = self.state.files.lock().unwrap();
        let (content, large) = &files[name];
        etag(content, *large)
    }
}

fn etag(content: &[u8], large: bool) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    if large {
        return hex(&sha2::Sha256::digest(content));
    }
    let mut hash = sha1::Sha1::new();
    hash.update(format!("blob {}\0", content.len()));
    hash.update(content);
    hex(&hash.finalize())
}

impl State {
    fn serve(&self, mut stream: TcpStream, host: &'static str) -> std::io::Result<()> {
        let (line, headers) = read_head(&stream)?;
        let (authorization, range) = (headers.get("authorization").cloned(), headers.get("range").cloned());
        let seen =
            Seen { host, line: line.clone(), authorization: authorization.clone(), range: range.clone() };
        self.seen.lock().unwrap().push(seen);
        let (method, path) = line.split_once(' ').unwrap_or_default();

        if host == "hub" {
            if let Some((status, code)) = *self.closed.lock().unwrap() {
                return answer(&mut stream, status, &[("X-Error-Code", code)], b"");
            }
            let token = self.token.lock().unwrap().clone();
            if token.is_some_and(|token| authorization != Some(format!("Bearer {token}"))) {
                return answer(&mut stream, 401, &[("X-Error-Code", "GatedRepo")], b"");
            }
        }
        if path == "/api/models/org/name/revision/main" {
            return self.list(&mut stream);
        }
        let redirected = path.strip_prefix("/api/resolve-cache/models/org/name/");
        let name = redirected
            .or_else(|| path.strip_prefix(&format!("/org/name/resolve/{COMMIT}/")))
            .or_else(|| path.strip_prefix("/stored/"));
        let Some(name) = name.map(|name| name.split('?').next().unwrap_or_default()) else {
            return answer(&mut stream, 404, &[("X-Error-Code", "RepoNotFound")], b"");
        };
        let found = self.files.lock().unwrap().get(name).cloned();
        let Some((content, large)) = found else {
            return answer(&mut stream, 404, &[("X-Error-Code", "EntryNotFound")], b"");
        };
        let size = self.false_sizes.lock().unwrap().get(name).copied().unwrap_or(content.len() as u64);
        let (quoted, size) = (format!("\"{}\"", etag(&content, large)), size.to_string());
        if host == "hub" && large {
            let location = format!("{}/stored/{name}?signature=x", self.cdn.lock().unwrap());
            let headers = [
                ("Location", location.as_str()),
                ("ETag", "\"of-the-pointer\""),
                ("X-Linked-Etag", &quoted),
                ("X-Linked-Size", &size),
                ("X-Repo-Commit", COMMIT),
            ];
            return answer(&mut stream, 302, &headers, b"moved to another host");
        }
        if host == "hub" && redirected.is_none() && name == "tokenizer.json" {
            // For small files, the hub redirects to another of its own paths.
            let location = format!("/api/resolve-cache/models/org/name/{name}");
            return answer(&mut stream, 307, &[("Location", &location)], b"moved here");
        }
        if method == "HEAD" {
            let head = format!(
                "HTTP/1.1 200 OK\r\nETag: W/{quoted}\r\nX-Repo-Commit: {COMMIT}\r\nContent-Length: {size}\r\n\
                 Connection: close\r\n\r\n"
            );
            return stream.write_all(head.as_bytes());
        }
        let busy = self.busy.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_busy.fetch_max(busy, Ordering::SeqCst);
        let result = self.content(&mut stream, name, &content, range.as_deref());
        self.busy.fetch_sub(1, Ordering::SeqCst);
        result
    }

    fn next_fault(&self, name: &str) -> Option<Fault> {
        self.faults.lock().unwrap().get_mut(name).and_then(VecDeque::pop_front)
    }

    fn list(&self, stream: &mut TcpStream) -> std::io::Result<()> {
        if let Some(Fault::Status(status, code)) = self.next_fault("list") {
            return answer(stream, status, &[("X-Error-Code", code)], b"");
        }
        let siblings: Vec<_> =
            self.files.lock().unwrap().keys().map(|name| serde_json::json!({"rfilename": name})).collect();
        let body = serde_json::json!({"id": "org/name", "sha": COMMIT, "siblings": siblings, "gated": false});
        answer(stream, 200, &[("Content-Type", "application/json")], body.to_string().as_bytes())
    }

    fn content(
        &self,
        stream: &mut TcpStream,
        name: &str,
        content: &[u8],
        range: Option<&str>,
    ) -> std::io::Result<()> {
        let fault = self.next_fault(name);
        let bounds = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        let first_byte = bounds.and_then(|(first, _)| first.parse::<usize>().ok());
        let end =
            bounds.and_then(|(_, last)| last.parse::<usize>().ok()).map_or(content.len(), |last| last + 1);
        let mut from = first_byte.unwrap_or(0);
        let mut status = if first_byte.is_some() { 206 } else { 200 };
        let mut body = content.to_vec();
        let mut stall = None;
        let mut length = None;
        match fault {
            Some(Fault::Status(status, code)) => {
                return answer(stream, status, &[("X-Error-Code", code), ("Retry-After", "0")], b"");
            }
            Some(Fault::Drop(after)) => length = Some(after),
            Some(Fault::Stall(after, time)) => (length, stall) = (Some(after), Some(time)),
            Some(Fault::Garble) => body.iter_mut().for_each(|byte| *byte ^= 1),
            Some(Fault::IgnoreRange) => (from, status) = (0, 200),
            Some(Fault::WrongRange) => from += 1,
            Some(Fault::Delay(time)) => thread::sleep(time),
            None => {}
        }
        if from >= body.len() {
            return answer(stream, 416, &[], b"");
        }
        let rest = &body[from..end.clamp(from, body.len())];
        let head = format!(
            "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nContent-Range: bytes {from}-{}/{}\r\nConnection: close\r\n\r\n",
            rest.len(),
            from + rest.len().saturating_sub(1),
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(&rest[..length.unwrap_or(rest.len()).min(rest.len())])?;
        if let Some(time) = stall {
            thread::sleep(time);
        }
        Ok(())
    }
}

/// Reads a request's first line, without the HTTP version, and its headers, with lower-case names.
fn read_head(stream: &TcpStream) -> std::io::Result<(String, HashMap<String, String>)> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut headers = HashMap::new();
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        match header.trim_end().split_once(": ") {
            Some((name, value)) => headers.insert(name.to_ascii_lowercase(), value.to_owned()),
            None => break,
        };
    }
    Ok((line.trim_end().trim_end_matches(" HTTP/1.1").to_owned(), headers))
}

fn answer(stream: &mut TcpStream, status: u16, headers: &[(&str, &str)], body: &[u8]) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n", body.len());
    for (name, value) in headers.iter().filter(|(_, value)| !value.is_empty()) {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    stream.write_all(body)
}
