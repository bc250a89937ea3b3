//! Reads a machine: the probe that runs on it, and the parser of its transcript.

pub(crate) mod ifconfig;
mod linux;
mod macos;
mod sections;
mod thunderbolt;

use crate::machine::{Interface, Machine, System};

pub use sections::Sections;

/// The probe, for `sh`. It prints a transcript, changes nothing, and needs no sudo.
pub fn script() -> &'static str {
    include_str!("read/probe.sh")
}

/// The transcript cannot be used at all. Single missing parts are in [`Machine::unread`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The probe did not run to its end.
    #[error(
        "{name}: the answer ends in the middle, after {last:?}: the connection was lost, or sh was ended"
    )]
    Unfinished {
        /// The machine.
        name: String,
        /// The last section.
        last: String,
    },
    /// Neither macOS nor Linux.
    #[error("{name} runs {system:?}: thunder reads macOS and Linux")]
    System {
        /// The machine.
        name: String,
        /// What `uname` says.
        system: String,
    },
}

impl Machine {
    /// Reads the transcript of machine `name`.
    ///
    /// # Errors
    /// When the transcript is cut, or of a system that is not known.
    pub fn read(name: &str, transcript: &str) -> Result<Self, ReadError> {
        let sections = Sections::split(transcript);
        if sections.output("end").is_none() {
            return Err(ReadError::Unfinished { name: name.to_owned(), last: sections.last().to_owned() });
        }
        let mut machine = Self { name: name.to_owned(), ..Self::default() };
        machine.host_name = sections.line("name").unwrap_or(name).to_owned();
        match sections.line("system") {
            Some("Darwin") => macos::fill(&mut machine, &sections),
            Some("Linux") => linux::fill(&mut machine, &sections),
            system => {
                let system = system.unwrap_or_default().to_owned();
                return Err(ReadError::System { name: name.to_owned(), system });
            }
        }
        machine.reached_over = reached_over(sections.line("reached").unwrap_or_default(), &machine);
        machine.job.folder = sections.status("job-folder") == Some(0);
        machine.job.files = job_files(&machine.system, &sections);
        machine.ports.sort_by(|one, other| natural(&one.name).cmp(&natural(&other.name)));
        Ok(machine)
    }
}

/// The interface of the ssh connection, from `SSH_CONNECTION`: client, its port, the address here,
/// its port. A link-local address names its interface.
fn reached_over(connection: &str, machine: &Machine) -> Option<String> {
    let here = connection.split_whitespace().nth(2)?;
    if let Some((_, interface)) = here.split_once('%') {
        return machine.interface(interface).map(|interface| interface.name.clone());
    }
    let here: std::net::Ipv4Addr = here.strip_prefix("::ffff:").unwrap_or(here).parse().ok()?;
    let has = |interface: &&Interface| interface.addresses.iter().any(|own| own.address == here);
    machine.interfaces.iter().find(has).map(|interface| interface.name.clone())
}

/// The files of an earlier setup that are there.
fn job_files(system: &System, sections: &Sections) -> std::collections::BTreeMap<String, String> {
    let Some(paths) = crate::job::Paths::of(system) else { return Default::default() };
    let all = [("job-script", paths.script), ("job-unit", paths.unit), ("job-cables", paths.cables)];
    all.into_iter()
        .filter_map(|(section, path)| {
            // `section` adds one line end to what `$(…)` has stripped of all.
            sections
                .output(section)
                .map(|text| (path.to_owned(), format!("{}\n", text.trim_end_matches('\n'))))
        })
        .collect()
}

/// Sorts `10` after `9`.
fn natural(name: &str) -> (usize, &str) {
    (name.len(), name)
}
