//! Each finding by its code, from Macs whose commands answer so.

use super::fake::{FakeMac, FakePort, profile};
use super::setups;
use super::simulation::Simulation;
use crate::check::{Recovery, Severity, findings, recovery};
use crate::graph::Desk;
use crate::job::{self, Paths};
use crate::machine::{Machine, System};
use crate::plan::{Plan, PlanError};
use crate::record::Record;

fn desk(macs: Vec<FakeMac>) -> Desk {
    Simulation::new(macs).desk()
}

fn named(name: &str) -> Vec<FakeMac> {
    setups::all().into_iter().find(|(known, _)| *known == name).unwrap().1
}

/// A change of the first Mac of the line, the code that it gives, and how much that matters.
type Case = (fn(&mut FakeMac), &'static str, Severity);

#[test]
fn each_answer_gives_its_finding() {
    let cases: [Case; 9] = [
        (|mac| mac.firewall = true, "firewall-on", Severity::Warning),
        (|mac| mac.remote_login = false, "remote-login-off", Severity::Warning),
        (|mac| mac.version = "26.1".to_owned(), "macos-too-old", Severity::Problem),
        (|mac| mac.rdma = Some("limited".to_owned()), "rdma-unknown", Severity::Warning),
        (|mac| mac.rdma = None, "rdma-missing", Severity::Warning),
        (|mac| mac.hardware.retain(|(_, device)| device != "en2"), "no-interface", Severity::Problem),
        (|mac| mac.interfaces.retain(|known| known.name != "en2"), "interface-gone", Severity::Problem),
        (
            |mac| {
                let port = FakePort {
                    uuid: "0F".to_owned(),
                    most: 120,
                    plug: Some((String::new(), 80, "Mac15,14")),
                };
                let mut text: serde_json::Value = serde_json::from_str(&profile(&[port])).unwrap();
                text["SPThunderboltDataType"][0].as_object_mut().unwrap().remove("_items");
                mac.thunderbolt = text.to_string();
            },
            "silent-port",
            Severity::Warning,
        ),
        (
            |mac| {
                let system = System::Macos { version: "26.3".to_owned() };
                let unit = Paths::of(&system).unwrap().unit.to_owned();
                mac.files.insert(unit, job::unit(&system));
            },
            "job-not-loaded",
            Severity::Warning,
        ),
    ];
    for (change, code, severity) in cases {
        let has = |macs: &[FakeMac]| {
            let found = findings(&desk(macs.to_vec())).into_iter();
            found
                .filter(|found| found.code == code && found.machine == "a")
                .map(|found| found.severity)
                .next()
        };
        let mut macs = named("line");
        assert_eq!(has(&macs), None, "{code}");
        change(&mut macs[0]);
        assert_eq!(has(&macs), Some(severity), "{code}");
    }
}

#[test]
fn an_update_of_macos_comes_before_what_setup_can_do() {
    let mut macs = named("line");
    macs[2].version = "26.1".to_owned();
    let found = findings(&desk(macs));
    assert_eq!((found[0].code, found[0].machine.as_str()), ("macos-too-old", "c"));
    assert!(found.iter().any(|found| found.code == "in-bridge"));
}

#[test]
fn recovery_says_nothing_needed_only_where_that_is_known() {
    let of = |change: fn(&mut FakeMac)| {
        let mut macs = setups::pair();
        change(&mut macs[0]);
        recovery(&desk(macs).machines[0])
    };
    assert_eq!(of(|_| {}), Recovery::Needed);
    assert_eq!(of(|mac| mac.rdma = Some("enabled".to_owned())), Recovery::NotNeeded);
    let old: fn(&mut FakeMac) = |mac| (mac.version, mac.rdma) = ("26.1".to_owned(), None);
    assert_eq!(of(old), Recovery::UpdateFirst("26.1".to_owned()));
    let unknown = |needs: Recovery, why: &str| {
        assert!(matches!(&needs, Recovery::Unknown(said) if said.contains(why)), "{needs:?}");
    };
    unknown(of(|mac| mac.rdma = Some("limited".to_owned())), "limited");
    unknown(of(|mac| mac.rdma = None), "update macOS");
    unknown(of(|mac| mac.thunderbolt = "{".to_owned()), "system_profiler");
}

#[test]
fn ports_that_cannot_be_read_are_no_missing_cables() {
    let mut macs = named("line");
    macs[1].thunderbolt = "{".to_owned();
    let desk = desk(macs);
    let error = Plan::new(&desk).unwrap_err();
    assert!(matches!(&error, PlanError::Ports { machine, .. } if machine == "b"), "{error}");
    let stranger = findings(&desk).into_iter().find(|found| found.code == "stranger").unwrap();
    assert!(stranger.text.contains("perhaps b, whose ports could not be read"), "{}", stranger.text);
}

/// The lines `cable …` of b's job in the desk "line".
fn kept_by_b(simulation: &Simulation) -> Vec<String> {
    let mut names: Vec<String> =
        job::kept(&simulation.machines()[1]).into_iter().map(|end| end.interface).collect();
    names.sort();
    names
}

#[test]
fn a_setup_of_fewer_macs_keeps_the_other_cables_in_the_job() {
    let simulation = Simulation::new(named("line"));
    let mut record = Record::default();
    simulation.set_up(&mut record, None).0.unwrap();
    assert_eq!(kept_by_b(&simulation), ["en3", "en4"]);
    let two: Vec<Machine> = simulation.machines().into_iter().take(2).collect();
    let plan = Plan::new(&Desk::new(two)).unwrap();
    assert!(plan.is_done(), "nothing is to be rewritten: {:?}", plan.machines);
}

#[test]
fn an_interface_that_is_away_stays_in_the_job() {
    let simulation = Simulation::new(named("line"));
    let mut record = Record::default();
    simulation.set_up(&mut record, None).0.unwrap();
    simulation.macs.lock().unwrap()[1].interfaces.retain(|known| known.name != "en4");
    let plan = Plan::new(&simulation.desk()).unwrap();
    assert!(plan.left_out[0].contains("its interface en4 is not there"), "{:?}", plan.left_out);
    simulation.set_up(&mut record, None).0.unwrap();
    assert_eq!(kept_by_b(&simulation), ["en3", "en4"]);
}

#[test]
fn an_address_that_the_job_does_not_name_is_not_kept() {
    let simulation = Simulation::new(named("line"));
    simulation.set_up(&mut Record::default(), None).0.unwrap();
    let lost = |simulation: &Simulation| {
        let found = findings(&simulation.desk()).into_iter().find(|found| found.code == "not-kept");
        found.map(|found| (found.machine, found.text))
    };
    assert_eq!(lost(&simulation), None);
    for text in simulation.macs.lock().unwrap()[1].files.values_mut() {
        *text = text
            .lines()
            .filter(|line| !line.starts_with("cable en4"))
            .map(|line| format!("{line}\n"))
            .collect();
    }
    let (machine, text) = lost(&simulation).unwrap();
    assert!(machine == "b" && text.contains("en4") && !text.contains("en3"), "{text}");
}
