//! Ranks at the other end of `ssh`: the real one, or a script that stands for it and runs the
//! commands on this machine, in a session of their own as the real one does.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use thunder_cluster::launch::{Input, Launch, Place};

use crate::harness::{alive, finish, marker, program, run, start, wait_for};
use crate::sshd::Server;

/// Hosts that are folders on this machine, and the command that reaches them.
pub struct Hosts {
    folder: TempDir,
    ssh: Vec<String>,
    server: Option<Server>,
}

impl Hosts {
    /// A folder for each host, and a script in place of `ssh`.
    pub fn fake(hosts: &[&str]) -> Self {
        let folder = folders(hosts);
        let at = folder.path().display();
        let script = format!(
            r#"#!/bin/sh
while :; do case $1 in -T) shift ;; -o) shift 2 ;; *) break ;; esac; done
host=$1; shift
echo "$host: $*" >>{at}/log
cd {at}/"$host" 2>/dev/null || {{ echo "ssh: unknown host $host" >&2; exit 255; }}
[ ! -d bin ] || PATH=$PWD/bin
exec {setsid} sh -c "$*"
"#,
            // Without `setsid` (macOS), the other end is in the group of `ssh`.
            setsid = if Path::new("/usr/bin/setsid").exists() { "/usr/bin/setsid --wait" } else { "" },
        );
        let path = folder.path().join("ssh");
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        Self { folder, ssh: vec![path.into_os_string().into_string().unwrap()], server: None }
    }

    /// A folder for each host, in which the system's `sshd` runs the commands of the system's
    /// `ssh`.
    pub fn real(hosts: &[&str]) -> Self {
        let folder = folders(hosts);
        let (server, ssh) = Server::start(folder.path(), hosts);
        Self { folder, ssh, server: Some(server) }
    }

    pub fn launch(&self, hosts: &[&str], command: &[&str]) -> Launch {
        let command = command.iter().map(|word| (*word).to_owned()).collect();
        let mut launch = Launch::new(command, hosts.iter().map(|host| place(host)).collect());
        launch.ssh = self.ssh.clone();
        launch.grace = Duration::from_secs(3);
        // By default a rank starts in the launcher's directory, which here exists on "both
        // machines".
        launch.directory = Some(".".into());
        launch
    }
}

fn folders(hosts: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for host in hosts {
        std::fs::create_dir(folder.path().join(host)).unwrap();
    }
    folder
}

fn place(host: &str) -> Place {
    Place { ssh: host.to_owned(), ips: vec!["127.0.0.1".to_owned()], rdma: Vec::new() }
}

pub fn surroundings(hosts: &Hosts) {
    let script = concat!(
        "read line; printf '%s\\n' \"$THUNDER_RANK $(basename \"$PWD\") $GREETING $line\"; ",
        "cat $MLX_HOSTFILE; echo"
    );
    let mut launch = hosts.launch(&["alpha", "beta"], &["sh", "-c", script]);
    launch.port = Some(4000);
    launch.input = Input::All;
    let greeting = "it's $HOME \\n \"ä\"\n!".to_owned();
    launch.environment.push(("GREETING".to_owned(), greeting.clone()));
    let run = run(&launch, b"first\nsecond\n");
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    let addresses = r#"[["127.0.0.1:4001"],["127.0.0.1:4002"]]"#;
    let (before, after) = greeting.split_once('\n').unwrap();
    let lines = |rank: usize, host: &str| {
        [
            format!("[{rank}] {rank} {host} {before}"),
            format!("[{rank}] {after} first"),
            format!("[{rank}] {addresses}"),
        ]
    };
    let mut expected = [lines(0, "alpha"), lines(1, "beta")].concat();
    expected.sort();
    assert_eq!(run.sorted(), expected);
    large_input(hosts);
}

fn large_input(hosts: &Hosts) {
    let command = program("echo", &[]);
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    let mut launch = hosts.launch(&["alpha", "beta"], &command);
    launch.directory = None;
    let run = run(&launch, &vec![b'\n'; 1_000_000]);
    let sum = (0..1_000_000).fold(0u64, |sum, _| sum.wrapping_mul(31).wrapping_add(10));
    assert_eq!(run.sorted(), [format!("[0] 1000000 {sum}"), "[1] 0 0".to_owned()], "{}", run.stderr);
    // A rank that does not read its input must still be ended.
    let mut launch = hosts.launch(&["alpha", "beta"], &["sh", "-c", "sleep 1; exit $THUNDER_RANK"]);
    launch.input = Input::All;
    let run = crate::harness::run(&launch, &vec![b'x'; 1_000_000]);
    assert_eq!(run.status, Some(1), "{}", run.stderr);
}

pub fn ending(mut hosts: Hosts) {
    let all = ["alpha", "beta", "localhost"];
    for stubborn in ["", "trap '' TERM; "] {
        let marker = marker();
        let hang = program("hang", &[&marker]).join(" ");
        let script =
            format!("[ $THUNDER_RANK = 1 ] && {{ sleep 1; exit 5; }}; {stubborn}({hang}; :) & {hang}; :");
        let mut launch = hosts.launch(&all, &["sh", "-c", &script]);
        launch.grace = Duration::from_secs(1);
        let run = run(&launch, b"");
        assert_eq!(run.status, Some(5), "{}", run.stderr);
        assert!(run.stderr.contains("rank 1 on beta exited with status 5"), "{}", run.stderr);
        wait_for(&marker, 0);
    }
    // A killed launcher's connections close, and the scripts at their other ends end the ranks.
    for (signal, status) in [(Signal::INT, Some(130)), (Signal::KILL, None)] {
        let marker = marker();
        let hang = program("hang", &[&marker]);
        let hang: Vec<&str> = hang.iter().map(String::as_str).collect();
        let mut launch = hosts.launch(&all, &hang);
        launch.directory = None;
        let child = start(&launch);
        wait_for(&marker, 3);
        kill_process(Pid::from_child(&child), signal).unwrap();
        let run = finish(child);
        assert_eq!(run.status, status, "{}", run.stderr);
        wait_for(&marker, 0);
    }

    let child = start(&hosts.launch(&["alpha", "nowhere"], &["sleep", "60"]));
    let run = finish(child);
    assert_eq!(run.status, Some(255), "{}", run.stderr);
    let refusal = match hosts.server {
        Some(_) => "[1] ssh: connect to host 127.0.0.1 port 1: Connection refused",
        None => "[1] ssh: unknown host nowhere",
    };
    assert!(run.stderr.contains(refusal), "{}", run.stderr);
    assert!(run.stderr.contains("rank 1 on nowhere exited with status 255"), "{}", run.stderr);
    let run = crate::harness::run(&hosts.launch(&["alpha"], &["no-such-program"]), b"");
    assert_eq!(run.status, Some(127), "{}", run.stderr);
    assert!(run.stderr.contains("rank 0 on alpha: cannot start no-such-program"), "{}", run.stderr);
    let mut launch = hosts.launch(&["alpha"], &["true"]);
    launch.directory = Some("/no/such/folder".into());
    let run = crate::harness::run(&launch, b"");
    assert!(run.stderr.contains("rank 0 on alpha: no directory /no/such/folder"), "{}", run.stderr);
    let folder = hosts.folder.path().to_str().unwrap();
    // The server itself has the folder among its arguments.
    match hosts.server.take() {
        Some(server) => {
            drop(server);
            wait_for(folder, 0);
        }
        None => assert_eq!(alive(folder), [""; 0]),
    }
}

/// Leaves a host only a few programs, without `setsid`.
fn only_programs(hosts: &Hosts, host: &str, shell: &str) -> PathBuf {
    let bin = hosts.folder.path().join(host).join("bin");
    std::fs::create_dir(&bin).unwrap();
    let same = ["bash", "sleep", "mkdir", "rm", "mkfifo", "cat"].map(|name| (name, name));
    for (name, program) in same.into_iter().chain([("sh", shell)]) {
        let path = ["/bin", "/usr/bin"].map(|folder| Path::new(folder).join(program));
        let path = path.iter().find(|path| path.exists()).unwrap();
        std::os::unix::fs::symlink(path, bin.join(name)).unwrap();
    }
    bin
}

/// The launcher is killed when the rank has been started but is not yet in a group of its own.
pub fn ended_at_once() {
    let hosts = Hosts::fake(&["slow"]);
    let setsid = only_programs(&hosts, "slow", "sh").join("setsid");
    std::fs::write(&setsid, "#!/bin/sh\nsleep 1\nexec /usr/bin/setsid \"$@\"\n").unwrap();
    std::fs::set_permissions(&setsid, std::fs::Permissions::from_mode(0o755)).unwrap();
    let marker = marker();
    let hang = program("hang", &[&marker]);
    let hang: Vec<&str> = hang.iter().map(String::as_str).collect();
    let mut child = start(&hosts.launch(&["slow"], &hang));
    wait_for(&marker, 1);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for(&marker, 0);
}

/// As on macOS: `sh` is bash, and there is no `setsid`.
pub fn job_control() {
    let hosts = Hosts::fake(&["mac"]);
    only_programs(&hosts, "mac", "bash");
    let marker = marker();
    let hang = program("hang", &[&marker]).join(" ");
    let script = format!(
        "read line; echo $line $THUNDER_RANK; ({hang}; :) & [ $THUNDER_RANK = 0 ] || exit 6; {hang}; :"
    );
    let mut launch = hosts.launch(&["mac", "mac"], &["bash", "-c", &script]);
    launch.input = Input::All;
    let run = run(&launch, b"word\n");
    assert_eq!(run.status, Some(6), "{}", run.stderr);
    assert_eq!(run.sorted(), ["[0] word 0", "[1] word 1"]);
    assert!(!run.stderr.contains("job control") && !run.stderr.contains("Terminated"), "{}", run.stderr);
    wait_for(&marker, 0);
}

pub fn secrets() {
    let hosts = Hosts::fake(&["alpha"]);
    let script = "sleep 0.3; echo $MLX_HOSTFILE $THUNDER_SECRET $API_TOKEN; ps -A -ww -o args";
    let mut launch = hosts.launch(&["alpha", "localhost"], &["sh", "-c", script]);
    launch.environment.push(("API_TOKEN".to_owned(), marker()));
    // This test's own launcher gets the whole launch as an argument; `thunder launch` reads `--env
    // NAME` from the environment.
    let token = launch.environment[0].1.clone();
    let run = run(&launch, b"");
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    let text = run.text();
    let first = text.lines().find_map(|line| line.strip_prefix("[0] ")).unwrap();
    let [file, secret, shown] = first.split(' ').collect::<Vec<_>>()[..] else { panic!("{first}") };
    assert_eq!(shown, token);
    assert!(file.starts_with("/tmp/thunder-launch-") && !Path::new(file).exists(), "{file} is still there");
    assert_eq!(secret.len(), 64);
    assert!(secret.chars().all(|digit| digit.is_ascii_hexdigit()));
    let lines = |word: &str| {
        text.lines().filter(|line| line.contains(word) && !line.contains("--as-launcher")).count()
    };
    // Each rank prints them once.
    assert_eq!((lines(secret), lines(&token)), (2, 2));
    let log = std::fs::read_to_string(hosts.folder.path().join("log")).unwrap();
    assert!(!log.contains(secret) && !log.contains(&token));
    let plan = launch.plan().unwrap().to_string();
    assert!(plan.contains("THUNDER_SECRET=") && !plan.contains(&token), "{plan}");
}
