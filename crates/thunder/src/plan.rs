//! `thunder plan`.

use clap::Args;
use serde_json::json;
use thunder_model::error::human_bytes;
use thunder_model::{ModelFolder, ShardFootprint, ShardPlan};

use crate::engine_args::LayoutArgs;
use crate::model_arg::ModelArg;
use crate::{session, table};

/// Show how a model would be split over ranks
///
/// Prints the heads, channels, layers and bytes of each rank, and the KV cache's bytes per token.
/// Reads the model's headers only and starts no ranks.
#[derive(Args)]
#[command(mut_arg("ranks", |ranks| {
    ranks.help("Ranks to plan for [default: the number of --split's weights, else 1]").long_help(None)
}))]
pub struct PlanCommand {
    #[command(flatten)]
    model: ModelArg,
    #[command(flatten)]
    layout: LayoutArgs,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl PlanCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let folder = session::open_folder(self.model.name())?;
        let plan = self.layout.shard_plan(&folder, self.layout.ranks())?;
        let footprints = thunder_model::model::shard_footprints(&folder, &plan, self.layout.kv.into())?;
        thunder_model::unread_tensors(&folder).iter().for_each(|unread| eprintln!("warning: {unread}"));
        if self.json {
            println!("{}", to_json(&folder, &plan, &footprints));
        } else {
            print(&folder, &plan, &footprints);
        }
        Ok(())
    }
}

fn to_json(folder: &ModelFolder, plan: &ShardPlan, footprints: &[ShardFootprint]) -> serde_json::Value {
    let range = |range: &std::ops::Range<usize>| json!([range.start, range.end]);
    let ranks: Vec<_> = footprints
        .iter()
        .enumerate()
        .map(|(rank, footprint)| {
            json!({
                "rank": rank,
                "layers": range(&footprint.layers),
                "query_heads": range(&footprint.queries),
                "kv_heads": range(&footprint.kv),
                "mlp_channels": range(&footprint.channels),
                "vocab_rows": range(&footprint.vocab),
                "weight_bytes": footprint.weight_bytes,
                "kv_bytes_per_token": footprint.kv_bytes_per_token,
                "state_bytes_per_sequence": footprint.state_bytes_per_sequence,
            })
        })
        .collect();
    json!({
        "family": folder.spec.family,
        "layers": folder.spec.layers.len(),
        "tensor_ranks": plan.tensor_ranks(),
        "stages": plan.stages(),
        "model_bytes": folder.weights.bytes(),
        "ranks": ranks,
    })
}

/// Prints the plan as a table.
pub fn print(folder: &ModelFolder, plan: &ShardPlan, footprints: &[ShardFootprint]) {
    let spec = &folder.spec;
    println!(
        "{}, {} layers, {} of weights over {} rank(s): {}-way tensor parallel, {} pipeline stage(s)",
        spec.family,
        spec.layers.len(),
        human_bytes(folder.weights.bytes()),
        plan.ranks(),
        plan.tensor_ranks(),
        plan.stages()
    );
    let mut table = table::new(&[
        "rank",
        "layers",
        "query heads",
        "KV heads",
        "MLP channels",
        "vocabulary",
        "weights",
        "KV per token",
    ]);
    let range = |range: &std::ops::Range<usize>| match range.len() {
        0 => "-".to_owned(),
        len => format!("{}..{} ({len})", range.start, range.end),
    };
    for (rank, footprint) in footprints.iter().enumerate() {
        table.add_row([
            rank.to_string(),
            range(&footprint.layers),
            range(&footprint.queries),
            range(&footprint.kv),
            range(&footprint.channels),
            range(&footprint.vocab),
            human_bytes(footprint.weight_bytes),
            human_bytes(footprint.kv_bytes_per_token),
        ]);
    }
    println!("{table}");
}
