//! `thunder service` under systemd, which is process 1 of a machine in namespaces.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Where the service of the machine keeps its node.
const DATA: &str = "/var/lib/thunder";
/// The node agent as a service: without a network, on ports of its own.
const UP: [&str; 6] = ["up", "--name", "box", "--port", "0", "--no-discovery"];

/// A machine whose process 1 is systemd. It is ended when dropped.
struct Machine {
    folder: tempfile::TempDir,
    unshare: Option<Child>,
    /// A key of the node, once it has one.
    key: String,
}

impl Machine {
    /// `None`: this machine cannot have one.
    fn new() -> Option<Self> {
        // What a machine writes must not be on overlayfs.
        let folder = tempfile::Builder::new().prefix("systemd").tempdir_in("/dev/shm").ok()?;
        let can_boot = Path::new("/lib/systemd/systemd").exists()
            && fs::read_to_string("/proc/mounts").is_ok_and(|mounts| mounts.contains(" cgroup2 "))
            && Command::new("unshare")
                .args(["--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup", "--fork", "true"])
                .status()
                .is_ok_and(|status| status.success());
        can_boot.then_some(Self { folder, unshare: None, key: String::new() })
    }

    fn boot(&mut self) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/systemd/boot.sh");
        let log = fs::File::create(self.folder.path().join("console")).unwrap();
        let mut command = Command::new(script);
        command.arg(self.folder.path()).arg(env!("CARGO_BIN_EXE_thunder"));
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).process_group(0);
        self.unshare = Some(command.spawn().unwrap());
        self.wait("systemd has started", || {
            // "degraded": a service that is none of ours has failed.
            let said = self.said(&["systemctl", "is-system-running"]);
            said.starts_with("running") || said.starts_with("degraded")
        });
    }

    /// Waits until the machine has ended by itself.
    fn ends(&mut self) {
        let mut unshare = self.unshare.take().unwrap();
        self.wait("the machine ends", || unshare.try_wait().unwrap().is_some());
    }

    fn first_process(&self) -> Option<String> {
        let unshare = self.unshare.as_ref()?.id();
        let children = fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children")).ok()?;
        children.split_whitespace().next().map(str::to_owned)
    }

    /// Runs a command on the machine; `None` while it has no process 1.
    fn run(&self, words: &[&str]) -> Option<Output> {
        let first = self.first_process()?;
        let mut command = Command::new("nsenter");
        command.args(["--target", &first, "--all", "--root", "--wd", "env", "-i"]);
        command.args(["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "XDG_RUNTIME_DIR=/run/user/0"]);
        command.args(words).stdin(Stdio::null()).output().ok()
    }

    fn said(&self, words: &[&str]) -> String {
        self.run(words)
            .map_or_else(String::new, |output| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a command of the program that must succeed.
    fn thunder(&self, words: &[&str]) -> String {
        let output = self.run(&[&["/opt/thunder"], words].concat()).unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {error}\n{}", self.console());
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs one that must fail, and returns the error.
    fn refused(&self, words: &[&str]) -> String {
        let output = self.run(&[&["/opt/thunder"], words].concat()).unwrap();
        assert!(!output.status.success(), "{words:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Process identifiers of the program, as the machine counts them.
    fn processes(&self) -> Vec<String> {
        self.said(&["pgrep", "--full", "^/opt/thunder"]).lines().map(str::to_owned).collect()
    }

    /// The node's identifier, once its agent answers.
    fn node(&self) -> String {
        let status = || -> Option<serde_json::Value> {
            let words = ["/opt/thunder", "cluster", "status", "--json", "--data", DATA];
            serde_json::from_str(&self.said(&words)).ok()
        };
        self.wait("the agent answers", || status().is_some());
        status().unwrap()["me"].as_str().unwrap().to_owned()
    }

    fn answer(&self) -> String {
        let key = format!("THUNDER_API_KEY={}", self.key);
        let words =
            ["model", "infer", "builtin", "Who are you?", "--max-tokens", "8", "--json", "--data", DATA];
        let said = self.said(&[&[key.as_str(), "/opt/thunder"], &words[..]].concat());
        let said: serde_json::Value =
            serde_json::from_str(&said).unwrap_or_else(|_| panic!("no answer: {}", self.console()));
        said["text"].as_str().unwrap().to_owned()
    }

    fn console(&self) -> String {
        fs::read_to_string(self.folder.path().join("console")).unwrap_or_default()
    }

    fn wait(&self, what: &str, mut done: impl FnMut() -> bool) {
        let began = Instant::now();
        while !done() {
            let log = self.said(&["journalctl", "--no-pager", "--lines", "30"]);
            assert!(began.elapsed() < Duration::from_secs(60), "not {what}: {}\n{log}", self.console());
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some(mut unshare) = self.unshare.take() {
            // Its child, process 1, is killed with it.
            drop(unshare.kill());
            drop(unshare.wait());
        }
        let Ok(group) = fs::read_to_string(self.folder.path().join("group")) else { return };
        let remove = ["-depth", "-type", "d", "-exec", "rmdir", "{}", ";"];
        for _ in 0..20 {
            drop(Command::new("find").arg(group.trim()).args(remove).stderr(Stdio::null()).status());
            if !Path::new(group.trim()).exists() {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

#[test]
fn the_service_survives_a_crash_and_a_boot_and_leaves_nothing_when_removed() {
    let Some(mut machine) = Machine::new() else {
        thunder_testing::skip(
            "the_service_survives",
            "it needs root, namespaces and Debian's package systemd",
        );
        return;
    };
    machine.boot();

    // What would fail at each start is refused before anything is written.
    let error = machine.refused(&["service", "--system", "install", "--", "upp"]);
    assert!(error.contains("the service's command is wrong"), "{error}");
    assert_eq!(machine.said(&["ls", "/etc/systemd/system"]).matches("thunder").count(), 0);

    // One that cannot be started leaves no file: this user has no service manager yet.
    machine.refused(&[&["service", "install", "--name", "mine", "--"], &UP[..]].concat());
    assert_eq!(machine.said(&["ls", "/root/.config/systemd/user"]).matches("mine").count(), 0);

    // Its keys may be made before it runs.
    let key = machine.thunder(&["keys", "create", "boss", "--role", "admin", "--data", DATA]);
    machine.key = key.trim().to_owned();
    assert!(key.starts_with("th-"), "{key}");
    let said = machine.thunder(&[&["service", "install", "--system", "--"], &UP[..]].concat());
    assert!(said.contains("it runs") && said.contains(DATA), "{said}");
    machine.wait("the service has the key", || {
        machine.said(&["/opt/thunder", "keys", "list", "--data", DATA]).contains("boss")
    });
    let node = machine.node();
    machine.thunder(&["model", "load", "builtin", "--data", DATA]);
    let answer = machine.answer();
    assert_eq!(machine.processes().len(), 2, "an agent and its rank");
    let owner = machine.said(&["ps", "-o", "user=", "-p", &machine.processes()[0]]);
    assert_ne!(owner.trim(), "root");

    // What root's commands leave in the store while the service is down is the service's.
    machine.said(&["systemctl", "stop", "thunder"]);
    assert!(machine.thunder(&["keys", "list", "--data", DATA]).contains("boss"));
    let of_root = machine.said(&["find", &format!("{DATA}/"), "-user", "root"]);
    assert_eq!(of_root, "");
    machine.said(&["systemctl", "start", "thunder"]);
    assert_eq!(machine.node(), node);
    machine.wait("the model is there", || machine.processes().len() == 2);

    // Its settings are read again, by the service's user; nothing is started anew.
    let before = machine.processes();
    let file = machine.thunder(&["config", "init", "--node", "--data", DATA]);
    let written = format!("echo 'keep-requests = 9' >>{}", file.trim());
    machine.said(&["sh", "-c", &written]);
    machine.said(&["systemctl", "reload", "thunder"]);
    machine.wait("the settings are in force", || {
        let log = machine.said(&["journalctl", "--no-pager", "--unit", "thunder"]);
        log.contains("settings are read again; in force now: keep-requests")
    });
    assert_eq!(machine.processes(), before);

    // The agent dies: its rank ends with it, both come again, and answer as before.
    let agent = machine.said(&["systemctl", "show", "--property", "MainPID", "--value", "thunder"]);
    machine.said(&["kill", "-KILL", agent.trim()]);
    machine.wait("both are there again", || {
        let now = machine.processes();
        now.len() == 2 && now.iter().all(|process| !before.contains(process))
    });
    assert_eq!(machine.node(), node);
    assert_eq!(machine.answer(), answer);

    // The machine boots again.
    machine.said(&["systemctl", "reboot"]);
    machine.ends();
    machine.boot();
    assert_eq!(machine.node(), node);
    machine.wait("the model is there", || machine.processes().len() == 2);
    assert_eq!(machine.answer(), answer);

    // Another command takes the place of the first.
    machine.thunder(&[
        "service",
        "install",
        "--system",
        "--",
        "up",
        "--name",
        "other",
        "--port",
        "0",
        "--no-discovery",
    ]);
    machine.wait("the agent has its new name", || {
        machine.said(&["/opt/thunder", "cluster", "status", "--data", DATA]).contains("other (here)")
    });

    machine.thunder(&["service", "uninstall", "--system"]);
    assert_eq!(machine.processes(), Vec::<String>::new());
    let known = machine.said(&["systemctl", "show", "--property", "LoadState", "--value", "thunder"]);
    assert_eq!(known.trim(), "not-found");
    let error = machine.refused(&["service", "uninstall", "--system"]);
    assert!(error.contains("no service"), "{error}");
    // The node's key stays for the next installation.
    assert!(!machine.said(&["ls", &format!("{DATA}/node.key")]).is_empty());

    // A service of a user, which here is root.
    machine.said(&["systemctl", "start", "user@0.service"]);
    machine.thunder(&[&["service", "install", "--name", "mine", "--"], &UP[..]].concat());
    machine.wait("the user's agent answers", || {
        machine.said(&["/opt/thunder", "cluster", "status"]).contains("box (here)")
    });
    machine.thunder(&["service", "uninstall", "--name", "mine"]);
    assert_eq!(machine.processes(), Vec::<String>::new());
}
