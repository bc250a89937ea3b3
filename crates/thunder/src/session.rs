//! From command line arguments to a running engine: finding the model, forming the group, loading the shards.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use thunder_cluster::local::{LOCAL_RANK, LOCAL_RANKS, LocalRanks};
use thunder_collectives::{Config, Group, Op};
use thunder_compute::cpu::pool::allowed_cores;
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{Activations, CpuConfig, Isa, KvFormat, Overlap};
use thunder_engine::{Engine, EngineError, EngineLoop, Limits, ModelInfo, RankWorker, Sampling};
use thunder_model::model::demand;
use thunder_model::{Capacity, Demand, ModelError, ModelFolder, Parallelism, Plan};

use crate::builtin;

/// Rows of a step: prompt tokens that are read together.
pub const STEP_ROWS: usize = 256;
/// A rank that is alive may compute this long between two collectives: a large model's layer over a full step on slow cores.
/// A rank that died is noticed at once, whatever this is; THUNDER_STALL_LIMIT_MS overrides it.
const STALL_LIMIT: Duration = Duration::from_secs(60);

/// Shared memory for each direction between two ranks. Four times as much would speed up messages of a MiB by a sixth, which
/// are a small part of a prefill, and would take some 5 MiB of each rank, which is much beside a small model's share.
const RING_BYTES: usize = 128 << 10;

/// Requests that may wait for a slot.
const MAX_WAITING: usize = 1024;

/// A rank that has lost a peer stays this long, with its links open: were it to leave at once, others might take it for the
/// one that was lost first.
const LAST_TO_LEAVE: Duration = Duration::from_millis(300);

/// Who holds what.
#[derive(Args, Debug, Clone)]
pub struct Layout {
    /// Ranks to start on this machine. With THUNDER_RANK, THUNDER_WORLD_SIZE and THUNDER_COORDINATOR (or MLX's variables) in
    /// the environment, this process joins that group instead
    ///
    /// [default: as many as --split has shares, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub ranks: Option<u16>,
    /// Split each layer over the ranks (tensor), or give each rank some layers (pipeline)
    #[arg(long, value_enum, default_value_t = Parallel::Tensor)]
    pub parallel: Parallel,
    /// Share of each rank, e.g. 3,1 gives rank 0 three quarters; even if not given
    #[arg(long, value_name = "W,W,…", value_delimiter = ',')]
    pub split: Vec<f64>,
    /// How keys and values are kept: int8 takes little more than half of f16's memory, and of its time at long contexts
    #[arg(long, value_enum, default_value_t = KvBits::F16)]
    pub kv: KvBits,
}

/// How a model is spread and computed.
#[derive(Args, Debug, Clone)]
pub struct EngineArgs {
    /// Who holds what.
    #[command(flatten)]
    pub layout: Layout,
    /// Threads that compute in each rank [default: this machine's cores, divided among its ranks, as many as load it]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Keep each thread on a core of its own, if there are enough: faster on a machine that does nothing else, slower beside
    /// other work
    #[arg(long)]
    pub pin: bool,
    /// Tokens that prompt and answer may have together [default: what the model was made for and memory allows]
    #[arg(long, value_name = "TOKENS")]
    pub context: Option<usize>,
    /// Requests that are decoded together
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub max_batch: u16,
    /// Precision of activations in products with weights: auto is bf16 where a matrix unit (AMX) reads prompts; elsewhere
    /// one byte, or two for those of a feed-forward network's channels, where a few are far larger than the others (logits
    /// of the built-in model 0.8 % off). int8 is auto with one byte everywhere (faster on prompts without a matrix unit; 1.3 %
    /// off), bf16 is auto with two bytes everywhere (slower in batches, and on such prompts; at most 0.4 % off), int16 gives
    /// quantized weights' products the same bits on any machine, f32 rules them out as the cause of anything
    #[arg(long, value_enum, default_value_t = ActivationBits::Auto)]
    pub activations: ActivationBits,
    /// Sum a prompt's rows over the ranks in two halves, one while the other is computed: auto does so where the ranks' links are
    /// slower than reading a layer's weights twice
    #[arg(long, value_enum, default_value_t = OverlapWhen::Auto)]
    pub overlap: OverlapWhen,
    /// What ranks talk over
    #[arg(long, value_enum, default_value_t = TransportName::Auto, env = "THUNDER_TRANSPORT")]
    pub transport: TransportName,
}

/// `--parallel`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parallel {
    /// Every layer over all ranks.
    Tensor,
    /// Layers one after the other.
    Pipeline,
}

/// `--activations`.
#[derive(ValueEnum, Serialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum ActivationBits {
    /// bf16 for prompts, integers of one byte elsewhere, and of two where that costs precision.
    Auto,
    /// As auto, with one byte everywhere.
    Int8,
    /// As auto, with two bytes everywhere.
    Bf16,
    /// Integers of two bytes.
    Int16,
    /// Plain floats.
    F32,
}

impl From<ActivationBits> for Activations {
    fn from(bits: ActivationBits) -> Self {
        match bits {
            ActivationBits::Auto => Self::Auto,
            ActivationBits::Int8 => Self::Int8,
            ActivationBits::Bf16 => Self::Bf16,
            ActivationBits::Int16 => Self::Int16,
            ActivationBits::F32 => Self::F32,
        }
    }
}

/// `--overlap`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverlapWhen {
    /// Where it should pay.
    Auto,
    /// For every prompt.
    Always,
    /// Never.
    Never,
}

impl From<OverlapWhen> for Overlap {
    fn from(when: OverlapWhen) -> Self {
        match when {
            OverlapWhen::Auto => Self::Auto,
            OverlapWhen::Always => Self::Always,
            OverlapWhen::Never => Self::Never,
        }
    }
}

/// `--kv`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvBits {
    /// Half-precision floats.
    F16,
    /// One byte, with a scale for each head and token.
    Int8,
}

impl From<KvBits> for KvFormat {
    fn from(bits: KvBits) -> Self {
        match bits {
            KvBits::F16 => Self::F16,
            KvBits::Int8 => Self::Int8,
        }
    }
}

/// `--transport`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportName {
    /// Shared memory on one machine, else RDMA or TCP.
    Auto,
    /// Shared memory only.
    Shm,
    /// TCP even on one machine.
    Tcp,
    /// RDMA wherever there is a device.
    Rdma,
}

impl TransportName {
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }
}

impl Layout {
    /// Ranks that are asked for: --ranks, or as many as --split has shares.
    pub fn world_size(&self) -> usize {
        self.ranks.map_or(self.split.len().max(1), usize::from)
    }
}

/// A model's folder and the name to serve it under.
pub fn find_model(name: &str) -> anyhow::Result<(PathBuf, String)> {
    if name == builtin::NAME {
        return Ok((builtin::folder()?, name.to_owned()));
    }
    let located = thunder_hub::locate(name)?;
    let served = match located.repo {
        Some(repo) => repo,
        None => {
            let folder = located.folder.canonicalize().unwrap_or_else(|_| located.folder.clone());
            folder.file_name().map_or_else(|| name.to_owned(), |n| n.to_string_lossy().into_owned())
        }
    };
    Ok((located.folder, served))
}

/// The plan that the arguments ask for, for so many ranks.
pub fn plan(folder: &ModelFolder, layout: &Layout, ranks: usize) -> anyhow::Result<Plan> {
    let weights = match layout.split.len() {
        0 => vec![1.0; ranks],
        n if n == ranks => layout.split.clone(),
        n => bail!("--split has {n} weights for {ranks} ranks: give one for each rank"),
    };
    let mode = match layout.parallel {
        Parallel::Tensor => Parallelism::Tensor,
        Parallel::Pipeline => Parallelism::Pipeline,
    };
    Ok(Plan::new(&folder.spec, mode, &weights)?)
}

/// An engine in this process, which is rank 0.
pub struct Session {
    /// Takes requests.
    pub engine: Engine,
    /// How the model is split.
    pub plan: Plan,
    /// What each rank takes.
    pub demands: Vec<Demand>,
    /// What the ranks talk over, in words.
    pub transport: String,
    /// Bytes of an embedding of which a step reads a few rows only (0 if it is the output projection too).
    pub embedding_bytes: u64,
    /// What its products are.
    pub multiplied: Multiplied,
    scheduler: JoinHandle<Result<(), EngineError>>,
    ranks: Option<LocalRanks>,
}

/// What a token is multiplied with, on all ranks together.
#[derive(Debug, Clone, Copy)]
pub struct Multiplied {
    /// Weights of the layers.
    pub layers: u64,
    /// Weights of the output projection.
    pub head: u64,
    /// Whether they are quantized.
    pub quantized: bool,
}

/// Whether this process will be rank 0.
pub fn is_head() -> anyhow::Result<bool> {
    Ok(leads(Config::from_env()?.as_ref()))
}

fn leads(joined: Option<&Config>) -> bool {
    joined.is_none_or(|config| config.rank == 0)
}

/// Forms the group and loads the model. `None` on ranks other than 0: they have followed rank 0 to its end.
pub fn open(model: &str, args: &EngineArgs) -> anyhow::Result<Option<Session>> {
    let (path, name) = find_model(model)?;
    let folder = ModelFolder::open(&path)?;
    let joined = Config::from_env()?;
    // What only rank 0 needs comes first: what is wrong with it is found before there are ranks, and what reading it took for
    // a moment is given back before the weights take memory.
    let text =
        if leads(joined.as_ref()) { Some((folder.tokenizer()?, folder.chat_template()?)) } else { None };
    thunder_compute::memory::give_back();
    let (config, ranks) = match joined {
        Some(config) => (Some(config), None),
        None if args.layout.world_size() == 1 => (None, None),
        None => {
            // Errors that every rank would find are found before there are ranks.
            demand(&folder, &plan(&folder, &args.layout, args.layout.world_size())?, args.layout.kv.into())?;
            let (config, ranks) = LocalRanks::start(args.layout.world_size(), args.transport.name())?;
            (Some(config), Some(ranks))
        }
    };
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<usize>().ok());
    let (local_rank, local_ranks) = match ranks {
        Some(_) => (0, args.layout.world_size()),
        None => (number(LOCAL_RANK).unwrap_or(0), number(LOCAL_RANKS).unwrap_or(1).max(1)),
    };
    let mut world = match config {
        Some(mut config) => {
            if std::env::var_os("THUNDER_STALL_LIMIT_MS").is_none() {
                config.stall_limit = STALL_LIMIT;
            }
            if std::env::var_os("THUNDER_RING_BYTES").is_none() {
                config.ring_bytes = RING_BYTES;
            }
            Group::init(config)?
        }
        None => Group::solo(),
    };
    let plan = plan(&folder, &args.layout, world.size())?;
    let demands = demand(&folder, &plan, args.layout.kv.into())?;
    let limits = limits(&folder, args, &demands, &mut world, local_ranks)?;
    let cpu = cpu_config(args, local_rank, local_ranks)?;
    let capacity = Capacity {
        rows: limits.rows,
        logit_rows: limits.sequences,
        kv_blocks: limits.kv_blocks,
        kv_format: args.layout.kv.into(),
    };
    let transport = transport(&world);
    let bar = if text.is_some() { progress_bar(demands[0].weight_bytes) } else { ProgressBar::hidden() };
    tracing::info!(
        ranks = plan.ranks(),
        transport,
        kv_tokens = limits.kv_blocks * KV_BLOCK_TOKENS,
        ?cpu,
        "group formed"
    );
    let began = Instant::now();
    let mut rank =
        RankWorker::load(&folder, &plan, world, &cpu, capacity, &mut |done, _| bar.set_position(done))?;
    bar.finish_and_clear();
    tracing::info!(model = %path.display(), seconds = began.elapsed().as_secs_f64(), "loaded");
    let Some((tokenizer, chat_template)) = text else {
        let followed = rank.follow();
        if followed.is_err() {
            std::thread::sleep(LAST_TO_LEAVE);
        }
        return Ok(followed.map(|()| None)?);
    };
    let info = ModelInfo {
        name,
        context_length: context(&folder, args).min(limits.kv_blocks * KV_BLOCK_TOKENS),
        vocab_size: folder.spec.vocab,
        tokenizer,
        chat_template,
        default_sampling: default_sampling(&folder),
        ranks: plan.ranks(),
    };
    let (engine, inbox) = Engine::channel(info, MAX_WAITING);
    let info = Arc::new(engine.info().clone());
    let scheduler = EngineLoop::new(rank, info, inbox, limits, folder.spec.eos.clone());
    let scheduler = std::thread::Builder::new().name("scheduler".into()).spawn(move || scheduler.run())?;
    let embedding_bytes = thunder_model::model::lookup_bytes(&folder);
    let multiplied = Multiplied {
        layers: folder.spec.layer_weights(),
        head: (folder.spec.hidden * folder.spec.vocab) as u64,
        quantized: folder.quantization.is_any(),
    };
    Ok(Some(Session { engine, plan, demands, transport, embedding_bytes, multiplied, scheduler, ranks }))
}

impl Session {
    /// Ends the engine once its requests are answered, and the ranks that were started.
    ///
    /// # Errors
    /// Why the engine had stopped before.
    pub fn close(self) -> anyhow::Result<()> {
        let Self { engine, scheduler, ranks, .. } = self;
        drop(engine);
        let outcome = scheduler.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        if let Some(mut ranks) = ranks {
            ranks.finish();
        }
        Ok(outcome?)
    }
}

/// What ranks talk over, for people.
fn transport(world: &Group) -> String {
    let mut names: Vec<String> = (0..world.size())
        .filter(|rank| *rank != world.rank())
        .map(|rank| world.transport(rank).to_string())
        .collect();
    names.sort();
    names.dedup();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn cpu_config(args: &EngineArgs, local_rank: usize, local_ranks: usize) -> anyhow::Result<CpuConfig> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let share = (cores / local_ranks).max(1);
    let threads = args.threads.unwrap_or(share);
    if threads == 0 || threads > 1024 {
        bail!("--threads is {threads}, but must be between 1 and 1024");
    }
    Ok(CpuConfig {
        threads,
        packing_threads: share,
        first_core: (args.pin && threads * local_ranks <= allowed_cores().len())
            .then_some(local_rank * threads),
        isa: Isa::detect().map_err(anyhow::Error::msg)?,
        activations: args.activations.into(),
        overlap: args.overlap.into(),
    })
}

fn context(folder: &ModelFolder, args: &EngineArgs) -> usize {
    args.context.unwrap_or(folder.spec.context).min(folder.spec.context)
}

/// How many tokens the cache holds: enough for every slot's context, if all ranks have memory for that.
fn limits(
    folder: &ModelFolder,
    args: &EngineArgs,
    demands: &[Demand],
    world: &mut Group,
    local_ranks: usize,
) -> anyhow::Result<Limits> {
    if args.context.is_some_and(|context| context < KV_BLOCK_TOKENS) {
        bail!("--context is {}, but must be at least {KV_BLOCK_TOKENS}", args.context.unwrap_or(0));
    }
    if let Some(asked) = args.context.filter(|asked| *asked > folder.spec.context) {
        bail!("--context is {asked}, but the model was made for {}", folder.spec.context);
    }
    let sequences = usize::from(args.max_batch);
    let context = context(folder, args);
    let own = &demands[world.rank()];
    let available = thunder_compute::memory::available_bytes().map(|bytes| {
        if local_ranks < demands.len() {
            return bytes / local_ranks as u64;
        }
        // All ranks are here: each may take what its share of the weights is of all.
        let all: u64 = demands.iter().map(|demand| demand.weight_bytes).sum();
        (u128::from(bytes) * u128::from(own.weight_bytes) / u128::from(all.max(1))) as u64
    });
    let mut tokens = (context * sequences) as u64;
    if let Some(available) = available {
        // A part is left for buffers, and for everything else on the machine.
        let for_kv = (available * 9 / 10).saturating_sub(own.weight_bytes);
        let fits = for_kv / own.kv_bytes_per_token.max(1);
        let least = args.context.unwrap_or(KV_BLOCK_TOKENS * 8).min(context) as u64;
        if fits < least {
            return Err(ModelError::DoesNotFit {
                rank: world.rank(),
                weights: own.weight_bytes,
                kv: least * own.kv_bytes_per_token,
                tokens: least as usize,
                available,
            }
            .into());
        }
        tokens = tokens.min(fits);
    }
    // All ranks have the same blocks: as many as the one with the least room has.
    let mut blocks = [tokens.div_ceil(KV_BLOCK_TOKENS as u64)];
    world.all_reduce(&mut blocks, Op::Min)?;
    Ok(Limits { sequences, rows: STEP_ROWS, kv_blocks: blocks[0] as usize })
}

/// generation_config.json's sampling: greedy, unless it asks for sampling.
fn default_sampling(folder: &ModelFolder) -> Sampling {
    let generation = &folder.generation;
    let penalty = generation.repetition_penalty.unwrap_or(1.0);
    if generation.do_sample != Some(true) {
        return Sampling { repetition_penalty: penalty, ..Sampling::default() };
    }
    Sampling {
        temperature: generation.temperature.unwrap_or(1.0),
        top_p: generation.top_p.unwrap_or(1.0),
        top_k: generation.top_k.and_then(|k| usize::try_from(k).ok()).unwrap_or(0),
        min_p: generation.min_p.unwrap_or(0.0),
        repetition_penalty: penalty,
        ..Sampling::default()
    }
}

fn progress_bar(bytes: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("loading {bar:40} {bytes}/{total_bytes} {bytes_per_sec}");
    ProgressBar::new(bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Reads a model's headers, for commands that compute nothing.
pub fn open_folder(model: &str) -> anyhow::Result<ModelFolder> {
    let (path, _) = find_model(model)?;
    ModelFolder::open(&path).with_context(|| format!("model {model}"))
}
