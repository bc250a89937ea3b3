//! Macs in this process, and what can go wrong with them.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use super::fake::FakeMac;
use crate::apply::{self, ApplyError, Host, Hosts, Sudo};
use crate::graph::Desk;
use crate::machine::Machine;
use crate::plan::Plan;
use crate::read;
use crate::record::Record;
use crate::shell::{Output, Shell, ShellError};

/// What goes wrong, at the command of this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The connection is lost before the command runs.
    LostBefore(usize),
    /// The connection is lost after it has run, so that nobody hears of it.
    LostAfter(usize),
    /// The command fails.
    Fails(usize),
    /// The interface of the command, if it has one, vanishes before it runs.
    Vanishes(usize),
}

/// Macs whose commands run in this process.
pub struct Simulation {
    pub macs: Mutex<Vec<FakeMac>>,
    /// As they were at first.
    fresh: Vec<FakeMac>,
    pub fault: Mutex<Option<Fault>>,
    commands: Mutex<usize>,
    /// Interfaces that have vanished: the Mac's index, and the interface.
    pub gone: Mutex<Vec<(usize, super::fake::FakeInterface, bool)>>,
}

struct SimulatedShell<'a>(&'a Simulation, usize);

impl Simulation {
    pub fn new(macs: Vec<FakeMac>) -> Self {
        Self {
            fresh: macs.clone(),
            macs: Mutex::new(macs),
            fault: Mutex::default(),
            commands: Mutex::default(),
            gone: Mutex::default(),
        }
    }

    pub fn states(&self) -> Vec<FakeMac> {
        self.macs.lock().unwrap().clone()
    }

    /// Puts back what has vanished. A bridge takes its members back, as after a replug.
    pub fn come_back(&self) {
        let mut macs = self.macs.lock().unwrap();
        for (mac, interface, was_member) in self.gone.lock().unwrap().drain(..) {
            if was_member {
                macs[mac].members.push(interface.name.clone());
                macs[mac].members.sort();
            }
            macs[mac].interfaces.push(interface);
            macs[mac].interfaces.sort_by(|one, other| one.name.cmp(&other.name));
        }
    }

    pub fn machines(&self) -> Vec<Machine> {
        self.states().iter().map(|mac| Machine::read(&mac.name, &mac.transcript()).unwrap()).collect()
    }

    pub fn desk(&self) -> Desk {
        Desk::new(self.machines())
    }

    fn with_hosts<T>(&self, work: impl FnOnce(&Hosts<'_>) -> T) -> T {
        let names: Vec<String> = self.states().iter().map(|mac| mac.name.clone()).collect();
        let shells: Vec<_> = (0..names.len()).map(|index| SimulatedShell(self, index)).collect();
        let host = |shell| Host { shell, sudo: Sudo::Free };
        let pairs = names.into_iter().zip(&shells);
        work(&pairs.map(|(name, shell)| (name, host(shell as &dyn Shell))).collect::<BTreeMap<_, _>>())
    }

    /// Runs a setup with `fault`. Returns the outcome and the number of commands.
    pub fn set_up(&self, record: &mut Record, fault: Option<Fault>) -> (Result<(), ApplyError>, usize) {
        let desk = self.desk();
        let plan = Plan::new(&desk).unwrap();
        (*self.commands.lock().unwrap(), *self.fault.lock().unwrap()) = (0, fault);
        let outcome = self.with_hosts(|hosts| {
            apply::apply(&plan.machines, &desk.machines, hosts, record, &mut |_| Ok(()), &mut |_| {})
        });
        *self.fault.lock().unwrap() = None;
        (outcome, *self.commands.lock().unwrap())
    }

    /// Carries out a plan of the caller's.
    pub fn carry_out(
        &self,
        plans: &[crate::plan::MachinePlan],
        record: &mut Record,
    ) -> Result<(), ApplyError> {
        let machines = self.machines();
        self.with_hosts(|hosts| apply::apply(plans, &machines, hosts, record, &mut |_| Ok(()), &mut |_| {}))
    }

    /// Undoes. Returns what is left.
    pub fn undo(&self, record: &mut Record) -> Vec<String> {
        self.undo_with(record, None)
    }

    /// Commands since the last setup or undo began.
    pub fn commands(&self) -> usize {
        *self.commands.lock().unwrap()
    }

    /// Undoes with `fault`. Returns what is left.
    pub fn undo_with(&self, record: &mut Record, fault: Option<Fault>) -> Vec<String> {
        (*self.commands.lock().unwrap(), *self.fault.lock().unwrap()) = (0, fault);
        let left = self.undo_now(record);
        *self.fault.lock().unwrap() = None;
        left
    }

    fn undo_now(&self, record: &mut Record) -> Vec<String> {
        self.with_hosts(|hosts| apply::undo(hosts, record, &mut |_| Ok(()), &mut |_| {}).unwrap())
    }

    /// Starts a Mac anew: what commands have set is gone, and what is on disk stays.
    pub fn restart(&self, fresh: &[FakeMac]) {
        for (mac, fresh) in self.macs.lock().unwrap().iter_mut().zip(fresh) {
            mac.interfaces = fresh.interfaces.clone();
            mac.members = fresh.members.clone();
            mac.gpu_mib = 0;
        }
    }
}

impl Shell for SimulatedShell<'_> {
    fn run(&self, script: &str, input: &str, _: Duration) -> Result<Output, ShellError> {
        let Self(simulation, index) = self;
        let mut macs = simulation.macs.lock().unwrap();
        let mac = &mut macs[*index];
        let lost =
            || Err(ShellError::Lost { machine: mac.name.clone(), why: "closed by remote host".to_owned() });
        if script == read::script() {
            return Ok(Output { out: mac.transcript(), ..Output::default() });
        }
        let number = {
            let mut commands = simulation.commands.lock().unwrap();
            *commands += 1;
            *commands - 1
        };
        let command = script
            .split_once("sudo -n ")
            .unwrap()
            .1
            .replace("\"$root\"", "")
            .replace("Application Support", "Application\u{a0}Support");
        let words: Vec<String> =
            command.split(' ').map(|word| word.replace('\u{a0}', " ").replace('\'', "")).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match *simulation.fault.lock().unwrap() {
            Some(Fault::LostBefore(at)) if number >= at => return lost(),
            Some(Fault::Fails(at)) if number == at => {
                return Ok(Output { status: 1, err: "no".to_owned(), ..Output::default() });
            }
            Some(Fault::LostAfter(at)) if number >= at => {
                if number == at {
                    let _ = mac.run(&words, input);
                }
                return Err(ShellError::Lost {
                    machine: mac.name.clone(),
                    why: "closed by remote host".to_owned(),
                });
            }
            Some(Fault::Vanishes(at)) if number == at => {
                if let Some(place) =
                    mac.interfaces.iter().position(|interface| words.contains(&interface.name.as_str()))
                {
                    let name = mac.interfaces.remove(place).name;
                    mac.members.retain(|member| *member != name);
                    // It comes back as macOS makes it anew: as at first.
                    let fresh = &simulation.fresh[*index];
                    let interface = fresh.interfaces.iter().find(|known| known.name == name).unwrap().clone();
                    let was_member = fresh.members.contains(&name);
                    simulation.gone.lock().unwrap().push((*index, interface, was_member));
                }
            }
            _ => {}
        }
        let (status, err) = mac.run(&words, input);
        Ok(Output { status, out: String::new(), err })
    }
}
