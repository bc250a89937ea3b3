//! Placement of a model on the machines of a cluster: every layout with its predicted figures, and
//! the best one.
//!
//! Machines and links are measured; the model is described by its configuration and headers. A
//! layout is one group of ranks, or several groups, which are replicas.

mod machines;
mod pick;

use serde::Serialize;
use thunder_compute::KvFormat;
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_cost::Parallel;
pub use thunder_cost::{Exchange, LinkSpeed, MachineSpeed};
use thunder_engine::assembly::memory::{KvCacheRequest, MemoryBudget};
use thunder_engine::{Limits, RoutedExperts, STEP_TIME};
use thunder_model::model::shard_footprints;
use thunder_model::{ModelError, ModelFolder, ShardPlan};

use crate::layouts::{kv_room, prompt_rate, step_times};
use crate::simulate::{self, Habit, Workload};
pub use machines::{Machines, Node, Shared};
use machines::{divided, near_together, slowest_links, subsets};
pub use pick::{Pick, pick};

/// Tokens of the prompt and of the answer for comparing layouts.
const PROMPT_TOKENS: usize = 1000;
const ANSWER_TOKENS: usize = 200;
/// Parallel requests for the throughput, over all groups together.
const CLIENTS: usize = 16;
/// Machines whose speeds differ by less than this get equal shares, because equal shares give the
/// same bits on other machines.
const EQUAL_SPEED: f64 = 1.15;
/// The largest weight of a share.
const LARGEST_WEIGHT: f64 = 100.0;

/// The goal for choosing a layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Goal {
    /// The shortest time for one answer.
    Latency,
    /// The most tokens a second for all answers together.
    Throughput,
    /// The most tokens in the KV cache.
    Context,
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Wanted {
    /// What counts.
    pub goal: Goal,
    /// Maximum tokens of a prompt and its answer; `None`: the model's maximum, or less.
    pub context: Option<usize>,
    /// Requests that decode together.
    pub max_batch: usize,
    /// Number of groups that serve the model; `None`: the best number.
    pub replicas: Option<usize>,
}

/// A group of ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Group {
    /// Stages of the pipeline, whose ranks are consecutive: 1 is tensor parallel.
    pub stages: usize,
    /// The machines in rank order, by index.
    pub nodes: Vec<usize>,
    /// Shares of the model in rank order.
    pub weights: Vec<u32>,
}

/// A layout and its predicted figures.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Layout {
    /// Its groups: one, or replicas.
    pub groups: Vec<Group>,
    /// The layout in words.
    pub name: String,
    /// The reason, if the layout does not fit.
    pub why_not: Option<String>,
    /// Tokens a second for a single answer after a prompt of 1000 tokens, in the slowest group.
    pub decode_tokens_s: f64,
    /// Prompt tokens a second for a prompt of 2000 tokens, in the slowest group.
    pub prefill_tokens_s: f64,
    /// Tokens a second for 16 parallel answers, in all groups together.
    pub batch_tokens_s: f64,
    /// Tokens in the KV caches of all groups together.
    pub kv_tokens: u64,
    /// Tokens of the longest request.
    pub longest_tokens: u64,
    /// Seconds for one answer of 200 tokens to a prompt of 1000, in the slowest group.
    pub answer_s: f64,
}

impl Layout {
    /// Whether it fits.
    pub fn fits(&self) -> bool {
        self.why_not.is_none()
    }

    /// Machines that it uses.
    pub fn machines(&self) -> usize {
        self.groups.iter().map(|group| group.nodes.len()).sum()
    }

    /// The layout's score for a goal; larger is better.
    fn score(&self, goal: Goal) -> f64 {
        match goal {
            Goal::Latency => 1.0 / self.answer_s.max(1e-9),
            Goal::Throughput => self.batch_tokens_s,
            Goal::Context => self.longest_tokens as f64,
        }
    }
}

/// All reasonable layouts, best first; layouts that do not fit are last.
///
/// # Errors
/// When the model's files are damaged.
pub fn layouts(
    folder: &ModelFolder,
    machines: &Machines,
    wanted: &Wanted,
) -> Result<Vec<Layout>, ModelError> {
    let mut found = Vec::new();
    let all: Vec<usize> = (0..machines.nodes.len()).collect();
    if wanted.replicas.is_none_or(|replicas| replicas == 1) {
        for nodes in subsets(machines, &all) {
            found.extend(of_nodes(folder, machines, wanted, &nodes, Company { busy: &nodes, groups: 1 })?);
        }
    }
    let most = wanted.replicas.unwrap_or(all.len()).min(all.len());
    for replicas in wanted.replicas.unwrap_or(2).max(2)..=most {
        let mut groups = Vec::new();
        for nodes in divided(machines, &all, replicas) {
            let mut choices = Vec::new();
            for subset in subsets(machines, &nodes) {
                let company = Company { busy: &all, groups: replicas };
                choices.extend(of_nodes(folder, machines, wanted, &subset, company)?);
            }
            sort(&mut choices, wanted.goal);
            groups.extend(choices.into_iter().next());
        }
        if groups.len() == replicas {
            found.push(together(&groups, &machines.nodes));
        }
    }
    sort(&mut found, wanted.goal);
    Ok(found)
}

/// The layouts of one group on these machines with these shares, best first.
///
/// # Errors
/// When the model's files are damaged.
pub fn with_shares(
    folder: &ModelFolder,
    machines: &Machines,
    wanted: &Wanted,
    nodes: &[usize],
    weights: &[u32],
) -> Result<Vec<Layout>, ModelError> {
    let mut found = Vec::new();
    for stages in divisors(nodes.len()) {
        let group = Group { stages, nodes: nodes.to_vec(), weights: weights.to_vec() };
        let company = Company { busy: nodes, groups: 1 };
        found.extend(if_possible(of_group(folder, machines, wanted, group, company))?);
    }
    sort(&mut found, wanted.goal);
    Ok(found)
}

/// Numbers of stages that `ranks` ranks can form.
fn divisors(ranks: usize) -> impl Iterator<Item = usize> {
    (1..=ranks).filter(move |stages| ranks.is_multiple_of(*stages))
}

/// `None` if there are more stages than layers.
fn if_possible(layout: Result<Layout, ModelError>) -> Result<Option<Layout>, ModelError> {
    match layout {
        Ok(layout) => Ok(Some(layout)),
        Err(ModelError::Plan(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

fn sort(layouts: &mut [Layout], goal: Goal) {
    layouts.sort_by(|a, b| {
        let worse = (!a.fits()).cmp(&!b.fits());
        let score = b.score(goal).total_cmp(&a.score(goal));
        worse.then(score).then(a.machines().cmp(&b.machines())).then(a.name.cmp(&b.name))
    });
}

impl Goal {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Throughput => "throughput",
            Self::Context => "context",
        }
    }
}

/// The other computing machines and groups.
#[derive(Debug, Clone, Copy)]
struct Company<'a> {
    /// Busy machines, including the group's own.
    busy: &'a [usize],
    /// Groups that share the requests, including this one.
    groups: usize,
}

/// The layouts of one group on all of these machines.
fn of_nodes(
    folder: &ModelFolder,
    machines: &Machines,
    wanted: &Wanted,
    nodes: &[usize],
    company: Company<'_>,
) -> Result<Vec<Layout>, ModelError> {
    let mut found = Vec::new();
    for stages in divisors(nodes.len()) {
        let nodes = near_together(machines, nodes, stages);
        let weights = weights(folder, machines, &nodes, company.busy);
        let group = Group { stages, nodes, weights };
        found.extend(if_possible(of_group(folder, machines, wanted, group, company))?);
    }
    Ok(found)
}

/// Shares in proportion to the machines' speeds, limited by their memory.
fn weights(folder: &ModelFolder, machines: &Machines, nodes: &[usize], busy: &[usize]) -> Vec<u32> {
    let speed = |node: &usize| machines.speed_among(*node, nodes).memory_bytes_s.max(1.0);
    let speeds: Vec<f64> = nodes.iter().map(speed).collect();
    let (least, most) =
        (speeds.iter().copied().fold(f64::MAX, f64::min), speeds.iter().copied().fold(0.0, f64::max));
    let mut shares = if most < least * EQUAL_SPEED { vec![1.0; nodes.len()] } else { speeds };
    let total: f64 = shares.iter().sum();
    shares.iter_mut().for_each(|share| *share /= total);
    // A tenth for buffers, and some memory for the cache.
    let memory = |node: &usize| machines.memory_among(*node, busy) as f64;
    let room = |node: &usize| memory(node) * 0.8 / folder.weights.bytes().max(1) as f64;
    let mut full = vec![false; nodes.len()];
    for _ in 0..nodes.len() {
        let mut over = 0.0;
        for (place, node) in nodes.iter().enumerate() {
            if !full[place] && shares[place] > room(node) {
                over += shares[place] - room(node);
                (shares[place], full[place]) = (room(node), true);
            }
        }
        let open: f64 = shares.iter().zip(&full).filter(|(_, full)| !**full).map(|(share, _)| share).sum();
        if over == 0.0 || open <= 0.0 {
            break;
        }
        shares
            .iter_mut()
            .zip(&full)
            .filter(|(_, full)| !**full)
            .for_each(|(share, _)| *share *= 1.0 + over / open);
    }
    let largest = shares.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let weight = |share: &f64| ((share / largest * LARGEST_WEIGHT).round() as u32).max(1);
    let weights: Vec<u32> = shares.iter().map(weight).collect();
    if weights.iter().all(|weight| *weight == weights[0]) { vec![1; weights.len()] } else { weights }
}

fn of_group(
    folder: &ModelFolder,
    machines: &Machines,
    wanted: &Wanted,
    group: Group,
    Company { busy, groups }: Company<'_>,
) -> Result<Layout, ModelError> {
    let weights: Vec<f64> = group.weights.iter().map(|weight| f64::from(*weight)).collect();
    let plan = ShardPlan::staged(&folder.spec, group.stages, &weights)?;
    let footprints = shard_footprints(folder, &plan, KvFormat::F16)?;
    let links = slowest_links(machines, &group);
    let times = |speeds: Vec<MachineSpeed>| step_times(folder, &plan, &footprints, &speeds, links);
    // One answer: the ranks of a stage compute in parallel, the stages one after the other.
    let stages = group.nodes.chunks(plan.tensor_ranks()).zip(weights.chunks(plan.tensor_ranks()));
    let single =
        times(stages.flat_map(|(stage, weights)| machines.speeds_in_stage(stage, weights)).collect());
    // Several answers, or a long prompt, keep all stages busy.
    let several = times(group.nodes.iter().map(|node| machines.speed_among(*node, busy)).collect());
    let context = wanted.context.unwrap_or(folder.spec.context).min(folder.spec.context);
    let request = KvCacheRequest {
        sequences: wanted.max_batch,
        states: 2 * wanted.max_batch,
        context,
        is_required: wanted.context.is_some(),
    };
    let memory = |node: &usize| {
        let budget = MemoryBudget { bytes: machines.memory_among(*node, busy), is_set: false };
        (budget, machines.nodes[*node].device_memory)
    };
    let (kv_tokens, why_not) = match kv_room(&footprints, group.nodes.iter().map(memory), request) {
        Ok(tokens) => (tokens, None),
        Err(error @ ModelError::DoesNotFit { rank, .. }) => {
            (0, Some(format!("{}: {error}", machines.nodes[group.nodes[rank]].name)))
        }
        Err(error) => return Err(error),
    };
    // All ranks of a group compute the same rows.
    let rows = group.nodes.iter().map(|node| machines.nodes[*node].step_rows).min().unwrap_or(1);
    let decode = single.decode_tokens_s(PROMPT_TOKENS as f64);
    let prefill = prompt_rate(&several, 2 * PROMPT_TOKENS, rows);
    Ok(Layout {
        name: name(&group, &machines.nodes),
        why_not,
        decode_tokens_s: decode,
        prefill_tokens_s: prefill,
        batch_tokens_s: batch_rate(
            &several,
            kv_tokens,
            rows,
            RoutedExperts::of(&footprints),
            CLIENTS.div_ceil(groups),
        ),
        kv_tokens,
        longest_tokens: kv_tokens.min(context as u64),
        answer_s: PROMPT_TOKENS as f64 / prefill + ANSWER_TOKENS as f64 / decode,
        groups: vec![group],
    })
}

/// Tokens a second for `clients` parallel answers. Prompts count as time, not as tokens.
fn batch_rate(
    cost: &Parallel,
    kv_tokens: u64,
    step_rows: usize,
    routed: Option<RoutedExperts>,
    clients: usize,
) -> f64 {
    if kv_tokens == 0 {
        return 0.0;
    }
    let limits = Limits {
        sequences: clients,
        rows: step_rows,
        kv_blocks: (kv_tokens as usize).div_ceil(KV_BLOCK_TOKENS),
        whole_prompts: None,
        prefix_cache: false,
        snapshots: None,
        draft_rows: 0,
        ahead: false,
        draft_states: false,
        step_time: STEP_TIME,
        routed,
    };
    let habit = Habit { prompt: PROMPT_TOKENS / 4, answer: ANSWER_TOKENS / 2, shared: 0.0, users: 1 };
    let requests = habit.open(1.0, 2 * clients, 1);
    let context = 2 * PROMPT_TOKENS;
    let outcome = simulate::run(cost, limits, context, Workload::Closed { clients, requests });
    let tokens: usize = outcome.served.iter().map(|served| served.tokens).sum();
    tokens as f64 / outcome.span_s.max(1e-9)
}

/// Replicas, which share the requests.
fn together(groups: &[Layout], nodes: &[Node]) -> Layout {
    let slowest = |of: fn(&Layout) -> f64| groups.iter().map(of).fold(f64::MAX, f64::min);
    let names: Vec<String> =
        groups.iter().flat_map(|layout| &layout.groups).map(|group| name(group, nodes)).collect();
    Layout {
        name: format!("{} replicas: {}", groups.len(), names.join(" | ")),
        why_not: groups.iter().find_map(|group| group.why_not.clone()),
        decode_tokens_s: slowest(|group| group.decode_tokens_s),
        prefill_tokens_s: slowest(|group| group.prefill_tokens_s),
        // Each replica gets the same number of requests.
        batch_tokens_s: slowest(|group| group.batch_tokens_s) * groups.len() as f64,
        kv_tokens: groups.iter().map(|group| group.kv_tokens).sum(),
        longest_tokens: groups.iter().map(|group| group.longest_tokens).min().unwrap_or(0),
        answer_s: groups.iter().map(|group| group.answer_s).fold(0.0, f64::max),
        groups: groups.iter().flat_map(|layout| layout.groups.clone()).collect(),
    }
}

fn name(group: &Group, nodes: &[Node]) -> String {
    let names: Vec<&str> = group.nodes.iter().map(|node| nodes[*node].name.as_str()).collect();
    if names.len() == 1 {
        return format!("{} alone", names[0]);
    }
    let kind = match group.stages {
        1 => "tensor".to_owned(),
        stages if stages == names.len() => "pipeline".to_owned(),
        stages => format!("{stages} stages of {}", names.len() / stages),
    };
    if group.weights.iter().all(|weight| *weight == group.weights[0]) {
        return format!("{kind} on {}", names.join(" + "));
    }
    let total: u32 = group.weights.iter().sum();
    let share = |(name, weight): (&&str, &u32)| {
        format!("{name} {:.0} %", f64::from(*weight) * 100.0 / f64::from(total))
    };
    format!("{kind} on {}", names.iter().zip(&group.weights).map(share).collect::<Vec<_>>().join(" + "))
}

#[cfg(test)]
#[path = "placement_tests.rs"]
mod tests;
