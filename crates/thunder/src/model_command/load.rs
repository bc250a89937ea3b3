//! `thunder model load` and `unload`: models that the cluster serves.

use std::path::Path;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::{Args, ValueEnum};
use serde_json::json;
use thunder_node::agent::control::{self, ControlError, Reply, Request};
use thunder_node::agent::{ModelStatus, Status};
use thunder_node::document::{OnLoss, PlannedLayout};
use thunder_node::report::RankState;

use super::nodes::Picture;
use crate::cluster_command::plan::{Ask, GoalArg, Plan};
use crate::cluster_command::status::failures;
use crate::cluster_command::{fetch, parse_time};
use crate::engine_args::DEFAULT_MAX_BATCH;
use crate::up::DataArgs;
use crate::{current_thread, node_list, report, session};

/// Interval between checks of the model.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Time for the head to report why its group has ended.
const WORDS_OF_HEAD: Duration = Duration::from_millis(600);

/// Time for the cluster to form a group again whose start has failed because a node was lost.
const AFTER_LOSS: Duration = Duration::from_secs(3);

/// `thunder model load`.
#[derive(Args)]
pub struct Load {
    /// `builtin`, a name on the Hugging Face hub, or a folder or GGUF file that every node has
    ///
    /// Nodes that lack a model of the hub get it from nodes that have it, or from the hub if no
    /// node has it.
    #[arg(value_name = "MODEL")]
    model: String,
    /// Nodes that run the model together: a number, names or ids separated by commas, or all
    /// [default: the choice of `thunder cluster plan`]
    ///
    /// A number selects the nodes with the most free memory. If a node is lost, the model is formed
    /// again on other nodes that may run it.
    #[arg(long, value_name = "NODES")]
    nodes: Option<String>,
    /// Shares of the model, as NODE=WEIGHT,… [default: equal shares]
    ///
    /// The model runs on these nodes unless --nodes names others. A node without a weight has
    /// weight 1.
    #[arg(long, value_name = "SHARES", value_delimiter = ',', value_parser = parse_share)]
    split: Vec<(String, u32)>,
    /// Goal for choosing the nodes if neither --nodes nor --split names them
    #[arg(long = "for", value_name = "GOAL", value_enum, default_value_t = GoalArg::Latency)]
    goal: GoalArg,
    /// Number of groups that serve the model, each on its own nodes. A request goes to the group
    /// that has computed the beginning of its prompt, unless that group is much busier than others
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    replicas: u32,
    /// Unload the model after this long without a request, e.g. 30m; the next request loads it
    /// again [default: never]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    idle_unload: Option<Duration>,
    /// What to do if a node of the model's group is lost
    ///
    /// A node that is drained or removed is replaced with either value.
    #[arg(long, value_name = "POLICY", value_enum, default_value_t = OnLossArg::Replace)]
    on_loss: OnLossArg,
    /// A small model with the same tokenizer that guesses the next tokens, as for --draft of
    /// `thunder serve`
    ///
    /// The group's head holds the draft model, and gets it from other nodes or the hub like the
    /// model. `thunder cluster plan` does not count its memory when it chooses nodes.
    #[arg(long, value_name = "MODEL")]
    draft: Option<String>,
    /// Seconds to wait until the model is ready, not counting downloads; 0 does not wait
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    wait: u64,
    /// Print one JSON object with the nodes of each group
    #[arg(long)]
    json: bool,
    /// Options for `thunder serve`, after --, e.g. -- --context 4096 --memory 8G
    #[arg(last = true, value_name = "OPTIONS")]
    options: Vec<String>,
    #[command(flatten)]
    data: DataArgs,
}

/// Policy for the loss of a node of a model's group.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum OnLossArg {
    /// Form a new group on the remaining nodes
    Replace,
    /// Keep the model on its nodes; requests wait or fail until the lost node returns. For models
    /// that do not fit on other nodes, or are too slow on fewer nodes
    Wait,
}

impl From<OnLossArg> for OnLoss {
    fn from(policy: OnLossArg) -> Self {
        match policy {
            OnLossArg::Replace => Self::Replace,
            OnLossArg::Wait => Self::Wait,
        }
    }
}

/// `thunder model unload`.
#[derive(Args)]
pub struct Unload {
    /// Name of the model in `thunder cluster status`
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
            None | Some(("all", _)) => (Vec::new(), None),
            Some((_, Ok(0))) => bail!("--nodes 0: at least one node has to run the model"),
            Some((_, Ok(count))) => (Vec::new(), Some(count)),
            Some((names, Err(_))) => (node_list::parse(names)?, None),
        };
        let model = absolute(self.model)?;
        let mut options = self.options;
        if let Some(draft) = self.draft {
            options.extend(["--draft".to_owned(), absolute(draft)?]);
        }
        let named = if nodes.is_empty() { count.map(|count| count as usize) } else { Some(nodes.len()) };
        if let (Some(nodes), Some(stages)) = (named, value_of::<usize>(&options, "--stages"))
            && (stages == 0 || !nodes.is_multiple_of(stages))
        {
            bail!("--stages {stages} does not divide {nodes} nodes: each stage has as many");
        }
        let is_free = self.nodes.is_none() && self.split.is_empty();
        current_thread::runtime()?.block_on(async {
            let layouts = if is_free && may_plan(&options) {
                planned(&data, &model, self.goal, self.replicas, &options).await?
            } else {
                Vec::new()
            };
            let request = Request::Load {
                model: model.clone(),
                nodes,
                count,
                arguments: options,
                weights: self.split,
                layouts,
                replicas: self.replicas,
                idle_unload_s: self.idle_unload.map(|time| time.as_secs()),
                on_loss: self.on_loss.into(),
            };
            control::ask(&data, &request).await?;
            let began = Instant::now();
            let groups = match self.wait {
                0 => Vec::new(),
                seconds => wait(&data, &model, Duration::from_secs(seconds)).await?,
            };
            if self.json {
                let (ready, seconds) = (self.wait > 0, began.elapsed().as_secs_f64());
                let loaded = json!({ "model": model, "ready": ready, "groups": groups, "seconds": seconds });
                println!("{loaded}");
            }
            Ok(())
        })
    }
}

/// A model's name, or its path. A relative path would mean another folder to an agent that runs
/// elsewhere.
fn absolute(model: String) -> std::io::Result<String> {
    match Path::new(&model) {
        path if path.components().count() > 1 && path.exists() => {
            Ok(std::path::absolute(path)?.to_string_lossy().into_owned())
        }
        _ => Ok(model),
    }
}

/// Whether the options for `thunder serve` leave the layout open.
pub fn may_plan(options: &[String]) -> bool {
    let decides = ["--parallel", "--stages", "--split", "--ranks", "--experts"];
    let names = |option: &String| decides.contains(&option.split('=').next().unwrap_or_default());
    !options.iter().any(names)
}

/// The value of an option for `thunder serve`, if it has this type.
fn value_of<T: FromStr>(options: &[String], name: &str) -> Option<T> {
    let place = options.iter().position(|option| option.split('=').next() == Some(name))?;
    let text =
        options[place].split_once('=').map_or_else(|| options.get(place + 1), |_| options.get(place))?;
    text.rsplit('=').next()?.parse().ok()
}

/// The question of a plan with these options for `thunder serve`. `replicas`: `None` for the best
/// number.
pub fn ask_for(goal: GoalArg, replicas: Option<usize>, options: &[String]) -> Ask {
    Ask {
        goal: goal.into(),
        replicas,
        context: value_of(options, "--context"),
        max_batch: value_of(options, "--max-batch").unwrap_or_else(|| usize::from(DEFAULT_MAX_BATCH)),
        device: value_of(options, "--device").unwrap_or_default(),
        split: Vec::new(),
        again: false,
    }
}

/// The layouts to try, best first, for each replica. Without a plan the model runs on all nodes,
/// and a message says so.
async fn planned(
    data: &Path,
    model: &str,
    goal: GoalArg,
    replicas: u32,
    options: &[String],
) -> anyhow::Result<Vec<Vec<PlannedLayout>>> {
    // Without the model it runs nowhere.
    let folder = session::open_headers(data, model.as_ref()).await?;
    match Plan::make(data, &folder, ask_for(goal, Some(replicas as usize), options)).await {
        Ok(plan) => {
            let Some(pick) = &plan.pick else {
                bail!(
                    "{model} fits on no set of nodes: `thunder cluster plan {model} --all` says why; --nodes tries all \
                     the same"
                );
            };
            eprintln!("{}", pick.why);
            pick.slower.iter().for_each(|slower| eprintln!("note: {slower}"));
            Ok(plan.wishes())
        }
        // Without an agent the rest would not work either.
        Err(error)
            if error
                .downcast_ref::<ControlError>()
                .is_some_and(|e| matches!(e, ControlError::NoAgent(_))) =>
        {
            Err(error)
        }
        Err(error) => {
            eprintln!("not planned, so it runs on all nodes: {}", report::line(&error));
            Ok(Vec::new())
        }
    }
}

/// A node and its weight.
pub fn parse_share(text: &str) -> Result<(String, u32), String> {
    let wrong = || "write NODE=WEIGHT with a weight from 1 to 1000, e.g. studio=3".to_owned();
    let (node, weight) = text.split_once('=').ok_or_else(wrong)?;
    let weight = weight.parse().ok().filter(|weight| (1..=1000).contains(weight)).ok_or_else(wrong)?;
    if node.is_empty() { Err(wrong()) } else { Ok((node.to_owned(), weight)) }
}

/// Waits until a model is ready. Returns the nodes of each group.
async fn wait(data: &Path, name: &str, limit: Duration) -> anyhow::Result<Vec<Vec<String>>> {
    let (mut began, mut failed_at, mut picture) = (Instant::now(), None::<Instant>, Picture::default());
    let mut lost = Vec::new();
    while began.elapsed() < limit {
        let status: Status = match fetch(data).await {
            // Loading may take all cores for a while.
            Err(error) if matches!(error.downcast_ref(), Some(ControlError::Silent { .. })) => continue,
            status => status?,
        };
        match status.tasks.iter().find(|task| task.model == name && !task.is_over()) {
            Some(task) => {
                picture.show(task);
                // A download takes as long as it takes.
                began = Instant::now();
            }
            None => picture.clear(),
        }
        let is_of = |model: &&ModelStatus| model.name == name || model.replica_of.as_deref() == Some(name);
        let groups: Vec<&ModelStatus> = status.models.iter().filter(is_of).collect();
        if groups.is_empty() {
            bail!("{name} was unloaded meanwhile");
        }
        if groups.iter().all(|group| group.ready) {
            let nodes = |group: &&ModelStatus| group.ranks.iter().map(|rank| rank.node.clone()).collect();
            let groups: Vec<Vec<String>> = groups.iter().map(nodes).collect();
            let names: Vec<String> = groups.iter().map(|nodes| nodes.join(", ")).collect();
            eprintln!(
                "{name} is ready on {} after {:.1} s",
                names.join(" | "),
                began.elapsed().as_secs_f64()
            );
            return Ok(groups);
        }
        let away: Vec<&String> = groups.iter().flat_map(|group| &group.lost).collect();
        for node in &away {
            if !lost.contains(*node) {
                eprintln!("{node} does not answer; {name} waits for it or is placed without it (--on-loss)");
                lost.push((*node).clone());
            }
        }
        let failed =
            failures(&status).into_iter().find(|(model, ..)| groups.iter().any(|group| group.name == *model));
        // What fails while a node is away, or just after, fails because of that.
        if let Some((_, node, why)) = failed.filter(|_| away.is_empty()) {
            // Ranks end because of each other. The head's report with the reason may arrive later.
            let head = |group: &&ModelStatus| group.ranks.first().and_then(|rank| rank.state.clone());
            let is_of_head = groups.iter().any(|group| matches!(head(group), Some(RankState::Ended(_))));
            let patience = match (lost.is_empty(), is_of_head) {
                (false, _) => AFTER_LOSS,
                (true, true) => Duration::ZERO,
                (true, false) => WORDS_OF_HEAD,
            };
            if failed_at.get_or_insert_with(Instant::now).elapsed() >= patience {
                bail!(
                    "{name} does not start on {node}: {why}; the cluster goes on trying, `thunder model unload` ends that"
                );
            }
        } else {
            failed_at = None;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    bail!("{name} is not ready after {} s; `thunder cluster status` shows its ranks", limit.as_secs())
}

impl Unload {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let data = self.data.folder()?;
        match current_thread::runtime()?.block_on(control::ask(&data, &Request::Unload(self.model)))? {
            Reply::Changed { name, .. } => eprintln!("{name} is unloaded"),
            reply => bail!("the agent replied {reply:?}: is it of another version?"),
        }
        Ok(())
    }
}
