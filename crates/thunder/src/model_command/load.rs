//! `thunder model load` and `unload`: models that the cluster serves.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;
use thunder_node::agent::Status;
use thunder_node::agent::control::{self, Reply, Request};

use super::nodes::Picture;
use crate::cluster_command::fetch;
use crate::cluster_command::status::failures;
use crate::up::DataArgs;

/// Interval at which the model is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// `thunder model load`.
#[derive(Args)]
pub struct Load {
    /// `builtin`, a name of the Hugging Face hub, or a folder or GGUF file that every node has
    ///
    /// Nodes that lack a model of the hub get it from nodes that have it, and from the hub if none
    /// does.
    #[arg(value_name = "MODEL")]
    model: String,
    /// Nodes to run it on together: their number, or their names or ids with commas [default: all]
    ///
    /// A number takes those with the most free memory. When one is lost, the model is formed again
    /// on others that may run it.
    #[arg(long, value_name = "NODES")]
    nodes: Option<String>,
    /// Shares of the model, as NODE=WEIGHT,… [default: equal]
    ///
    /// The model runs on these nodes, unless --nodes says otherwise; a node without a weight has 1.
    #[arg(long, value_name = "SHARES", value_delimiter = ',', value_parser = parse_share)]
    split: Vec<(String, u32)>,
    /// Seconds to wait until the model is ready, downloads aside; 0 does not wait
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    wait: u64,
    /// Options for `thunder serve`, after --, e.g. -- --context 4096 --memory 8G
    #[arg(last = true, value_name = "OPTIONS")]
    options: Vec<String>,
    #[command(flatten)]
    data: DataArgs,
}

/// `thunder model unload`.
#[derive(Args)]
pub struct Unload {
    /// Name of the model, as `thunder cluster status` shows it
    #[arg(value_name = "MODEL")]
    model: String,
    #[command(flatten)]
    data: DataArgs,
}

impl Load {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let data = self.data.folder()?;
        let (nodes, count) = match self.nodes.as_deref().map(|nodes| (nodes, nodes.parse::<u32>())) {
            None => (Vec::new(), None),
            Some((_, Ok(0))) => bail!("--nodes 0: at least one node has to run the model"),
            Some((_, Ok(count))) => (Vec::new(), Some(count)),
            Some((names, Err(_))) => (names.split(',').map(|name| name.trim().to_owned()).collect(), None),
        };
        // A relative path would mean another folder to an agent that runs elsewhere.
        let model = match Path::new(&self.model) {
            path if path.components().count() > 1 && path.exists() => {
                std::path::absolute(path)?.to_string_lossy().into_owned()
            }
            _ => self.model,
        };
        let request = Request::Load {
            model: model.clone(),
            nodes,
            count,
            arguments: self.options,
            weights: self.split,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            control::ask(&data, &request).await?;
            if self.wait == 0 {
                return Ok(());
            }
            wait(&data, &model, Duration::from_secs(self.wait)).await
        })
    }
}

/// A node and its weight.
fn parse_share(text: &str) -> Result<(String, u32), String> {
    let wrong = || "write NODE=WEIGHT with a weight from 1 to 1000, e.g. studio=3".to_owned();
    let (node, weight) = text.split_once('=').ok_or_else(wrong)?;
    let weight = weight.parse().ok().filter(|weight| (1..=1000).contains(weight)).ok_or_else(wrong)?;
    if node.is_empty() { Err(wrong()) } else { Ok((node.to_owned(), weight)) }
}

/// Waits until a model is ready.
async fn wait(data: &Path, name: &str, limit: Duration) -> anyhow::Result<()> {
    let (mut began, mut picture) = (Instant::now(), Picture::default());
    while began.elapsed() < limit {
        let status: Status = fetch(data).await?;
        match status.tasks.iter().find(|task| task.model == name && !task.is_over()) {
            Some(task) => {
                picture.show(task);
                // A download takes as long as it takes.
                began = Instant::now();
            }
            None => picture.clear(),
        }
        let Some(model) = status.models.iter().find(|model| model.name == name) else {
            bail!("{name} was unloaded meanwhile");
        };
        if model.ready {
            let nodes: Vec<&str> = model.ranks.iter().map(|rank| rank.node.as_str()).collect();
            eprintln!("{name} is ready on {} after {:.1} s", nodes.join(", "), began.elapsed().as_secs_f64());
            return Ok(());
        }
        if let Some((_, node, why)) = failures(&status).into_iter().find(|(model, ..)| model == name) {
            bail!(
                "{name} does not start on {node}: {why}; the cluster goes on trying, `thunder model unload` ends that"
            );
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    bail!("{name} is not ready after {} s; `thunder cluster status` shows its ranks", limit.as_secs())
}

impl Unload {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let data = self.data.folder()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        match runtime.block_on(control::ask(&data, &Request::Unload(self.model)))? {
            Reply::Changed { name, .. } => eprintln!("{name} is unloaded"),
            reply => bail!("the agent replied {reply:?}: is it of another version?"),
        }
        Ok(())
    }
}
