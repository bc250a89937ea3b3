//! Real `sh`, `ssh` and commands on PATH, which are doubles: setup, restart, undo, with faults.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use super::farm::Farm;
use super::setups;
use crate::apply::{self, Host, Hosts, ask_sudo};
use crate::graph::Desk;
use crate::machine::Machine;
use crate::plan::Plan;
use crate::record::Record;
use crate::shell::{ProcessShell, Shell};

/// A folder of Macs with their commands.
struct Doubles {
    farm: Farm,
    shells: BTreeMap<String, ProcessShell>,
}

impl Doubles {
    fn new(macs: &[super::fake::FakeMac]) -> Self {
        let farm = Farm::new(macs);
        // env stands for the user's environment: ssh and the doubles are found on its PATH.
        let desk = format!("DESK={}", farm.desk().display());
        let ssh = ["env".to_owned(), format!("PATH={}", farm.path()), desk, "ssh".to_owned()];
        let shell = |mac: &super::fake::FakeMac| (mac.name.clone(), ProcessShell::through(&ssh, &mac.name));
        Self { shells: macs.iter().map(shell).collect(), farm }
    }

    fn desk(&self) -> PathBuf {
        self.farm.desk()
    }

    fn state(&self) -> BTreeMap<PathBuf, String> {
        self.farm.state()
    }

    fn hosts(&self) -> Hosts<'_> {
        let mut hosts = Hosts::new();
        for (name, shell) in &self.shells {
            hosts.insert(name.clone(), Host { shell, sudo: ask_sudo(shell).unwrap().unwrap() });
        }
        hosts
    }

    fn read(&self) -> Desk {
        let read = |(name, shell): (&String, &ProcessShell)| {
            Machine::read(name, &apply::probe(shell).unwrap()).unwrap()
        };
        Desk::new(self.shells.iter().map(read).collect())
    }

    fn set_up(&self, record: &mut Record) -> Result<(), apply::ApplyError> {
        let desk = self.read();
        let plan = Plan::new(&desk).unwrap();
        apply::apply(&plan.machines, &desk.machines, &self.hosts(), record, &mut |_| Ok(()), &mut |_| {})
    }

    fn undo(&self, record: &mut Record) -> Vec<String> {
        apply::undo(&self.hosts(), record, &mut |_| Ok(()), &mut |_| {}).unwrap()
    }
}

#[test]
fn every_setup_is_set_up_restarted_and_undone() {
    for (index, (name, macs)) in setups::all().into_iter().enumerate() {
        let doubles = Doubles::new(&macs);
        let before = doubles.state();
        let mut record = Record::default();
        // Each setup begins with another fault, and is then run again.
        let (fault, said) =
            [("drop", "cannot be reached"), ("fail", "not permitted"), ("vanish", "en")][index % 3];
        let in_bridge = leaves_a_bridge(&macs);
        // Only commands for interfaces are left by one that has vanished, and they come first.
        let at = if fault == "vanish" { usize::from(in_bridge) } else { 2 + index % 7 };
        fs::write(doubles.desk().join(fault), format!("{at}\n")).unwrap();
        let error = doubles.set_up(&mut record).unwrap_err().to_string();
        assert!(error.contains(said), "{name}: {fault}: {error}");
        let _ = fs::remove_file(doubles.desk().join("drop"));
        assert_eq!(doubles.farm.come_back(&macs), fault == "vanish", "{name}");
        doubles.set_up(&mut record).unwrap_or_else(|error| panic!("{name}: {error}"));
        let desk = doubles.read();
        assert!(Plan::new(&desk).unwrap().is_done(), "{name}");
        let log = fs::read_to_string(doubles.desk().join(&macs[0].name).join("log")).unwrap();
        assert_eq!(log.contains("deletem"), in_bridge, "{log}");
        assert!(log.contains("launchctl bootstrap"), "{log}");

        if index == 0 {
            restart(&doubles, &macs[0], &desk);
        }
        assert_eq!(doubles.undo(&mut record), Vec::<String>::new(), "{name}");
        assert_eq!(doubles.state(), before, "{name}");
    }
}

/// Whether a setup takes an interface of the first Mac out of its bridge.
fn leaves_a_bridge(macs: &[super::fake::FakeMac]) -> bool {
    let desk = super::simulation::Simulation::new(macs.to_vec()).desk();
    let mut ends = desk.cables.iter().filter_map(|cable| cable.end_at(0));
    ends.any(|end| desk.interface(end).unwrap().bridge.is_some())
}

/// The job gives a Mac that starts anew what setup gave it.
fn restart(doubles: &Doubles, mac: &super::fake::FakeMac, set_up: &Desk) {
    let folder = doubles.desk().join(&mac.name);
    let script = folder.join("root/Library/Application Support/Thunderhead/cables.sh");
    let kept = fs::read_to_string(&script).unwrap();
    assert!(kept.contains("cable en6 10.84.72.1 255.255.255.252 9000"), "{kept}");
    for interface in &mac.interfaces {
        fs::write(folder.join("interfaces").join(&interface.name).join("mtu"), "1500\n").unwrap();
        if interface.name != "en0" {
            fs::write(folder.join("interfaces").join(&interface.name).join("inet"), "").unwrap();
        }
    }
    fs::write(folder.join("members"), "en1\nen2\nen6\n").unwrap();
    assert!(!Plan::new(&doubles.read()).unwrap().is_done(), "a restart takes the addresses");
    for _ in 0..2 {
        let run = Command::new("sh")
            .arg(&script)
            .env("PATH", doubles.farm.path())
            .env("FAKE", &folder)
            .env("DESK", doubles.desk())
            .status();
        assert!(run.unwrap().success());
        assert_eq!(doubles.read(), *set_up, "launchd runs it again and again");
    }
}

#[test]
fn a_machine_that_cannot_be_reached_is_named_and_keeps_its_record() {
    let macs = setups::book_and_studio();
    let doubles = Doubles::new(&macs);
    let before = doubles.state();
    let mut record = Record::default();
    doubles.set_up(&mut record).unwrap();
    let (here, away) = (doubles.desk().join("studio"), doubles.farm.folder().join("away"));
    // The hosts are known to work before: undo asks each again.
    let hosts = doubles.hosts();
    fs::rename(&here, &away).unwrap();
    let left = apply::undo(&hosts, &mut record, &mut |_| Ok(()), &mut |_| {}).unwrap();
    assert!(
        left.len() == 1 && left[0].contains("studio cannot be reached: ssh: Could not resolve"),
        "{left:?}"
    );
    assert!(!record.is_undone());
    fs::rename(&away, &here).unwrap();
    assert_eq!(doubles.undo(&mut record), Vec::<String>::new());
    assert_eq!(doubles.state(), before);
}

#[test]
fn output_and_time_of_commands_are_bounded() {
    let shell = ProcessShell::local("here");
    let limit = std::time::Duration::from_millis(300);
    let slow = shell.run("sleep 20", "", limit).unwrap_err().to_string();
    assert!(slow.contains("here"), "{slow}");
    let minute = std::time::Duration::from_secs(60);
    let long =
        shell.run("head -c 9000000 /dev/zero | tr '\\0' x; echo no >&2; exit 3", "unread", minute).unwrap();
    assert_eq!((long.status, long.out.len(), long.err.trim()), (3, 4 << 20, "no"));
    assert_eq!(shell.run("cat", "what it reads", minute).unwrap().out, "what it reads");
}

#[test]
fn the_power_assertion_ends_with_what_holds_it() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("caffeinate");
    let log = folder.path().join("log");
    let script = format!("#!/bin/sh\necho \"$*\" >{0}.new; mv {0}.new {0}\nexec sleep 60\n", log.display());
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let started = std::time::Instant::now();
    let awake = crate::awake::Awake::hold_with(program.to_str().unwrap()).unwrap();
    while !log.exists() && started.elapsed().as_secs() < 20 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(fs::read_to_string(&log).unwrap(), format!("-i -m -s -w {}\n", std::process::id()));
    drop(awake);
    assert!(started.elapsed().as_secs() < 50, "dropping it ends the program");
    let error = crate::awake::Awake::hold_with("/nonexistent/caffeinate").unwrap_err();
    assert!(error.contains("may sleep"), "{error}");
}
