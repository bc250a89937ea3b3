//! Starts the program and talks to it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test file uses a part of this")]

pub mod collector;
pub mod converted;
#[cfg(target_os = "linux")]
#[path = "../../src/cluster_command/demo/machine.rs"]
pub mod machine;
#[cfg(unix)]
pub mod terminal;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

/// The program with these arguments, without the variables of the user who runs the tests.
pub fn thunder(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_thunder"));
    for name in ["THUNDER_RANK", "THUNDER_WORLD_SIZE", "THUNDER_COORDINATOR", "THUNDER_TRANSPORT", "MLX_RANK"]
    {
        command.env_remove(name);
    }
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs to the end and parses what is printed.
pub fn run_json(args: &[&str]) -> Value {
    let output = thunder(args).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{args:?}: {e}: {}", String::from_utf8_lossy(&output.stdout)))
}

/// True if a file of the folder, or of one in it, has this text.
pub fn holds(folder: &Path, text: &str) -> bool {
    std::fs::read_dir(folder).unwrap().any(|entry| {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => holds(&path, text),
            // A socket cannot be read, and holds nothing.
            false => std::fs::read(&path)
                .is_ok_and(|bytes| bytes.windows(text.len()).any(|part| part == text.as_bytes())),
        }
    })
}

/// A process that is told to end when dropped: an agent then ends its ranks as well.
pub struct Ending(pub Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.0.id().to_string()).status();
        let _ = self.0.wait();
    }
}

/// A `thunder serve` that is killed when dropped.
pub struct Server {
    child: Child,
    address: String,
    log: Arc<Mutex<String>>,
    reader: JoinHandle<()>,
}

impl Server {
    /// Starts a server on a free port and waits until it listens.
    pub fn start(args: &[&str]) -> Self {
        Self::from(thunder(&[&["serve", "--port", "0"], args].concat()))
    }

    /// Starts a command that says at which address it serves, and waits until it does.
    pub fn from(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut text = String::new();
        let address = loop {
            let line = lines.next().unwrap_or_else(|| panic!("the server ended: {text}")).unwrap();
            // A warning may name another server.
            if let Some((_, rest)) = line.split_once("http://").filter(|_| !line.contains("WARN")) {
                break rest.split('/').next().unwrap().to_owned();
            }
            text.push_str(&(line + "\n"));
        };
        let log = Arc::new(Mutex::new(text));
        let writer = log.clone();
        let reader = std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                writer.lock().unwrap().push_str(&(line + "\n"));
            }
        });
        Self { child, address, log, reader }
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.address)
    }

    pub fn id(&self) -> i32 {
        self.child.id() as i32
    }

    /// What it has logged since it listens.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Process ids of the ranks that the server started, in rank order.
    pub fn children(&self) -> Vec<i32> {
        children(self.child.id())
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: our own child, not yet waited for.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    /// Waits until the server has ended by itself. Returns its status and its standard error.
    pub fn wait(&mut self, limit: Duration) -> (ExitStatus, String) {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                finish_reading(&self.reader);
                return (status, self.log.lock().unwrap().clone());
            }
            assert!(Instant::now() < deadline, "the server did not end: {}", self.log.lock().unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The other ranks notice the end of rank 0 and end too.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until a thread has read everything that an ended program wrote, or for some seconds if a
/// child of the program holds its output open.
pub fn finish_reading(reader: &JoinHandle<()>) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !reader.is_finished() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Process ids of a process's children, in start order.
pub fn children(id: u32) -> Vec<i32> {
    let threads = std::fs::read_dir(format!("/proc/{id}/task")).unwrap();
    // A thread may end meanwhile.
    let of_thread = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("children")).ok();
    let texts: String = threads.flatten().filter_map(of_thread).collect();
    texts.split_whitespace().map(|id| id.parse().unwrap()).collect()
}

/// A number of `/metrics`.
pub fn metric(server: &Server, name: &str) -> f64 {
    let (_, text) = get(&server.url("/metrics"));
    let line =
        text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}: {text}"));
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

/// Gets `address/path`. Returns the status and the whole answer.
fn get(url: &str) -> (u16, String) {
    let (address, path) = url.split_once('/').unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET /{path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    (answer[9..12].parse().unwrap(), answer)
}

/// Posts JSON to `address/path` and reads the answer, which is cut if the server dies.
pub fn exchange(url: &str, body: &Value) -> std::io::Result<String> {
    let (address, path) = url.split_once('/').unwrap();
    let body = body.to_string();
    let mut stream = TcpStream::connect(address)?;
    let head = format!(
        "POST /{path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Posts JSON to `address/path` and reads the answer.
pub fn post(url: &str, body: &Value) -> (u16, Value) {
    let answer = exchange(url, body).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split_whitespace().nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap_or_else(|_| Value::String(body.to_owned())))
}
