//! `thunder cluster plan`: where a model would run best, predicted from what was measured.

pub mod speeds;

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum};
use serde::Deserialize;
use serde_json::json;
use thunder_capacity::placement::{self, Goal, Group, Layout, Machines, Node, Pick, Wanted};
use thunder_engine::assembly::device::DeviceChoice;
use thunder_model::ModelFolder;
use thunder_model::error::human_bytes;
use thunder_node::agent::MemberStatus;
use thunder_node::agent::control::{self, Request};
use thunder_node::document::{MOST_LAYOUTS, PlannedLayout};
use thunder_node::id::NodeId;

use super::fetch;
use crate::model_arg::completer;
use crate::model_command::parse_share;
use crate::{session, table};

/// Layouts that are shown, unless all are asked for.
const SHOWN: usize = 12;

/// What a layout is chosen for.
#[derive(ValueEnum, Deserialize, Debug, Default, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum GoalArg {
    /// The shortest time for one answer (200 tokens, to a prompt of 1000)
    #[default]
    Latency,
    /// The most tokens a second for 16 parallel answers
    Throughput,
    /// The longest requests
    Context,
}

impl From<GoalArg> for Goal {
    fn from(goal: GoalArg) -> Self {
        match goal {
            GoalArg::Latency => Self::Latency,
            GoalArg::Throughput => Self::Throughput,
            GoalArg::Context => Self::Context,
        }
    }
}

/// Predict how fast a model would be on each set of nodes, and choose one
///
/// Predicts layouts for every set of nodes (with more than six nodes: the fastest set and the set
/// with the most memory of each size): a single node, tensor parallel, pipeline, both together with
/// shares by speed and memory, and replicas. `thunder model load` uses the chosen layout, unless
/// you name the nodes.
///
/// Reads only the model's configuration and headers: from this machine, a node that has the model,
/// or the hub. Each node measures its memory and arithmetic once, in two seconds; nodes that share
/// a machine also measure together; a GPU takes a few seconds more. Links are measured if they were
/// not measured before.
#[derive(Args)]
pub struct PlanArgs {
    /// `builtin`, a folder, a GGUF file, or the name of a model in the Hugging Face cache
    #[arg(value_name = "MODEL", add = completer())]
    model: OsString,
    /// Goal of the choice
    #[arg(long = "for", value_name = "GOAL", value_enum, default_value_t = GoalArg::Latency)]
    goal: GoalArg,
    /// Number of groups that serve the model: 1 for no replicas [default: the best number]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    replicas: Option<u16>,
    /// Tokens of prompt and answer together that must fit [default: the model's maximum, or less]
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Predict only for these nodes and relative shares, e.g. studio=3,mini=1 [default: every set
    /// of nodes, with shares by speed and memory]
    #[arg(long, value_name = "NODE=WEIGHT", value_delimiter = ',', value_parser = parse_share,
        conflicts_with = "replicas")]
    split: Vec<(String, u32)>,
    /// Device that ranks compute on, as for --device of `thunder serve`: auto, cpu, gpu or gpu:N.
    /// Nodes without it are left out
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Auto)]
    device: DeviceChoice,
    /// Measure nodes and links again, e.g. if they were busy at the last measurement; without it,
    /// earlier measurements are used
    #[arg(long)]
    again: bool,
    /// Print all layouts, not only the best 12
    #[arg(long)]
    all: bool,
    /// Print one JSON object with all layouts
    #[arg(long)]
    json: bool,
}

/// What is planned for.
#[derive(Debug, Clone)]
pub struct Ask {
    /// What counts.
    pub goal: Goal,
    /// Groups; `None`: as many as are best.
    pub replicas: Option<usize>,
    /// Most tokens of a request.
    pub context: Option<usize>,
    /// Requests that decode together.
    pub max_batch: usize,
    /// What ranks compute on.
    pub device: DeviceChoice,
    /// Names of nodes and their shares; empty: every set of nodes.
    pub split: Vec<(String, u32)>,
    /// Measure nodes and links that are measured, too.
    pub again: bool,
}

/// A plan.
pub struct Plan {
    /// The nodes, by the layouts' indices.
    pub ids: Vec<NodeId>,
    /// Their names and figures.
    pub machines: Machines,
    /// All layouts, best first.
    pub layouts: Vec<Layout>,
    /// The one to take; `None` if the model fits nowhere.
    pub pick: Option<Pick>,
}

impl Plan {
    /// Plans a model from its headers, on the nodes that answer and take work.
    ///
    /// # Errors
    /// When a node or a link cannot be measured.
    pub async fn make(data: &Path, folder: &ModelFolder, ask: Ask) -> anyhow::Result<Self> {
        control::ask(data, &Request::MeasureMachines { again: ask.again }).await?;
        let mut status = fetch(data).await?;
        if ask.again || !speeds::all_links(&status) {
            control::ask(data, &Request::MeasureLinks).await?;
            status = fetch(data).await?;
        }
        let take_work: Vec<&MemberStatus> =
            status.members.iter().filter(|member| member.up && !member.drained).collect();
        ensure!(
            !take_work.is_empty(),
            "no node takes work: `thunder cluster resume NODE` gives a drained one work again"
        );
        let (members, nodes) = speeds::nodes(take_work, folder, ask.device)?;
        let link = |from: &&MemberStatus| members.iter().map(|to| speeds::link(&status, from, to)).collect();
        let machines = Machines { nodes, links: members.iter().map(link).collect() };
        let wanted =
            Wanted { goal: ask.goal, context: ask.context, max_batch: ask.max_batch, replicas: ask.replicas };
        if let Some(replicas) = ask.replicas.filter(|replicas| *replicas > members.len()) {
            bail!("{replicas} replicas need as many nodes; {} take work", members.len());
        }
        let layouts = if ask.split.is_empty() {
            placement::layouts(folder, &machines, &wanted)?
        } else {
            let (chosen, weights) = places_of(&ask.split, &machines)?;
            placement::with_shares(folder, &machines, &wanted, &chosen, &weights)?
        };
        let pick = placement::pick(&layouts, ask.goal);
        Ok(Self { ids: members.iter().map(|member| member.id).collect(), machines, layouts, pick })
    }

    /// The layouts for each group of the pick: its own first, then the others that use one group,
    /// for the time when its nodes are not all there.
    pub fn wishes(&self) -> Vec<Vec<PlannedLayout>> {
        self.pick.as_ref().map_or_else(Vec::new, |pick| self.wishes_of(&self.layouts[pick.index]))
    }

    /// The same for another layout than the pick.
    fn wishes_of(&self, layout: &Layout) -> Vec<Vec<PlannedLayout>> {
        let single = self.layouts.iter().filter(|layout| layout.fits() && layout.groups.len() == 1);
        let spare: Vec<PlannedLayout> = single.map(|layout| self.planned(&layout.groups[0])).collect();
        let of_group = |group: &Group| {
            let own = self.planned(group);
            let others = spare.iter().filter(|layout| **layout != own).cloned();
            std::iter::once(own.clone()).chain(others).take(MOST_LAYOUTS).collect()
        };
        layout.groups.iter().map(of_group).collect()
    }

    /// The plan for programs. `load` of a layout is what `/admin/models/load` takes for it.
    pub fn to_json(&self) -> serde_json::Value {
        let nodes = self.machines.nodes.iter().zip(&self.ids).map(|(node, id)| {
            let together = node.shared.map(|shared| shared.together);
            json!({ "name": node.name, "id": id, "speed": node.speed, "together": together,
                    "memory_bytes": node.memory_bytes, "device": node.device })
        });
        let layouts = self.layouts.iter().map(|layout| {
            let mut shown = json!(layout);
            shown["load"] = json!({ "layouts": self.wishes_of(layout), "replicas": layout.groups.len() });
            shown
        });
        json!({ "nodes": nodes.collect::<Vec<_>>(), "layouts": layouts.collect::<Vec<_>>(), "pick": self.pick })
    }

    fn planned(&self, group: &Group) -> PlannedLayout {
        let arguments: &[&str] = match group.stages {
            1 => &[],
            stages if stages == group.nodes.len() => &["--parallel", "pipeline"],
            stages => &["--stages", &stages.to_string()],
        };
        PlannedLayout {
            nodes: group.nodes.iter().map(|node| self.ids[*node]).collect(),
            weights: group.weights.clone(),
            arguments: arguments.iter().map(|word| (*word).to_owned()).collect(),
        }
    }
}

/// The places of the nodes with these names, and their shares.
fn places_of(split: &[(String, u32)], machines: &Machines) -> anyhow::Result<(Vec<usize>, Vec<u32>)> {
    let place_of = |(name, weight): &(String, u32)| {
        let place = machines.nodes.iter().position(|node| node.name == *name);
        let place = place.with_context(|| {
            let known: Vec<&str> = machines.nodes.iter().map(|node| node.name.as_str()).collect();
            format!("no node that takes work is called {name}: use {}", known.join(", "))
        })?;
        Ok::<_, anyhow::Error>((place, *weight))
    };
    let (places, weights): (Vec<usize>, Vec<u32>) =
        split.iter().map(place_of).collect::<anyhow::Result<Vec<_>>>()?.into_iter().unzip();
    let twice = places.iter().enumerate().find(|(index, place)| places[..*index].contains(place));
    if let Some((_, place)) = twice {
        bail!("{} is named twice in --split", machines.nodes[*place].name);
    }
    Ok((places, weights))
}

impl PlanArgs {
    /// Runs the command.
    ///
    /// # Errors
    /// When no plan can be made.
    pub async fn run(self, data: &Path) -> anyhow::Result<()> {
        let ask = Ask {
            goal: self.goal.into(),
            replicas: self.replicas.map(usize::from),
            context: self.context,
            max_batch: usize::from(crate::engine_args::DEFAULT_MAX_BATCH),
            device: self.device,
            split: self.split,
            again: self.again,
        };
        let folder = session::open_headers(data, &self.model).await?;
        let plan = Plan::make(data, &folder, ask).await?;
        if self.json {
            println!("{}", plan.to_json());
            return Ok(());
        }
        println!("{}", table_of(&plan.layouts, if self.all { usize::MAX } else { SHOWN }));
        for Node { name, device, memory_bytes, .. } in &plan.machines.nodes {
            println!("{name} computes on {device}, with {}", human_bytes(*memory_bytes));
        }
        match &plan.pick {
            Some(pick) => {
                println!("{}", pick.why);
                pick.slower.iter().for_each(|slower| println!("Note: {slower}"));
            }
            None => println!("The model fits nowhere: `thunder cluster plan --all` says why of each layout."),
        }
        Ok(())
    }
}

fn table_of(layouts: &[Layout], most: usize) -> comfy_table::Table {
    let mut rows = table::new(&[
        "layout",
        "decode tokens/s",
        "prefill tokens/s",
        "16 at a time",
        "an answer",
        "KV tokens",
    ]);
    for layout in layouts.iter().take(most) {
        if let Some(why) = &layout.why_not {
            rows.add_row([layout.name.clone(), why.clone()]);
            continue;
        }
        rows.add_row([
            layout.name.clone(),
            format!("{:.1}", layout.decode_tokens_s),
            format!("{:.0}", layout.prefill_tokens_s),
            format!("{:.0} tokens/s", layout.batch_tokens_s),
            format!("{:.2} s", layout.answer_s),
            layout.kv_tokens.to_string(),
        ]);
    }
    rows
}
