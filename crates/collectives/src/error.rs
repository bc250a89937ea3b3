//! The errors of forming a group and of its operations.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::Transport;

/// Why a group could not be formed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InitError {
    /// An environment variable or configuration field has an invalid value.
    #[error("{name} is {value:?}: {remedy}")]
    Setting {
        /// Its name.
        name: String,
        /// Its value.
        value: String,
        /// What it should be.
        remedy: String,
    },
    /// A variable is set, but another that it needs is not.
    #[error("{present} is set but {missing} is not: {remedy}")]
    Incomplete {
        /// The variable that is set.
        present: &'static str,
        /// The variable that is missing.
        missing: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// A hostfile could not be read or parsed.
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
    /// The coordinator's address is in use or not an address of this machine.
    #[error("rank 0 cannot listen on {address}: {source}; choose another THUNDER_COORDINATOR")]
    Listen {
        /// The address.
        address: String,
        /// The system's error.
        source: io::Error,
    },
    /// The coordinator did not answer in time.
    #[error(
        "no coordinator at {address} within {} ({last}): start rank 0, or check THUNDER_COORDINATOR and the firewall",
        rounded(*after)
    )]
    NoCoordinator {
        /// The address.
        address: String,
        /// How long this rank tried.
        after: Duration,
        /// The last failure.
        last: String,
    },
    /// Some ranks did not join in time.
    #[error("{} did not join within {}: {}", list(missing), rounded(*after), start(missing))]
    Missing {
        /// The ranks.
        missing: Vec<usize>,
        /// How long the group waited.
        after: Duration,
    },
    /// Ranks have joined, but did not connect to this rank in time.
    #[error(
        "{} joined, but did not connect to port {port} of this rank within {}: check their output, or open the port in \
         the firewall (THUNDER_PORTS fixes the range of ports)",
        list(ranks), rounded(*after)
    )]
    NotConnected {
        /// The ranks.
        ranks: Vec<usize>,
        /// The port on which this rank listens for data links.
        port: u16,
        /// How long this rank waited.
        after: Duration,
    },
    /// The other side refused this rank.
    #[error("refused by {address}: {why}")]
    Refused {
        /// The address of the other side.
        address: String,
        /// Its reason.
        why: String,
    },
    /// A connection between two ranks could not be made.
    #[error(
        "rank {rank} cannot be reached at {tried}: {source}; check its output, and whether a firewall closes the port \
         (THUNDER_PORTS fixes the range of ports)"
    )]
    Unreachable {
        /// The rank.
        rank: usize,
        /// The addresses that were tried.
        tried: String,
        /// The last failure.
        source: io::Error,
    },
    /// The cables to a rank cannot be used.
    #[error("RDMA with rank {rank}: {source}; THUNDER_TRANSPORT=tcp avoids RDMA")]
    Rdma {
        /// The rank.
        rank: usize,
        /// The error of the device or channel.
        source: thunder_verbs::Error,
    },
    /// Only shared memory was allowed, but a rank is on another host.
    #[error("rank {rank} is on another host, which shared memory cannot reach: use THUNDER_TRANSPORT=auto")]
    NotLocal {
        /// The rank.
        rank: usize,
    },
    /// The system refused a resource.
    #[error("{what}: {source}")]
    System {
        /// What failed.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A rank could not connect to its part of a group that is divided, so no rank has one.
    #[error("rank {rank} could not connect to its part of the group: check its output")]
    Split {
        /// The rank.
        rank: usize,
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

/// Why an operation failed. After any of these except [`CommError::Argument`] the group cannot be
/// used any more: every later operation returns the same error, and the other ranks are told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A rank has exited, was killed, or can no longer be reached by this rank or by a rank that
    /// has reported it.
    #[error(
        "rank {rank} is lost ({transport}, noticed {}): it ended or cannot be reached, its output may say why",
        noticed(*after)
    )]
    PeerLost {
        /// The rank.
        rank: usize,
        /// What this rank used to talk to it.
        transport: Transport,
        /// Time from the start of the operation until the loss was noticed; zero if noticed between
        /// operations.
        after: Duration,
    },
    /// A rank is alive, but the link to it failed: it lost data, or its device reported an error.
    #[error("the link to rank {rank} failed ({transport}): {reason}")]
    LinkFailed {
        /// The rank.
        rank: usize,
        /// What this rank used to talk to it.
        transport: Transport,
        /// The link's error.
        reason: String,
    },
    /// A rank is alive but has sent nothing for the stall limit.
    #[error(
        "rank {rank} has stalled ({transport}, noticed {}): it is stopped, overloaded or not in the same operation", noticed(*after)
    )]
    Stalled {
        /// The rank.
        rank: usize,
        /// What this rank uses to talk to it.
        transport: Transport,
        /// How long nothing arrived; zero if another rank noticed it between operations.
        after: Duration,
    },
    /// Two ranks are in different operations.
    #[error(
        "rank {rank} is in {theirs}, this rank in {ours}: all ranks must call the same operations in the same order"
    )]
    Mismatch {
        /// The other rank.
        rank: usize,
        /// The other rank's operation.
        theirs: String,
        /// This rank's operation.
        ours: String,
    },
    /// An argument is invalid. Nothing was sent, and the group can still be used.
    #[error("{operation}: {why}")]
    Argument {
        /// The operation.
        operation: &'static str,
        /// What is wrong.
        why: String,
    },
    /// Another rank gave the group up and told this one.
    #[error("rank {by} aborted the group because of rank {rank}: {why}")]
    Aborted {
        /// The rank that gave up.
        by: usize,
        /// The rank that it blames.
        rank: usize,
        /// The reason.
        why: &'static str,
    },
}

impl CommError {
    /// The rank that is to blame, if there is one.
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

    /// True when a rank or a link is lost, so that the group must be formed again.
    pub fn is_loss(&self) -> bool {
        matches!(self, Self::PeerLost { .. } | Self::LinkFailed { .. } | Self::Stalled { .. })
    }
}

fn noticed(after: Duration) -> String {
    if after.is_zero() { "between operations".to_owned() } else { format!("after {}", rounded(after)) }
}

/// A duration for people: two digits or more, no fraction from 10 of a unit on.
pub(crate) fn rounded(duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    let (value, unit) = match seconds {
        // A value that rounds to 1000 of a unit is shown in the next unit.
        s if s >= 0.9995 => (s, "s"),
        s if s >= 0.000_999_5 => (s * 1e3, "ms"),
        s => (s * 1e6, "µs"),
    };
    let text = format!("{value:.1}");
    if value >= 10.0 {
        format!("{value:.0} {unit}")
    } else {
        format!("{} {unit}", text.trim_end_matches(".0"))
    }
}

/// What to do about ranks that did not join.
fn start(ranks: &[usize]) -> &'static str {
    if ranks.len() == 1 { "start it, or check its output" } else { "start them, or check their output" }
}

/// `rank 1`, or `ranks 1, 3`.
pub(crate) fn list(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_rounded_for_people() {
        let cases = [
            (60_017_648_827, "60 s"),
            (60_000_000_000, "60 s"),
            (1_300_000_000, "1.3 s"),
            (2_000_000_000, "2 s"),
            (999_900_000, "1 s"),
            (300_000_000, "300 ms"),
            (1_234_567, "1.2 ms"),
            (85_400, "85 µs"),
            (0, "0 µs"),
        ];
        for (nanoseconds, text) in cases {
            assert_eq!(rounded(Duration::from_nanos(nanoseconds)), text);
        }
        let missing = InitError::Missing { missing: vec![2], after: Duration::from_nanos(60_017_648_827) };
        assert_eq!(missing.to_string(), "rank 2 did not join within 60 s: start it, or check its output");
    }
}
