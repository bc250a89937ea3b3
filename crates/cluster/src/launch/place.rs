//! Which rank runs where, and the plan in which nothing is left open.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use super::environment::{self, Variables};
use super::{Backend, Launch, LaunchError, remote};
use crate::hostfile::{Host, is_host_name};

/// Where one rank runs.
pub type Place = Host;

/// One rank, ready to be started.
#[derive(Debug, Clone, Serialize)]
pub struct PlannedRank {
    /// The rank.
    pub rank: usize,
    /// Its machine, as the user called it.
    pub host: String,
    /// Whether it runs as a child of this process.
    pub local: bool,
    /// Program and arguments.
    pub command: Vec<String>,
    /// Working directory; `None`: this one, if the machine has it.
    pub directory: Option<PathBuf>,
    /// Variables, later ones win.
    #[serde(serialize_with = "environment::hidden")]
    pub environment: Vec<(String, String)>,
    /// Variables that name a file, with what is to be in it.
    pub files: Vec<(String, String)>,
}

/// Everything that a launch will do.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// The ranks in order.
    pub ranks: Vec<PlannedRank>,
    /// The backend whose variables are set.
    pub backend: Backend,
    /// What the user may want to know.
    pub notes: Vec<String>,
    #[serde(skip)]
    pub(crate) launch: Launch,
}

impl Launch {
    /// Places the ranks and settles their commands and variables.
    ///
    /// # Errors
    /// When something that the ranks need is missing or contradictory.
    pub fn plan(&self) -> Result<Plan, LaunchError> {
        if self.command.first().is_none_or(String::is_empty) {
            return Err(LaunchError::NoCommand);
        }
        let Variables { backend, ranks, notes } = environment::settle(self)?;
        let command = self.full_command();
        let ranks = self
            .places
            .iter()
            .zip(ranks)
            .enumerate()
            .map(|(rank, (place, variables))| PlannedRank {
                rank,
                host: place.ssh.clone(),
                local: is_local(&place.ssh),
                command: command.clone(),
                directory: self.directory.clone(),
                environment: variables.environment,
                files: variables.files,
            })
            .collect();
        Ok(Plan { ranks, backend, notes, launch: self.clone() })
    }

    /// A Python script runs under the Python of the active environment, whatever its first line says.
    fn full_command(&self) -> Vec<String> {
        let script = self.command[0].ends_with(".py");
        let python = self.python.clone().or_else(|| script.then(active_python));
        python.into_iter().chain(self.command.iter().cloned()).collect()
    }
}

fn active_python() -> String {
    let environment = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().find_map(std::env::var_os);
    let program = environment.map(|folder| PathBuf::from(folder).join("bin/python"));
    let program =
        program.filter(|path| path.exists()).and_then(|path| path.into_os_string().into_string().ok());
    program.unwrap_or_else(|| "python3".to_owned())
}

/// What the plan would run, as text for a shell; values that look like secrets are hidden.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for rank in &self.ranks {
            let how = if rank.local { "" } else { "; the script goes over standard input, as one line" };
            writeln!(f, "# rank {} on {}{how}", rank.rank, rank.host)?;
            let mut shown = rank.clone();
            shown.environment = environment::masked(&rank.environment);
            if !rank.local {
                let ssh = remote::ssh_command(&self.launch.ssh, &rank.host, remote::BOOTSTRAP);
                writeln!(f, "{} <<'END'", remote::join(&ssh))?;
                let folder = remote::Folder::example();
                writeln!(f, "{}END", remote::script(&shown, &self.launch, &folder))?;
                continue;
            }
            if let Some(directory) = &rank.directory {
                writeln!(f, "cd {}", remote::quote(&directory.to_string_lossy()))?;
            }
            write!(f, "env")?;
            for (name, value) in &shown.environment {
                write!(f, " {name}={}", remote::quote(value))?;
            }
            for (name, content) in &shown.files {
                write!(f, " {name}=<(echo {})", remote::quote(content))?;
            }
            writeln!(f, " {}", remote::join(&rank.command))?;
        }
        Ok(())
    }
}

/// Reads `a,b:2,user@c`: names separated by commas, `:N` for N ranks there; `repeat` where no number is given.
///
/// # Errors
/// Names the entry that is not a host, or counts more ranks than a group may have.
pub fn parse_hosts(text: &str, repeat: usize) -> Result<Vec<Place>, LaunchError> {
    let mut places = Vec::new();
    for entry in text.split(',') {
        let malformed = || LaunchError::Host { entry: entry.to_owned() };
        let (name, count) = match entry.rsplit_once(':') {
            // An address of IPv6 has colons of its own: [::1]:2 or plain ::1.
            Some((name, count)) if !name.contains(':') || name.ends_with(']') => {
                (name, count.parse().ok().filter(|count| *count > 0).ok_or_else(malformed)?)
            }
            _ => (entry, repeat),
        };
        let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        if !is_host_name(name) {
            return Err(malformed());
        }
        let ips = name.parse::<std::net::IpAddr>().is_ok().then(|| name.to_owned());
        let place = Place { ssh: name.to_owned(), ips: ips.into_iter().collect(), rdma: Vec::new() };
        check_count(places.len().saturating_add(count))?;
        places.extend(std::iter::repeat_n(place, count));
    }
    Ok(places)
}

/// `repeat` ranks for each host, one after the other.
pub(super) fn repeated(hosts: &[Host], repeat: usize) -> Result<Vec<Place>, LaunchError> {
    check_count(hosts.len().saturating_mul(repeat))?;
    Ok(hosts.iter().flat_map(|host| std::iter::repeat_n(host.clone(), repeat)).collect())
}

fn check_count(count: usize) -> Result<(), LaunchError> {
    let most = thunder_collectives::MAX_RANKS;
    if count > most { Err(LaunchError::TooMany { count, most }) } else { Ok(()) }
}

/// Whether ranks on `host` are children of this process: loopback, or this machine's own name.
pub(super) fn is_local(host: &str) -> bool {
    if host.eq_ignore_ascii_case("localhost") {
        return true;
    }
    if let Ok(address) = host.parse::<std::net::IpAddr>() {
        return address.is_loopback();
    }
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    let short = name.split('.').next().unwrap_or_default();
    !short.is_empty() && (host.eq_ignore_ascii_case(&name) || host.eq_ignore_ascii_case(short))
}
