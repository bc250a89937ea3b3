//! What happens while a group forms, for programs that show it to their user. The library itself
//! prints nothing.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{list, rounded};

/// A group that forms within this time reports refusals only.
const FIRST_REPORT: Duration = Duration::from_secs(1);
/// Interval of the reports about a state that does not change.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// What happens while a group forms. `Display` gives a line for the user.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FormingEvent {
    /// Rank 0 waits for other ranks. Reported after a second, then every 10 s.
    Waiting {
        /// Where rank 0 listens.
        address: String,
        /// The ranks that have not joined.
        missing: Vec<usize>,
        /// Time until rank 0 gives up.
        left: Duration,
    },
    /// A rank has joined after rank 0 had reported that it waits.
    Joined {
        /// The rank.
        rank: usize,
        /// Its address.
        address: String,
        /// The ranks that have not joined.
        missing: Vec<usize>,
    },
    /// A connection to this rank was refused.
    Refused {
        /// Address of the other side.
        address: String,
        /// The reason.
        why: String,
    },
    /// Rank 0 does not answer. Reported after a second, when the reason changes, and every 10 s.
    NoCoordinator {
        /// Where rank 0 was looked for.
        address: String,
        /// The last failure.
        why: String,
        /// Time until this rank gives up.
        left: Duration,
    },
    /// Rank 0 knows this rank, and waits for others. Reported after a second, then every 10 s.
    Registered {
        /// Where rank 0 listens.
        address: String,
        /// Time until this rank gives up.
        left: Duration,
    },
    /// All ranks have joined, but this rank cannot connect to another one yet.
    Unreachable {
        /// The other rank.
        rank: usize,
        /// The addresses that were tried.
        tried: String,
        /// The last failure.
        why: String,
        /// Time until this rank gives up.
        left: Duration,
    },
    /// All ranks have joined, but some have not connected to this one yet.
    Unconnected {
        /// The other ranks.
        ranks: Vec<usize>,
        /// This rank's port.
        port: u16,
        /// Time until this rank gives up.
        left: Duration,
    },
}

impl fmt::Display for FormingEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Waiting { address, missing, left } => {
                write!(f, "waiting at {address} for {}, {} more", list(missing), rounded(*left))
            }
            Self::Joined { rank, address, missing } if missing.is_empty() => {
                write!(f, "rank {rank} has joined from {address}: the group is complete")
            }
            Self::Joined { rank, address, missing } => {
                write!(f, "rank {rank} has joined from {address}; waiting for {}", list(missing))
            }
            Self::Refused { address, why } => write!(f, "refused {address}: {why}"),
            Self::NoCoordinator { address, why, left } => {
                write!(f, "no rank 0 at {address} yet ({why}); {}", trying(*left))
            }
            Self::Registered { address, left } => {
                write!(f, "joined rank 0 at {address}; waiting for other ranks, {} more", rounded(*left))
            }
            Self::Unreachable { rank, tried, why, left } => {
                write!(f, "rank {rank} cannot be reached at {tried} yet ({why}); {}", trying(*left))
            }
            Self::Unconnected { ranks, port, left } => write!(
                f,
                "{} have joined, but not connected to port {port} of this rank: is it closed by a firewall? \
                 waiting for {} more",
                list(ranks),
                rounded(*left)
            ),
        }
    }
}

fn trying(left: Duration) -> String {
    match left < Duration::from_millis(1) {
        true => "giving up".to_owned(),
        false => format!("trying for {} more", rounded(left)),
    }
}

/// Called with each [`FormingEvent`], possibly from several threads at once.
#[derive(Clone)]
pub struct Observer(Arc<dyn Fn(&FormingEvent) + Send + Sync>);

impl Observer {
    /// An observer that calls `tell`.
    pub fn new(tell: impl Fn(&FormingEvent) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }

    pub(crate) fn tell(&self, event: &FormingEvent) {
        (self.0)(event);
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}

/// Decides when a wait is reported.
pub(crate) struct Reports {
    observer: Option<Observer>,
    deadline: Instant,
    next: Instant,
    has_begun: bool,
}

impl Reports {
    /// For a wait that begins now and ends by `deadline`.
    pub fn new(observer: Option<&Observer>, deadline: Instant) -> Self {
        let next = Instant::now() + FIRST_REPORT;
        Self { observer: observer.cloned(), deadline, next, has_begun: false }
    }

    /// Time that the wait may take before [`Reports::due`] is asked again.
    pub fn pause(&self) -> Duration {
        self.deadline.min(self.next).saturating_duration_since(Instant::now())
    }

    /// Time until the wait ends.
    pub fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Whether a report was due at any time.
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Reports the state if it is time to, or if it has changed since the last report. The closure
    /// gets the time left.
    pub fn due(&mut self, has_changed: bool, event: impl FnOnce(Duration) -> FormingEvent) {
        let now = Instant::now();
        if now >= self.next || (self.has_begun && has_changed) {
            self.has_begun = true;
            self.next = now + REPORT_INTERVAL;
            self.tell(event(self.left()));
        }
    }

    /// Reports in any case.
    pub fn tell(&self, event: FormingEvent) {
        if let Some(observer) = &self.observer {
            observer.tell(&event);
        }
    }
}
