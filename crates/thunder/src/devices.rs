//! `thunder devices`, and the devices that `thunder doctor` names.

use clap::{Args, Subcommand};

use crate::stats;
use crate::up::DataArgs;

/// This machine's GPUs, and the cluster's machines
#[derive(Args)]
pub struct DevicesCommand {
    #[command(subcommand)]
    command: DevicesSubcommand,
}

#[derive(Subcommand)]
enum DevicesSubcommand {
    /// List GPUs with driver, memory and features, and the machines of this node's cluster
    ///
    /// Their numbers are those of --device gpu:N. Software devices compute on the CPU, for tests:
    /// --device auto never takes one.
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
        let cluster = stats::cluster(&list.data);
        if list.json {
            let machines = cluster.map(|status| status.members);
            println!("{}", serde_json::json!({ "gpus": json(), "machines": machines }));
            return Ok(());
        }
        println!("GPUs of this machine");
        lines().iter().for_each(|line| println!("  {line}"));
        match cluster {
            Some(status) => println!("Machines of the cluster\n{}", stats::machines(&status)),
            None => println!("Machines of the cluster: no `thunder up` runs here"),
        }
        Ok(())
    }
}

/// All devices as a JSON array.
#[cfg(feature = "gpu")]
pub fn json() -> serde_json::Value {
    thunder_gpu::devices().into_iter().map(|found| serde_json::json!(found.info)).collect()
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
    devices.into_iter().flat_map(|found| describe(&found.info)).collect()
}

#[cfg(feature = "gpu")]
fn describe(info: &thunder_gpu::DeviceInfo) -> [String; 3] {
    use thunder_model::error::human_bytes;

    let memory = info.memory_bytes.map_or_else(|| "unknown".to_owned(), human_bytes);
    let [fewest, most] = info.subgroup_lanes;
    let lanes = if fewest == most { fewest.to_string() } else { format!("{fewest} to {most}") };
    let note = match (info.is_usable(), info.is_real()) {
        (false, _) => ", unusable: no push constants",
        (true, false) => ", computes on the CPU: only for --device gpu:N",
        (true, true) => "",
    };
    [
        format!("gpu:{}  {} ({}, {}{note})", info.number, info.name, info.kind, info.api),
        format!(
            "       driver {}, memory {memory}, buffers up to {}",
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
