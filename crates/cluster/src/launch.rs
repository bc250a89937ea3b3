//! `thunder launch`: starts the ranks of a program on this machine and on others, and stands by them until the last has
//! ended.
//!
//! A [`Launch`] says what to start; [`Launch::plan`] places the ranks and settles every variable and command, without side
//! effects; [`Plan::run`] starts them, passes their output on line by line, and ends all of them when one fails.
//!
//! A local rank is a child in a process group of its own. A remote one is a child of a small `sh` script at the other end of
//! `ssh`, which is sent over standard input (nothing secret is in any command line) and which ends its rank as soon as that
//! input closes. One thread waits in `poll`; standard input is read by a second one.

mod environment;
mod error;
mod guard;
mod lines;
mod output;
mod place;
mod rank;
mod remote;
mod report;
mod signals;
mod supervise;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::hostfile::Hostfile;

pub use error::LaunchError;
pub use place::{Place, Plan, PlannedRank, parse_hosts};
pub use report::{End, Outcome, RankReport};

/// What to start, where and how. Start from [`Launch::new`] and change fields.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Launch {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Where, and with what addresses and devices. One rank per place.
    pub places: Vec<Place>,
    /// What the ranks talk over.
    pub backend: Backend,
    /// More variables for every rank; they win over those that the launcher sets, rank and world size aside.
    pub environment: Vec<(String, String)>,
    /// The ranks' working directory. `None`: this one where it exists, else the home directory.
    pub directory: Option<PathBuf>,
    /// The Python under which a `.py` command runs. `None`: that of the active virtual environment, else `python3`.
    pub python: Option<String>,
    /// The program that reaches other machines, and its first arguments.
    pub ssh: Vec<String>,
    /// First of the ports used when ranks are on several machines, and the coordinator's. `None`: 32323, or free ones when
    /// all ranks are local.
    pub port: Option<u16>,
    /// MLX's ring uses this many connections per address.
    pub connections_per_ip: usize,
    /// Who gets standard input.
    pub input: Input,
    /// Whether lines carry their rank.
    pub prefix: bool,
    /// Whether the ranks' standard output goes to standard error, so that standard output is left for a report.
    pub output_to_stderr: bool,
    /// How long ranks have between TERM and KILL.
    pub grace: Duration,
}

impl Launch {
    /// A launch of `command`, one rank per place, everything else as `thunder launch` has it by default.
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
            connections_per_ip: 1,
            input: Input::First,
            prefix: true,
            output_to_stderr: false,
            grace: Duration::from_secs(5),
        }
    }

    /// Takes places, variables and, if none was chosen, the backend from a host file; each entry is `repeat` ranks.
    ///
    /// # Errors
    /// When the file asks for a backend that does not exist, or for more ranks than a group may have.
    pub fn apply(&mut self, hostfile: &Hostfile, repeat: usize) -> Result<(), LaunchError> {
        if let (Backend::Auto, Some(name)) = (self.backend, &hostfile.backend) {
            self.backend = name.parse()?;
        }
        let given = std::mem::take(&mut self.environment);
        self.environment = hostfile.envs.iter().cloned().chain(given).collect();
        self.places = place::repeated(&hostfile.hosts, repeat)?;
        Ok(())
    }
}

/// What the ranks talk over. Thunderhead's variables are always set; this chooses its transport and MLX's variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// JACCL where the host file lists all devices, else MLX's ring.
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

/// Who gets the launcher's standard input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Input {
    /// Rank 0.
    #[default]
    First,
    /// Every rank, each all of it.
    All,
    /// Nobody.
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
