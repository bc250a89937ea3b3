//! Runs commands on this machine, or on another over ssh.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::plan::action::quoted;

/// Longer output is cut off; our commands print less.
const LONGEST_OUTPUT_BYTES: u64 = 4 << 20;
/// Interval between checks whether a command has ended.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// The exit status of ssh if ssh itself failed.
const SSH_FAILED: i32 = 255;

/// A command's output and exit status.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Output {
    /// Its exit status.
    pub status: i32,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

/// A command could not be run to its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShellError {
    /// The machine cannot be reached, or the connection was lost.
    #[error("{machine} cannot be reached: {why}")]
    Lost {
        /// The machine.
        machine: String,
        /// What ssh said.
        why: String,
    },
    /// It took too long.
    #[error("a command on {machine} has not ended after {seconds} s")]
    Slow {
        /// The machine.
        machine: String,
        /// The limit.
        seconds: u64,
    },
}

/// Runs scripts on one machine.
pub trait Shell: Send + Sync {
    /// Runs `script` in `sh`, with `input` on its standard input.
    ///
    /// # Errors
    /// When nothing is known of how it ended.
    fn run(&self, script: &str, input: &str, limit: Duration) -> Result<Output, ShellError>;
}

/// Runs scripts as processes: `sh` here, or through ssh.
#[derive(Debug, Clone)]
pub struct ProcessShell {
    machine: String,
    /// ssh with its arguments and the host; empty for this machine.
    ssh: Vec<String>,
}

impl ProcessShell {
    /// Scripts run on this machine.
    pub fn local(machine: &str) -> Self {
        Self { machine: machine.to_owned(), ssh: Vec::new() }
    }

    /// Scripts run on `machine`; `ssh` is the program that reaches it, and its first arguments.
    pub fn over(ssh: &[String], machine: &str) -> Self {
        // A host that asks for a password would wait forever.
        let options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10"].map(str::to_owned);
        let (program, rest) = ssh.split_at(ssh.len().min(1));
        let ssh: Vec<String> = program.iter().cloned().chain(options).chain(rest.iter().cloned()).collect();
        Self::through(&ssh, machine)
    }

    /// Scripts run on `machine` through a program that takes ssh's arguments.
    pub fn through(program: &[String], machine: &str) -> Self {
        let ssh = program.iter().cloned().chain([machine.to_owned()]).collect();
        Self { machine: machine.to_owned(), ssh }
    }

    fn command(&self, script: &str) -> Command {
        let Some((program, arguments)) = self.ssh.split_first() else {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            return command;
        };
        let mut command = Command::new(program);
        // The user's shell on the other machine can be any; it only has to start sh.
        command.args(arguments).arg(format!("exec sh -c {}", quoted(script)));
        command
    }
}

impl Shell for ProcessShell {
    fn run(&self, script: &str, input: &str, limit: Duration) -> Result<Output, ShellError> {
        let lost = |why: String| ShellError::Lost { machine: self.machine.clone(), why };
        let mut command = self.command(script);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            command.spawn().map_err(|error| lost(format!("{:?}: {error}", command.get_program())))?;
        let (out, err) = (read_all(child.stdout.take()), read_all(child.stderr.take()));
        if let Some(mut stdin) = child.stdin.take() {
            let input = input.to_owned();
            // A command that reads nothing closes the pipe, which is not an error.
            std::thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
        }
        let deadline = Instant::now() + limit;
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if Instant::now() < deadline => std::thread::sleep(LOOK_EVERY),
                Ok(None) => {
                    // Fails if it has ended just now.
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(ShellError::Slow { machine: self.machine.clone(), seconds: limit.as_secs() });
                }
                Err(error) => return Err(lost(error.to_string())),
            }
        };
        // A grandchild may keep the pipes open; its output is not waited for.
        let rest = Duration::from_secs(2);
        let out = out.recv_timeout(rest).unwrap_or_default();
        let err = err.recv_timeout(rest).unwrap_or_default();
        match status.code() {
            Some(SSH_FAILED) if !self.ssh.is_empty() => Err(lost(last_line(&err, "ssh failed"))),
            Some(status) => Ok(Output { status, out, err }),
            None => Err(lost(format!("{status}"))),
        }
    }
}

fn read_all(pipe: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // Data from before an error is used.
            let _ = pipe.by_ref().take(LONGEST_OUTPUT_BYTES).read_to_end(&mut bytes);
            // The writer must not block on a full pipe.
            let _ = std::io::copy(&mut pipe, &mut std::io::sink());
        }
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}

/// The last line of an error text that is not empty.
pub fn last_line(text: &str, otherwise: &str) -> String {
    let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty());
    line.unwrap_or(otherwise).chars().filter(|letter| !letter.is_control()).take(300).collect()
}
