//! `thunder plan`.

use clap::Args;
use serde_json::json;
use thunder_model::error::human_bytes;
use thunder_model::{Demand, ModelFolder, Plan};

use crate::engine_args::LayoutArgs;
use crate::{session, table};

/// Show how a model would be split over ranks
///
/// Which heads, channels, layers and bytes each rank would hold, and what a token of context costs. Reads headers only.
#[derive(Args)]
pub struct PlanCommand {
    /// `builtin`, a folder, or a model in the Hugging Face cache
    #[arg(long, default_value = crate::builtin::NAME)]
    model: String,
    #[command(flatten)]
    layout: LayoutArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl PlanCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let folder = session::open_folder(&self.model)?;
        let plan = self.layout.shard_plan(&folder, self.layout.ranks())?;
        let demands = thunder_model::model::demand(&folder, &plan, self.layout.kv.into())?;
        if self.json {
            println!("{}", to_json(&folder, &plan, &demands));
        } else {
            print(&folder, &plan, &demands);
        }
        Ok(())
    }
}

fn to_json(folder: &ModelFolder, plan: &Plan, demands: &[Demand]) -> serde_json::Value {
    let range = |range: &std::ops::Range<usize>| json!([range.start, range.end]);
    let ranks: Vec<_> = demands
        .iter()
        .enumerate()
        .map(|(rank, demand)| {
            json!({
                "rank": rank,
                "layers": range(&demand.layers),
                "query_heads": range(&demand.queries),
                "kv_heads": range(&demand.kv),
                "mlp_channels": range(&demand.channels),
                "vocab_rows": range(&demand.vocab),
                "weight_bytes": demand.weight_bytes,
                "kv_bytes_per_token": demand.kv_bytes_per_token,
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

/// The plan as a table.
pub fn print(folder: &ModelFolder, plan: &Plan, demands: &[Demand]) {
    let spec = &folder.spec;
    println!(
        "{} of {} layers, {} of weights, over {} rank(s): {} way(s) tensor, {} stage(s) pipeline",
        spec.family,
        spec.layers.len(),
        human_bytes(folder.weights.bytes() as u64),
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
        "KV a token",
    ]);
    let range = |range: &std::ops::Range<usize>| match range.len() {
        0 => "-".to_owned(),
        len => format!("{}..{} ({len})", range.start, range.end),
    };
    for (rank, demand) in demands.iter().enumerate() {
        table.add_row([
            rank.to_string(),
            range(&demand.layers),
            range(&demand.queries),
            range(&demand.kv),
            range(&demand.channels),
            range(&demand.vocab),
            human_bytes(demand.weight_bytes),
            human_bytes(demand.kv_bytes_per_token),
        ]);
    }
    println!("{table}");
}
