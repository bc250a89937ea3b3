//! `thunder bench`.

mod comm;
mod generate;
mod membw;

use clap::{Args, Subcommand};

/// Measures what this machine, or a cluster, gives.
///
/// Compare figures of one run: machines are noisy, and ratios side by side mean more than absolute times.
#[derive(Args)]
pub struct BenchCommand {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Tokens per second of answers, and the share of memory bandwidth that this is
    Decode(generate::DecodeCommand),
    /// Tokens per second of reading a prompt
    Prefill(generate::PrefillCommand),
    /// Bytes per second that threads read from memory
    Membw(membw::MembwCommand),
    /// Latency and bandwidth of collectives among ranks
    Comm(comm::CommCommand),
}

impl BenchCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        match self.what {
            What::Decode(command) => command.run(),
            What::Prefill(command) => command.run(),
            What::Membw(command) => command.run(),
            What::Comm(command) => command.run(),
        }
    }
}
