//! `thunder plan`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use serde::Serialize;
use serde_json::json;
use thunder_cables::Desk;
use thunder_cables::route::{self, Route};
use thunder_cluster::hostfile::{Devices, Hostfile};
use thunder_engine::assembly::device::{FirstDevice, first_device};
use thunder_engine::assembly::memory::KvCacheRequest;
use thunder_engine::assembly::spec::PlanError;
use thunder_engine::assembly::{DeviceChoice, DeviceMemory, Draft, EngineSpec, KvCacheSize};
use thunder_model::error::human_bytes;
use thunder_model::{ModelError, ModelFolder, ShardFootprint, ShardPlan};

use crate::engine_args::{CacheArgs, LayoutArgs};
use crate::mac_command::desk::desk_of;
use crate::mac_command::nodes::NodesArgs;
use crate::model_arg::{ModelArg, completer};
use crate::{session, table};

/// Show how a model would be split over ranks
///
/// Prints the heads, channels, layers and bytes of each rank, and the KV cache if all ranks run on
/// one machine (--memory, --context, --max-batch). Reads only the model's headers, and starts no
/// ranks. `thunder cluster plan` also predicts how fast the ranks would be.
#[derive(Args)]
#[command(mut_arg("ranks", |ranks| {
    ranks.help("Ranks to plan for [default: the number of --split's weights, else 1]").long_help(None)
}))]
#[command(mut_arg("nodes", |nodes| {
    nodes
        .help("Also print the present transport of each pair of these nodes; without a value, of all nodes")
        .long_help(None)
        .conflicts_with("hostfile")
}))]
pub struct PlanCommand {
    #[command(flatten)]
    model: ModelArg,
    #[command(flatten)]
    layout: LayoutArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// Also count a draft model, as for --draft of `thunder run`
    ///
    /// Rank 0 holds the whole draft model, with its own KV cache. The command also checks that both
    /// models have the same tokens.
    #[arg(long, value_name = "MODEL", add = completer())]
    draft: Option<OsString>,
    /// Device whose memory to plan for: auto, cpu, gpu or gpu:N
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Auto, env = "THUNDER_DEVICE")]
    device: DeviceChoice,
    /// Host file of `thunder mac setup`, to also print the transport of each pair of ranks
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    #[command(flatten)]
    nodes: NodesArgs,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl PlanCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let mut folder = session::open_folder(self.model.name())?;
        if self.draft.is_some() {
            // A draft model replaces the model's own layer.
            folder.spec.ahead = None;
        }
        let plan = self.layout.shard_plan(&folder, self.layout.ranks())?;
        let mut footprints = thunder_model::model::shard_footprints(&folder, &plan, self.layout.kv.into())?;
        let draft = self.draft(&folder)?;
        if let Some(draft) = &draft {
            draft.add_to(&mut footprints);
        }
        thunder_model::unread_tensors(&folder).iter().for_each(|unread| eprintln!("warning: {unread}"));
        let needs: Vec<_> = footprints.iter().flat_map(|footprint| &footprint.needs).copied().collect();
        let device = first_device(self.device, &needs).map_err(anyhow::Error::msg)?;
        let cache = self.kv_cache(&folder, &footprints, &device)?;
        let links = match &self.hostfile {
            Some(path) => Some(links(path)?),
            None => self
                .nodes
                .find_given()?
                .map(|nodes| desk_of(nodes).map(|desk| links_now(&desk)))
                .transpose()?,
        };
        if self.json {
            let mut json = to_json(&folder, &plan, &footprints);
            json["device"] = device.name.as_str().into();
            json["memory_bytes"] = self.memory(&device).bytes.into();
            json["kv_cache"] = match &cache {
                Ok(size) => json!({ "tokens": size.tokens, "bytes": size.bytes, "most_tokens": size.wanted }),
                Err(_) => serde_json::Value::Null,
            };
            if let Some(links) = &links {
                json["links"] = serde_json::to_value(links)?;
            }
            println!("{json}");
            return Ok(());
        }
        print(&folder, &plan, &footprints);
        if let Some(ShardFootprint { weight_bytes, kv_bytes_per_token, .. }) =
            draft.map(|draft| draft.footprint)
        {
            let [weights, kv] = [weight_bytes, kv_bytes_per_token].map(human_bytes);
            println!("rank 0's weights and KV per token include {weights} and {kv} of the draft model");
        }
        let ahead: u64 = footprints.iter().map(|footprint| footprint.ahead_bytes).sum();
        if ahead > 0 {
            println!(
                "weights include {} of the layer that predicts further tokens, for drafts; --no-speculation of \
                 `thunder serve` leaves it out",
                human_bytes(ahead)
            );
        }
        let tables: u64 = footprints.iter().map(|footprint| footprint.table_bytes).sum();
        if tables > 0 {
            println!("weights include {} of tables of which a token reads a few rows", human_bytes(tables));
        }
        for PairLink { ranks: [one, other], hosts: [here, there], over } in links.iter().flatten() {
            println!("rank {one} ({here}) – rank {other} ({there}): {over}");
        }
        let memory = self.memory(&device).bytes.map_or_else(|| "unknown".to_owned(), human_bytes);
        let whose = if self.cache.memory.is_some() { "of --memory" } else { "available here now" };
        let (name, count) = (&device.name, device.memories.min(footprints.len()));
        let others = if count > 1 { format!(" and {} more", count - 1) } else { String::new() };
        println!("With all ranks on one machine ({name}{others}: {memory} {whose}):");
        match cache {
            Ok(size) => println!("{}", session::kv_cache_line(&size)),
            Err(does_not_fit) => println!("{does_not_fit}"),
        }
        if let ranks @ 2.. = footprints.len() {
            println!(
                "More ranks are not always faster: two GPUs decode an 8B no faster than one. `thunder cluster plan` \
                 predicts speeds; `thunder bench decode --ranks {ranks}` measures them."
            );
        }
        Ok(())
    }

    /// The draft model, if one is given.
    fn draft(&self, folder: &ModelFolder) -> anyhow::Result<Option<Draft>> {
        let Some(draft) = &self.draft else { return Ok(None) };
        let (_, name) = session::find_model(self.model.name())?;
        let served = (name.as_str(), &*folder.tokenizer()?);
        let requests = self.cache.max_batch.into();
        Ok(Some(Draft::open(&session::find_draft(draft)?, served, self.layout.kv.into(), requests)?))
    }

    /// The device's memory; the given limit replaces its size, because a plan may be for a machine
    /// with more memory than this one.
    fn memory(&self, device: &FirstDevice) -> DeviceMemory {
        DeviceMemory { bytes: self.cache.memory.or(device.memory.bytes), ..device.memory }
    }

    /// The KV cache if this machine had all ranks, or the error if the model does not fit, because
    /// a plan may be for other machines.
    fn kv_cache(
        &self,
        folder: &ModelFolder,
        footprints: &[ShardFootprint],
        device: &FirstDevice,
    ) -> anyhow::Result<Result<KvCacheSize, ModelError>> {
        let engine = EngineSpec {
            context: self.cache.context,
            max_batch: self.cache.max_batch.into(),
            prefix_cache: !self.cache.no_prefix_cache,
            ..EngineSpec::new("", "")
        };
        engine.validate()?;
        let request = KvCacheRequest::of(&engine, &folder.spec, engine.context_tokens(folder.spec.context)?);
        let memory = (self.memory(device), device.memories);
        match KvCacheSize::plan(footprints, memory, self.cache.memory, request) {
            Ok(size) => Ok(Ok(size)),
            Err(PlanError::Model(error @ ModelError::DoesNotFit { .. })) => Ok(Err(error)),
            Err(error) => Err(error.into()),
        }
    }
}

/// The transport of a pair of ranks.
#[derive(Serialize)]
struct PairLink {
    ranks: [usize; 2],
    hosts: [String; 2],
    over: String,
}

/// The transport of each pair in a host file: as noted by `thunder mac setup`, otherwise RDMA if
/// both name a device for each other.
fn links(path: &Path) -> anyhow::Result<Vec<PairLink>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("host file {}", path.display()))?;
    let hostfile = Hostfile::parse(&text).with_context(|| format!("host file {}", path.display()))?;
    let value: serde_json::Value = serde_json::from_str(&text)?;
    let noted = |one: usize, other: usize| {
        let links = value.get("links")?.as_array()?;
        let link = links.iter().find(|link| link["ranks"] == json!([one, other]))?;
        let gbits = link["gbits"].as_u64().map(|gbits| format!(", {gbits} Gbit/s")).unwrap_or_default();
        Some(format!("{}{gbits}", link["over"].as_str()?))
    };
    let hosts = &hostfile.hosts;
    let device =
        |one: usize, other: usize| hosts[one].rdma.get(other).is_some_and(|found| *found != Devices::None);
    let pairs = (0..hosts.len()).flat_map(|one| (one + 1..hosts.len()).map(move |other| [one, other]));
    Ok(pairs
        .map(|[one, other]| PairLink {
            ranks: [one, other],
            hosts: [hosts[one].ssh.clone(), hosts[other].ssh.clone()],
            over: noted(one, other).unwrap_or_else(|| {
                if device(one, other) && device(other, one) { "RDMA" } else { "TCP" }.to_owned()
            }),
        })
        .collect())
}

/// The transport of each pair of nodes with the present cables.
fn links_now(desk: &Desk) -> Vec<PairLink> {
    let link = |route: Route| PairLink {
        ranks: route.machines,
        hosts: route.machines.map(|machine| desk.machines[machine].name.clone()),
        over: route.words(),
    };
    route::now(desk).into_iter().map(link).collect()
}

fn to_json(folder: &ModelFolder, plan: &ShardPlan, footprints: &[ShardFootprint]) -> serde_json::Value {
    let range = |range: &std::ops::Range<usize>| json!([range.start, range.end]);
    let ranks: Vec<_> = footprints
        .iter()
        .enumerate()
        .map(|(rank, footprint)| {
            json!({
                "rank": rank,
                "layers": range(&footprint.layers),
                "query_heads": range(&footprint.queries),
                "kv_heads": range(&footprint.kv),
                "mlp_channels": range(&footprint.channels),
                "vocab_rows": range(&footprint.vocab),
                "experts": range(&footprint.held_experts),
                "weight_bytes": footprint.weight_bytes,
                "ahead_bytes": footprint.ahead_bytes,
                "table_bytes": footprint.table_bytes,
                "lookup_bytes": footprint.lookup_bytes,
                "read_bytes_per_token": footprint.read_bytes(1),
                "kv_bytes_per_token": footprint.kv_bytes_per_token,
                "state_bytes_per_sequence": footprint.state_bytes_per_sequence,
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

/// Prints the plan as a table.
pub fn print(folder: &ModelFolder, plan: &ShardPlan, footprints: &[ShardFootprint]) {
    let spec = &folder.spec;
    println!(
        "{}, {} layers, {} of weights over {} rank(s): {}-way tensor parallel, {} pipeline stage(s)",
        spec.family,
        spec.layers.len(),
        human_bytes(folder.weights.bytes()),
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
        "experts",
        "vocabulary",
        "weights",
        "read per token",
        "KV per token",
    ]);
    let range = |range: &std::ops::Range<usize>| match range.len() {
        0 => "-".to_owned(),
        len => format!("{}..{} ({len})", range.start, range.end),
    };
    for (rank, footprint) in footprints.iter().enumerate() {
        table.add_row([
            rank.to_string(),
            range(&footprint.layers),
            range(&footprint.queries),
            range(&footprint.kv),
            range(&footprint.channels),
            range(&footprint.held_experts),
            range(&footprint.vocab),
            human_bytes(footprint.weight_bytes),
            human_bytes(footprint.read_bytes(1)),
            human_bytes(footprint.kv_bytes_per_token),
        ]);
    }
    println!("{table}");
}
