//! `thunder devices`, and the devices that `thunder doctor` names.

use std::os::unix::process::CommandExt;
use std::process::Command;

use clap::{Args, Subcommand};
use thunder_cluster::watched::{USER_SOCKETS, quiet_drivers};
use thunder_node::agent::control::ControlError;

use crate::up::DataArgs;
use crate::{report, stats};

/// List this machine's GPUs and the cluster's machines
#[derive(Args)]
pub struct DevicesCommand {
    #[command(subcommand)]
    command: DevicesSubcommand,
}

#[derive(Subcommand)]
enum DevicesSubcommand {
    /// List GPUs with driver, memory, measured bandwidth and features, and the machines of this
    /// node's cluster
    ///
    /// The numbers are those of --device gpu:N. Software devices compute on the CPU, for tests;
    /// --device auto never uses one. The bandwidth of each real GPU is measured in about a second,
    /// by reading 1 GiB of its memory.
    List(ListCommand),
}

#[derive(Args)]
struct ListCommand {
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    data: DataArgs,
}

impl DevicesCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let DevicesSubcommand::List(list) = self.command;
        begin_again_quietly();
        let cluster = stats::cluster(&list.data);
        if list.json {
            let machines = cluster.ok().map(|status| status.members);
            println!("{}", serde_json::json!({ "gpus": json(), "machines": machines }));
            return Ok(());
        }
        println!("GPUs of this machine");
        lines().iter().for_each(|line| println!("  {line}"));
        match cluster {
            Ok(status) => println!("Machines of the cluster\n{}", stats::machines(&status)),
            Err(why) => match why.downcast_ref() {
                Some(ControlError::NoAgent(_)) => {
                    println!("Machines of the cluster: no `thunder up` runs here");
                }
                _ => println!("Machines of the cluster: {}", report::line(&why)),
            },
        }
        Ok(())
    }
}

/// Runs this command again in this process if drivers would print errors. Their libraries read the
/// environment, which a running program cannot change safely.
fn begin_again_quietly() {
    if !cfg!(all(target_os = "linux", feature = "gpu")) || std::env::var_os(USER_SOCKETS).is_some() {
        return;
    }
    if let Ok(program) = std::env::current_exe() {
        let mut command = Command::new(program);
        command.args(std::env::args_os().skip(1));
        quiet_drivers(&mut command);
        // If the system refuses, only the errors of the drivers are seen.
        let _ = command.exec();
    }
}

/// All devices as a JSON array.
#[cfg(feature = "gpu")]
pub fn json() -> serde_json::Value {
    let of = |found: thunder_gpu::Found| {
        let mut info = serde_json::json!(found.info);
        info["memory_bytes_per_s"] = bandwidth(&found).and_then(Result::ok).into();
        info
    };
    thunder_gpu::devices().into_iter().map(of).collect()
}

/// All devices for people, several lines for each.
#[cfg(feature = "gpu")]
pub fn lines() -> Vec<String> {
    let devices = thunder_gpu::devices();
    if devices.is_empty() {
        return vec![
            "none found; a GPU needs its Vulkan driver and, on Linux, the Vulkan loader (libvulkan1)"
                .to_owned(),
        ];
    }
    devices.into_iter().flat_map(|found| describe(&found)).collect()
}

/// Memory bandwidth of a real device in bytes per second. Other devices use the CPU's memory.
#[cfg(feature = "gpu")]
fn bandwidth(found: &thunder_gpu::Found) -> Option<Result<f64, String>> {
    let is_gpu = found.info.is_real() && found.info.is_usable();
    is_gpu.then(|| thunder_gpu::bandwidth(found).map_err(|error| error.to_string()))
}

#[cfg(feature = "gpu")]
fn describe(found: &thunder_gpu::Found) -> Vec<String> {
    use thunder_model::error::human_bytes;

    let info = &found.info;
    let memory = info.memory_bytes.map_or_else(|| "unknown".to_owned(), human_bytes);
    let read = match bandwidth(found) {
        Some(Ok(rate)) => format!(", read at {:.0} GB/s", rate / 1e9),
        Some(Err(reason)) => format!(", bandwidth not measured: {reason}"),
        None => String::new(),
    };
    let [fewest, most] = info.subgroup_lanes;
    let lanes = if fewest == most { fewest.to_string() } else { format!("{fewest} to {most}") };
    let note = match (info.is_usable(), info.is_real()) {
        (false, _) => ", unusable: no push constants",
        (true, false) => ", computes on the CPU: only for --device gpu:N",
        (true, true) => "",
    };
    vec![
        format!("gpu:{}  {} ({}, {}{note})", info.number, info.name, info.kind, info.api),
        format!(
            "       driver {}, memory {memory}{read}, buffers up to {}",
            info.driver,
            human_bytes(info.max_binding_bytes)
        ),
        format!("       subgroups of {lanes} lanes; {}", info.features.join(", ")),
    ]
}

/// All devices as a JSON array.
#[cfg(not(feature = "gpu"))]
pub fn json() -> serde_json::Value {
    serde_json::json!([])
}

/// All devices for people.
#[cfg(not(feature = "gpu"))]
pub fn lines() -> Vec<String> {
    vec!["this thunder was built without the feature gpu".to_owned()]
}
