//! `thunder bench`.

mod comm;
mod generate;
mod kernels;
mod membw;

use clap::{Args, Subcommand};

/// Measure decode, prefill, kernels, memory bandwidth or collectives
///
/// Compare figures from one run: a machine's speed varies over time, so ratios measured side by
/// side mean more than absolute times.
#[derive(Args)]
pub struct BenchCommand {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Decode(generate::DecodeCommand),
    Prefill(generate::PrefillCommand),
    Kernels(kernels::KernelsCommand),
    Membw(membw::MembwCommand),
    Comm(comm::CommCommand),
}

impl BenchCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        match self.what {
            What::Decode(command) => command.run(),
            What::Prefill(command) => command.run(),
            What::Kernels(command) => command.run(),
            What::Membw(command) => command.run(),
            What::Comm(command) => command.run(),
        }
    }
}
