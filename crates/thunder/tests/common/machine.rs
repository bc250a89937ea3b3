//! Machines as network namespaces on this one.

use std::io::Read;
use std::process::{Child, Command, Stdio};

/// Whether this user and system can make machines.
pub fn can_make_machines() -> bool {
    let output = Command::new("unshare").args(["--net", "--mount", "--uts", "ip", "link"]).output();
    output.is_ok_and(|output| output.status.success())
}

/// A process that is killed when dropped.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Fails if it has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A network namespace with its own mounts and host name. It ends with its holder, so nothing
/// remains however the test ends.
pub struct Machine {
    holder: Process,
}

impl Machine {
    pub fn new(name: &str) -> Self {
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount", "--uts", "sh", "-c", "echo ready; exec cat"]);
        let mut holder = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = [0; 6];
        holder.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
        let machine = Self { holder: Process(holder) };
        let sudo = r#"printf '#!/bin/sh\nexec "$@"\n' >/usr/local/bin/sudo && chmod 755 /usr/local/bin/sudo"#;
        let mounts = "for d in /root /usr/local/bin; do mount -t tmpfs -o mode=755 tmpfs $d; done";
        machine.run(&format!("hostname {name} && ip link set lo up && {mounts} && {sudo}"));
        machine
    }

    pub fn id(&self) -> String {
        self.holder.0.id().to_string()
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.id(), "--net", "--mount", "--uts", "--wd=."]).args(words);
        command.env_clear().env("HOME", "/root").env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin");
        command.stdin(Stdio::null());
        command
    }

    pub fn run(&self, script: &str) {
        let status = self.command(&["sh", "-c", script]).status().unwrap();
        assert!(status.success(), "{script}");
    }
}

/// A switch: a namespace with a bridge that machines are plugged into.
pub struct Switch(Machine);

impl Switch {
    pub fn new() -> Self {
        let machine = Machine::new("switch");
        // Without the wait of a spanning tree, as on a desk.
        machine.run("ip link add br0 type bridge forward_delay 0 && ip link set br0 up");
        Self(machine)
    }

    /// Connects a machine's `eth0`, with these addresses.
    pub fn plug(&self, name: &str, machine: &Machine, addresses: &[&str]) {
        self.0.run(&format!("ip link add {name} type veth peer name eth0 netns {}", machine.id()));
        self.0.run(&format!("ip link set {name} master br0 up"));
        let script: String =
            addresses.iter().map(|address| format!("ip address add {address} dev eth0 && ")).collect();
        machine.run(&format!("{script} ip link set eth0 up"));
    }

    /// Cuts a machine's cable, or mends it.
    pub fn set_cable(&self, name: &str, works: bool) {
        self.0.run(&format!("ip link set {name} {}", if works { "up" } else { "down" }));
    }
}
