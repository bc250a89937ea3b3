//! `thunder model pull`, `list`, `remove`, `verify` and `update` on the nodes of the cluster, with
//! the progress of all nodes.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use clap::Args;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use thunder_model::error::human_bytes;
use thunder_node::agent::control::{self, ControlError, Reply, Request};
use thunder_node::agent::{
    ModelAnswer, ModelAsk, ModelStatus, NodeTask, StoredModel, TaskState, TaskStatus, Work, uses_files,
};

use thunder_node::report::of_bytes;

use crate::cluster_command::fetch;
use crate::up::DataArgs;
use crate::{current_thread, node_list, table};

/// Interval between checks of the progress.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// An agent that does not know a task for this long was restarted in the meantime.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(2);

/// The nodes of a command.
#[derive(Args, Debug)]
pub struct NodesArgs {
    /// Do it on these nodes of the cluster instead of here: `all`, or names or ids separated by
    /// commas
    ///
    /// A node gets a missing model from nodes that have it, and only if there are none from the
    /// hub. `thunder up` must run on this machine.
    #[arg(long, value_name = "NODES")]
    nodes: Option<String>,
    #[command(flatten)]
    data: DataArgs,
}

/// The answers of nodes, by name.
type Answers = Vec<(String, Result<ModelAnswer, String>)>;

impl NodesArgs {
    /// A connection to the cluster; `None` if the command is only for this machine.
    pub fn cluster(&self) -> anyhow::Result<Option<Cluster>> {
        let Some(nodes) = &self.nodes else { return Ok(None) };
        let nodes = match nodes.as_str() {
            "all" => Vec::new(),
            names => node_list::parse(names)?,
        };
        let runtime = current_thread::runtime()?;
        Ok(Some(Cluster { data: self.data.folder()?, nodes, runtime }))
    }

    /// The model with a rank on this machine that uses these files; `None` also without an agent.
    pub fn served_here(&self, files: &str) -> anyhow::Result<Option<String>> {
        let status = match current_thread::runtime()?.block_on(fetch(&self.data.folder()?)) {
            Err(error) if matches!(error.downcast_ref(), Some(ControlError::NoAgent(_))) => return Ok(None),
            status => status?,
        };
        let me = status.members.iter().find(|member| member.id == status.me);
        let is_here =
            |model: &&ModelStatus| model.ranks.iter().any(|rank| Some(&rank.node) == me.map(|me| &me.name));
        let mut names =
            status.models.iter().filter(is_here).map(|it| it.replica_of.as_ref().unwrap_or(&it.name));
        Ok(names.find(|name| uses_files(name, files)).cloned())
    }
}

/// The agent of this machine, and the nodes of a command.
pub struct Cluster {
    data: std::path::PathBuf,
    /// Empty: all that answer.
    nodes: Vec<String>,
    runtime: tokio::runtime::Runtime,
}

impl Cluster {
    /// Runs a job with a model on the nodes, and shows the progress until it has ended.
    ///
    /// # Errors
    /// When it has failed on a node.
    pub fn run(&self, work: Work, model: &str, revision: &str, json: bool) -> anyhow::Result<()> {
        let done = self.job(work, model, revision)?;
        if json {
            println!("{}", done.report());
        } else {
            done.show();
        }
        match done.failure() {
            Some(why) => bail!(why),
            None => Ok(()),
        }
    }

    fn job(&self, work: Work, model: &str, revision: &str) -> anyhow::Result<JobDone> {
        let (model, revision) = match model.split_once('@') {
            Some((model, named)) if revision == "main" => (model, named),
            _ => (model, revision),
        };
        let (began, model) = (Instant::now(), model.to_owned());
        let ask = ModelAsk::Begin {
            work,
            model: model.clone(),
            revision: revision.to_owned(),
            commit: None,
            part: None,
        };
        let request = Request::Models { nodes: self.nodes.clone(), ask };
        let task = self.runtime.block_on(async {
            match control::ask(&self.data, &request).await? {
                Reply::Begun(id) => watch(&self.data, id).await,
                reply => bail!("the agent replied {reply:?}: is it of another version?"),
            }
        })?;
        Ok(JobDone { model, task, seconds: began.elapsed().as_secs_f64() })
    }

    /// Updates every model of every node, one after the other.
    ///
    /// # Errors
    /// When one could not be updated; the others are updated all the same.
    pub fn update_all(&self, json: bool) -> anyhow::Result<()> {
        let began = Instant::now();
        let mut holders: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (node, models) in self.stored()? {
            // A part stays of the commit that its rank reads.
            let whole = models?.into_iter().filter(|model| model.part_of.is_none());
            whole.for_each(|model| holders.entry(model.name).or_default().push(node.clone()));
        }
        let (mut reports, mut failed) = (Vec::new(), Vec::new());
        for (model, nodes) in holders {
            if !json {
                println!("{model}:");
            }
            let cluster = Self { data: self.data.clone(), nodes, runtime: current_thread::runtime()? };
            match cluster.job(Work::Update, &model, "main") {
                Ok(done) => {
                    failed.extend(done.failure());
                    reports.push(done.report());
                    if !json {
                        done.show();
                    }
                }
                Err(error) => {
                    reports.push(json!({ "model": model, "error": error.to_string() }));
                    failed.push(error.to_string());
                }
            }
        }
        if json {
            println!("{}", json!({ "models": reports, "seconds": began.elapsed().as_secs_f64() }));
        }
        ensure!(failed.is_empty(), "{}", failed.join("\n"));
        Ok(())
    }

    /// Deletes a model on the nodes that have it.
    ///
    /// # Errors
    /// When a node could not delete it, or none has it.
    pub fn remove(&self, model: &str, json: bool) -> anyhow::Result<()> {
        let (mut holders, mut others, mut failed) = (Vec::new(), Vec::new(), Vec::new());
        for (node, models) in self.stored()? {
            match models {
                Ok(models) if models.iter().any(|it| uses_files(&it.name, model)) => holders.push(node),
                Ok(_) => others.push(node),
                Err(why) => failed.push(of_node(&node, why)),
            }
        }
        if holders.is_empty() {
            if !others.is_empty() {
                let list = "`thunder model list --nodes all` shows what is there";
                failed.insert(0, format!("{model} is not on {}: {list}", others.join(", ")));
            }
            bail!(failed.join("; "));
        }
        let answers = self.ask(holders, ModelAsk::Remove(model.to_owned()))?;
        let mut removed = BTreeMap::new();
        for (node, answer) in answers {
            match answer {
                Ok(ModelAnswer::Removed(bytes)) => drop(removed.insert(node, bytes)),
                Ok(other) => failed.push(format!("{node} answered {other:?}")),
                Err(why) => failed.push(of_node(&node, why)),
            }
        }
        if json {
            println!("{}", json!({ "model": model, "removed": removed }));
        } else {
            removed.iter().for_each(|(node, bytes)| println!("{node}: removed {}", human_bytes(*bytes)));
        }
        ensure!(failed.is_empty(), "{}", failed.join("; "));
        Ok(())
    }

    /// Prints which models are on which nodes.
    ///
    /// # Errors
    /// When a node did not answer; the others are shown all the same.
    pub fn list(&self, json: bool) -> anyhow::Result<()> {
        let nodes = self.stored()?;
        let mut failed = Vec::new();
        let mut all: Vec<(StoredModel, String)> = Vec::new();
        let mut report = serde_json::Map::new();
        for (node, models) in nodes {
            match models {
                Ok(models) => {
                    report.insert(node.clone(), serde_json::to_value(&models)?);
                    all.extend(models.into_iter().map(|model| (model, node.clone())));
                }
                Err(why) => failed.push(of_node(&node, why)),
            }
        }
        if json {
            println!("{}", Value::Object(serde_json::Map::from_iter([("nodes".to_owned(), report.into())])));
        } else {
            all.sort_by(|one, other| (&one.0.name, &one.1).cmp(&(&other.0.name, &other.1)));
            let mut table = table::new(&["model", "node", "size", "commit"]);
            for (model, node) in all {
                let size = match (model.missing, model.part_of) {
                    (Some(missing), _) => format!("incomplete: lacks {missing}"),
                    (None, Some(total)) => format!("part: {}", of_bytes(model.bytes, total)),
                    (None, None) => human_bytes(model.bytes),
                };
                let commit = model.commit.unwrap_or_default().chars().take(8).collect();
                table.add_row([model.name, node, size, commit]);
            }
            println!("{table}");
        }
        ensure!(failed.is_empty(), "{}", failed.join("; "));
        Ok(())
    }

    fn stored(&self) -> anyhow::Result<Vec<(String, anyhow::Result<Vec<StoredModel>>)>> {
        let models = |answer| match answer {
            Ok(ModelAnswer::Models(models)) => Ok(models),
            Ok(other) => Err(anyhow::anyhow!("it answered {other:?}: is it of another version?")),
            Err(why) => Err(anyhow::anyhow!("{why}")),
        };
        let answers = self.ask(self.nodes.clone(), ModelAsk::List)?;
        Ok(answers.into_iter().map(|(node, answer)| (node, models(answer))).collect())
    }

    fn ask(&self, nodes: Vec<String>, ask: ModelAsk) -> anyhow::Result<Answers> {
        match self.runtime.block_on(control::ask(&self.data, &Request::Models { nodes, ask }))? {
            Reply::Models(answers) => Ok(answers),
            reply => bail!("the agent replied {reply:?}: is it of another version?"),
        }
    }
}

/// A job that has ended on all nodes.
struct JobDone {
    model: String,
    task: TaskStatus,
    seconds: f64,
}

impl JobDone {
    fn report(&self) -> Value {
        let TaskStatus { model, work, nodes, .. } = &self.task;
        json!({ "model": model, "work": work, "seconds": self.seconds, "nodes": nodes })
    }

    fn show(&self) {
        let done = self.task.nodes.iter().filter(|node| !has_failed(node));
        done.for_each(|node| println!("{}", line(node)));
        let bytes: u64 = self.task.nodes.iter().map(|node| node.done).sum();
        println!("{} in {:.1} s", human_bytes(bytes), self.seconds);
    }

    /// What failed, if anything did.
    fn failure(&self) -> Option<String> {
        let failures = failures(&self.task);
        (!failures.is_empty()).then(|| format!("{}: {}", self.model, failures.join("; ")))
    }
}

/// Watches a task until it has ended.
async fn watch(data: &Path, id: u64) -> anyhow::Result<TaskStatus> {
    let mut picture = Picture::default();
    let mut known_at = Instant::now();
    loop {
        let task = fetch(data).await?.tasks.into_iter().find(|task| task.id == id);
        match task {
            Some(task) => {
                known_at = Instant::now();
                picture.show(&task);
                if task.is_over() {
                    picture.clear();
                    return Ok(task);
                }
            }
            None if known_at.elapsed() > FORGOTTEN_AFTER => {
                bail!("the agent does not know the job any more: was it restarted? Begin again, it continues")
            }
            None => {}
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// A failure on a node. The agent names other nodes already, its own not.
fn of_node(node: &str, why: impl std::fmt::Display) -> String {
    let why = why.to_string();
    let is_named = why.strip_prefix(node).is_some_and(|rest| rest.starts_with(": "));
    if is_named { why } else { format!("{node}: {why}") }
}

/// A node's part in a line.
fn line(node: &NodeTask) -> String {
    let from =
        if node.from.is_empty() { String::new() } else { format!(", from {}", node.from.join(" and ")) };
    let state = match &node.state {
        TaskState::Waiting => "waits for another node",
        TaskState::Running => "runs",
        TaskState::Done(words) | TaskState::Failed(words) => words,
    };
    format!("{}: {state}{from}", node.node)
}

fn has_failed(node: &NodeTask) -> bool {
    matches!(node.state, TaskState::Failed(_))
}

/// The failures of a task, grouped by their text.
fn failures(task: &TaskStatus) -> Vec<String> {
    let mut by_words: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for node in &task.nodes {
        if let TaskState::Failed(why) = &node.state {
            by_words.entry(why).or_default().push(&node.node);
        }
    }
    by_words.into_iter().map(|(why, nodes)| format!("{}: {why}", nodes.join(", "))).collect()
}

/// A bar for each node on a terminal, otherwise a line for each change of a node's state. Failures
/// are reported by the command's error.
#[derive(Default)]
pub struct Picture {
    bars: Option<MultiProgress>,
    nodes: BTreeMap<String, (ProgressBar, Option<TaskState>)>,
}

impl Picture {
    /// Draws a task as it is now.
    pub fn show(&mut self, task: &TaskStatus) {
        let on_terminal = std::io::stderr().is_terminal();
        let bars = self.bars.get_or_insert_with(MultiProgress::new);
        for node in &task.nodes {
            let (bar, last) = self.nodes.entry(node.node.clone()).or_insert_with(|| {
                let style = ProgressStyle::with_template(
                    "{prefix:12!} {bar:24} {bytes:>11}/{total_bytes:11} {bytes_per_sec:>13} {msg}",
                );
                let bar = ProgressBar::new(0).with_prefix(node.node.clone());
                let bar = bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
                (if on_terminal { bars.add(bar) } else { bar }, None)
            });
            if on_terminal {
                bar.set_length(node.total);
                bar.set_position(node.done);
                bar.set_message(
                    line(node).split_once(": ").map_or_else(String::new, |(_, words)| words.to_owned()),
                );
            } else if last.as_ref() != Some(&node.state) && !has_failed(node) {
                eprintln!("{}", line(node));
            }
            *last = Some(node.state.clone());
        }
    }

    /// Removes the bars.
    pub fn clear(&mut self) {
        if let Some(bars) = self.bars.take() {
            // An error means that the terminal is closed.
            bars.clear().ok();
        }
        self.nodes.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_a_line_that_names_its_sources() {
        let node = |state, from: &[&str]| NodeTask {
            node: "bee".into(),
            state,
            done: 5,
            total: 10,
            from: from.iter().map(|name| (*name).to_owned()).collect(),
            took_ms: 0,
        };
        assert_eq!(line(&node(TaskState::Running, &["ant", "cat"])), "bee: runs, from ant and cat");
        assert_eq!(line(&node(TaskState::Failed("the disk is full".into()), &[])), "bee: the disk is full");
    }

    #[test]
    fn a_failure_names_its_node_once() {
        for why in ["org/tiny is served here", "cat: org/tiny is served here"] {
            assert_eq!(of_node("cat", why), "cat: org/tiny is served here");
        }
        assert_eq!(of_node("cat", "cattle"), "cat: cattle");
    }

    #[test]
    fn the_same_failure_is_said_once_for_all_nodes() {
        let node = |name: &str, state| NodeTask {
            node: name.into(),
            state,
            done: 0,
            total: 0,
            from: Vec::new(),
            took_ms: 0,
        };
        let failed = |why: &str| TaskState::Failed(why.into());
        let nodes = vec![
            node("ant", failed("no hub")),
            node("bee", TaskState::Done("it is complete".into())),
            node("cat", failed("no hub")),
            node("dog", failed("the disk is full")),
        ];
        let task = TaskStatus { id: 1, work: Work::Pull, model: "org/name".into(), nodes };
        assert_eq!(failures(&task), ["ant, cat: no hub", "dog: the disk is full"]);
    }
}
