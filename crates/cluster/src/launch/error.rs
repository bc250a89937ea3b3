//! Errors of the launcher itself. A rank that fails is part of the report, not an error.

use std::path::PathBuf;

use crate::hostfile::HostfileError;

/// Why a launch could not be planned or started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// There is no command.
    #[error("no command was given: write it after `--`, for example `thunder launch -n 2 -- ./program`")]
    NoCommand,
    /// An entry of `--hosts` is malformed.
    #[error(
        "\"{entry}\" in the list of hosts is not a host: write names separated by commas, each with :N for N ranks"
    )]
    Host {
        /// The entry.
        entry: String,
    },
    /// More ranks than a group can have.
    #[error("{count} ranks are too many: a group has at most {most}; lower :N in the list of hosts, or -n")]
    TooMany {
        /// Ranks asked for.
        count: usize,
        /// The limit.
        most: usize,
    },
    /// No backend has this name.
    #[error(
        "there is no backend \"{name}\": use auto, ring, jaccl, jaccl-ring, nccl, shm or tcp (MPI: call mpirun)"
    )]
    UnknownBackend {
        /// The name.
        name: String,
    },
    /// The host file is wrong.
    #[error(transparent)]
    Hostfile(#[from] HostfileError),
    /// The RDMA devices that JACCL needs are not in the host file.
    #[error("backend {backend} needs a host file with \"rdma\" devices, one rank per host: {why}")]
    NoDevices {
        /// The backend.
        backend: &'static str,
        /// What is missing.
        why: String,
    },
    /// Shared memory cannot reach another host.
    #[error("backend shm needs all ranks on one host, but rank {rank} is on {host}: use auto or tcp")]
    NotOneHost {
        /// The first rank on another host.
        rank: usize,
        /// Its host.
        host: String,
    },
    /// A host has no address at which the other ranks can reach it.
    #[error(
        "no address is known for {host}, which {why}: use a name that resolves, set HostName for it in ~/.ssh/config, or \
         add the address to \"ips\" in a host file"
    )]
    NoAddress {
        /// The host.
        host: String,
        /// What needs the address.
        why: &'static str,
    },
    /// Fewer ports exist above the first one than are needed.
    #[error("there are no {needed} ports from {first} on: choose a lower --port")]
    Ports {
        /// The first port.
        first: u16,
        /// Ports needed.
        needed: usize,
    },
    /// The working directory does not exist.
    #[error("rank {rank} on this machine: no directory {}", path.display())]
    NoDirectory {
        /// The rank.
        rank: usize,
        /// The directory.
        path: PathBuf,
    },
    /// A program could not be started.
    #[error("rank {rank} on {host}: cannot start {program}: {why}")]
    Start {
        /// The rank.
        rank: usize,
        /// Its host.
        host: String,
        /// The program, or `ssh`.
        program: String,
        /// The system's error.
        why: std::io::Error,
    },
    /// Another system call failed.
    #[error("cannot {what}: {why}")]
    System {
        /// What the launcher tried to do.
        what: &'static str,
        /// The system's error.
        why: std::io::Error,
    },
}

impl LaunchError {
    /// For `map_err`: a system call failed while trying to `what`.
    pub(crate) fn system<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |why| Self::System { what, why: why.into() }
    }
}
