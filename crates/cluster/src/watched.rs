//! One rank that a node's agent starts, watches and ends.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::launch::guard::Guard;
use crate::ranks::{RankProcess, RankSet};

/// Lines of a rank's standard error that are kept.
const LINES_KEPT: usize = 40;
/// Longer lines are cut.
const LONGEST_LINE_BYTES: usize = 2000;
/// Time from TERM to KILL.
const GRACE: Duration = Duration::from_secs(5);
/// Time for an ended rank's last lines. A process that it left behind may hold the pipe open.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Variable: the folder of a user's sockets.
pub const USER_SOCKETS: &str = "XDG_RUNTIME_DIR";

/// Keeps GPU drivers quiet where nobody is logged in: without this variable libwayland, in which
/// they look for a window system, prints an error, which would count as the reason for an end.
pub fn quiet_drivers(command: &mut Command) {
    if std::env::var_os(USER_SOCKETS).is_none() {
        command.env(USER_SOCKETS, "/nonexistent");
    }
}

/// The line with which a program says why it has failed: the last one that begins with `error`,
/// else the last one.
pub fn reason<'a>(lines: impl DoubleEndedIterator<Item = &'a str>) -> Option<&'a str> {
    let mut last = None;
    for line in lines.rev().filter(|line| !line.trim().is_empty()) {
        if line.starts_with("error") {
            return Some(line);
        }
        last = last.or(Some(line));
    }
    last
}

/// A rank's process. Dropping it kills the rank; if the agent itself is killed, a guard does.
#[derive(Debug)]
pub struct WatchedRank {
    set: RankSet,
    lines: Arc<Mutex<VecDeque<String>>>,
    reader: JoinHandle<()>,
    _guard: Guard,
    _folder: tempfile::TempDir,
}

impl WatchedRank {
    /// Starts `command` as rank `number`, without input. `on_line` gets each line of its standard
    /// error, on a thread of its own.
    ///
    /// # Errors
    /// When the system cannot start it.
    pub fn start(
        mut command: Command,
        number: usize,
        on_line: impl Fn(&str) + Send + 'static,
    ) -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("thunder-rank-").tempdir()?;
        let mut guard = Guard::start(folder.path(), GRACE).map_err(io::Error::other)?;
        let (reader, writer) = io::pipe()?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(writer);
        quiet_drivers(&mut command);
        let mut set = RankSet::new(GRACE);
        set.ranks.push(RankProcess::spawn(command, number, "localhost".to_owned(), true)?);
        guard.watch(&set.guarded_groups());
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        let kept = lines.clone();
        let read = move || read_lines(reader, &kept, &on_line);
        let reader = std::thread::Builder::new().name(format!("rank-{number}")).spawn(read)?;
        Ok(Self { set, lines, reader, _guard: guard, _folder: folder })
    }

    /// How the rank ended, as a message with its last output; `None` while it runs, and until its
    /// last output is read.
    pub fn ended(&mut self) -> Option<String> {
        let now = Instant::now();
        self.set.reap(now);
        let rank = self.set.ranks.first()?;
        let ended_at = rank.ended_at?;
        if !self.reader.is_finished() && now.saturating_duration_since(ended_at) < LAST_LINES {
            return None;
        }
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        Some(match reason(lines.iter().map(String::as_str)) {
            Some(line) => format!("{}: {line}", rank.words()),
            None if rank.status.is_some_and(|status| status.code().is_some()) => {
                format!("{}, but it printed nothing", rank.words())
            }
            None => rank.words(),
        })
    }

    /// Whether the rank's process is stopped (SIGSTOP), if the system reports this.
    pub fn is_stopped(&self) -> bool {
        let Some(group) = self.set.guarded_groups().first().copied() else { return false };
        // The state follows the program's name, which is in parentheses and may have any character.
        let stat = std::fs::read_to_string(format!("/proc/{group}/stat")).unwrap_or_default();
        let state = stat.rsplit_once(") ").map(|(_, rest)| rest);
        state.is_some_and(|state| state.starts_with('T'))
    }

    /// Ends the rank: TERM, and KILL after a grace time. A stopped rank is killed at once, because
    /// it would not handle TERM until it continues. Blocks until it has ended.
    pub fn stop(mut self) {
        if self.is_stopped() {
            self.set.kill(Instant::now());
        } else {
            self.set.terminate(Instant::now());
        }
        self.set.wait(Instant::now() + GRACE + GRACE);
    }
}

/// Reads until the rank and all processes that it started have closed the pipe.
fn read_lines(mut reader: io::PipeReader, kept: &Mutex<VecDeque<String>>, on_line: &impl Fn(&str)) {
    let (mut line, mut buffer) = (Vec::new(), [0; 4096]);
    let keep = |line: &mut Vec<u8>| {
        let text = String::from_utf8_lossy(line).into_owned();
        line.clear();
        if text.trim().is_empty() {
            return;
        }
        on_line(&text);
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == LINES_KEPT {
            kept.pop_front();
        }
        kept.push_back(text);
    };
    while let Ok(count @ 1..) = reader.read(&mut buffer) {
        for byte in &buffer[..count] {
            // A progress bar draws over its line.
            if !matches!(byte, b'\n' | b'\r') {
                if line.len() < LONGEST_LINE_BYTES {
                    line.push(*byte);
                }
                continue;
            }
            keep(&mut line);
        }
    }
    // A process that was killed may have left a line without its end.
    keep(&mut line);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    fn start(script: &str) -> (WatchedRank, Arc<Mutex<Vec<String>>>) {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let hear = heard.clone();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let on_line = move |line: &str| hear.lock().unwrap().push(line.to_owned());
        (WatchedRank::start(command, 2, on_line).unwrap(), heard)
    }

    fn end_of(rank: &mut WatchedRank) -> String {
        let began = Instant::now();
        loop {
            if let Some(words) = rank.ended() {
                return words;
            }
            assert!(began.elapsed() < LIMIT);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_rank_that_fails_says_why() {
        let script = "echo ready >&2; echo 'error: out of luck' >&2; echo 'and more' >&2; exit 3";
        let (mut rank, heard) = start(script);
        assert_eq!(
            end_of(&mut rank),
            "rank 2 ended with status 3: what it printed says why: error: out of luck"
        );
        assert_eq!(*heard.lock().unwrap(), ["ready", "error: out of luck", "and more"]);
    }

    #[test]
    fn an_end_is_told_once_the_last_output_is_read_which_is_bounded() {
        // Its child writes the reason a moment after the rank has ended.
        let (mut rank, _) = start("(sleep 0.1; printf 'error: too late' >&2) & exit 1");
        assert!(end_of(&mut rank).ends_with("says why: error: too late"));
        let (mut rank, _) = start("exit 1");
        assert!(end_of(&mut rank).ends_with("says why, but it printed nothing"));
        let began = Instant::now();
        let (mut rank, _) = start("setsid sleep 5 & echo 'error: no luck' >&2; exit 1");
        assert!(end_of(&mut rank).ends_with("says why: error: no luck"));
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    }

    #[test]
    fn the_reason_is_the_last_line_with_an_error_else_the_last() {
        let clap =
            "error: unexpected argument '--bogus' found\n\nUsage: x\n\nFor more information, try '--help'.\n";
        assert_eq!(reason(clap.lines()), Some("error: unexpected argument '--bogus' found"));
        assert_eq!(reason("a\nb\n\n".lines()), Some("b"));
        assert_eq!(reason("\n".lines()), None);
    }

    #[test]
    fn output_without_end_is_bounded() {
        let script = "i=0; while [ $i -lt 2000 ]; do echo line $i >&2; i=$((i+1)); done; \
                      head -c 100000 /dev/zero | tr '\\0' x >&2; echo >&2; echo 'error: out of luck' >&2";
        let (mut rank, _) = start(script);
        end_of(&mut rank);
        let lines = rank.lines.lock().unwrap();
        assert!(lines.len() <= LINES_KEPT && lines.iter().all(|line| line.len() <= LONGEST_LINE_BYTES));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_stopped_rank_is_killed_at_once() {
        let (rank, _) = start("kill -STOP $$; sleep 100");
        let began = Instant::now();
        while !rank.is_stopped() {
            assert!(began.elapsed() < LIMIT);
            std::thread::sleep(Duration::from_millis(5));
        }
        let began = Instant::now();
        rank.stop();
        assert!(began.elapsed() < GRACE / 2, "{:?}", began.elapsed());
    }

    #[test]
    fn stopping_ends_a_rank_that_runs() {
        let (mut rank, _) = start("exec sleep 600");
        assert_eq!(rank.ended(), None);
        let began = Instant::now();
        rank.stop();
        assert!(began.elapsed() < GRACE, "TERM is enough");
    }
}
