//! Runs the commands of `docs/two-machines.md` as they are written, between two network namespaces
//! with an ssh server: each has its own host name, home and `/usr/local/bin`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(target_os = "linux")]

mod common;

use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use common::machine::{Machine, Process, can_make_machines};

const DOCUMENT: &str = include_str!("../../../docs/two-machines.md");
const NAMES: [&str; 2] = ["mini", "studio"];
const ADDRESSES: [&str; 2] = ["192.168.7.1", "192.168.7.2"];
/// For the commands of a section; copying the program takes longest.
const SECTION_LIMIT: Duration = Duration::from_secs(240);
const START_LIMIT: Duration = Duration::from_secs(20);

/// A fenced block of the document.
struct Block {
    section: String,
    kind: String,
    text: String,
}

fn blocks() -> Vec<Block> {
    let (mut blocks, mut section, mut open) = (Vec::new(), String::new(), None::<Block>);
    for line in DOCUMENT.lines() {
        match (&mut open, line.strip_prefix("```")) {
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some(block), None) => writeln!(block.text, "{line}").unwrap(),
            (None, Some(kind)) => {
                let (section, kind) = (section.clone(), kind.to_owned());
                open = Some(Block { section, kind, text: String::new() });
            }
            (None, None) => {
                if let Some(title) = line.strip_prefix("## ") {
                    section = title.to_owned();
                }
            }
        }
    }
    blocks
}

/// The text of a section's blocks of one kind.
fn text_of(blocks: &[Block], section: &str, kind: &str) -> String {
    let found = blocks.iter().filter(|block| block.section == section && block.kind == kind);
    found.map(|block| block.text.as_str()).collect()
}

fn sshd() -> Option<PathBuf> {
    ["/usr/sbin/sshd", "/usr/local/sbin/sshd"].map(PathBuf::from).into_iter().find(|path| path.exists())
}

/// Starts the ssh server of `studio`, and gives `mini` the key and the document's configuration.
fn connect(machines: &[Machine; 2], folder: &Path, sshd: &Path, client_config: &str) -> Process {
    for key in ["host_key", "user_key"] {
        let mut command = Command::new("ssh-keygen");
        command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(folder.join(key));
        assert!(command.status().unwrap().success());
    }
    std::fs::create_dir_all("/run/sshd").unwrap();
    std::fs::write(folder.join("ssh_config"), client_config).unwrap();
    let at = folder.display();
    let config = format!(
        "HostKey {at}/host_key\nAuthorizedKeysFile {at}/user_key.pub\nPidFile none\nStrictModes no\nUsePAM no\n\
         PasswordAuthentication no\nListenAddress {}\nSubsystem sftp internal-sftp\n",
        ADDRESSES[1]
    );
    std::fs::write(folder.join("sshd_config"), config).unwrap();
    let [mini, studio] = machines;
    mini.run(&format!(
        "mkdir -m 700 /root/.ssh && cp {at}/ssh_config /root/.ssh/config && cp {at}/user_key /root/.ssh/id_ed25519"
    ))
    .unwrap();
    mini.run(&format!("ip link add eth0 type veth peer name eth0 netns {}", studio.id())).unwrap();
    for (machine, address) in machines.iter().zip(ADDRESSES) {
        machine.run(&format!("ip address add {address}/24 dev eth0 && ip link set eth0 up")).unwrap();
    }
    let program = sshd.to_str().unwrap();
    let log = std::fs::File::create(folder.join("sshd.log")).unwrap();
    let mut command = studio.command(&[program, "-D", "-e", "-f", &format!("{at}/sshd_config")]);
    let server = Process(command.stderr(log).spawn().unwrap());
    let began = Instant::now();
    while !std::fs::read_to_string(folder.join("sshd.log")).unwrap().contains("Server listening") {
        assert!(began.elapsed() < START_LIMIT, "sshd does not start");
        std::thread::sleep(Duration::from_millis(10));
    }
    server
}

/// Runs a section's commands on both machines at once. Returns what they printed.
fn run_section(machines: &[Machine; 2], folder: &Path, blocks: &[Block], section: &str) -> String {
    let mut started = Vec::new();
    for (machine, name) in machines.iter().zip(NAMES) {
        let script = text_of(blocks, section, &format!("sh {name}"));
        if script.is_empty() {
            continue;
        }
        let path = folder.join(format!("output-{name}"));
        let output = std::fs::File::create(&path).unwrap();
        let mut command = machine.command(&["sh", "-ec", &script]);
        command.current_dir(folder).stdout(output.try_clone().unwrap()).stderr(output);
        started.push((name, path, Process(command.spawn().unwrap())));
    }
    let (deadline, mut said) = (Instant::now() + SECTION_LIMIT, String::new());
    for (name, path, mut process) in started {
        let status = loop {
            let status = process.0.try_wait().unwrap();
            if status.is_some() || Instant::now() > deadline {
                break status;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let output = std::fs::read_to_string(&path).unwrap();
        assert!(status.is_some_and(|status| status.success()), "{section}, {name}: {status:?}\n{output}");
        said.push_str(&output);
    }
    said
}

#[test]
fn the_walk_through_works_as_written() {
    let Some(sshd) = sshd().filter(|_| can_make_machines()) else {
        thunder_testing::skip("the_walk_through_works_as_written", "it needs root, sshd and namespaces");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("target/release")).unwrap();
    let program = folder.path().join("target/release/thunder");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_thunder"), program).unwrap();
    let blocks = blocks();
    let machines = NAMES.map(|name| Machine::new(name).unwrap());
    let client_config = text_of(&blocks, "ssh without a password", "ssh-config");
    assert!(
        client_config.contains(ADDRESSES[1]) && ADDRESSES.iter().all(|text| text.parse::<IpAddr>().is_ok())
    );
    let _server = connect(&machines, folder.path(), &sshd, &client_config);
    let mut sections: Vec<&str> = blocks.iter().map(|block| block.section.as_str()).collect();
    sections.dedup();
    assert_eq!(sections.len(), 6, "{sections:?}");
    for section in sections {
        let began = Instant::now();
        let said = run_section(&machines, folder.path(), &blocks, section);
        println!("{section}: {:.1} s\n{said}", began.elapsed().as_secs_f64());
        for line in text_of(&blocks, section, "text").lines() {
            assert!(said.contains(line), "{section}: {line:?} is not in\n{said}");
        }
    }
}
