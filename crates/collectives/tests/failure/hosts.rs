//! Hosts on one machine: network namespaces, each with a cable to a switch. A namespace and its
//! interfaces live as long as a process in it, so nothing remains however a test ends.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const NAMESPACE_LIMIT: Duration = Duration::from_secs(10);

/// True if this machine can have them: as root, or with the right to create network namespaces.
pub fn are_possible() -> bool {
    let works = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output();
        output.is_ok_and(|output| output.status.success())
    };
    works("unshare", &["--net", "ip", "link", "add", "bridge0", "type", "bridge"])
}

struct Namespace {
    /// Ends when its input is closed, so at the latest with this process.
    holder: Child,
}

impl Namespace {
    fn new() -> Self {
        let holder = Command::new("unshare")
            .args(["--net", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("unshare, of the Debian package util-linux, starts");
        let namespace = Self { holder };
        let own = std::fs::read_link("/proc/self/ns/net").expect("a namespace");
        let started = Instant::now();
        while std::fs::read_link(namespace.path()).is_ok_and(|theirs| theirs == own) {
            assert!(started.elapsed() < NAMESPACE_LIMIT, "no network namespace was made: it takes root");
            std::thread::sleep(Duration::from_millis(1));
        }
        namespace.run(&["ip", "link", "set", "lo", "up"]);
        namespace
    }

    fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.holder.id())
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path())).arg(program);
        command
    }

    fn run(&self, words: &[&str]) {
        let status = self.command(Path::new(words[0])).args(&words[1..]).status();
        assert!(status.expect("nsenter starts").success(), "{words:?} failed");
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Fails if it has already ended; either way it is reaped.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Hosts 0, 1, … on one switch.
pub struct Hosts {
    switch: Namespace,
    hosts: Vec<Namespace>,
}

impl Hosts {
    pub fn new(count: usize) -> Self {
        let switch = Namespace::new();
        switch.run(&["ip", "link", "add", "bridge0", "type", "bridge"]);
        switch.run(&["ip", "link", "set", "bridge0", "up"]);
        let hosts = (0..count).map(|host| {
            let namespace = Namespace::new();
            let (port, process) = (port(host), namespace.holder.id().to_string());
            switch.run(&[
                "ip", "link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &process,
            ]);
            switch.run(&["ip", "link", "set", &port, "master", "bridge0", "up"]);
            let address = format!("{}/24", Self::address(host));
            namespace.run(&["ip", "address", "add", &address, "dev", "eth0"]);
            namespace.run(&["ip", "link", "set", "eth0", "up"]);
            namespace
        });
        Self { hosts: hosts.collect(), switch }
    }

    pub fn address(host: usize) -> String {
        format!("10.77.0.{}", host + 1)
    }

    /// A command that runs `program` on a host.
    pub fn command(&self, host: usize, program: &Path) -> Command {
        self.hosts[host].command(program)
    }

    /// Disconnects a host's cable from the switch.
    pub fn cut(&self, host: usize) {
        self.switch.run(&["ip", "link", "set", &port(host), "down"]);
    }

    /// Connects it again.
    pub fn mend(&self, host: usize) {
        self.switch.run(&["ip", "link", "set", &port(host), "up"]);
    }

    /// Delays or drops what a host sends; `netem` is the option list of `tc`.
    pub fn disturb(&self, host: usize, netem: &[&str]) {
        let words = [&["tc", "qdisc", "add", "dev", "eth0", "root", "netem"], netem].concat();
        self.hosts[host].run(&words);
    }

    /// Number of packets of a disturbed host that were lost so far.
    pub fn lost(&self, host: usize) -> u64 {
        let mut tc = self.hosts[host].command(Path::new("tc"));
        let output = tc.args(["-s", "-j", "qdisc", "show", "dev", "eth0"]).output().expect("tc starts");
        let rows: serde_json::Value = serde_json::from_slice(&output.stdout).expect("tc writes JSON");
        rows[0]["drops"].as_u64().expect("a count of drops")
    }
}

fn port(host: usize) -> String {
    format!("port{host}")
}
