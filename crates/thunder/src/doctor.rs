//! `thunder doctor`.

use clap::Args;
use serde_json::json;
use thunder_compute::Isa;
use thunder_model::error::human_bytes;
use thunder_verbs::doctor;

/// Say what this machine offers: RDMA devices, kernels, memory, and what is missing
#[derive(Args)]
pub struct DoctorCommand {
    /// Print JSON
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
            let object =
                json!({ "cores": cores, "memory_available_bytes": memory, "kernels": kernels, "rdma": rdma });
            println!("{object}");
            return Ok(());
        }
        println!("cores     {cores}");
        println!("memory    {} available", memory.map_or("unknown".into(), human_bytes));
        println!("kernels   {} (the last is used; {} forces one)", kernels.join(", "), Isa::VARIABLE);
        println!("RDMA      {}", if rdma.usable { "usable" } else { "none that is usable" });
        match (&rdma.library.found, &rdma.library.problem) {
            (_, Some(problem)) => println!("  library {problem}"),
            (Some(path), None) => println!("  library {path}"),
            (None, None) => println!("  library not found (tried {})", rdma.library.tried.join(", ")),
        }
        for device in &rdma.devices {
            println!(
                "  device  {}{}",
                device.name,
                device.problem.as_ref().map_or(String::new(), |p| format!(": {p}"))
            );
            for port in &device.ports {
                let rate = port.rate_gbits.map_or("unknown rate".into(), |gbits| format!("{gbits} Gbit/s"));
                let (mtu, gids) = (port.active_mtu_bytes, port.gids.len());
                println!("    port {}: {:?}, MTU {mtu}, {rate}, {gids} address(es)", port.number, port.state);
            }
        }
        for advice in &rdma.advice {
            println!("  -> {advice}");
        }
        Ok(())
    }
}
