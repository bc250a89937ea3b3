//! What can go wrong while a group forms and while it works.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::Transport;

/// AbortReason a group could not be formed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InitError {
    /// An environment variable or configuration field has a value that cannot be used.
    #[error("{name} is {value:?}: {remedy}")]
    Setting {
        /// The variable or field.
        name: String,
        /// Its value.
        value: String,
        /// What it should be.
        remedy: String,
    },
    /// A variable is set, but another that it needs is not.
    #[error("{present} is set but {missing} is not: {remedy}")]
    Incomplete {
        /// The variable that is there.
        present: &'static str,
        /// The one that is not.
        missing: &'static str,
        /// How to go on.
        remedy: &'static str,
    },
    /// A hostfile could not be read or understood.
    #[error("hostfile {}: {why}", path.display())]
    Hostfile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A group over the network needs a shared secret.
    #[error(
        "the coordinator {coordinator} is not on this machine and no secret is set: give all ranks the same THUNDER_SECRET"
    )]
    NoSecret {
        /// The address.
        coordinator: String,
    },
    /// The coordinator's address is taken or not this machine's.
    #[error("rank 0 cannot listen on {address}: {source}; choose another THUNDER_COORDINATOR")]
    Listen {
        /// The address.
        address: String,
        /// The system's answer.
        source: io::Error,
    },
    /// The coordinator did not answer in time.
    #[error(
        "no coordinator at {address} within {after:?} ({last}): start rank 0, or check THUNDER_COORDINATOR and the firewall"
    )]
    NoCoordinator {
        /// The address.
        address: String,
        /// How long this rank tried.
        after: Duration,
        /// The last failure.
        last: String,
    },
    /// Some ranks never came.
    #[error("ranks {} have not come within {after:?}: start them, or look at their output", list(missing))]
    Missing {
        /// The ranks.
        missing: Vec<usize>,
        /// How long was waited.
        after: Duration,
    },
    /// The other side refused this rank.
    #[error("refused by {address}: {why}")]
    Refused {
        /// Who refused.
        address: String,
        /// Its reason.
        why: String,
    },
    /// A connection between two ranks could not be made.
    #[error("rank {rank} cannot be reached at {tried}: {source}")]
    Unreachable {
        /// The rank.
        rank: usize,
        /// The addresses that were tried.
        tried: String,
        /// The last failure.
        source: io::Error,
    },
    /// The cables to a rank cannot be used.
    #[error("RDMA with rank {rank}: {source}; THUNDER_TRANSPORT=tcp does without it")]
    Rdma {
        /// The rank.
        rank: usize,
        /// AbortReason.
        source: thunder_verbs::Error,
    },
    /// Shared memory was demanded between ranks of different hosts.
    #[error("rank {rank} is on another host, which shared memory cannot reach: use THUNDER_TRANSPORT=auto")]
    NotLocal {
        /// The rank.
        rank: usize,
    },
    /// The system refused a resource.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The parent group failed while a split exchanged its addresses.
    #[error(transparent)]
    Comm(#[from] CommError),
}

impl InitError {
    pub(crate) fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}

/// AbortReason an operation failed. After any of these but [`CommError::Argument`] the group is of no further use: every later
/// operation returns the same error, and the other ranks are told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A rank has exited, was killed, or cannot be reached any more, by this rank or by one that has told so.
    #[error(
        "rank {rank} is lost ({transport}, noticed {}): restart it and form the group again", noticed(*after)
    )]
    PeerLost {
        /// The rank.
        rank: usize,
        /// How this rank talked to it.
        transport: Transport,
        /// Time from the start of the operation to the notice; zero when it was noticed before an operation.
        after: Duration,
    },
    /// A rank is there, but the link to it failed: it lost data, or its device reported an error.
    #[error("the link to rank {rank} failed ({transport}): {reason}")]
    LinkFailed {
        /// The rank.
        rank: usize,
        /// How this rank talked to it.
        transport: Transport,
        /// What the link says.
        reason: String,
    },
    /// A rank is there but has sent nothing for the stall limit.
    #[error(
        "rank {rank} has stalled ({transport}, noticed {}): it is stopped, overloaded or not in the same operation", noticed(*after)
    )]
    Stalled {
        /// The rank.
        rank: usize,
        /// How this rank talks to it.
        transport: Transport,
        /// How long nothing came; zero when another rank had noticed before an operation.
        after: Duration,
    },
    /// Two ranks do not agree on what they are doing.
    #[error(
        "rank {rank} does {theirs} while this rank does {ours}: all ranks must call the same operations in order"
    )]
    Mismatch {
        /// The rank that differs.
        rank: usize,
        /// Its operation.
        theirs: String,
        /// Ours.
        ours: String,
    },
    /// An argument is impossible; nothing was sent and the group is still good.
    #[error("{operation}: {why}")]
    Argument {
        /// The operation.
        operation: &'static str,
        /// What is wrong.
        why: String,
    },
    /// Another rank gave up and told this one; `rank` is the one that it blames.
    #[error("rank {by} gave the group up because of rank {rank}: {why}")]
    Aborted {
        /// Who gave up.
        by: usize,
        /// Who is to blame.
        rank: usize,
        /// AbortReason.
        why: &'static str,
    },
}

impl CommError {
    /// The rank that is to blame, where there is one.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Self::PeerLost { rank, .. }
            | Self::LinkFailed { rank, .. }
            | Self::Stalled { rank, .. }
            | Self::Mismatch { rank, .. }
            | Self::Aborted { rank, .. } => Some(*rank),
            Self::Argument { .. } => None,
        }
    }

    /// Whether a rank is gone, so that the group must be formed anew.
    pub fn is_loss(&self) -> bool {
        matches!(self, Self::PeerLost { .. } | Self::LinkFailed { .. } | Self::Stalled { .. })
    }
}

fn noticed(after: Duration) -> String {
    if after.is_zero() { "between operations".to_owned() } else { format!("after {after:?}") }
}

fn list(ranks: &[usize]) -> String {
    let mut text = String::new();
    for (index, rank) in ranks.iter().enumerate() {
        if index > 0 {
            text.push_str(", ");
        }
        text.push_str(&rank.to_string());
    }
    text
}
