//! One rank while it runs: its process, what it prints, what it is fed, and how it is ended.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};

use super::lines::Lines;
use super::output::Pipe;
use super::place::PlannedRank;
use super::remote::{self, Folder};
use super::{Launch, LaunchError, environment};

/// How often it is looked whether what a rank has left behind is gone; nothing announces that.
const LEFTOVERS_EVERY: Duration = Duration::from_millis(25);
/// How long output of an ended rank may stay open: something that left its group, or a shared ssh connection, holds it.
const OUTPUT_LINGERS: Duration = Duration::from_millis(500);
/// How long the other end may take to obey KILL before `ssh` itself is killed.
const REMOTE_KILL: Duration = Duration::from_secs(2);
/// How long the kernel may take to clear away a killed process: one with much memory takes seconds.
const LAST_WAIT: Duration = Duration::from_secs(15);

/// How far the launcher has gone in ending a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Ending {
    No,
    Term,
    Kill,
    /// Nothing more can be done.
    GivenUp,
}

/// One of a rank's two output streams.
pub(super) struct Stream {
    pipe: Option<OwnedFd>,
    pub lines: Lines,
    /// When an unfinished line is shown all the same (without prefixes only).
    pub show_at: Option<Instant>,
}

impl Stream {
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

/// The way of the launcher's standard input to a rank.
enum Feed {
    None,
    Local(Pipe),
    /// Opened when the first data comes.
    Remote {
        command: Vec<String>,
        connection: Option<(Child, Pipe)>,
    },
}

/// A started rank.
pub(super) struct Rank {
    pub number: usize,
    pub host: String,
    local: bool,
    child: Child,
    group: Pid,
    pub streams: [Stream; 2],
    feed: Feed,
    /// Orders to the script at the other end.
    control: Option<Pipe>,
    pub status: Option<ExitStatus>,
    pub ended_at: Option<Instant>,
    pub ending: Ending,
    /// When the next step of its ending is due.
    deadline: Option<Instant>,
    group_gone: bool,
    /// Whether its streams are to be closed although someone holds them, and its process left if it is still there.
    pub abandoned: bool,
    pub done: bool,
}

impl Rank {
    /// Starts a rank; `folder` is for the files of local ones.
    pub fn start(plan: &PlannedRank, launch: &Launch, folder: &Path) -> Result<Self, LaunchError> {
        if plan.local { Self::start_local(plan, launch, folder) } else { Self::start_remote(plan, launch) }
    }

    fn start_local(plan: &PlannedRank, launch: &Launch, folder: &Path) -> Result<Self, LaunchError> {
        let mut command = Command::new(&plan.command[0]);
        command.args(&plan.command[1..]);
        for name in environment::OWN {
            command.env_remove(name);
        }
        command.envs(plan.environment.iter().map(|(name, value)| (name, value)));
        for (name, content) in &plan.files {
            let path = folder.join(name);
            std::fs::write(&path, content).map_err(LaunchError::system("write the ranks' files"))?;
            command.env(name, path);
        }
        if let Some(directory) = &plan.directory {
            if !directory.is_dir() {
                return Err(LaunchError::NoDirectory { rank: plan.rank, path: directory.clone() });
            }
            command.current_dir(directory);
        }
        let is_fed = launch.input.reaches(plan.rank);
        command.stdin(if is_fed { Stdio::piped() } else { Stdio::null() });
        let mut rank = Self::spawn(command, plan)?;
        if let Some(pipe) = rank.child.stdin.take() {
            rank.feed = Feed::Local(Pipe::new(pipe).map_err(LaunchError::system("open a rank's input"))?);
        }
        Ok(rank)
    }

    fn start_remote(plan: &PlannedRank, launch: &Launch) -> Result<Self, LaunchError> {
        let folder = Folder::random()?;
        let words = remote::ssh_command(&launch.ssh, &plan.host, remote::BOOTSTRAP);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).stdin(Stdio::piped());
        let mut rank = Self::spawn(command, plan)?;
        if let Some(pipe) = rank.child.stdin.take() {
            let mut control = Pipe::new(pipe).map_err(LaunchError::system("open the way to ssh"))?;
            control.push(remote::encode(&remote::script(plan, launch, &folder)).as_bytes());
            rank.control = Some(control);
        }
        if launch.input.reaches(plan.rank) {
            let command = remote::ssh_command(&launch.ssh, &plan.host, &folder.feed());
            rank.feed = Feed::Remote { command, connection: None };
        }
        Ok(rank)
    }

    fn spawn(mut command: Command, plan: &PlannedRank) -> Result<Self, LaunchError> {
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(|why| LaunchError::Start {
            rank: plan.rank,
            host: plan.host.clone(),
            program: command.get_program().to_string_lossy().into_owned(),
            why,
        })?;
        let streams = [Stream::new(child.stdout.take()), Stream::new(child.stderr.take())];
        Ok(Self {
            number: plan.rank,
            host: plan.host.clone(),
            local: plan.local,
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

    /// The process group to end should the launcher be killed; the other end of `ssh` sees to that by itself.
    pub fn guarded_group(&self) -> Option<i32> {
        (self.local && !self.group_gone).then(|| self.group.as_raw_nonzero().get())
    }

    /// Notices that the process has ended, once.
    pub fn reap(&mut self, now: Instant, grace: Duration) -> Option<ExitStatus> {
        if let Feed::Remote { connection: Some((child, _)), .. } = &mut self.feed
            && matches!(child.try_wait(), Ok(Some(_)))
        {
            self.feed = Feed::None;
            self.order(remote::END_INPUT);
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
            // What a rank that succeeded leaves behind may finish its work; otherwise it is ended at once.
            let patience = match (self.group_gone, status.success()) {
                (true, _) => OUTPUT_LINGERS,
                (false, true) => grace,
                (false, false) => Duration::ZERO,
            };
            self.deadline = Some(now + patience);
        }
        Some(status)
    }

    /// Asks it to end.
    pub fn terminate(&mut self, now: Instant, grace: Duration) {
        if self.done || self.ending >= Ending::Term {
            return;
        }
        self.ending = Ending::Term;
        self.deadline = Some(now + grace);
        self.stop_feeding();
        self.signal(Signal::TERM, remote::TERMINATE);
    }

    /// Ends it.
    pub fn kill(&mut self, now: Instant) {
        if self.done || self.ending >= Ending::Kill {
            return;
        }
        self.ending = Ending::Kill;
        self.deadline = Some(now + if self.local { OUTPUT_LINGERS } else { REMOTE_KILL });
        self.stop_feeding();
        self.signal(Signal::KILL, remote::KILL);
    }

    /// Takes the steps that are due, and says when the next one is. Sets `abandoned` when it is no use to wait longer.
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
        if self.local || self.status.is_some() {
            if !self.group_gone {
                // It may have ended just now.
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

    /// Hands it a piece of standard input.
    pub fn feed(&mut self, data: &[u8]) {
        if let Feed::Remote { command, connection: connection @ None } = &mut self.feed {
            let feeder = Command::new(&command[0])
                .args(&command[1..])
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .process_group(0)
                .spawn();
            // If this fails, so has the first connection, which says why.
            *connection = feeder.ok().and_then(|mut child| {
                let pipe = Pipe::new(child.stdin.take()?).ok()?;
                Some((child, pipe))
            });
        }
        if let Some(pipe) = self.feed_pipe() {
            pipe.push(data);
        }
    }

    /// Tells it that standard input has ended.
    pub fn finish_feed(&mut self) {
        match &mut self.feed {
            Feed::Local(pipe) | Feed::Remote { connection: Some((_, pipe)), .. } => pipe.finish(),
            Feed::Remote { .. } => self.order(remote::END_INPUT),
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

    /// The pipes to it on which something is waiting.
    pub fn waiting_pipes(&self) -> [Option<BorrowedFd<'_>>; 2] {
        let feed = match &self.feed {
            Feed::Local(pipe) | Feed::Remote { connection: Some((_, pipe)), .. } => pipe.fd(),
            _ => None,
        };
        [self.control.as_ref().and_then(Pipe::fd), feed]
    }

    /// Whether it still has to read earlier input.
    pub fn is_behind(&self) -> bool {
        self.waiting_pipes()[1].is_some()
    }

    /// Writes to the pipe with that number of [`Rank::waiting_pipes`].
    pub fn write_pipe(&mut self, number: usize) {
        let pipe = if number == 0 { self.control.as_mut() } else { self.feed_pipe() };
        if let Some(pipe) = pipe {
            pipe.write();
        }
    }

    /// What it counts as: its own status, or 128 and the signal's number as shells have it.
    pub fn code(&self) -> Option<i32> {
        let status = self.status?;
        status.code().or_else(|| status.signal().map(|signal| 128 + signal))
    }
}

/// Only an error of the launcher itself leaves ranks that are not done.
impl Drop for Rank {
    fn drop(&mut self) {
        self.stop_feeding();
        self.control = None;
        if self.status.is_none() {
            if self.local {
                let _ = kill_process_group(self.group, Signal::KILL);
            }
            let _ = self.child.wait();
        }
    }
}
