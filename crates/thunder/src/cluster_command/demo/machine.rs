//! Machines as network namespaces of this one, on a switch. Linux, and root.

use std::io::{self, Read};
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
/// remains however this program ends.
pub struct Machine {
    holder: Process,
}

impl Machine {
    /// Makes a machine with an empty home folder.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn new(name: &str) -> io::Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount", "--uts", "sh", "-c", "echo ready; exec cat"]);
        let mut holder = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut ready = [0; 6];
        if let Some(said) = holder.stdout.as_mut() {
            said.read_exact(&mut ready)?;
        }
        let machine = Self { holder: Process(holder) };
        let sudo = r#"printf '#!/bin/sh\nexec "$@"\n' >/usr/local/bin/sudo && chmod 755 /usr/local/bin/sudo"#;
        let mounts = "for d in /root /usr/local/bin; do mount -t tmpfs -o mode=755 tmpfs $d; done";
        machine.run(&format!("hostname {name} && ip link set lo up && {mounts} && {sudo}"))?;
        Ok(machine)
    }

    /// The process that holds it.
    pub fn id(&self) -> String {
        self.holder.0.id().to_string()
    }

    /// A command on this machine, without the caller's variables.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.id(), "--net", "--mount", "--uts", "--wd=."]).args(words);
        command.env_clear().env("HOME", "/root").env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin");
        command.stdin(Stdio::null());
        command
    }

    /// Runs a shell's script.
    ///
    /// # Errors
    /// When it fails.
    pub fn run(&self, script: &str) -> io::Result<()> {
        let status = self.command(&["sh", "-c", script]).status()?;
        if status.success() { Ok(()) } else { Err(io::Error::other(format!("{status}: {script}"))) }
    }
}

/// A switch: a namespace with a bridge that machines are plugged into.
pub struct Switch(Machine);

impl Switch {
    /// Makes a switch.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn new() -> io::Result<Self> {
        let machine = Machine::new("switch")?;
        // Without the wait of a spanning tree, as on a desk.
        machine.run("ip link add br0 type bridge forward_delay 0 && ip link set br0 up")?;
        Ok(Self(machine))
    }

    /// Connects a machine's `eth0`, with these addresses.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn plug(&self, name: &str, machine: &Machine, addresses: &[&str]) -> io::Result<()> {
        self.plug_into(name, machine, "eth0", addresses)
    }

    /// The same with another of the machine's interfaces.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn plug_into(
        &self,
        name: &str,
        machine: &Machine,
        interface: &str,
        addresses: &[&str],
    ) -> io::Result<()> {
        self.0.run(&format!("ip link add {name} type veth peer name {interface} netns {}", machine.id()))?;
        self.0.run(&format!("ip link set {name} master br0 up"))?;
        let script: String =
            addresses.iter().map(|address| format!("ip address add {address} dev {interface} && ")).collect();
        machine.run(&format!("{script} ip link set {interface} up"))
    }

    /// Cuts a machine's cable, or mends it.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn set_cable(&self, name: &str, works: bool) -> io::Result<()> {
        self.0.run(&format!("ip link set {name} {}", if works { "up" } else { "down" }))
    }
}
