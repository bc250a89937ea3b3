//! A model on machines: the bytes that each rank would hold and read, and its operations.
//!
//! Footprints come from the description that loading uses (`thunder plan` shows the same). A model
//! that is not on the disk is described by its published shape: a folder with real headers, in
//! which the weights are holes in the files and take no space.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use thunder_compute::KvFormat;
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_cost::{LinkSpeed, MachineSpeed, Parallel, RankLoad, Stage};
use thunder_engine::assembly::assemble::STEP_ROWS;
use thunder_engine::assembly::memory::{DeviceMemory, KvCacheRequest, MemoryBudget, kv_cache_tokens};
use thunder_engine::{Limits, RoutedExperts, STEP_TIME};
use thunder_model::model::shard_footprints;
use thunder_model::spec::{LayerSpec, MixerSpec};
use thunder_model::synth::{Shape, outline};
use thunder_model::{ModelError, ModelFolder, Parallelism, ShardFootprint, ShardPlan};

use crate::machines::Machine;
use crate::{PlanError, simulate::StepCost};

/// A model of a published shape with weights of `bits` (16: bf16), without a download. The folder
/// lives as long as the returned guard.
///
/// # Errors
/// When the name or the bits are unknown.
pub fn published(name: &str, bits: u32) -> Result<(ModelFolder, tempfile::TempDir), PlanError> {
    let shape = Shape::named(name).ok_or_else(|| PlanError::Field {
        field: "model",
        value: name.to_owned(),
        must_be: format!("use a folder, or one of {}", Shape::names().collect::<Vec<_>>().join(", ")),
    })?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model");
    outline(&shape, (bits < 16).then_some(bits), 64, &path)?;
    Ok((ModelFolder::open(&path)?, folder))
}

/// Opens a folder or a GGUF file.
///
/// # Errors
/// When it is no model.
pub fn on_disk(path: &Path) -> Result<ModelFolder, PlanError> {
    Ok(ModelFolder::open(path)?)
}

/// How to serve a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Serving {
    /// Requests that decode together.
    pub max_batch: usize,
    /// Maximum tokens of a prompt and its answer together.
    pub context: usize,
    /// Time that a step may take for each new prompt while answers are running.
    pub step_time: Duration,
}

/// One way to place a model on machines.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Its figures, for people.
    pub shown: Layout,
    /// Its step times.
    pub cost: Parallel,
    /// The scheduler's limits; `None` if the model does not fit.
    pub limits: Option<Limits>,
    /// Tokens of a prompt and its answer together.
    pub context: usize,
    /// Machines that it uses.
    pub machines: usize,
}

/// A layout's figures.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Layout {
    /// `one machine`, with its name if machines differ, `tensor × 4` or `pipeline × 4`.
    pub layout: String,
    /// Whether weights and a KV cache fit.
    pub fits: bool,
    /// Why not.
    pub why: Option<String>,
    /// Bytes of weights on all machines.
    pub weight_bytes: u64,
    /// Tokens that the KV cache holds.
    pub kv_tokens: u64,
    /// Tokens a second for a single answer, after a prompt of 1000 tokens.
    pub decode_tokens_s: f64,
    /// Prompt tokens a second, for a prompt of 2000 tokens.
    pub prompt_tokens_s: f64,
}

/// All layouts of a model on these machines: one machine alone, and tensor parallel and pipeline on
/// all.
///
/// # Errors
/// When the model's files are damaged.
pub fn candidates(
    folder: &ModelFolder,
    machines: &[Machine],
    link: LinkSpeed,
    serving: Serving,
) -> Result<Vec<Candidate>, ModelError> {
    let mut found = Vec::new();
    // If machines differ, the machine with the most memory: it may hold the model alone.
    let largest = machines.iter().max_by_key(|machine| machine.memory_bytes).copied();
    let mut add = |name: String, mode, machines: &[Machine]| {
        // Weighted by bandwidth, because a step waits for the slowest machine.
        let weights: Vec<f64> = machines.iter().map(|machine| machine.memory_bytes_s / 1e11).collect();
        let plan = ShardPlan::new(&folder.spec, mode, &weights);
        match plan.and_then(|plan| candidate(folder, &plan, name, machines, link, serving)) {
            Ok(candidate) => found.push(candidate),
            // No layout with more stages than layers, or if layers read the cache of other layers.
            Err(ModelError::Plan(_)) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    };
    if let Some(largest) = largest {
        let differ = machines.iter().any(|machine| machine.name != largest.name);
        let which = if differ { format!(" ({})", largest.name) } else { String::new() };
        add(format!("one machine{which}"), Parallelism::Tensor, &[largest])?;
    }
    if machines.len() > 1 {
        add(format!("tensor × {}", machines.len()), Parallelism::Tensor, machines)?;
        add(format!("pipeline × {}", machines.len()), Parallelism::Pipeline, machines)?;
    }
    Ok(found)
}

fn candidate(
    folder: &ModelFolder,
    plan: &ShardPlan,
    layout: String,
    machines: &[Machine],
    link: LinkSpeed,
    Serving { max_batch, context, step_time }: Serving,
) -> Result<Candidate, ModelError> {
    let footprints = shard_footprints(folder, plan, KvFormat::F16)?;
    let context = context.min(folder.spec.context);
    let speeds: Vec<_> = machines.iter().map(Machine::speed).collect();
    let cost = step_times(folder, plan, &footprints, &speeds, Links { within: link, between: link });
    let request = KvCacheRequest { sequences: max_batch, states: 2 * max_batch, context, is_required: false };
    let memory = |machine: &Machine| {
        (MemoryBudget { bytes: machine.memory_bytes, is_set: true }, DeviceMemory::default())
    };
    let (tokens, why) = match kv_room(&footprints, machines.iter().map(memory), request) {
        Ok(tokens) => (tokens, None),
        Err(error @ ModelError::DoesNotFit { .. }) => (0, Some(error.to_string())),
        Err(error) => return Err(error),
    };
    let has_states = footprints.iter().any(|footprint| footprint.state_bytes_per_sequence > 0);
    let limits = why.is_none().then(|| Limits {
        sequences: max_batch,
        rows: STEP_ROWS,
        kv_blocks: (tokens as usize).div_ceil(KV_BLOCK_TOKENS),
        whole_prompts: None,
        prefix_cache: true,
        snapshots: has_states.then_some(max_batch),
        // Speculation depends on the text, which a simulation does not have.
        draft_rows: 0,
        ahead: false,
        draft_states: false,
        step_time,
        routed: RoutedExperts::of(&footprints),
    });
    let shown = Layout {
        layout,
        fits: why.is_none(),
        why,
        weight_bytes: footprints.iter().map(|footprint| footprint.weight_bytes).sum(),
        kv_tokens: tokens,
        decode_tokens_s: cost.decode_tokens_s(1000.0),
        prompt_tokens_s: prompt_rate(&cost, 2000, STEP_ROWS),
    };
    Ok(Candidate { shown, cost, limits, context, machines: machines.len() })
}

/// Tokens that the KV caches of all ranks hold, with these budgets and devices in rank order.
///
/// # Errors
/// [`ModelError::DoesNotFit`] of the first rank that lacks memory.
pub(crate) fn kv_room(
    footprints: &[ShardFootprint],
    memories: impl Iterator<Item = (MemoryBudget, DeviceMemory)>,
    request: KvCacheRequest,
) -> Result<u64, ModelError> {
    let ranks = footprints.iter().zip(memories).enumerate();
    let of_rank = |(rank, (footprint, (budget, device)))| {
        kv_cache_tokens(footprint, rank, Some(budget), request, device)
    };
    ranks.map(of_rank).try_fold(u64::MAX, |least, tokens| Ok(least.min(tokens?)))
}

/// Tokens a second for a prompt that is read in steps of `step_rows`, pipelined if there are
/// stages.
pub(crate) fn prompt_rate(cost: &impl StepCost, tokens: usize, step_rows: usize) -> f64 {
    let limits = Limits {
        sequences: 1,
        rows: step_rows,
        kv_blocks: tokens / KV_BLOCK_TOKENS + 2,
        whole_prompts: None,
        prefix_cache: false,
        snapshots: None,
        draft_rows: 0,
        ahead: false,
        draft_states: false,
        step_time: STEP_TIME,
        // No other request waits for these steps.
        routed: None,
    };
    let arrival = crate::simulate::Arrival { at_s: 0.0, user: 0, prompt: tokens, shared: 0, answer: 1 };
    let outcome =
        crate::simulate::run(cost, limits, 2 * tokens, crate::simulate::Workload::Open(vec![arrival]));
    tokens as f64 / outcome.span_s.max(1e-9)
}

/// The slowest links that a layout uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Links {
    /// Between ranks of a stage.
    pub within: LinkSpeed,
    /// From a stage to the next one.
    pub between: LinkSpeed,
}

/// The cost of steps of a model's ranks on machines with these speeds, in rank order.
pub(crate) fn step_times(
    folder: &ModelFolder,
    plan: &ShardPlan,
    footprints: &[ShardFootprint],
    speeds: &[MachineSpeed],
    links: Links,
) -> Parallel {
    // The work of one token, divided among the ranks by the bytes that they read for it.
    let spec = &folder.spec;
    let work = 2.0 * (spec.layer_weights() as f64 + (spec.vocab * spec.hidden) as f64);
    let read = |footprint: &ShardFootprint| footprint.read_bytes(1) as f64;
    let all: f64 = footprints.iter().map(read).sum();
    let of_rank = |footprint: &ShardFootprint| {
        let share = read(footprint) / all.max(1.0);
        // Of these a step reads a few rows for each token.
        let tables = footprint.table_bytes + footprint.lookup_bytes;
        RankLoad {
            layers: footprint.layers.len() as f64,
            weight_bytes: (footprint.weight_bytes - tables) as f64,
            routed_bytes: footprint.routed_bytes as f64,
            experts: footprint.experts as f64,
            chosen: footprint.chosen as f64,
            kv_bytes_per_token: footprint.kv_bytes_per_token as f64,
            flops_per_token: work * share,
            flops_per_pair: flops_per_pair(folder) * share,
        }
    };
    let ranks: Vec<_> =
        footprints.iter().zip(speeds).map(|(footprint, speed)| (*speed, of_rank(footprint))).collect();
    let size = plan.tensor_ranks();
    let stages = ranks
        .chunks(size)
        .zip(footprints.chunks(size))
        .map(|(ranks, shards)| {
            let layers = shards.first().map_or(0..0, |shard| shard.layers.clone());
            let sum = |of: fn(&LayerSpec) -> usize| folder.spec.layers[layers.clone()].iter().map(of).sum();
            // The embedding's and the logits' exchanges are two more.
            let exchanges = if layers.is_empty() { 0 } else { 2 };
            Stage {
                ranks: ranks.to_vec(),
                // The same holds for the vectors of tables.
                reductions: sum(LayerSpec::parts) + exchanges + folder.spec.tables(&layers),
                divided_norms: sum(LayerSpec::divided_norms),
                hidden: folder.spec.hidden,
                link: links.within,
            }
        })
        .collect();
    Parallel { stages, link: links.between }
}

/// Operations of attention for each pair of tokens, in all layers.
fn flops_per_pair(folder: &ModelFolder) -> f64 {
    let of_layer = |mixer: &MixerSpec| match mixer {
        // Two operations for each number of a head, once for the score and once for the weighted
        // value.
        MixerSpec::Attention(shape) => 4.0 * (shape.heads * shape.head_dim) as f64,
        MixerSpec::Latent(shape) => 4.0 * (shape.heads * shape.rank) as f64,
        // A window and a selection do not grow; the scores for the selection do.
        MixerSpec::Compressed(shape) => shape.compression.map_or(0.0, |of| {
            let per_key = match (of.selection, of.sources) {
                (None, _) => 4 * shape.heads * shape.dim,
                (Some(selection), None) => 2 * selection.heads * selection.dim,
                (Some(selection), Some(sources)) if sources.selection.is_none() => {
                    2 * selection.heads * selection.dim
                }
                _ => 0,
            };
            per_key as f64 / of.every as f64
        }),
        // A state of fixed size: no pairs.
        MixerSpec::Delta(_)
        | MixerSpec::ChannelDelta(_)
        | MixerSpec::StateSpace(_)
        | MixerSpec::GatedConv(_)
        | MixerSpec::None => 0.0,
    };
    folder.spec.layers.iter().map(|layer| of_layer(&layer.mixer)).sum()
}
