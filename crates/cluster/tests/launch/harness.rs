//! Starts the launcher, and looks for processes that it left.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use thunder_cluster::launch::{Launch, parse_hosts};

/// No test takes longer, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(100);

pub struct Run {
    pub status: Option<i32>,
    pub stdout: Vec<u8>,
    pub stderr: String,
    pub time: Duration,
}

impl Run {
    pub fn text(&self) -> String {
        String::from_utf8(self.stdout.clone()).unwrap()
    }

    /// The sorted lines of standard output: ranks print in any order.
    pub fn sorted(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.text().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }
}

/// The command of a rank that runs `name` of `programs.rs`.
pub fn program(name: &str, more: &[&str]) -> Vec<String> {
    let exe = std::env::current_exe().unwrap().into_os_string().into_string().unwrap();
    [&exe, "--as-rank", name].into_iter().chain(more.iter().copied()).map(str::to_owned).collect()
}

/// A launch of a shell command on `count` local ranks.
pub fn shell(count: usize, command: &str) -> Launch {
    local(count, ["sh", "-c", command].map(str::to_owned).to_vec())
}

pub fn local(count: usize, command: Vec<String>) -> Launch {
    let mut launch = Launch::new(command, parse_hosts("localhost", count).unwrap());
    launch.grace = Duration::from_secs(3);
    launch
}

/// The launcher's command, with piped streams.
pub fn launcher(launch: &Launch) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--as-launcher", &serde_json::to_string(launch).unwrap()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

pub fn start(launch: &Launch) -> Child {
    launcher(launch).spawn().unwrap()
}

pub fn run(launch: &Launch, input: &[u8]) -> Run {
    let mut child = start(launch);
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // Writing may fail: a launcher need not read its input.
    std::thread::spawn(move || drop(stdin.write_all(&input)));
    finish(child)
}

/// Waits, and fails if it takes too long.
pub fn finish(mut child: Child) -> Run {
    let began = Instant::now();
    let collect = |mut stream: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut data = Vec::new();
            stream.read_to_end(&mut data).unwrap();
            data
        })
    };
    let stdout = child.stdout.take().map(|stream| collect(Box::new(stream)));
    let stderr = child.stderr.take().map(|stream| collect(Box::new(stream)));
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if began.elapsed() > LIMIT {
            child.kill().unwrap();
            panic!("the launcher did not end within {LIMIT:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let time = began.elapsed();
    let stdout = stdout.map(|thread| thread.join().unwrap()).unwrap_or_default();
    let stderr = stderr.map(|thread| thread.join().unwrap()).unwrap_or_default();
    Run { status: status.code(), stdout, stderr: String::from_utf8(stderr).unwrap(), time }
}

/// A random word that is in no other process's arguments.
pub fn marker() -> String {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).unwrap();
    format!("marker-{:016x}", u64::from_le_bytes(bytes))
}

/// Processes with `marker` among their arguments, except the launcher.
pub fn alive(marker: &str) -> Vec<String> {
    let list = Command::new("ps").args(["-A", "-ww", "-o", "pid=,stat=,args="]).output().unwrap();
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    let is_zombie = |line: &str| line.split_whitespace().nth(1).is_some_and(|state| state.starts_with('Z'));
    list.lines()
        .filter(|line| line.contains(marker) && !line.contains("--as-launcher") && !is_zombie(line))
        .map(str::to_owned)
        .collect()
}

/// Waits until `count` processes have the marker.
pub fn wait_for(marker: &str, count: usize) {
    let began = Instant::now();
    loop {
        let found = alive(marker);
        if found.len() == count {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{count} processes were expected: {found:#?}");
        std::thread::sleep(Duration::from_millis(30));
    }
}
