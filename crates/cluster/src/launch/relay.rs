//! The launcher's loop: passes output and input on, and ends all ranks when one fails. One thread,
//! which sleeps in `poll`.

use std::io::{IsTerminal, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::guard::Guard;
use super::output::Output;
use super::plan::LaunchPlan;
use super::report::{LaunchReport, RankEnd, RankReport};
use super::signals::{self, Signals};
use super::start::start;
use super::{Input, Launch, LaunchError};
use crate::ranks::{Ending, RankProcess, RankSet};

/// Most bytes read at once from a rank or from standard input.
const READ_BYTES: usize = 64 << 10;
/// Most bytes read from a stream that is given up; more than any pipe holds.
const LEFT_IN_PIPE_BYTES: usize = 1 << 20;
/// Without prefixes, an unfinished line is shown after this pause, because it may be a prompt.
const PROMPT_PAUSE: Duration = Duration::from_millis(50);
/// Time that an interrupted launcher waits for its output to be read.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Exit status when the reader of the output has closed it, the same as of a program that SIGPIPE
/// ends.
const OUTPUT_CLOSED: u8 = 128 + libc::SIGPIPE as u8;

impl LaunchPlan {
    /// Starts all ranks. Returns when the last one has ended and everything that the ranks printed
    /// is written.
    ///
    /// Handles SIGINT, SIGTERM and SIGHUP meanwhile: the first signal ends the ranks, a second one
    /// kills them. If the ranks get standard input, a thread keeps reading it until the process
    /// ends.
    ///
    /// # Errors
    /// When a rank cannot be started; those already started are ended. A rank that fails later is
    /// part of the report.
    pub fn run(self) -> Result<LaunchReport, LaunchError> {
        let signals = Signals::install()?;
        let folder = tempfile::Builder::new()
            .prefix("thunder-launch-")
            .tempdir()
            .map_err(LaunchError::system("make a folder for the ranks' files"))?;
        let mut guard = Guard::start(folder.path(), self.launch.grace)?;
        let started = Instant::now();
        let mut set = RankSet::new(self.launch.grace);
        for plan in &self.ranks {
            set.ranks.push(start(plan, &self.launch, folder.path())?);
            guard.watch(&set.guarded_groups());
        }
        let outputs = outputs(&self.launch)?;
        let input = if self.launch.input == Input::None { None } else { Some(read_input()?) };
        let prefixes = outputs.each_ref().map(|output| prefixes(&self.launch, set.ranks.len(), output));
        let mut relay =
            Relay { started, set, outputs, prefixes, input, first_failure: None, interrupted_by: None };
        relay.run(signals, &mut guard);
        Ok(relay.report())
    }
}

/// The launcher's standard output and standard error; twice the latter if the report needs the
/// former.
fn outputs(launch: &Launch) -> Result<[Output; 2], LaunchError> {
    let outputs = if launch.output_to_stderr {
        [Output::new(std::io::stderr()), Output::new(std::io::stderr())]
    } else {
        [Output::new(std::io::stdout()), Output::new(std::io::stderr())]
    };
    let [first, second] = outputs.map(|output| output.map_err(LaunchError::system("open the output")));
    Ok([first?, second?])
}

struct Relay {
    started: Instant,
    set: RankSet,
    outputs: [Output; 2],
    /// For each output, the prefix of each rank's lines.
    prefixes: [Vec<Vec<u8>>; 2],
    input: Option<OwnedFd>,
    first_failure: Option<usize>,
    interrupted_by: Option<i32>,
}

/// What a descriptor in `poll` belongs to.
#[derive(Clone, Copy)]
enum Source {
    Signals,
    Input,
    Output(usize),
    Stream(usize, usize),
    Pipe(usize, usize),
}

impl Relay {
    fn run(&mut self, mut signals: Signals, guard: &mut Guard) {
        let mut buffer = vec![0; READ_BYTES];
        let mut guarded = usize::MAX;
        let mut leave_at = None;
        loop {
            let now = Instant::now();
            if let Some(signal) = signals.take() {
                self.interrupt(signal, now);
            }
            if let Some(rank) = self.set.reap(now) {
                self.first_failure.get_or_insert(rank);
                self.set.terminate(now);
            }
            if self.outputs.iter().any(Output::is_closed) {
                self.set.terminate(now);
                self.outputs.iter_mut().for_each(Output::discard);
            }
            let wake = self.step(now);
            let groups = self.set.guarded_groups();
            if groups.len() != guarded {
                guarded = groups.len();
                guard.watch(&groups);
            }
            if self.set.is_done() {
                // An interrupted launcher does not wait forever for a reader that has stopped
                // reading.
                let leave = *leave_at.get_or_insert(now + LAST_WORDS);
                let wait_no_longer = self.interrupted_by.is_some() && leave <= now;
                if wait_no_longer || self.outputs.iter().all(Output::is_empty) {
                    return;
                }
            }
            let wake = wake.or(leave_at.filter(|leave| *leave > now));
            for source in self.wait(&signals, wake) {
                self.handle(source, &mut buffer);
            }
        }
    }

    fn interrupt(&mut self, signal: i32, now: Instant) {
        if self.interrupted_by.is_some() {
            self.set.kill(now);
        } else if !self.set.is_done() {
            let grace = self.set.grace().as_secs_f64();
            let says = format!(
                "thunder launch: ending the ranks, which have {grace} s; Ctrl-C again kills them at once\n"
            );
            self.outputs[1].buffer().extend_from_slice(says.as_bytes());
        }
        self.interrupted_by.get_or_insert(signal);
        self.set.terminate(now);
    }

    fn step(&mut self, now: Instant) -> Option<Instant> {
        let mut wake = None;
        for index in 0..self.set.ranks.len() {
            let next = self.set.step(index, now);
            if self.set.ranks[index].abandoned && !self.set.ranks[index].done {
                self.abandon(index);
            }
            for stream in 0..2 {
                if self.set.ranks[index].streams[stream].show_at.is_some_and(|at| at <= now) {
                    let from = &mut self.set.ranks[index].streams[stream];
                    from.show_at = None;
                    from.lines.flush_characters(self.outputs[stream].buffer());
                }
            }
            let shows = self.set.ranks[index].streams.iter().filter_map(|stream| stream.show_at);
            wake = shows.chain(next).chain(wake).min();
        }
        wake
    }

    /// Reads the remaining data in a rank's pipes, closes them, and counts the rank as done.
    fn abandon(&mut self, index: usize) {
        for stream in 0..2 {
            let Some(fd) = self.set.ranks[index].streams[stream].fd() else { continue };
            let mut rest = Vec::new();
            if let Ok(file) = fd.try_clone_to_owned().map(std::fs::File::from)
                && let Ok(flags) = rustix::fs::fcntl_getfl(&file)
                && rustix::fs::fcntl_setfl(&file, flags | rustix::fs::OFlags::NONBLOCK).is_ok()
            {
                // Reading ends with an error if a process still holds the other end. `rest` has
                // everything before that.
                let _ = file.take(LEFT_IN_PIPE_BYTES as u64).read_to_end(&mut rest);
            }
            self.take(index, stream, &rest);
            self.close(index, stream);
        }
        self.set.ranks[index].done = true;
    }

    fn take(&mut self, index: usize, stream: usize, data: &[u8]) {
        let prefix = &self.prefixes[stream][index];
        let from = &mut self.set.ranks[index].streams[stream];
        from.lines.push(data, prefix, self.outputs[stream].buffer());
        from.show_at = (prefix.is_empty() && from.lines.is_pending()).then(|| Instant::now() + PROMPT_PAUSE);
    }

    fn close(&mut self, index: usize, stream: usize) {
        let from = &mut self.set.ranks[index].streams[stream];
        from.lines.finish(&self.prefixes[stream][index], self.outputs[stream].buffer());
        from.close();
    }

    /// Sleeps until something is ready or `wake` has come.
    fn wait(&self, signals: &Signals, wake: Option<Instant>) -> Vec<Source> {
        let mut watched: Vec<(Source, BorrowedFd<'_>, PollFlags)> =
            vec![(Source::Signals, signals.fd(), PollFlags::IN)];
        for (index, output) in self.outputs.iter().enumerate().filter(|(_, output)| !output.is_empty()) {
            watched.push((Source::Output(index), output.fd(), PollFlags::OUT));
        }
        for (index, rank) in self.set.ranks.iter().enumerate() {
            for (stream, from) in rank.streams.iter().enumerate() {
                if let (Some(fd), false) = (from.fd(), self.outputs[stream].is_full()) {
                    watched.push((Source::Stream(index, stream), fd, PollFlags::IN));
                }
            }
            for (number, fd) in rank.waiting_pipes().into_iter().enumerate() {
                watched.extend(fd.map(|fd| (Source::Pipe(index, number), fd, PollFlags::OUT)));
            }
        }
        // Input is read no faster than the slowest rank reads it.
        if let (Some(input), false) = (&self.input, self.set.ranks.iter().any(RankProcess::is_behind)) {
            watched.push((Source::Input, input.as_fd(), PollFlags::IN));
        }
        let mut fds: Vec<PollFd<'_>> =
            watched.iter().map(|(_, fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)).collect();
        let timeout = wake.map(|wake| {
            let left = wake.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
        });
        if poll(&mut fds, timeout.as_ref()).is_err() {
            // A signal interrupted `poll`: no descriptor was checked.
            return Vec::new();
        }
        let ready = fds.iter().zip(&watched).filter(|(fd, _)| !fd.revents().is_empty());
        ready.map(|(_, (source, _, _))| *source).collect()
    }

    fn handle(&mut self, source: Source, buffer: &mut [u8]) {
        match source {
            // Handled at the top of the loop.
            Source::Signals => {}
            Source::Output(index) => self.outputs[index].write(),
            Source::Pipe(index, number) => self.set.ranks[index].write_pipe(number),
            Source::Stream(index, stream) => {
                let Some(fd) = self.set.ranks[index].streams[stream].fd() else { return };
                match rustix::io::read(fd, &mut *buffer) {
                    Err(Errno::INTR | Errno::AGAIN) => {}
                    Ok(0) | Err(_) => self.close(index, stream),
                    Ok(count) => self.take(index, stream, &buffer[..count]),
                }
            }
            Source::Input => {
                let Some(input) = &self.input else { return };
                match rustix::io::read(input, &mut *buffer) {
                    Err(Errno::INTR | Errno::AGAIN) => {}
                    Ok(0) | Err(_) => {
                        self.input = None;
                        self.set.ranks.iter_mut().for_each(RankProcess::finish_feed);
                    }
                    Ok(count) => self.set.ranks.iter_mut().for_each(|rank| rank.feed(&buffer[..count])),
                }
            }
        }
    }

    fn report(&self) -> LaunchReport {
        let ranks: Vec<RankReport> = self.set.ranks.iter().map(|rank| self.rank_report(rank)).collect();
        let output_closed = self.outputs.iter().any(Output::is_closed);
        let failed = self.first_failure.and_then(|rank| ranks[rank].status).map(|status| status as u8);
        let interrupted = self.interrupted_by.map(|signal| 128u8.saturating_add(signal as u8));
        let stuck = ranks.iter().any(|rank| rank.end == RankEnd::Stuck).then_some(1);
        let status = failed.or(interrupted).or(output_closed.then_some(OUTPUT_CLOSED)).or(stuck).unwrap_or(0);
        LaunchReport {
            status,
            first_failure: self.first_failure,
            interrupted_by: self.interrupted_by,
            output_closed,
            ranks,
        }
    }

    fn rank_report(&self, rank: &RankProcess) -> RankReport {
        let end = match (rank.status, rank.ending) {
            (None, _) => RankEnd::Stuck,
            _ if self.first_failure == Some(rank.number) => RankEnd::Failed,
            (Some(status), _) if status.success() => RankEnd::Completed,
            (_, Ending::No) => RankEnd::Failed,
            (_, Ending::Term) => RankEnd::Terminated,
            (_, Ending::Kill | Ending::GivenUp) => RankEnd::Killed,
        };
        let seconds = rank.ended_at.unwrap_or_else(Instant::now).duration_since(self.started).as_secs_f64();
        RankReport { rank: rank.number, host: rank.host.clone(), end, status: rank.code(), seconds }
    }
}

/// Standard input through a pipe. A thread can read every kind of file, but `poll` cannot wait for
/// every kind.
fn read_input() -> Result<OwnedFd, LaunchError> {
    let (reader, writer) = std::io::pipe().map_err(LaunchError::system("make a pipe for the input"))?;
    let copy = move || {
        signals::block_terminal_input_signal();
        let (mut input, mut writer) = (std::io::stdin().lock(), writer);
        let mut buffer = vec![0; READ_BYTES];
        // Ends at the end of input, when the launcher closes the pipe, or at an error, which counts
        // as the end.
        while let Ok(count) = input.read(&mut buffer)
            && count > 0
            && writer.write_all(&buffer[..count]).is_ok()
        {}
    };
    std::thread::Builder::new()
        .name("input".to_owned())
        .spawn(copy)
        .map_err(LaunchError::system("start the thread that reads the input"))?;
    Ok(reader.into())
}

/// `[1] ` for each rank, in colour on a terminal.
fn prefixes(launch: &Launch, count: usize, output: &Output) -> Vec<Vec<u8>> {
    const COLOURS: [u8; 6] = [36, 33, 32, 35, 34, 31];
    if !launch.prefix {
        return vec![Vec::new(); count];
    }
    let wants_colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let colour = wants_colour && output.fd().is_terminal();
    let width = count.saturating_sub(1).to_string().len();
    let prefix = |rank: usize| match colour {
        true => format!("\x1b[{}m[{rank:width$}]\x1b[0m ", COLOURS[rank % COLOURS.len()]).into_bytes(),
        false => format!("[{rank:width$}] ").into_bytes(),
    };
    (0..count).map(prefix).collect()
}
