//! What can be wrong before, or with, a launch itself; a rank that fails is a result, not an error.

use std::path::PathBuf;

use crate::hostfile::HostfileError;

/// Why nothing could be started, or why the launcher had to stop.
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
    /// More ranks than a group may have.
    #[error("{count} ranks: a group has {most} at most; lower :N in the list of hosts, or -n")]
    TooMany {
        /// What was asked for.
        count: usize,
        /// What is possible.
        most: usize,
    },
    /// A backend that does not exist.
    #[error(
        "there is no backend \"{name}\": use auto, ring, jaccl, jaccl-ring, nccl, shm or tcp (MPI: call mpirun)"
    )]
    UnknownBackend {
        /// Its name.
        name: String,
    },
    /// The host file is wrong.
    #[error(transparent)]
    Hostfile(#[from] HostfileError),
    /// JACCL needs devices that no host file told.
    #[error("backend {backend} needs a host file with \"rdma\" devices, one rank per host: {why}")]
    NoDevices {
        /// The backend.
        backend: &'static str,
        /// What is wrong.
        why: String,
    },
    /// Shared memory does not reach another host.
    #[error("backend shm needs all ranks on one host, but rank {rank} is on {host}: use auto or tcp")]
    NotOneHost {
        /// The first rank elsewhere.
        rank: usize,
        /// Its host.
        host: String,
    },
    /// A host has no address that the other ranks could use.
    #[error(
        "no address is known for {host}, which {why}: name it in a host file's \"ips\", or by a name that resolves"
    )]
    NoAddress {
        /// The host.
        host: String,
        /// Who needs it.
        why: &'static str,
    },
    /// There are more ports wanted than exist above the first.
    #[error("port {first} leaves no room for {needed} ports: choose a lower --port")]
    Ports {
        /// The first.
        first: u16,
        /// How many are wanted.
        needed: usize,
    },
    /// The working directory is not there.
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
        /// The system's answer.
        why: std::io::Error,
    },
    /// The system refused something else.
    #[error("cannot {what}: {why}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        why: std::io::Error,
    },
}

impl LaunchError {
    /// For `map_err`: a call that failed while trying to do `what`.
    pub(crate) fn system<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |why| Self::System { what, why: why.into() }
    }
}
