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
    // All of them take half a minute; the simulation tries each with each fault.
    let quick = ["pair", "book and studio", "two cables", "Thunderbolt 4", "two Studios"];
    let all = setups::all().into_iter().enumerate();
    let is_tried = |name: &str| thunder_testing::is_long() || quick.contains(&name);
    for (index, (name, macs)) in all.filter(|(_, (name, _))| is_tried(name)) {
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

        // The two Studios have their owner's addresses again.
        restart(&doubles, &macs, &desk, name != "two Studios");
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

/// The jobs give Macs that start anew what setup gave them.
fn restart(doubles: &Doubles, macs: &[super::fake::FakeMac], set_up: &Desk, is_lost: bool) {
    let folder = |mac: &super::fake::FakeMac| doubles.desk().join(&mac.name);
    for mac in macs {
        mac.interfaces.iter().for_each(|interface| interface.write_to(&folder(mac)));
        let members: String = mac.members.iter().map(|member| format!("{member}\n")).collect();
        fs::write(folder(mac).join("members"), members).unwrap();
    }
    assert_eq!(doubles.read() != *set_up, is_lost, "a restart takes the addresses");
    for _ in 0..2 {
        for mac in macs {
            let script = folder(mac).join("root/Library/Application Support/Thunderhead/cables.sh");
            let run = Command::new("sh")
                .arg(&script)
                .env("PATH", doubles.farm.path())
                .env("FAKE", folder(mac))
                .env("DESK", doubles.desk())
                .status();
            assert!(run.unwrap().success(), "{}", mac.name);
        }
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
