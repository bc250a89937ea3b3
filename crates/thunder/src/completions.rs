//! `thunder completions`: the script comes from clap; it calls this program back for candidates.

use std::io::Write;

use anyhow::bail;
use clap::builder::PossibleValuesParser;
use clap::{Args, CommandFactory};
use clap_complete::CompleteEnv;
use clap_complete::env::Shells;

/// The variable by which the script asks for candidates.
const VARIABLE: &str = "THUNDER_COMPLETE";

/// Shown after the options.
pub const HELP: &str = "\
To have completions in every new shell:
  bash   echo 'source <(thunder completions bash)' >> ~/.bashrc
  zsh    echo 'source <(thunder completions zsh)' >> ~/.zshrc
  fish   echo 'thunder completions fish | source' >> ~/.config/fish/config.fish";

/// Print a shell script that completes commands, options and model names
#[derive(Args)]
#[command(after_help = HELP)]
pub struct CompletionsCommand {
    /// Shell to write the script for
    #[arg(value_name = "SHELL", value_parser = PossibleValuesParser::new(Shells::builtins().names()))]
    shell: String,
}

impl CompletionsCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let shells = Shells::builtins();
        let Some(shell) = shells.completer(&self.shell) else { bail!("unknown shell {}", self.shell) };
        let program = std::env::args().next().unwrap_or_else(|| "thunder".to_owned());
        let mut script = Vec::new();
        shell.write_registration(VARIABLE, "thunder", "thunder", &program, &mut script)?;
        Ok(std::io::stdout().write_all(&script)?)
    }
}

/// Prints candidates and ends, if a shell's script called this program for them.
pub fn answer_shell<Cli: CommandFactory>() {
    CompleteEnv::with_factory(Cli::command).var(VARIABLE).complete();
}
