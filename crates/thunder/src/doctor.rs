//! `thunder doctor`.

use clap::Args;
use serde_json::json;
use thunder_compute::Isa;
use thunder_model::error::human_bytes;
use thunder_verbs::doctor;

use crate::devices;

/// Report this machine's cores, memory, kernels, GPUs and RDMA devices, and what RDMA lacks
#[derive(Args)]
pub struct DoctorCommand {
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

impl DoctorCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let rdma = doctor::examine();
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let memory = thunder_compute::memory::available_bytes();
        let kernels: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
        if self.json {
            let object = json!({
                "cores": cores,
                "memory_available_bytes": memory,
                "kernels": kernels,
                "gpus": devices::json(),
                "rdma": rdma,
            });
            println!("{object}");
            return Ok(());
        }
        println!("cores     {cores}");
        println!("memory    {} available", memory.map_or("unknown".into(), human_bytes));
        println!("kernels   {} (the last one is used; {} forces another)", kernels.join(", "), Isa::VARIABLE);
        println!("GPUs");
        devices::lines().iter().for_each(|line| println!("  {line}"));
        println!("RDMA");
        rdma.to_string().lines().for_each(|line| println!("  {line}"));
        Ok(())
    }
}
