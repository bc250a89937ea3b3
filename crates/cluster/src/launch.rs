//! `thunder launch`: starts the ranks of a program on this machine and on others, and supervises
//! them until the last has ended.
//!
//! A [`Launch`] says what to start. [`Launch::plan`] places the ranks and decides every variable
//! and command, without side effects. [`LaunchPlan::run`] starts the ranks, passes their output on
//! line by line, and ends all of them when one fails.
//!
//! A local rank is a child in a process group of its own. A remote rank is a child of a small `sh`
//! script at the other end of `ssh`. The script is sent over standard input, so that no command
//! line holds a secret, and ends its rank when that input closes. One thread waits in `poll`; a
//! second one reads standard input.

mod addresses;
mod dry_run;
mod environment;
mod error;
pub(crate) mod guard;
mod hosts;
mod output;
mod plan;
mod relay;
mod remote;
mod report;
mod secret;
mod shell;
mod signals;
mod start;

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::hostfile::Hostfile;

pub use error::LaunchError;
pub use hosts::{Place, is_local as is_this_machine, parse_hosts};
pub use plan::{LaunchPlan, PlannedRank};
pub use report::{LaunchReport, RankEnd, RankReport};

/// What to start, where and how. Start from [`Launch::new`] and change fields.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Launch {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Host, addresses and devices of each rank.
    pub places: Vec<Place>,
    /// Transport, and which of MLX's variables to set.
    pub backend: Backend,
    /// Additional variables for every rank. They override the launcher's own, except for rank and
    /// world size.
    pub environment: Vec<(String, String)>,
    /// The ranks' working directory. `None`: the launcher's if the host has it, otherwise the home
    /// directory.
    pub directory: Option<PathBuf>,
    /// The Python that runs a `.py` command. `None`: that of the active virtual environment,
    /// otherwise `python3`.
    pub python: Option<String>,
    /// The program that reaches other machines, usually `ssh`, and its first arguments.
    pub ssh: Vec<String>,
    /// First port, which is the coordinator's. `None`: 32323, or free ports if all ranks are local.
    pub port: Option<u16>,
    /// Ports on which Thunderhead's ranks take each other's connections. `None`: any free port.
    #[serde(default)]
    pub data_ports: Option<RangeInclusive<u16>>,
    /// Connections per address in MLX's ring.
    pub connections_per_ip: usize,
    /// Which ranks get standard input.
    pub input: Input,
    /// Whether each line of output starts with its rank.
    pub prefix: bool,
    /// Whether the ranks' standard output goes to standard error, to keep standard output for a
    /// report.
    pub output_to_stderr: bool,
    /// Time between TERM and KILL.
    pub grace: Duration,
}

impl Launch {
    /// A launch of `command`, one rank per place, with `thunder launch`'s defaults.
    pub fn new(command: Vec<String>, places: Vec<Place>) -> Self {
        Self {
            command,
            places,
            backend: Backend::Auto,
            environment: Vec::new(),
            directory: None,
            python: None,
            ssh: vec!["ssh".to_owned()],
            port: None,
            data_ports: None,
            connections_per_ip: 1,
            input: Input::First,
            prefix: true,
            output_to_stderr: false,
            grace: Duration::from_secs(5),
        }
    }

    /// Takes places, variables and (if the backend is still `Auto`) the backend from a host file.
    /// Each entry is `repeat` ranks.
    ///
    /// # Errors
    /// When the file asks for an unknown backend, or for more ranks than a group may have.
    pub fn apply(&mut self, hostfile: &Hostfile, repeat: usize) -> Result<(), LaunchError> {
        if let (Backend::Auto, Some(name)) = (self.backend, &hostfile.backend) {
            self.backend = name.parse()?;
        }
        let given = std::mem::take(&mut self.environment);
        self.environment = hostfile.envs.iter().cloned().chain(given).collect();
        self.places = hosts::repeated(&hostfile.hosts, repeat)?;
        Ok(())
    }
}

/// Transport between ranks. Thunderhead's variables are always set; the backend decides its
/// transport and MLX's variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// JACCL if the host file lists all RDMA devices, otherwise MLX's ring.
    #[default]
    Auto,
    /// MLX's ring over TCP.
    Ring,
    /// RDMA in a full mesh.
    Jaccl,
    /// RDMA in a ring.
    JacclRing,
    /// NCCL.
    Nccl,
    /// Shared memory only (Thunderhead's programs).
    Shm,
    /// TCP only (Thunderhead's programs; MLX's get their ring).
    Tcp,
}

impl Backend {
    /// Every backend with its name.
    pub const ALL: [(&'static str, Self); 7] = [
        ("auto", Self::Auto),
        ("ring", Self::Ring),
        ("jaccl", Self::Jaccl),
        ("jaccl-ring", Self::JacclRing),
        ("nccl", Self::Nccl),
        ("shm", Self::Shm),
        ("tcp", Self::Tcp),
    ];
}

impl std::str::FromStr for Backend {
    type Err = LaunchError;

    fn from_str(name: &str) -> Result<Self, LaunchError> {
        let known = Self::ALL.iter().find(|(known, _)| *known == name);
        known
            .map(|(_, backend)| *backend)
            .ok_or_else(|| LaunchError::UnknownBackend { name: name.to_owned() })
    }
}

/// Which ranks get the launcher's standard input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Input {
    /// Rank 0.
    #[default]
    First,
    /// Every rank gets all of it.
    All,
    /// No rank.
    None,
}

impl Input {
    fn reaches(self, rank: usize) -> bool {
        match self {
            Self::First => rank == 0,
            Self::All => true,
            Self::None => false,
        }
    }
}
