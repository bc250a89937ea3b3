//! How a launch and its ranks ended.

use serde::Serialize;

use crate::signal;

/// Shells add this to a signal's number to make an exit status.
const SIGNALLED: i32 = 128;

/// How a rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RankEnd {
    /// By itself, with exit status 0.
    Completed,
    /// By itself with another exit status, or by a signal that the launcher did not send.
    Failed,
    /// By the launcher's TERM.
    Terminated,
    /// By the launcher's KILL.
    Killed,
    /// Not at all: even KILL had no effect.
    Stuck,
}

/// One rank's end.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// How it ended.
    pub end: RankEnd,
    /// Its exit status; 128 plus the signal's number if a signal ended it.
    pub status: Option<i32>,
    /// Seconds that it ran.
    pub seconds: f64,
}

/// How a launch ended.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LaunchReport {
    /// The launcher's own exit status: the first failing rank's, or 128 plus the number of the
    /// signal that ended the launcher.
    pub status: u8,
    /// The first rank that failed.
    pub first_failure: Option<usize>,
    /// The signal that told the launcher to end.
    pub interrupted_by: Option<i32>,
    /// Whether the reader of the output closed it.
    pub output_closed: bool,
    /// All ranks.
    pub ranks: Vec<RankReport>,
}

impl LaunchReport {
    /// A line for the user; empty if all ranks completed.
    pub fn summary(&self) -> String {
        let mut text = String::new();
        if let Some(first) = self.first_failure.and_then(|rank| self.ranks.get(rank)) {
            let RankReport { rank, host, seconds, .. } = first;
            text = format!("rank {rank} on {host} {} after {seconds:.1} s", describe(first.status));
            let advice = first.status.map_or("", |status| signal::advice(status - SIGNALLED));
            if !advice.is_empty() {
                text.push_str(&format!(": {advice}"));
            }
        } else if let Some(signal) = self.interrupted_by {
            text = format!("ended by {}", signal::name(signal));
        } else if self.output_closed {
            text = "ended because nobody reads the output".to_owned();
        }
        for (end, how) in [
            (RankEnd::Terminated, "ended by TERM"),
            (RankEnd::Killed, "ended by KILL"),
            (RankEnd::Stuck, "could not be ended"),
        ] {
            let ranks = self.ranks.iter().filter(|rank| rank.end == end);
            let list: Vec<String> = ranks.map(|rank| format!("{} on {}", rank.rank, rank.host)).collect();
            if !list.is_empty() {
                let word = if list.len() == 1 { "rank" } else { "ranks" };
                let separator = if text.is_empty() { "" } else { "; " };
                text.push_str(&format!("{separator}{how}: {word} {}", list.join(", ")));
            }
        }
        text
    }
}

fn describe(status: Option<i32>) -> String {
    match status {
        // `ssh` exits with 255 itself when it cannot connect or loses the connection.
        Some(255) => {
            "exited with status 255 (on another machine, possibly the status of ssh itself)".to_owned()
        }
        Some(status) if status > SIGNALLED => {
            format!("was ended by {} (status {status})", signal::name(status - SIGNALLED))
        }
        Some(status) => format!("exited with status {status}"),
        None => "did not end".to_owned(),
    }
}
