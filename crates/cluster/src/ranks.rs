//! The processes of a group's ranks, started by any part of the program. Only this module notices
//! their ends and ends them.

mod lines;
mod pipe;
mod process;

use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

pub(crate) use pipe::Pipe;
pub(crate) use process::{Ending, Feed, RankProcess};

/// Interval at which [`RankSet::wait`] looks at the processes.
const WAIT_INTERVAL: Duration = Duration::from_millis(5);

/// The ranks of a group that are children of this process, local or at the other end of `ssh`.
/// Dropping it kills them.
#[derive(Debug)]
pub(crate) struct RankSet {
    pub ranks: Vec<RankProcess>,
    /// Time between TERM and KILL.
    grace: Duration,
}

impl RankSet {
    pub fn new(grace: Duration) -> Self {
        Self { ranks: Vec::new(), grace }
    }

    /// Time between TERM and KILL.
    pub fn grace(&self) -> Duration {
        self.grace
    }

    /// Notices which processes have ended. Returns a rank that failed without having been told to
    /// end; if several failed, one that a signal killed, because its end is the likelier cause of
    /// the others' failures.
    pub fn reap(&mut self, now: Instant) -> Option<usize> {
        let grace = self.grace;
        let failed = self.ranks.iter_mut().filter_map(|rank| {
            let was_told = rank.ending != Ending::No;
            let status = rank.reap(now, grace)?;
            // The script at the other end of `ssh` reports a signal as a shell does.
            let was_killed =
                status.signal().is_some() || status.code().is_some_and(|code| (129..255).contains(&code));
            (!was_told && !status.success()).then_some((!was_killed, rank.number))
        });
        failed.min().map(|(_, rank)| rank)
    }

    /// Sends TERM to all ranks that still run.
    pub fn terminate(&mut self, now: Instant) {
        let running = self.ranks.iter_mut().filter(|rank| rank.status.is_none());
        running.for_each(|rank| rank.terminate(now, self.grace));
    }

    /// Kills all ranks.
    pub fn kill(&mut self, now: Instant) {
        self.ranks.iter_mut().for_each(|rank| rank.kill(now));
    }

    /// Takes the steps that are due to end rank `index`, and returns when its next step is due.
    pub fn step(&mut self, index: usize, now: Instant) -> Option<Instant> {
        self.ranks[index].step(now, self.grace)
    }

    /// Whether all ranks have ended and all their output was read.
    pub fn is_done(&self) -> bool {
        self.ranks.iter().all(|rank| rank.done)
    }

    /// Process groups to end if this process is killed. The other end of `ssh` ends its rank by
    /// itself.
    pub fn guarded_groups(&self) -> Vec<i32> {
        self.ranks.iter().filter_map(RankProcess::guarded_group).collect()
    }

    /// Waits until all ranks have ended or `deadline` has come. For ranks whose output is not read
    /// here.
    pub fn wait(&mut self, deadline: Instant) {
        loop {
            let now = Instant::now();
            self.reap(now);
            for index in 0..self.ranks.len() {
                self.step(index, now);
                if self.ranks[index].abandoned {
                    self.ranks[index].done = true;
                }
            }
            if self.is_done() || now >= deadline {
                return;
            }
            std::thread::sleep(WAIT_INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use rustix::process::{Pid, WaitId, WaitIdOptions, test_kill_process_group, waitid};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    fn set(scripts: &[&str]) -> RankSet {
        let mut set = RankSet::new(Duration::from_secs(3));
        for (number, script) in scripts.iter().enumerate() {
            let mut command = Command::new("sh");
            command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::null());
            let rank = RankProcess::spawn(command, number, "localhost".to_owned(), true);
            set.ranks.push(rank.expect("sh starts"));
        }
        set
    }

    /// Whether a child that was not yet waited for has ended.
    fn has_ended(child: Pid) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(child), options).unwrap().is_some()
    }

    fn groups(set: &RankSet) -> Vec<Pid> {
        set.guarded_groups().into_iter().filter_map(Pid::from_raw).collect()
    }

    #[test]
    fn waiting_ends_with_the_last_rank() {
        let began = Instant::now();
        let mut set = set(&["exit 0", "sleep 0.3", "exit 4"]);
        set.wait(began + LIMIT);
        assert!(set.is_done() && (Duration::from_millis(300)..LIMIT).contains(&began.elapsed()));
        assert_eq!(set.ranks.iter().map(RankProcess::code).collect::<Vec<_>>(), [Some(0), Some(0), Some(4)]);
        assert_eq!(groups(&set), []);
    }

    #[test]
    fn waiting_ends_at_the_deadline_and_dropping_kills_whole_groups() {
        let mut set = set(&["sleep 600 & wait"]);
        set.wait(Instant::now() + Duration::from_millis(200));
        let left = groups(&set);
        assert!(!set.is_done() && left.len() == 1);
        drop(set);
        let began = Instant::now();
        while left.iter().any(|group| test_kill_process_group(*group).is_ok()) {
            assert!(began.elapsed() < LIMIT, "a process is left");
            std::thread::sleep(WAIT_INTERVAL);
        }
    }

    #[test]
    fn of_several_failures_the_killed_rank_counts_as_the_first() {
        for killed in ["kill -s KILL $$", "exit 137"] {
            let mut set = set(&["exit 1", killed, "exit 0"]);
            let began = Instant::now();
            while !groups(&set).iter().all(|group| has_ended(*group)) {
                assert!(began.elapsed() < LIMIT, "a process goes on");
                std::thread::sleep(WAIT_INTERVAL);
            }
            assert_eq!(set.reap(Instant::now()), Some(1));
            assert_eq!(set.reap(Instant::now()), None, "each end is reported once");
        }
    }

    #[test]
    fn a_killed_rank_says_by_which_signal_and_what_to_do() {
        let mut set = set(&["exit 3", "kill -s KILL $$"]);
        set.wait(Instant::now() + LIMIT);
        let words: Vec<String> = set.ranks.iter().map(RankProcess::words).collect();
        assert_eq!(words[0], "rank 0 ended with status 3: what it printed says why");
        assert!(
            words[1].starts_with("rank 1 was killed by signal 9 (SIGKILL): out of memory?"),
            "{}",
            words[1]
        );
    }

    #[test]
    fn a_rank_that_was_told_to_end_has_not_failed() {
        let mut set = set(&["exec sleep 600"]);
        set.terminate(Instant::now());
        let began = Instant::now();
        while set.ranks[0].status.is_none() {
            assert_eq!(set.reap(Instant::now()), None);
            assert!(began.elapsed() < LIMIT, "TERM had no effect");
            std::thread::sleep(WAIT_INTERVAL);
        }
        assert_eq!(set.ranks[0].code(), Some(128 + libc::SIGTERM));
    }
}
