//! A temporary server of the system's OpenSSH that accepts only its own key.

use std::fmt::Write;
use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// The system's `sshd`, if there is one. It must be started by its full path.
fn program() -> Option<PathBuf> {
    let folders = ["/usr/sbin", "/usr/local/sbin", "/usr/bin"];
    folders.map(|folder| Path::new(folder).join("sshd")).into_iter().find(|path| path.exists())
}

/// Whether launches can be tested over `sshd`. macOS has one too, but it was not tried.
pub fn is_there() -> bool {
    cfg!(target_os = "linux") && program().is_some()
}

/// `sshd` with one port per host; commands run in the host's folder. Dropping it ends it.
pub struct Server(Child);

impl Server {
    /// Also returns the command that reaches the hosts. Hosts of other names do not answer.
    pub fn start(folder: &Path, hosts: &[&str]) -> (Self, Vec<String>) {
        for key in ["host_key", "user_key"] {
            let mut command = Command::new("ssh-keygen");
            command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(folder.join(key));
            assert!(command.status().unwrap().success());
        }
        let public = |key: &str| std::fs::read_to_string(folder.join(key).with_extension("pub")).unwrap();
        std::fs::write(folder.join("authorized_keys"), public("user_key")).unwrap();
        std::fs::write(folder.join("known_hosts"), format!("thunder {}", public("host_key"))).unwrap();
        // As root, `sshd` needs this folder, which its service would have made.
        if rustix::process::geteuid().is_root() {
            std::fs::create_dir_all("/run/sshd").unwrap();
        }
        // Another process may take a port between its choice and its use.
        for _ in 0..5 {
            let listeners: Vec<TcpListener> =
                hosts.iter().map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
            let ports: Vec<u16> =
                listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
            drop(listeners);
            if let Some(server) = Self::listen(folder, hosts, &ports) {
                let config = folder.join("ssh_config").into_os_string().into_string().unwrap();
                std::fs::write(&config, client_config(folder, hosts, &ports)).unwrap();
                return (server, vec!["ssh".to_owned(), "-F".to_owned(), config]);
            }
        }
        panic!("sshd did not start: {}", std::fs::read_to_string(folder.join("sshd.log")).unwrap());
    }

    fn listen(folder: &Path, hosts: &[&str], ports: &[u16]) -> Option<Self> {
        let config = folder.join("sshd_config");
        std::fs::write(&config, server_config(folder, hosts, ports)).unwrap();
        let log = File::create(folder.join("sshd.log")).unwrap();
        let mut command = Command::new(program().unwrap());
        command.args(["-D", "-e", "-f"]).arg(&config).stderr(log);
        let mut server = Self(command.spawn().unwrap());
        let began = Instant::now();
        while server.0.try_wait().unwrap().is_none() && began.elapsed() < Duration::from_secs(20) {
            if ports.iter().all(|port| TcpStream::connect(("127.0.0.1", *port)).is_ok()) {
                return Some(server);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails if it has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn server_config(folder: &Path, hosts: &[&str], ports: &[u16]) -> String {
    let at = folder.display();
    let mut text = format!(
        "HostKey {at}/host_key\nAuthorizedKeysFile {at}/authorized_keys\nPidFile none\nStrictModes no\nUsePAM no\n\
         PasswordAuthentication no\n"
    );
    for port in ports {
        writeln!(text, "ListenAddress 127.0.0.1:{port}").unwrap();
    }
    for (host, port) in hosts.iter().zip(ports) {
        let command = format!("cd {at}/{host} && exec sh -c \"$SSH_ORIGINAL_COMMAND\"");
        writeln!(text, "Match LocalPort {port}\n  ForceCommand {command}").unwrap();
    }
    text
}

fn client_config(folder: &Path, hosts: &[&str], ports: &[u16]) -> String {
    let at = folder.display();
    let mut text = String::new();
    for (host, port) in hosts.iter().zip(ports) {
        writeln!(text, "Host {host}\n  Port {port}").unwrap();
    }
    // No process listens on port 1.
    text + &format!(
        "Host *\n  HostName 127.0.0.1\n  Port 1\n  IdentityFile {at}/user_key\n  IdentitiesOnly yes\n\
         \x20 HostKeyAlias thunder\n  UserKnownHostsFile {at}/known_hosts\n  GlobalKnownHostsFile /dev/null\n\
         \x20 StrictHostKeyChecking yes\n"
    )
}
