//! One rank's process: its output streams, its input, and the steps that end it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};

use super::lines::Lines;
use super::pipe::Pipe;
use crate::signal;

/// Interval at which a process group is tested for processes that its rank left behind; no event
/// reports their end.
const LEFTOVERS_EVERY: Duration = Duration::from_millis(25);
/// Time that an ended rank's output may stay open, held by a process that left the group or by a
/// shared ssh connection.
const OUTPUT_LINGERS: Duration = Duration::from_millis(500);
/// Time that the other end of `ssh` has to obey KILL before `ssh` itself is killed.
const REMOTE_KILL: Duration = Duration::from_secs(2);
/// Time that the kernel has to clear away a killed process. With much memory this takes seconds.
const LAST_WAIT: Duration = Duration::from_secs(15);

/// Order to the script at the other end of `ssh`: send TERM to the rank's process group.
const TERMINATE: &[u8] = b"T\n";
/// Order to the script: send KILL to the rank's process group.
const KILL: &[u8] = b"K\n";
/// Order to the script: close the rank's standard input.
const END_INPUT: &[u8] = b"E\n";

/// The last step that was taken to end a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ending {
    No,
    Term,
    Kill,
    /// KILL had no effect, and nothing more can be done.
    GivenUp,
}

/// One of a rank's two output streams.
#[derive(Debug)]
pub(crate) struct OutputStream {
    pipe: Option<OwnedFd>,
    pub lines: Lines,
    /// When an unfinished line is shown (without prefixes only).
    pub show_at: Option<Instant>,
}

impl OutputStream {
    fn new(pipe: Option<impl Into<OwnedFd>>) -> Self {
        Self { pipe: pipe.map(Into::into), lines: Lines::default(), show_at: None }
    }

    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    pub fn close(&mut self) {
        self.pipe = None;
        self.show_at = None;
    }
}

/// How the launcher's standard input reaches a rank.
#[derive(Debug)]
pub(crate) enum Feed {
    None,
    Local(Pipe),
    /// Over a second connection, opened by `command` when the first data comes.
    Remote {
        command: Vec<String>,
        connection: Option<(Child, Pipe)>,
    },
}

/// A started rank: its process here, or the `ssh` that leads to it.
#[derive(Debug)]
pub(crate) struct RankProcess {
    pub number: usize,
    pub host: String,
    is_local: bool,
    child: Child,
    group: Pid,
    pub streams: [OutputStream; 2],
    pub feed: Feed,
    /// Orders to the script at the other end of `ssh`.
    pub control: Option<Pipe>,
    pub status: Option<ExitStatus>,
    pub ended_at: Option<Instant>,
    pub ending: Ending,
    /// When the next step to end the rank is due.
    deadline: Option<Instant>,
    group_gone: bool,
    /// True when further waiting is useless: the streams are then closed although a process holds
    /// them, and a remaining process is abandoned.
    pub abandoned: bool,
    pub done: bool,
}

impl RankProcess {
    /// Starts `command` in a process group of its own, so that a Ctrl-C at the terminal does not
    /// reach it. Streams that the command pipes are read through [`RankProcess::streams`].
    ///
    /// # Errors
    /// When the system cannot start the program.
    pub fn spawn(mut command: Command, number: usize, host: String, is_local: bool) -> io::Result<Self> {
        let mut child = command.process_group(0).spawn()?;
        let streams = [OutputStream::new(child.stdout.take()), OutputStream::new(child.stderr.take())];
        Ok(Self {
            number,
            host,
            is_local,
            group: Pid::from_child(&child),
            child,
            streams,
            feed: Feed::None,
            control: None,
            status: None,
            ended_at: None,
            ending: Ending::No,
            deadline: None,
            group_gone: false,
            abandoned: false,
            done: false,
        })
    }

    /// The pipe to the process's standard input, if its command asked for one. Can be taken once.
    pub fn take_input(&mut self) -> io::Result<Option<Pipe>> {
        self.child.stdin.take().map(Pipe::new).transpose()
    }

    /// The process group to end if this process is killed. The other end of `ssh` ends its rank by
    /// itself.
    pub fn guarded_group(&self) -> Option<i32> {
        (self.is_local && !self.group_gone).then(|| self.group.as_raw_nonzero().get())
    }

    /// Returns the exit status when the process has ended, once.
    pub fn reap(&mut self, now: Instant, grace: Duration) -> Option<ExitStatus> {
        if let Feed::Remote { connection: Some((child, _)), .. } = &mut self.feed
            && matches!(child.try_wait(), Ok(Some(_)))
        {
            self.feed = Feed::None;
            self.order(END_INPUT);
        }
        if self.status.is_some() {
            return None;
        }
        let status = self.child.try_wait().ok().flatten()?;
        (self.status, self.ended_at) = (Some(status), Some(now));
        self.control = None;
        self.stop_feeding();
        self.group_gone = test_kill_process_group(self.group).is_err();
        if self.ending == Ending::No {
            // Processes that a successful rank left behind may finish their work; those of a failed
            // one are ended at once.
            let patience = match (self.group_gone, status.success()) {
                (true, _) => OUTPUT_LINGERS,
                (false, true) => grace,
                (false, false) => Duration::ZERO,
            };
            self.deadline = Some(now + patience);
        }
        Some(status)
    }

    /// Sends TERM.
    pub fn terminate(&mut self, now: Instant, grace: Duration) {
        if self.done || self.ending >= Ending::Term {
            return;
        }
        self.ending = Ending::Term;
        self.deadline = Some(now + grace);
        self.stop_feeding();
        self.signal(Signal::TERM, TERMINATE);
    }

    /// Sends KILL.
    pub fn kill(&mut self, now: Instant) {
        if self.done || self.ending >= Ending::Kill {
            return;
        }
        self.ending = Ending::Kill;
        self.deadline = Some(now + if self.is_local { OUTPUT_LINGERS } else { REMOTE_KILL });
        self.stop_feeding();
        self.signal(Signal::KILL, KILL);
    }

    /// Takes the steps that are due to end the rank, and returns when the next one is. Sets
    /// `abandoned` when waiting longer is of no use.
    pub fn step(&mut self, now: Instant, grace: Duration) -> Option<Instant> {
        if self.done {
            return None;
        }
        let ended = self.status.is_some();
        if ended && !self.group_gone {
            self.group_gone = test_kill_process_group(self.group).is_err();
        }
        if ended && self.group_gone && self.streams.iter().all(|stream| stream.pipe.is_none()) {
            self.done = true;
            return None;
        }
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            match self.ending {
                Ending::No if !self.group_gone => self.terminate(now, grace),
                Ending::Term if !self.group_gone => self.kill(now),
                Ending::Kill if !ended => {
                    // `ssh` did not come back, or the kernel still holds the process.
                    let _ = kill_process_group(self.group, Signal::KILL);
                    self.control = None;
                    self.ending = Ending::GivenUp;
                    self.deadline = Some(now + LAST_WAIT);
                }
                _ => {
                    self.abandoned = true;
                    return Some(now);
                }
            }
        }
        let poll = ended.then(|| now + LEFTOVERS_EVERY);
        [self.deadline, poll].into_iter().flatten().min()
    }

    fn signal(&mut self, signal: Signal, order: &[u8]) {
        if self.is_local || self.status.is_some() {
            if !self.group_gone {
                // Fails if the group has ended just now.
                let _ = kill_process_group(self.group, signal);
            }
        } else {
            self.order(order);
        }
    }

    fn order(&mut self, order: &[u8]) {
        if let Some(control) = &mut self.control {
            control.push(order);
        }
    }

    /// Sends a piece of standard input to the rank.
    pub fn feed(&mut self, data: &[u8]) {
        if let Feed::Remote { command, connection: connection @ None } = &mut self.feed {
            let feeder = Command::new(&command[0])
                .args(&command[1..])
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .process_group(0)
                .spawn();
            // If this fails, the first connection has failed too, and its error says why.
            *connection = feeder.ok().and_then(|mut child| {
                let pipe = Pipe::new(child.stdin.take()?).ok()?;
                Some((child, pipe))
            });
        }
        if let Some(pipe) = self.feed_pipe() {
            pipe.push(data);
        }
    }

    /// Closes the rank's standard input once everything is written.
    pub fn finish_feed(&mut self) {
        match &mut self.feed {
            Feed::Local(pipe) | Feed::Remote { connection: Some((_, pipe)), .. } => pipe.finish(),
            Feed::Remote { .. } => self.order(END_INPUT),
            Feed::None => {}
        }
    }

    fn feed_pipe(&mut self) -> Option<&mut Pipe> {
        match &mut self.feed {
            Feed::Local(pipe) | Feed::Remote { connection: Some((_, pipe)), .. } => Some(pipe),
            _ => None,
        }
    }

    fn stop_feeding(&mut self) {
        if let Feed::Remote { connection: Some((mut child, _)), .. } =
            std::mem::replace(&mut self.feed, Feed::None)
        {
            let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
            let _ = child.wait();
        }
    }

    /// The pipes to the rank that have data to write: orders, then standard input.
    pub fn waiting_pipes(&self) -> [Option<BorrowedFd<'_>>; 2] {
        let feed = match &self.feed {
            Feed::Local(pipe) | Feed::Remote { connection: Some((_, pipe)), .. } => pipe.fd(),
            _ => None,
        };
        [self.control.as_ref().and_then(Pipe::fd), feed]
    }

    /// Whether the rank has not read all earlier input.
    pub fn is_behind(&self) -> bool {
        self.waiting_pipes()[1].is_some()
    }

    /// Writes to the pipe at index `number` of [`RankProcess::waiting_pipes`].
    pub fn write_pipe(&mut self, number: usize) {
        let pipe = if number == 0 { self.control.as_mut() } else { self.feed_pipe() };
        if let Some(pipe) = pipe {
            pipe.write();
        }
    }

    /// How the rank ended, for the user.
    pub fn words(&self) -> String {
        let number = self.number;
        match self.status.map(|status| (status.signal(), status.code())) {
            Some((Some(signal), _)) => {
                let advice = match signal {
                    libc::SIGKILL => {
                        "out of memory? The system's log (dmesg) says so; lower --memory or --context, or use more machines"
                    }
                    _ => signal::advice(signal),
                };
                let separator = if advice.is_empty() { "" } else { ": " };
                format!("rank {number} was killed by {}{separator}{advice}", signal::name(signal))
            }
            Some((None, Some(code))) => {
                format!("rank {number} ended with status {code}: what it printed says why")
            }
            _ => format!("rank {number} ended"),
        }
    }

    /// Exit status as shells report it: the process's own, or 128 plus the number of the signal
    /// that ended it.
    pub fn code(&self) -> Option<i32> {
        let status = self.status?;
        status.code().or_else(|| status.signal().map(|signal| 128 + signal))
    }
}

/// Kills a remaining rank, because the launcher has failed or a group on this machine was dropped.
impl Drop for RankProcess {
    fn drop(&mut self) {
        self.stop_feeding();
        self.control = None;
        if self.status.is_none() {
            if self.is_local {
                let _ = kill_process_group(self.group, Signal::KILL);
            }
            let _ = self.child.wait();
        }
    }
}
