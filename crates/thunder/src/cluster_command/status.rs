//! `thunder cluster status`.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use clap::Args;
use thunder_model::error::human_bytes;
use thunder_node::agent::{MemberStatus, ModelStatus, Status};
use thunder_node::document::OnLoss;
use thunder_node::report::RankState;

use super::{fetch, watch};
use crate::{stats, table};

/// Interval of `--watch`.
const WATCH_EVERY: Duration = Duration::from_millis(500);

#[derive(Args)]
pub struct StatusArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Keep showing nodes, memory, models with their tokens a second, and links, until Ctrl-C
    ///
    /// Without a terminal, prints the tables again after each change; with --json, one object a
    /// line.
    #[arg(long)]
    watch: bool,
}

impl StatusArgs {
    /// Runs the command.
    pub async fn run(self, data: &Path) -> anyhow::Result<()> {
        if self.watch && !self.json && std::io::stdout().is_terminal() {
            return watch::run(data).await;
        }
        let mut last = None;
        loop {
            let status = fetch(data).await?;
            if last.as_ref() != Some(&status) {
                let text = if self.json { serde_json::to_string(&status)? + "\n" } else { text_of(&status) };
                let mut out = std::io::stdout().lock();
                out.write_all(text.as_bytes())?;
                out.flush()?;
                last = Some(status);
            }
            if !self.watch {
                return Ok(());
            }
            tokio::time::sleep(WATCH_EVERY).await;
        }
    }
}

fn text_of(status: &Status) -> String {
    let mut text = String::new();
    if status.removed {
        text += "This node was removed from its cluster: `thunder cluster leave` makes it a new node.\n";
    }
    let mut nodes =
        table::new(&["node", "id", "state", "cores", "memory", "free", "ranks on", "version", "system"]);
    for member in &status.members {
        nodes.add_row(row(member, member.id == status.me));
    }
    text += &format!("{nodes}\n");
    if !status.models.is_empty() {
        text += &format!("{}\n", models_table(status));
    }
    for (model, node, why) in failures(status) {
        text += &format!("{model} on {node}: {why}\n");
    }
    if let Some(code) = &status.code {
        text += &format!(
            "In no cluster. To add this machine to one, type on one of its nodes: thunder cluster approve {code}\n"
        );
    }
    for newcomer in &status.newcomers {
        text += &format!(
            "{} ({}) waits to be approved: type thunder cluster approve and the code that it shows\n",
            newcomer.name, newcomer.short
        );
    }
    if let Some(error) = &status.disk_error {
        text += &format!("The cluster's document is not on the disk: {error}\n");
    }
    text
}

/// The models, and where they run.
pub fn models_table(status: &Status) -> comfy_table::Table {
    let mut models = table::new(&["model", "state", "ranks", "groups so far", "after a loss"]);
    status.models.iter().for_each(|model| {
        models.add_row(model_row(model));
    });
    models
}

/// Whether a member answers, in words.
pub fn state(member: &MemberStatus) -> &'static str {
    match (member.up, member.drained) {
        (false, _) if member.refused.is_some() => "refused: version",
        (false, _) => "down",
        (true, true) => "up, drained",
        (true, false) => "up",
    }
}

fn row(member: &MemberStatus, is_me: bool) -> Vec<String> {
    let name = if is_me { format!("{} (here)", member.name) } else { member.name.clone() };
    let mut row = vec![name, member.short.clone(), state(member).to_owned()];
    match &member.report {
        Some(report) => row.extend([
            report.cores.to_string(),
            human_bytes(report.memory_total),
            human_bytes(report.memory_free),
            stats::device(report),
            report.version.clone(),
            report.system.clone(),
        ]),
        None => row.extend(std::iter::repeat_n("-".to_owned(), 6)),
    }
    row
}

fn model_row(model: &ModelStatus) -> [String; 5] {
    let nodes: Vec<&str> = model.ranks.iter().map(|rank| rank.node.as_str()).collect();
    let policy = match model.on_loss {
        OnLoss::Replace => "placed anew",
        OnLoss::Wait => "waits for the node",
    };
    let generation = model.generation.to_string();
    [model.name.clone(), model.in_words(), nodes.join(", "), generation, policy.to_owned()]
}

/// The ranks that have ended: model, node and why.
pub fn failures(status: &Status) -> Vec<(String, String, String)> {
    let ranks = status.models.iter().flat_map(|model| model.ranks.iter().map(move |rank| (model, rank)));
    let failed = ranks.filter_map(|(model, rank)| match &rank.state {
        Some(RankState::Ended(why)) => Some((model.name.clone(), rank.node.clone(), why.clone())),
        _ => None,
    });
    failed.collect()
}
