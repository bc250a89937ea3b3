//! Running other programs, with errors that show the command line.

use anyhow::{Context, bail};
use std::{ffi::OsStr, process::Command};

/// A command from its words.
pub fn command<S: AsRef<OsStr>>(words: impl IntoIterator<Item = S>) -> Command {
    let mut words = words.into_iter();
    let mut command = match words.next() {
        Some(program) => Command::new(program),
        None => Command::new(""),
    };
    command.args(words);
    command
}

/// Runs a command with this terminal's input and output.
///
/// # Errors
/// If the program is missing, or ends with anything but success.
pub fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("could not start {command:?}"))?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}

/// The output of a command; its errors are shown as they occur.
///
/// # Errors
/// If the program is missing, ends with anything but success, or prints what is not UTF-8.
pub fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command
        .stderr(std::process::Stdio::inherit())
        .output()
        .with_context(|| format!("could not start {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} ended with {}", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("{command:?} printed what is not UTF-8"))
}

/// Whether a command can be started and succeeds; its output is not shown.
pub fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// Whether a program of that name is on the path.
pub fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}
