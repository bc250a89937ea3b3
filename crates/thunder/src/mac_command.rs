//! `thunder mac`: the machines of a desk and their Thunderbolt cables.

mod changes;
pub mod desk;
mod look;
pub mod nodes;
mod tune;
mod verify;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use thunder_cables::awake::Awake;

/// Check, draw, set up and undo the Thunderbolt cables between Macs or Linux machines
///
/// `check` and `graph` change nothing. `setup` first shows every command, then gives each cable its
/// own network, measures each cable, and writes host files. `undo` restores the state before that.
/// The commands work on this machine alone, or over ssh without a password (--hosts); `check`,
/// `graph`, `verify` and `recovery` also work through the agents of a cluster (--nodes).
#[derive(Args)]
pub struct MacCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    Check(look::CheckCommand),
    Graph(look::GraphCommand),
    Setup(changes::SetupCommand),
    Verify(verify::VerifyCommand),
    Undo(changes::UndoCommand),
    Tune(tune::TuneCommand),
    Recovery(look::RecoveryCommand),
}

impl MacCommand {
    /// Runs the command. The exit status is 1 when `check` has found a problem.
    ///
    /// # Errors
    /// When a machine cannot be read or changed.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.action {
            Action::Check(command) => command.run(),
            Action::Graph(command) => command.run(),
            Action::Setup(command) => command.run(),
            Action::Verify(command) => command.run(),
            Action::Undo(command) => command.run(),
            Action::Tune(command) => command.run(),
            Action::Recovery(command) => command.run(),
        }
    }
}

/// Keeps a Mac from sleeping for as long as the result lives; warns if that is not possible.
pub fn keep_awake() -> Option<Awake> {
    Awake::hold().unwrap_or_else(|warning| {
        eprintln!("warning: {warning}");
        None
    })
}
