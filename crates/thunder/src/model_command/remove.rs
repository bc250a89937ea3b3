//! `thunder model remove`.

use anyhow::{bail, ensure};
use clap::Args;
use serde_json::json;
use thunder_model::error::human_bytes;

use super::nodes::NodesArgs;
use crate::builtin;
use crate::model_arg::completer;

/// `thunder model remove`.
#[derive(Args)]
pub struct Remove {
    /// A model of the Hugging Face cache; other programs that use the cache lose it as well
    #[arg(value_name = "ORG/NAME[:QUANTIZATION]", add = completer())]
    name: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    nodes: NodesArgs,
}

impl Remove {
    /// Runs the command.
    ///
    /// # Errors
    /// When the model is not there or is served, or a file cannot be deleted.
    pub fn run(self) -> anyhow::Result<()> {
        ensure!(self.name != builtin::NAME, "{} is part of the program: it cannot be removed", self.name);
        if let Some(cluster) = self.nodes.cluster()? {
            return cluster.remove(&self.name, self.json);
        }
        if let Some(model) = self.nodes.served_here(&self.name)? {
            bail!("{model} is served here: `thunder model unload {model}` first");
        }
        let bytes = thunder_hub::remove(&self.name, &thunder_hub::cache_root())?;
        if self.json {
            println!("{}", json!({ "model": self.name, "bytes": bytes }));
        } else {
            println!("removed {}: {} are free", self.name, human_bytes(bytes));
        }
        Ok(())
    }
}
