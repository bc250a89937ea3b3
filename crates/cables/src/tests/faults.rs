//! Every setup with every fault at every command: the state after undo is the state before.

use super::fake::FakeMac;
use super::setups;
use super::simulation::{Fault, Simulation};
use crate::machine::RdmaState;
use crate::plan::{Plan, PlanError};
use crate::record::{Record, RecordFile};

pub fn sorted(mut macs: Vec<FakeMac>) -> Vec<FakeMac> {
    macs.iter_mut().for_each(|mac| mac.interfaces.sort_by(|one, other| one.name.cmp(&other.name)));
    macs
}

/// Both ends of each cable are up and in no bridge, and packets for the other end's address leave
/// over the cable: of all networks and routes with that address, the cable's is the longest.
pub fn assert_all_can_talk(simulation: &Simulation) {
    let desk = simulation.desk();
    let links = Plan::new(&desk).unwrap().links;
    assert_eq!(links.len(), desk.cables.len());
    for link in &links {
        let [one, other] = link.ends.map(|end| desk.interface(end).unwrap());
        assert!(one.up && other.up && one.bridge.is_none() && other.bridge.is_none(), "{one:?} {other:?}");
        for side in [0, 1] {
            let (machine, own) = (desk.machine(link.ends[side]), desk.interface(link.ends[side]).unwrap());
            assert!(own.addresses.contains(&link.addresses[side]), "{own:?} {link:?}");
            let there = link.addresses[1 - side].address;
            let prefix = link.addresses[side].prefix;
            for found in machine.interfaces.iter().filter(|found| found.name != own.name) {
                let takes = found.addresses.iter().any(|own| own.contains(there) && own.prefix >= prefix);
                assert!(!takes, "{there} leaves over {} of {}", found.name, machine.name);
            }
            let hidden = machine.routes.iter().find(|route| route.contains(there) && route.prefix > prefix);
            assert_eq!(hidden, None, "{there} on {}", machine.name);
        }
    }
}

#[test]
fn a_setup_is_complete_idempotent_and_undone_exactly() {
    for (name, macs) in setups::all() {
        let before = sorted(macs.clone());
        let simulation = Simulation::new(macs.clone());
        let mut record = Record::default();
        simulation.set_up(&mut record, None).0.unwrap();
        assert_all_can_talk(&simulation);
        assert!(Plan::new(&simulation.desk()).unwrap().is_done(), "{name}: nothing is left to do");
        // After a restart the job does it again; here a second setup does, and undo takes both.
        simulation.restart(&macs);
        simulation.set_up(&mut record, None).0.unwrap();
        assert_all_can_talk(&simulation);
        assert_ne!(sorted(simulation.states()), before, "{name}");
        assert_eq!(simulation.undo(&mut record), Vec::<String>::new(), "{name}");
        assert_eq!(sorted(simulation.states()), before, "{name}");
        assert!(record.is_undone(), "{name}");
        assert_eq!(simulation.undo(&mut record), Vec::<String>::new(), "{name}: a second undo does nothing");
    }
}

#[test]
fn a_half_done_setup_is_undone_exactly_wherever_it_ended() {
    let kinds: [fn(usize) -> Fault; 4] = [Fault::LostBefore, Fault::LostAfter, Fault::Fails, Fault::Vanishes];
    let mut tried = 0;
    for (name, macs) in setups::all() {
        let before = sorted(macs.clone());
        let commands = Simulation::new(macs.clone()).set_up(&mut Record::default(), None).1;
        assert!(commands >= 10, "{name}: {commands} commands");
        for (kind, number) in kinds.iter().flat_map(|kind| (0..commands).map(move |number| (kind, number))) {
            let fault = kind(number);
            let simulation = Simulation::new(macs.clone());
            let mut record = Record::default();
            let outcome = simulation.set_up(&mut record, Some(fault)).0;
            assert!(outcome.is_err() || matches!(fault, Fault::Vanishes(_)), "{name}: {fault:?}");
            // With an interface gone, undo does what it can, and keeps the rest in the record.
            let left = simulation.undo(&mut record);
            let was_gone = !simulation.gone.lock().unwrap().is_empty();
            assert!(left.is_empty() || was_gone, "{name}: {fault:?}: {left:?}");
            simulation.come_back();
            assert_eq!(simulation.undo(&mut record), Vec::<String>::new(), "{name}: {fault:?}");
            assert_eq!(sorted(simulation.states()), before, "{name}: {fault:?}");
            tried += 1;
        }
    }
    assert!(tried > 400, "{tried} faults");
}

#[test]
fn an_undo_that_ends_in_the_middle_goes_on_next_time() {
    let kinds: [fn(usize) -> Fault; 4] = [Fault::LostBefore, Fault::LostAfter, Fault::Fails, Fault::Vanishes];
    let mut tried = 0;
    for (name, macs) in setups::all() {
        let before = sorted(macs.clone());
        let whole = Simulation::new(macs.clone());
        let mut record = Record::default();
        whole.set_up(&mut record, None).0.unwrap();
        let done = whole.states();
        whole.undo(&mut record.clone());
        let commands = whole.commands();
        for (kind, number) in kinds.iter().flat_map(|kind| (0..commands).map(move |number| (kind, number))) {
            let fault = kind(number);
            let simulation = Simulation::new(macs.clone());
            *simulation.macs.lock().unwrap() = done.clone();
            let mut record = record.clone();
            let left = simulation.undo_with(&mut record, Some(fault));
            // Not every command has an interface that can vanish.
            assert!(!left.is_empty() || matches!(fault, Fault::Vanishes(_)), "{name}: {fault:?}");
            simulation.come_back();
            assert_eq!(simulation.undo(&mut record), Vec::<String>::new(), "{name}: {fault:?}");
            assert_eq!(sorted(simulation.states()), before, "{name}: {fault:?}");
            tried += 1;
        }
    }
    assert!(tried > 400, "{tried} faults");
}

#[test]
fn a_setup_that_failed_can_be_run_again() {
    for (name, macs) in setups::all() {
        let before = sorted(macs.clone());
        let simulation = Simulation::new(macs);
        let mut record = Record::default();
        assert!(simulation.set_up(&mut record, Some(Fault::LostAfter(3))).0.is_err(), "{name}");
        simulation.set_up(&mut record, None).0.unwrap();
        assert_all_can_talk(&simulation);
        assert_eq!(simulation.undo(&mut record), Vec::<String>::new());
        assert_eq!(sorted(simulation.states()), before, "{name}");
    }
}

#[test]
fn what_somebody_has_changed_since_is_left_alone() {
    let simulation = Simulation::new(setups::pair());
    let mut record = Record::default();
    simulation.set_up(&mut record, None).0.unwrap();
    simulation.macs.lock().unwrap()[0]
        .interfaces
        .iter_mut()
        .find(|interface| interface.name == "en6")
        .unwrap()
        .mtu = 4000;
    assert_eq!(simulation.undo(&mut record), Vec::<String>::new());
    let machine = &simulation.machines()[0];
    assert_eq!(machine.interface("en6").unwrap().mtu, 4000);
    assert_eq!(machine.interface("en6").unwrap().bridge.as_deref(), Some("bridge0"));
}

#[test]
fn without_all_networks_there_is_no_plan() {
    let mut machines = Simulation::new(setups::pair()).machines();
    machines[1].unread.push("netstat -rn failed with status 1".to_owned());
    let error = Plan::new(&crate::Desk::new(machines.clone())).unwrap_err();
    assert!(matches!(&error, PlanError::Unread { machine, .. } if machine == "peer"), "{error}");
    machines.truncate(1);
    machines[0].unread.clear();
    assert_eq!(Plan::new(&crate::Desk::new(machines)).unwrap_err(), PlanError::NoCable);
}

#[test]
fn jumbo_frames_are_for_cables_that_carry_data_over_tcp() {
    let macs = setups::pair();
    let plan = |macs: &[FakeMac]| Plan::new(&Simulation::new(macs.to_vec()).desk()).unwrap();
    assert_eq!(plan(&macs).links[0].mtu, Some(9000), "RDMA is off on one");
    let mut both = macs.clone();
    for mac in &mut both {
        mac.rdma = Some("enabled".to_owned());
        mac.devices = ["en1", "en6", "en2"].map(|name| (format!("rdma_{name}"), name == "en6")).into();
    }
    let link = &plan(&both).links[0];
    assert!(link.rdma && link.mtu.is_none());
    let machines = Simulation::new(macs).machines();
    assert_eq!(
        machines.iter().map(|machine| machine.rdma.clone()).collect::<Vec<_>>(),
        [RdmaState::Disabled, RdmaState::Enabled]
    );
}

#[test]
fn a_record_survives_its_process_and_is_for_one_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("desk/record.json");
    let file = RecordFile::open(&path).unwrap();
    assert_eq!(file.load().unwrap(), Record::default());
    assert!(RecordFile::open(&path).unwrap_err().to_string().contains("another thunder"));
    let simulation = Simulation::new(setups::book_and_studio());
    let mut record = Record::default();
    simulation.set_up(&mut record, None).0.unwrap();
    file.save(&record).unwrap();
    assert_eq!(file.load().unwrap(), record);
    drop(file);
    let file = RecordFile::open(&path).unwrap();
    let mut record = file.load().unwrap();
    assert_eq!(simulation.undo(&mut record), Vec::<String>::new());
    file.save(&record).unwrap();
    assert!(!path.exists(), "a record of nothing is no file");
    std::fs::write(&path, "{}").unwrap();
    assert!(file.load().unwrap_err().to_string().contains("not a record"));
}
