//! Recent events on a node, for `thunder cluster logs`.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::host::unix_s;

/// Maximum lines that are kept.
pub(super) const MOST_LINES: usize = 500;
/// Longer lines are cut.
const LONGEST_LINE_BYTES: usize = 1000;

/// A line of a node's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// Counts this run's lines, from 1.
    pub number: u64,
    /// Seconds since 1970.
    pub unix_s: u64,
    /// The event.
    pub text: String,
}

/// The last lines. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct Log(Arc<Mutex<(u64, VecDeque<LogLine>)>>);

impl Log {
    /// Adds a line, and also shows it in the agent's own log.
    pub fn add(&self, mut text: String) {
        tracing::info!("{text}");
        let mut end = text.len().min(LONGEST_LINE_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        let mut log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, lines) = &mut *log;
        *number += 1;
        if lines.len() == MOST_LINES {
            lines.pop_front();
        }
        lines.push_back(LogLine { number: *number, unix_s: unix_s(), text });
    }

    /// The last `count` lines, of those after line number `after`.
    pub fn lines(&self, count: usize, after: u64) -> Vec<LogLine> {
        let log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let later = log.1.iter().filter(|line| line.number > after);
        let skipped = later.clone().count().saturating_sub(count);
        later.skip(skipped).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept() {
        let log = Log::default();
        (0..MOST_LINES + 5).for_each(|index| log.add(format!("{index} {}", "ü".repeat(1000))));
        let all = log.lines(usize::MAX, 0);
        assert_eq!((all.len(), all[0].number), (MOST_LINES, 6));
        assert!(all.iter().all(|line| line.text.len() <= LONGEST_LINE_BYTES));
        let last: Vec<u64> = log.lines(2, 0).iter().map(|line| line.number).collect();
        assert_eq!(last, [MOST_LINES as u64 + 4, MOST_LINES as u64 + 5]);
        assert!(log.lines(9, MOST_LINES as u64 + 5).is_empty());
    }
}
