//! Carries out a plan, and undoes the changes of a record.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::machine::{Machine, System};
use crate::plan::action::ShellCommand;
use crate::plan::{Effect, MachinePlan};
use crate::read::{self, ReadError};
use crate::record::{Entry, Record, RecordError, State};
use crate::shell::{Shell, ShellError, last_line};

/// Time for the probe: `system_profiler` takes seconds on a Mac that has just started.
const PROBE_LIMIT: Duration = Duration::from_secs(60);
/// Time for one command.
const COMMAND_LIMIT: Duration = Duration::from_secs(30);

/// How commands run as root on a machine.
#[derive(Clone, PartialEq, Eq)]
pub enum Sudo {
    /// They already do.
    Root,
    /// `sudo` asks nothing.
    Free,
    /// `sudo` takes this password.
    Password(String),
}

/// A machine on which commands can run.
pub struct Host<'a> {
    /// Its shell.
    pub shell: &'a dyn Shell,
    /// How commands run as root.
    pub sudo: Sudo,
}

/// The machines by their names.
pub type Hosts<'a> = BTreeMap<String, Host<'a>>;

/// Why the work stopped early.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The machine could not be reached, or a command did not end.
    #[error(transparent)]
    Shell(#[from] ShellError),
    /// A command failed.
    #[error("on {machine}, `{command}` failed with status {status}: {why}")]
    Command {
        /// The machine.
        machine: String,
        /// The command.
        command: String,
        /// Its exit status.
        status: i32,
        /// The last line that it printed.
        why: String,
    },
    /// The probe's answer cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The record cannot be written, so the work stops.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The plan names a machine without a shell.
    #[error("{0} is not among the machines: name it in --hosts")]
    Unknown(String),
}

/// Progress for the user.
#[derive(Debug)]
pub enum Event<'a> {
    /// A command is about to run.
    Runs {
        /// The machine.
        machine: &'a str,
        /// The command, as a person would type it.
        command: String,
    },
    /// Something was left unchanged.
    Left {
        /// The machine.
        machine: &'a str,
        /// Why.
        why: String,
    },
}

/// Told what happens.
pub type Observer<'a> = &'a mut dyn FnMut(Event<'_>);
/// Keeps the record.
pub type Save<'a> = &'a mut dyn FnMut(&Record) -> Result<(), RecordError>;

/// Runs the probe on a machine. Returns its transcript.
///
/// # Errors
/// When the machine cannot be reached.
pub fn probe(shell: &dyn Shell) -> Result<String, ShellError> {
    shell.run(read::script(), "", PROBE_LIMIT).map(|output| output.out)
}

/// Finds out how commands run as root on a machine. `None`: `sudo` needs a password.
///
/// # Errors
/// When the machine cannot be reached.
pub fn ask_sudo(shell: &dyn Shell) -> Result<Option<Sudo>, ShellError> {
    let script =
        r#"if [ "$(id -u)" = 0 ]; then echo root; elif sudo -n true 2>/dev/null; then echo free; fi"#;
    Ok(match shell.run(script, "", COMMAND_LIMIT)?.out.trim() {
        "root" => Some(Sudo::Root),
        "free" => Some(Sudo::Free),
        _ => None,
    })
}

/// Carries out the plan, machine by machine. The record is written before each command, so that
/// [`undo`] knows everything that may have happened.
///
/// # Errors
/// At the first command that fails. What has been done until then is in the record.
pub fn apply(
    plans: &[MachinePlan],
    machines: &[Machine],
    hosts: &Hosts<'_>,
    record: &mut Record,
    save: Save<'_>,
    observer: Observer<'_>,
) -> Result<(), ApplyError> {
    let first = record.entries.len();
    for plan in plans {
        let unknown = || ApplyError::Unknown(plan.machine.clone());
        let machine = machines.iter().find(|machine| machine.name == plan.machine).ok_or_else(unknown)?;
        if !hosts.contains_key(&plan.machine) {
            return Err(unknown());
        }
        record.entries.extend(plan.actions.iter().map(|action| Entry {
            machine: plan.machine.clone(),
            system: machine.system.clone(),
            action: action.clone(),
            state: State::Planned,
        }));
    }
    save(record)?;
    for index in first..record.entries.len() {
        record.entries[index].state = State::Begun;
        save(record)?;
        let Entry { machine, system, action, .. } = record.entries[index].clone();
        let host = hosts.get(&machine).ok_or_else(|| ApplyError::Unknown(machine.clone()))?;
        for command in action.commands(&system) {
            run(&machine, host, &command, observer)?;
        }
        record.entries[index].state = State::Done;
        save(record)?;
    }
    Ok(())
}

/// Undoes the changes of the record, newest first, on all machines that can be reached. Looks at
/// each machine first, and undoes only changes that are in effect, so nothing is undone twice after
/// an incomplete setup or a restart. Returns the changes that are not undone yet, in words; they
/// stay in the record.
///
/// # Errors
/// When the record cannot be written.
pub fn undo(
    hosts: &Hosts<'_>,
    record: &mut Record,
    save: Save<'_>,
    observer: Observer<'_>,
) -> Result<Vec<String>, RecordError> {
    let mut problems = Vec::new();
    for name in record.machines() {
        let Some(host) = hosts.get(&name) else { continue };
        let looked = probe(host.shell).map_err(ApplyError::from);
        match looked.and_then(|transcript| Ok(Machine::read(&name, &transcript)?)) {
            Ok(machine) => undo_machine(machine, host, record, save, observer, &mut problems)?,
            Err(error) => problems.push(error.to_string()),
        }
    }
    for entry in record.entries.iter_mut().filter(|entry| entry.state == State::Planned) {
        entry.state = State::Undone;
    }
    save(record)?;
    Ok(problems)
}

fn undo_machine(
    mut machine: Machine,
    host: &Host<'_>,
    record: &mut Record,
    save: Save<'_>,
    observer: Observer<'_>,
    problems: &mut Vec<String>,
) -> Result<(), RecordError> {
    for index in (0..record.entries.len()).rev() {
        let Entry { machine: name, system, action, state } = record.entries[index].clone();
        if name != machine.name || matches!(state, State::Undone | State::Planned) {
            continue;
        }
        match action.effect(&machine) {
            Effect::Yes => match undo_one(&name, host, &action.undo_commands(&system), observer) {
                Ok(()) => action.revert(&mut machine),
                Err(error) => {
                    problems.push(error.to_string());
                    continue;
                }
            },
            Effect::No => {}
            Effect::Changed(why) => {
                observer(Event::Left { machine: &name, why: format!("{why}: left as it is") })
            }
            Effect::Gone(interface) => {
                problems.push(format!(
                    "{name}: {interface} is not there, so it cannot be undone to {}: run `thunder mac undo` again \
                     when it is back",
                    action.purpose()
                ));
                continue;
            }
        }
        record.entries[index].state = State::Undone;
        save(record)?;
    }
    Ok(())
}

fn undo_one(
    name: &str,
    host: &Host<'_>,
    commands: &[ShellCommand],
    observer: Observer<'_>,
) -> Result<(), ApplyError> {
    commands.iter().try_for_each(|command| run(name, host, command, observer))
}

/// Runs one command as root.
fn run(
    machine: &str,
    host: &Host<'_>,
    command: &ShellCommand,
    observer: Observer<'_>,
) -> Result<(), ApplyError> {
    observer(Event::Runs { machine, command: command.shown() });
    let mut input = String::new();
    // The password goes over standard input, never into a command line. `-k` makes sudo ask even if
    // it has asked recently; otherwise the command would read the password.
    let sudo = match &host.sudo {
        Sudo::Root => "",
        Sudo::Free => "sudo -n ",
        Sudo::Password(password) => {
            input = format!("{password}\n");
            "sudo -k -S -p '' "
        }
    };
    input.push_str(command.input.as_deref().unwrap_or_default());
    // macOS has ifconfig, sysctl and others in /sbin, which ssh's PATH may lack.
    let script = format!("PATH=$PATH:/usr/sbin:/sbin; root=${{THUNDER_ROOT:-}}; {sudo}{}", command.script);
    let output = host.shell.run(&script, &input, COMMAND_LIMIT)?;
    if output.status == 0 {
        return Ok(());
    }
    Err(ApplyError::Command {
        machine: machine.to_owned(),
        command: command.shown(),
        status: output.status,
        why: last_line(&format!("{}\n{}", output.out, output.err), "it printed nothing"),
    })
}

/// The system of a machine in a record, for a plan that is shown.
pub fn shown_commands(plan: &MachinePlan, system: &System) -> Vec<(String, Vec<ShellCommand>)> {
    plan.actions.iter().map(|action| (action.purpose(), action.commands(system))).collect()
}
