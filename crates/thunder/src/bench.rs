//! `thunder bench`.

mod comm;
mod gateway;
mod generate;
#[cfg(feature = "gpu")]
mod gpu;
mod kernels;
mod machine;
mod membw;
mod report;
mod serve;

use clap::{Args, Subcommand};

/// Measure a model's speed, or this machine's
///
/// A machine's speed varies over time: compare only figures of one run, or of runs made in turn.
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
    Machine(machine::MachineCommand),
    Comm(comm::CommCommand),
    #[cfg(feature = "gpu")]
    Gpu(gpu::GpuCommand),
    Report(report::ReportCommand),
    Serve(serve::ServeCommand),
    Gateway(gateway::GatewayCommand),
}

impl BenchCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        crate::mlx_launch::fill_input();
        match self.what {
            What::Decode(command) => command.run(),
            What::Prefill(command) => command.run(),
            What::Kernels(command) => command.run(),
            What::Membw(command) => command.run(),
            What::Machine(command) => command.run(),
            What::Comm(command) => command.run(),
            #[cfg(feature = "gpu")]
            What::Gpu(command) => command.run(),
            What::Report(command) => command.run(),
            What::Serve(command) => command.run(),
            What::Gateway(command) => command.run(),
        }
    }
}
