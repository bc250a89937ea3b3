//! `thunder man`: the manual pages, made from the help texts.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, CommandFactory};

/// Write a manual page for each command into a folder, such as /usr/local/share/man/man1
#[derive(Args)]
pub struct ManCommand {
    /// Folder to write to; created if it does not exist
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

impl ManCommand {
    /// Runs the command.
    pub fn run<Cli: CommandFactory>(self) -> anyhow::Result<()> {
        let at = || format!("manual pages in {}", self.folder.display());
        std::fs::create_dir_all(&self.folder).with_context(at)?;
        clap_mangen::generate_to(Cli::command(), &self.folder).with_context(at)
    }
}
