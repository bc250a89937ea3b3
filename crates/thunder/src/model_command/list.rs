//! `thunder model list`.

use std::path::Path;

use anyhow::Context;
use clap::Args;
use serde_json::json;
use thunder_hub::CachedModel;
use thunder_model::error::human_bytes;
use thunder_node::report::of_bytes;

use super::nodes::NodesArgs;
use crate::table;

/// `thunder model list`.
#[derive(Args)]
pub struct List {
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    nodes: NodesArgs,
}

impl List {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        if let Some(cluster) = self.nodes.cluster()? {
            return cluster.list(self.json);
        }
        let root = thunder_hub::cache_root();
        let state = |model: &CachedModel| match (&model.missing, model.part_of) {
            (Some(missing), _) => Err(format!("incomplete: lacks {missing}")),
            (None, Some(total)) => Err(format!("part: {}", of_bytes(model.bytes, total))),
            (None, None) => Ok(model.bytes),
        };
        let models = thunder_hub::cached_models(&root)?;
        let models: Vec<_> = models.iter().map(|model| (&model.name, state(model))).collect();
        if self.json {
            let models: Vec<_> = models
                .iter()
                .map(|(name, state)| match state {
                    Ok(bytes) => json!({ "name": name, "complete": true, "bytes": bytes }),
                    Err(reason) => json!({ "name": name, "complete": false, "reason": reason }),
                })
                .collect();
            println!("{}", json!({ "cache": root, "models": models }));
            return Ok(());
        }
        if models.is_empty() {
            println!("no models in {}: download one with thunder model pull ORG/NAME", root.display());
            return Ok(());
        }
        let mut table = table::new(&["model", "size"]);
        for (name, state) in models {
            let size = state.map_or_else(|reason| reason, human_bytes);
            table.add_row([name.clone(), size]);
        }
        println!("{table}");
        Ok(())
    }
}

/// Names of the models in a cache. A repository of GGUF files has a model for each quantization.
pub fn cached_models(root: &Path) -> anyhow::Result<Vec<String>> {
    let entries = match std::fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot list {}", root.display())),
    };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let repos = names.filter_map(|name| name.strip_prefix("models--").map(repo_of_folder));
    let models = repos.flat_map(|repo| match thunder_hub::gguf_names_in(&repo, root) {
        names if names.is_empty() => vec![repo],
        names => names,
    });
    Ok(models.collect())
}

/// A folder name has `--` for the slash; repository names contain no `--`.
fn repo_of_folder(folder_name: &str) -> String {
    folder_name.replacen("--", "/", 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_models_are_listed_by_name() {
        let cache = tempfile::tempdir().expect("a folder");
        for folder in ["models--org--a-name_1.0", "models--gpt2", "datasets--org--x", ".locks"] {
            std::fs::create_dir(cache.path().join(folder)).expect("created");
        }
        let mut repos = cached_models(cache.path()).expect("listed");
        repos.sort();
        assert_eq!(repos, ["gpt2", "org/a-name_1.0"]);
        assert!(cached_models(&cache.path().join("nothing")).expect("no cache is an empty one").is_empty());
    }
}
