//! `thunder mac` on whole desks of Macs that are doubles of their commands: every setup from check
//! to undo, over ssh and through the agents of a cluster.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(target_os = "linux")]

mod common;
#[allow(dead_code, reason = "the tests of thunder-cables use the rest")]
#[path = "../../cables/src/tests/fake.rs"]
mod fake;
#[path = "../../cables/src/tests/farm.rs"]
mod farm;
#[allow(dead_code, reason = "the tests of thunder-cables use the rest")]
#[path = "../../cables/src/tests/setups.rs"]
mod setups;

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::thunder;
use fake::FakeMac;
use farm::Farm;
use serde_json::Value;
use setups::Wire;
// The included files name these as their own crate's.
use thunder_cables::{job, machine, network};

/// Macs, and the files that a person at the first of them has.
struct Desk {
    farm: Farm,
    macs: Vec<FakeMac>,
    wires: Vec<Wire>,
}

impl Desk {
    fn new(macs: Vec<FakeMac>, wires: Vec<Wire>) -> Self {
        let farm = Farm::new(&macs);
        farm.plug(&macs, &wires, |_| "");
        Self { farm, macs, wires }
    }

    fn named(name: &str) -> Self {
        let found = setups::wired().into_iter().find(|(known, ..)| *known == name);
        let (_, macs, wires) = found.unwrap();
        Self::new(macs, wires)
    }

    fn file(&self, name: &str) -> String {
        self.farm.folder().join(name).display().to_string()
    }

    fn hosts(&self) -> String {
        self.macs.iter().map(|mac| mac.name.as_str()).collect::<Vec<_>>().join(",")
    }

    /// `thunder mac ACTION` with ssh and the commands as doubles.
    fn command(&self, action: &str, more: &[&str]) -> Command {
        let mut command = thunder(&[&["mac", action], more].concat());
        command.env("PATH", self.farm.path()).env("DESK", self.farm.desk());
        command.env("THUNDER_DATA", self.file("no-agent"));
        command
    }

    fn run(&self, action: &str, more: &[&str]) -> (bool, String) {
        told(&self.command(action, &[&["--hosts", &self.hosts()], more].concat()).output().unwrap())
    }

    /// What a terminal shows, in its order.
    fn seen(&self, action: &str, more: &[&str]) -> String {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut command = self.command(action, &[&["--hosts", &self.hosts()], more].concat());
        let mut process = command.stdout(writer.try_clone().unwrap()).stderr(writer).spawn().unwrap();
        // It holds the pipe open.
        drop(command);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        process.wait().unwrap();
        text
    }

    fn json(&self, action: &str, more: &[&str]) -> (bool, Value) {
        let hosts = self.hosts();
        let more = [&["--hosts", &hosts, "--json"], more].concat();
        let output = self.command(action, &more).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        let text = serde_json::from_slice(&output.stdout);
        (output.status.success(), text.unwrap_or_else(|_| panic!("{action}: {error}")))
    }

    fn setup(&self, more: &[&str]) -> (bool, String) {
        let (record, hosts) = (self.file("record.json"), self.file("hosts.json"));
        self.run("setup", &[&["--yes", "--record", &record, "--hostfile", &hosts], more].concat())
    }

    fn verify(&self, fault: impl Fn(usize) -> &'static str) -> (bool, Value) {
        self.farm.plug(&self.macs, &self.wires, fault);
        self.json("verify", &["--program", &self.file("bin/thunder")])
    }

    fn undo(&self) -> (bool, String) {
        let output =
            self.command("undo", &["--yes", "--record", &self.file("record.json")]).output().unwrap();
        told(&output)
    }
}

/// Whether it succeeded, and all that it said.
fn told(output: &Output) -> (bool, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

fn codes(check: &Value) -> Vec<&str> {
    check["findings"].as_array().unwrap().iter().map(|finding| finding["code"].as_str().unwrap()).collect()
}

/// The cables of a measurement with their errors, over `over`.
fn errors<'a>(measured: &'a Value, over: &str) -> Vec<Option<&'a str>> {
    let cables = measured["cables"].as_array().unwrap().iter().filter(|cable| cable["over"] == over);
    cables.map(|cable| cable["error"].as_str()).collect()
}

/// The connection is lost, a command fails, or an interface vanishes in the middle; undo takes back
/// what was done, and the rest when the interface is back.
fn half_done(name: &str, desk: &Desk, (fault, at): (&str, usize)) {
    fs::write(desk.farm.desk().join(fault), format!("{at}\n")).unwrap();
    let (fine, said) = desk.setup(&["--no-verify"]);
    // Where an owner has set up all interfaces by hand, no command names one that could vanish.
    let is_named = fs::remove_file(desk.farm.desk().join(fault)).is_err() || fault != "vanish";
    assert!(fine != is_named, "{name}: {fault}: {said}");
    assert!(fine || said.contains("thunder mac undo"), "{name}: {fault}: {said}");
    assert!(is_named || name == "two Studios", "{name}: {fault}");
    if fault == "vanish" && is_named {
        let (fine, said) = desk.undo();
        assert!(
            !fine && said.contains("is not there") && said.contains("1 change(s) are left"),
            "{name}: {said}"
        );
        assert!(desk.farm.come_back(&desk.macs), "{name}");
    }
    let (fine, said) = desk.undo();
    assert!(fine && said.contains("Everything is as it was"), "{name}: {fault}: {said}");
}

fn from_check_to_undo(name: &str, desk: &Desk, index: usize) {
    let before = desk.farm.state();
    let (fine, check) = desk.json("check", &[]);
    let remedied = check["findings"].as_array().unwrap().iter().all(|finding| finding["remedy"] != "");
    // One owner has set up all that ranks need, until the next restart.
    let is_by_hand = codes(&check).iter().filter(|code| **code == "not-kept").count() == desk.macs.len();
    assert!(fine == (name == "two Studios") && remedied, "{name}: {:?}", codes(&check));
    assert_eq!(is_by_hand, name == "two Studios", "{name}: {:?}", codes(&check));
    let (fine, graph) = desk.json("graph", &[]);
    assert!(fine, "{name}");
    assert_eq!(graph["desk"]["cables"].as_array().unwrap().len(), desk.wires.len(), "{name}");

    // One kind for each desk in `./test`; thunder-cables tries all at each command, in its process.
    let faults = [("drop", 3 + index % 7), ("fail", 3 + index % 7), ("vanish", 0)];
    for (kind, fault) in faults.into_iter().enumerate() {
        if thunder_testing::is_long() || kind == index % 3 {
            half_done(name, desk, fault);
            assert_eq!(desk.farm.state(), before, "{name}: {fault:?}");
        }
    }

    let (fine, said) = desk.setup(&["--program", &desk.file("bin/thunder")]);
    assert!(fine && !said.contains('✗'), "{name}: {said}");
    let (_, check) = desk.json("check", &[]);
    assert!(!codes(&check).iter().any(|code| ["in-bridge", "no-address"].contains(code)), "{name}");
    let (fine, said) = desk.setup(&["--no-verify"]);
    assert!(fine && said.contains("nothing to do"), "{name}: {said}");

    // One cable gives a trickle, then nothing; the others are measured all the same.
    let last = desk.wires.len() - 1;
    desk.farm.plug(&desk.macs, &desk.wires, |wire| if wire == last { "slow" } else { "" });
    let (fine, said) = desk.run("verify", &["--program", &desk.file("bin/thunder")]);
    assert!(!fine && said.contains("plug the cable in again, or try another one"), "{name}: {said}");
    let (fine, measured) = desk.verify(|wire| if wire == last { "fails" } else { "" });
    let failed: Vec<_> = errors(&measured, "tcp").into_iter().flatten().collect();
    assert!(!fine && failed.len() == 1 && failed[0].contains("no packet passes"), "{name}: {measured}");
    assert_eq!(errors(&measured, "tcp").len(), desk.wires.len(), "{name}");

    let (fine, said) = desk.undo();
    assert!(fine && said.contains("Everything is as it was"), "{name}: {said}");
    assert_eq!(desk.farm.state(), before, "{name}");
    assert!(!Path::new(&desk.file("hosts.json")).exists(), "{name}");
}

#[test]
fn recorded_setups_go_from_check_to_undo() {
    // All of them take two minutes; each of these is of another kind.
    let quick =
        ["pair", "crossed cables", "line around a MacBook", "mesh of three", "mesh of four", "Thunderbolt 4"];
    for (index, (name, macs, wires)) in setups::wired().into_iter().enumerate() {
        if thunder_testing::is_long() || quick.contains(&name) {
            let began = Instant::now();
            from_check_to_undo(name, &Desk::new(macs, wires), index);
            println!("{name}: {:.1} s", began.elapsed().as_secs_f64());
        }
    }
}

#[test]
fn cables_with_rdma_are_measured_over_both_ways() {
    let desk = Desk::named("book and studio");
    assert!(desk.setup(&["--no-verify"]).0);
    let (fine, measured) = desk.verify(|_| "");
    let gbits = |over: &str| {
        let cables = measured["cables"].as_array().unwrap().iter().find(|cable| cable["over"] == over);
        cables.unwrap()["measured_gbits"].as_f64().unwrap()
    };
    assert!(fine && gbits("rdma") > 60.0 && (30.0..50.0).contains(&gbits("tcp")), "{measured}");
}

#[test]
fn memory_and_power_are_shown_changed_with_consent_and_put_back() {
    let mut macs = setups::pair();
    // The built-in model is small: on 3 GB, the 2 GiB for buffers are more than the default gives.
    (macs[0].memory_gib, macs[0].working_set) = (3, Some(2 << 30));
    let desk = Desk::new(macs, vec![((0, 1), (1, 1), 80)]);
    let before = desk.farm.state();
    let (fine, said) = desk.run("tune", &["--model", "builtin", "--dry-run"]);
    assert!(fine && said.contains("book: 3.0 GiB memory − 0.8 GiB for macOS = 2.2 GiB at most"), "{said}");
    assert!(
        said.contains("the GPU may hold 2.0 GiB (macOS's default): the limit has to be 2304 MiB"),
        "{said}"
    );
    assert!(said.contains("sudo sysctl iogpu.wired_limit_mb=2304"), "{said}");
    assert_eq!(desk.farm.state(), before, "--dry-run changes nothing");
    let (fine, said) = desk.run("tune", &["--model", "builtin"]);
    assert!(!fine && said.contains("--yes"), "without a terminal nobody can agree: {said}");
    let record = desk.file("record.json");
    let (fine, said) = desk.run("tune", &["--model", "builtin", "--yes", "--record", &record]);
    assert!(fine, "{said}");
    let of = |file: &str| fs::read_to_string(desk.farm.desk().join("book").join(file)).unwrap();
    assert!(of("gpu").trim() == "2304" && of("power").contains("lowpowermode         0"), "{}", of("power"));
    let (_, check) = desk.json("check", &[]);
    let metal = serde_json::json!({"bytes": 2304u64 << 20, "source": "metal", "is_set": true});
    assert_eq!(check["gpu_memory"]["book"], metal, "Metal tells of the limit that is set");
    let (fine, said) = desk.undo();
    assert!(fine, "{said}");
    assert_eq!(desk.farm.state(), before);
}

#[test]
fn rdma_ports_that_come_up_in_a_setup_are_used_by_it() {
    let desk = Desk::named("line");
    let before = desk.farm.state();
    fs::write(desk.farm.desk().join("rdma-after-bridge"), "").unwrap();
    let (_, plan) = desk.json("setup", &["--dry-run"]);
    assert!(plan["links"].as_array().unwrap().iter().all(|link| link["rdma"] == false), "{plan}");
    let (fine, said) = desk.setup(&["--program", &desk.file("bin/thunder")]);
    assert!(fine && said.contains("RDMA ports that have come up"), "{said}");
    assert!(said.contains("a – b: RDMA"), "{said}");
    let kept = desk.farm.desk().join("b/root/Library/Application Support/Thunderhead/cables");
    assert_eq!(fs::read_to_string(kept).unwrap(), "10.84.72.0/30=rdma_en3,10.84.72.4/30=rdma_en4\n");
    let (_, again) = desk.setup(&["--no-verify"]);
    assert!(again.contains("nothing to do"), "{again}");
    let (fine, said) = desk.undo();
    assert!(fine && said.contains("Everything is as it was"), "{said}");
    fs::remove_file(desk.farm.desk().join("rdma-after-bridge")).unwrap();
    assert_eq!(desk.farm.state(), before);
}

#[test]
fn machines_are_undone_one_by_one_if_they_are_named() {
    let desk = Desk::named("line");
    let before = desk.farm.state();
    assert!(desk.setup(&["--no-verify"]).0);
    let record = desk.file("record.json");
    let undo = |hosts: &str| {
        told(&desk.command("undo", &["--yes", "--record", &record, "--hosts", hosts]).output().unwrap())
    };
    let (fine, said) = undo("a,d");
    assert!(!fine && said.contains("nothing to undo on \"d\"; it has a, b, c"), "{said}");
    let (fine, said) = undo("a,c");
    assert!(fine && said.contains("a, c: as before. Still set up: b; `thunder mac undo`"), "{said}");
    assert!(!said.contains("hosts.json"), "{said}");
    assert!(Path::new(&desk.file("hosts.json")).exists(), "its cables are still set up at one end");
    let (fine, said) = desk.undo();
    assert!(fine && said.contains("Everything is as it was") && !said.contains("  a: "), "{said}");
    assert_eq!(desk.farm.state(), before);
    let missing = desk.file("no/record.json");
    let (fine, said) = told(&desk.command("undo", &["--record", &missing]).output().unwrap());
    assert!(fine && said.contains(&format!("nothing to undo: {missing} is not there")), "{said}");
    assert!(!Path::new(&desk.file("no")).exists(), "a look makes no folder");
}

#[test]
fn what_could_not_be_read_is_not_taken_for_nothing() {
    let (_, mut macs, wires) = setups::wired().into_iter().find(|(name, ..)| *name == "line").unwrap();
    macs[1].rdma = Some("disabled".to_owned());
    (macs[2].version, macs[2].rdma) = ("26.1".to_owned(), None);
    let desk = Desk::new(macs, wires);
    let fault = desk.farm.desk().join("b/no-profile");
    fs::write(&fault, "").unwrap();
    let (fine, said) = desk.run("graph", &[]);
    assert!(!fine && said.contains("thunder mac: b: ") && said.contains("system_profiler"), "{said}");
    assert!(said.contains("perhaps b, whose ports could not be read"), "{said}");
    let (fine, said) = desk.setup(&["--no-verify"]);
    assert!(!fine && said.contains("b: ") && said.contains("system_profiler"), "{said}");
    assert!(!desk.farm.desk().join("a/log").exists(), "setup has run nothing");
    let (fine, said) = desk.run("recovery", &[]);
    assert!(!fine && said.contains("[?] is not known (") && said.contains("): b"), "{said}");
    fs::remove_file(fault).unwrap();

    let (fine, said) = desk.run("recovery", &[]);
    assert!(fine && said.contains("[ ] has macOS 26.1: needs 26.2 or later, then these steps: c"), "{said}");
    assert!(said.contains("[x] needs nothing: a") && said.contains("[ ] needs these steps: b"), "{said}");
    let away = |action| told(&desk.command(action, &["--hosts", "a,b,nowhere"]).output().unwrap());
    let (fine, said) = away("recovery");
    assert!(!fine && said.contains("[?] is not known: nowhere"), "{said}");
    let (fine, said) = away("check");
    assert!(!fine && said.contains("✗ nowhere") && !said.contains("No problem"), "{said}");
    assert!(said.contains("1 machine(s) did not answer"), "{said}");
}

#[test]
fn answers_that_were_kept_tell_the_same_and_a_damaged_one_is_named() {
    let desk = Desk::named("pair");
    let kept = desk.file("kept");
    let (_, live) = desk.json("check", &["--save", &kept]);
    let from =
        |more: &[&str]| told(&desk.command("check", &[&["--from", &kept], more].concat()).output().unwrap());
    let read: Value = serde_json::from_str(&from(&["--json"]).1).unwrap();
    assert_eq!((&read["desk"], &read["findings"]), (&live["desk"], &live["findings"]));
    fs::write(Path::new(&kept).join("peer.txt"), "@@ system 0\nDarwin\n").unwrap();
    let (fine, said) = from(&[]);
    assert!(!fine && said.contains("✗ peer: the answer ends in the middle"), "{said}");
    assert!(said.contains("keep it again") && !said.contains("ssh-copy-id"), "{said}");
}

#[test]
fn an_interface_that_is_gone_is_found_and_left_out() {
    let desk = Desk::named("line");
    let before = desk.farm.state();
    assert!(desk.setup(&["--no-verify"]).0);
    let (there, away) = (desk.farm.desk().join("b/interfaces/en4"), desk.farm.folder().join("en4"));
    fs::rename(&there, &away).unwrap();
    let (fine, check) = desk.json("check", &[]);
    assert!(!fine && codes(&check).contains(&"interface-gone"), "{:?}", codes(&check));
    let (fine, said) = desk.setup(&["--no-verify"]);
    assert!(!fine && said.contains("its interface en4 is not there"), "{said}");
    assert!(said.contains("1 cable(s) are left out; the others are set up"), "{said}");
    fs::rename(&away, &there).unwrap();
    let (fine, said) = desk.undo();
    assert!(fine && said.contains("Everything is as it was"), "{said}");
    assert_eq!(desk.farm.state(), before);
}

#[test]
fn a_setup_over_the_bridge_that_it_takes_apart_is_refused() {
    let mut macs = setups::pair();
    macs[1].reached = "fe80::1c1f%bridge0 49158 fe80::8c2:7%bridge0 22".to_owned();
    let desk = Desk::new(macs, vec![((0, 1), (1, 1), 80)]);
    let before = desk.farm.state();
    let (fine, said) = desk.run("setup", &["--dry-run"]);
    assert!(fine && said.contains("✗ peer: ssh reaches it over bridge0"), "{said}");
    let (fine, said) = desk.setup(&["--no-verify"]);
    assert!(!fine && said.contains("nothing was changed. peer: ssh reaches it"), "{said}");
    assert!(said.contains("name it in --hosts by 192.168.1.11"), "{said}");
    assert_eq!(desk.farm.state(), before);
}

/// `serve` and `up` take the power assertion, and let it go when they end.
#[test]
fn a_mac_does_not_sleep_while_it_serves() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let script = "#!/bin/sh\necho \"$$ $*\" >\"$0.new\" && mv \"$0.new\" \"$0.log\"\nexec sleep 100\n";
    fs::write(path("caffeinate"), script).unwrap();
    fs::set_permissions(path("caffeinate"), fs::Permissions::from_mode(0o755)).unwrap();
    let data = path("data");
    let up: &[&str] = &["up", "--no-discovery", "--listen", "127.0.0.1:0", "--port", "0"];
    for words in [&["serve", "builtin", "--port", "0"], up] {
        let mut command = thunder(words);
        command.env("THUNDER_CAFFEINATE", path("caffeinate")).env("THUNDER_DATA", &data);
        let mut process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait("the assertion is taken", || Path::new(&path("caffeinate.log")).exists());
        let held = fs::read_to_string(path("caffeinate.log")).unwrap();
        let (holder, arguments) = held.trim().split_once(' ').unwrap();
        assert_eq!(arguments, format!("-i -m -s -w {}", process.id()), "{words:?}");
        let holder = Path::new("/proc").join(holder);
        assert!(holder.exists(), "{words:?}");
        let pid = rustix::process::Pid::from_child(&process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        wait("it ends", || process.try_wait().unwrap().is_some());
        assert!(!holder.exists(), "{words:?} lets the Mac sleep again");
        fs::remove_file(path("caffeinate.log")).unwrap();
    }
}

/// The outputs that docs/macs.md shows, from the program on doubles.
#[test]
fn the_document_shows_what_the_program_prints() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let document = fs::read_to_string(repository.join("docs/macs.md")).unwrap();
    let mut printed = Desk::named("pair").run("check", &[]).1;
    let desk = Desk::named("line");
    printed += &desk.run("graph", &[]).1;
    printed += &desk.run("setup", &["--dry-run"]).1;
    printed += &desk.setup(&["--program", &desk.file("bin/thunder")]).1;
    desk.farm.plug(&desk.macs, &desk.wires, |wire| if wire == 1 { "slow" } else { "" });
    printed += &desk.run("verify", &["--program", &desk.file("bin/thunder")]).1;
    printed += &desk.undo().1;
    let lines: Vec<&str> = printed.lines().map(str::trim_end).collect();
    let mut shown = 0;
    for block in document.split("```text\n").skip(1) {
        for line in block.split("```").next().unwrap().lines().filter(|line| line.trim() != "…") {
            assert!(lines.contains(&line.trim_end()), "docs/macs.md shows {line:?}, not printed:\n{printed}");
            shown += 1;
        }
    }
    assert!(shown > 40, "{shown} lines");

    let pair = Desk::named("pair");
    let line = Desk::named("line");
    let drawn = [
        ("check", "thunder mac check --hosts book,peer", pair.seen("check", &[])),
        ("graph", "thunder mac graph --hosts a,b,c", line.seen("graph", &[])),
        ("verify", "thunder mac verify --hosts a,b,c", {
            assert!(line.setup(&["--no-verify"]).0);
            line.farm.plug(&line.macs, &line.wires, |wire| if wire == 1 { "slow" } else { "" });
            line.seen("verify", &["--program", &line.file("bin/thunder")])
        }),
    ];
    for (name, command, printed) in drawn {
        let kept = repository.join(format!("docs/pictures/mac-{name}.svg"));
        let picture = terminal(&format!("$ {command}\n{printed}"));
        if std::env::var_os("THUNDER_DRAW").is_some() {
            fs::write(&kept, &picture).unwrap();
        }
        let is_same = fs::read_to_string(&kept).is_ok_and(|kept| kept == picture);
        assert!(is_same, "{} is another picture: run this test with THUNDER_DRAW=1", kept.display());
    }

    let picture = desk.file("desk.svg");
    let mesh = Desk::named("mesh of three");
    let (fine, said) = mesh.run("graph", &["--svg", &picture]);
    assert!(fine, "{said}");
    let kept = repository.join("docs/pictures/desk.svg");
    assert_eq!(fs::read_to_string(picture).unwrap(), fs::read_to_string(kept).unwrap_or_default());
}

/// A picture of a terminal with this text.
fn terminal(text: &str) -> String {
    const COLUMNS: usize = 124;
    let mut rows = Vec::new();
    for line in text.trim_end().lines() {
        let letters: Vec<char> = line.chars().collect();
        match letters.is_empty() {
            true => rows.push(String::new()),
            false => rows.extend(letters.chunks(COLUMNS).map(|row| row.iter().collect())),
        }
    }
    let width = rows.iter().map(|row| row.chars().count()).max().unwrap_or(0) * 8 + 32;
    let height = rows.len() * 18 + 32;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\">\n<rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#1d1f21\"/>\n\
         <g font-family=\"Menlo, DejaVu Sans Mono, monospace\" font-size=\"13\" fill=\"#d8dee3\">\n"
    );
    for (number, row) in rows.iter().enumerate() {
        let (y, columns) = (number * 18 + 30, row.chars().count());
        let row = row.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        // A row is as wide as its columns in any font.
        let fit = if columns > 0 { format!(" textLength=\"{}\"", columns * 8) } else { String::new() };
        svg += &format!("<text x=\"16\" y=\"{y}\" xml:space=\"preserve\"{fit}>{row}</text>\n");
    }
    svg + "</g>\n</svg>\n"
}

/// A node agent on each Mac.
struct Cluster {
    desk: Desk,
    agents: Vec<Child>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for agent in &mut self.agents {
            // Fails if it has ended by itself.
            let _ = agent.kill();
            let _ = agent.wait();
        }
    }
}

impl Cluster {
    fn new(desk: Desk) -> Self {
        let mut cluster = Self { desk, agents: Vec::new() };
        cluster.up(0, &[]);
        for mac in 1..cluster.desk.macs.len() {
            let token = cluster.thunder(0, &["cluster", "token"]).output().unwrap();
            let token = String::from_utf8(token.stdout).unwrap();
            cluster.up(mac, &["--token", token.trim()]);
        }
        let count = cluster.desk.macs.len();
        let all_up = |node: usize| {
            cluster.status(node)["members"].as_array().is_some_and(|members| {
                members.len() == count && members.iter().all(|member| member["up"] == true)
            })
        };
        wait("all nodes reach all", || (0..count).all(all_up));
        cluster
    }

    fn data(&self, mac: usize) -> PathBuf {
        self.desk.farm.folder().join(format!("node-{mac}"))
    }

    fn thunder(&self, mac: usize, words: &[&str]) -> Command {
        let mut command = thunder(words);
        command.env("THUNDER_DATA", self.data(mac));
        command
    }

    fn up(&mut self, mac: usize, more: &[&str]) {
        let fake = self.desk.farm.desk().join(&self.desk.macs[mac].name);
        let options = [
            "up",
            "--no-discovery",
            "--listen",
            "127.0.0.1:0",
            "--port",
            "0",
            "--name",
            &self.desk.macs[mac].name,
        ];
        let mut command = self.thunder(mac, &[&options, more].concat());
        command.env("PATH", self.desk.farm.path()).env("DESK", self.desk.farm.desk());
        command.env("FAKE", &fake).env("THUNDER_ROOT", fake.join("root"));
        self.agents.push(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        wait("the agent answers", || self.status(mac) != Value::Null);
    }

    fn status(&self, mac: usize) -> Value {
        let output = self.thunder(mac, &["cluster", "status", "--json"]).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }
}

fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(30), "{what}: not within 30 s");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn agents_tell_what_ssh_tells_and_strangers_are_told_nothing() {
    let mut cluster = Cluster::new(Desk::named("line"));
    let (_, over_ssh) = cluster.desk.json("check", &[]);
    let json = |output: Output| -> (bool, Value) {
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        (
            output.status.success(),
            serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{error}")),
        )
    };
    // All nodes by default, whichever of them is asked; some by name.
    for (node, nodes) in [(0, None), (2, Some("--nodes")), (1, Some("--nodes=a,b,c"))] {
        let words: Vec<&str> = ["mac", "check", "--json"].into_iter().chain(nodes).collect();
        let (fine, mut told) = json(cluster.thunder(node, &words).output().unwrap());
        assert!(!fine && told["unreachable"].as_array().unwrap().is_empty());
        // A cluster lists its nodes by their keys.
        told["desk"]["machines"].as_array_mut().unwrap().sort_by_key(|machine| machine["name"].to_string());
        assert_eq!(told["desk"]["machines"], over_ssh["desk"]["machines"], "{nodes:?}");
        assert_eq!(told["desk"]["cables"].as_array().unwrap().len(), 2);
    }
    let graph = cluster.thunder(1, &["mac", "graph", "--nodes=b,c"]).output().unwrap();
    let graph = String::from_utf8(graph.stdout).unwrap();
    assert!(graph.contains("═══ 80 Gbit/s ═══ c port 1  RDMA"), "{graph}");

    // `plan` says which way each pair goes: over Ethernet until the cables have addresses.
    let plan = |cluster: &Cluster| {
        let (fine, said) =
            told(&cluster.thunder(0, &["plan", "--ranks", "3", "--nodes=a,b,c"]).output().unwrap());
        assert!(fine, "{said}");
        said
    };
    assert!(plan(&cluster).contains("rank 0 (a) – rank 1 (b): Ethernet"), "{}", plan(&cluster));
    assert!(cluster.desk.setup(&["--no-verify"]).0);
    let said = plan(&cluster);
    assert!(said.contains("rank 0 (a) – rank 1 (b): RDMA, 80 Gbit/s"), "{said}");
    assert!(said.contains("rank 0 (a) – rank 2 (c): Ethernet"), "{said}");

    // A stranger runs an agent of its own, and is in no cluster.
    cluster.up_stranger();
    let refused = cluster.thunder(9, &["mac", "check", "--nodes=a"]).output().unwrap();
    let (fine, said) = told(&refused);
    assert!(!fine && said.contains("no member is named a") && !said.contains("Apple"), "{said}");

    // A node that is gone is named, and the others are shown.
    cluster.agents[2].kill().unwrap();
    cluster.agents[2].wait().unwrap();
    let (fine, told) = json(cluster.thunder(0, &["mac", "check", "--nodes", "--json"]).output().unwrap());
    assert!(
        !fine && told["unreachable"][0].as_str().unwrap().contains("c cannot be reached"),
        "{}",
        told["unreachable"]
    );
    assert_eq!(told["desk"]["machines"].as_array().unwrap().len(), 2);
    let both = cluster.thunder(0, &["mac", "check", "--nodes", "--hosts", "a"]).output().unwrap();
    assert!(String::from_utf8_lossy(&both.stderr).contains("give one of them"));
}

impl Cluster {
    /// An agent that nobody has admitted.
    fn up_stranger(&mut self) {
        let mut command =
            self.thunder(9, &["up", "--no-discovery", "--listen", "127.0.0.1:0", "--port", "0"]);
        self.agents.push(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        wait("the stranger's agent answers", || self.status(9) != Value::Null);
    }
}
