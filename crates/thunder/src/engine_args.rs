//! Command line options that describe an engine, and the [`EngineSpec`] that they fill.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use clap::{Args, ValueEnum};
use serde::Serialize;
use thunder_collectives::{Config, TransportChoice, parse_ports};
use thunder_compute::{Activations, KvFormat, Overlap};
use thunder_engine::assembly::{DeviceChoice, DiskCacheSpec, EngineSpec, Forming};
use thunder_model::{ExpertSplit, ModelFolder, Parallelism, ShardPlan};

use crate::model_arg::completer;

/// Default number of requests that decode together.
pub const DEFAULT_MAX_BATCH: u16 = 16;

/// The default of `--step-time`, as people write it.
pub const DEFAULT_STEP_TIME: &str = "15ms";

/// How the model is split over ranks.
#[derive(Args, Debug, Clone)]
pub struct LayoutArgs {
    /// Ranks to start on this machine [default: the number of --split's weights, else 1]
    ///
    /// Several ranks on one machine help if one process cannot use all cores or memory channels.
    /// For several machines, leave --ranks out and start this command by `thunder launch`: a
    /// process with THUNDER_RANK, THUNDER_WORLD_SIZE and THUNDER_COORDINATOR (or MLX's variables)
    /// in its environment joins that group.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub ranks: Option<u16>,
    /// How layers are divided over ranks
    #[arg(long, value_enum, default_value_t = ParallelArg::Tensor)]
    pub parallel: ParallelArg,
    /// Pipeline stages, each of which is divided over consecutive ranks. For groups of machines
    /// with fast links inside a group and slow links between groups
    ///
    /// The number of ranks must be a multiple of N. --parallel tensor is the same as 1 stage,
    /// --parallel pipeline the same as one stage for each rank.
    #[arg(long, value_name = "N", conflicts_with = "parallel",
        value_parser = clap::value_parser!(u16).range(1..=256))]
    pub stages: Option<u16>,
    /// How routed experts are divided over ranks
    ///
    /// Only for models with experts and --parallel tensor. All values give the same answers.
    #[arg(long, value_enum, default_value_t = ExpertsArg::Auto)]
    pub experts: ExpertsArg,
    /// Relative share of each rank, e.g. 3,1: rank 0 holds three quarters [default: even shares]
    ///
    /// Use it if machines differ in speed or memory, because the slowest rank determines the speed.
    #[arg(long, value_name = "W,W,…", value_delimiter = ',')]
    pub split: Vec<f64>,
    /// Number format of the KV cache
    #[arg(long, value_enum, default_value_t = KvArg::F16)]
    pub kv: KvArg,
}

/// Checks that `--ranks`, if given, is the size of the group in the environment.
///
/// # Errors
/// Names both numbers.
pub fn check_ranks(asked: Option<u16>, group: &Config) -> anyhow::Result<()> {
    let Some(asked) = asked.map(usize::from).filter(|asked| *asked != group.size) else { return Ok(()) };
    let size = group.size;
    let found = match std::env::var_os("THUNDER_RANK") {
        Some(_) => format!("THUNDER_WORLD_SIZE={size}"),
        None => format!("MLX's variables for a group of {size}"),
    };
    bail!(
        "--ranks {asked} contradicts {found} in the environment: leave out --ranks to join that group, or unset the \
         variables to start {asked} ranks here"
    )
}

/// How an engine is built and how it computes.
#[derive(Args, Debug, Clone)]
pub struct EngineArgs {
    /// How the model is split over ranks.
    #[command(flatten)]
    pub layout: LayoutArgs,
    /// Device to compute on: auto, cpu, gpu or gpu:N
    ///
    /// auto uses a real GPU if there is one, otherwise the CPU. gpu fails if there is none. The
    /// ranks of a machine use its GPUs in turn. gpu:N is number N of `thunder devices list`; it may
    /// also be a driver that computes on the CPU, for tests.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Auto, env = "THUNDER_DEVICE")]
    pub device: DeviceChoice,
    /// Compute threads of each rank [default: this machine's cores divided by its ranks]
    ///
    /// Use fewer threads to leave cores to other programs. Loading always uses all cores to pack
    /// the weights.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Pin each compute thread to its own core, if there are enough cores
    ///
    /// Of a rank that computes on a GPU, the threads that sum for it over the ranks are pinned.
    /// Faster on a machine that does nothing else. Slower if other programs run, because a pinned
    /// thread cannot move away from them.
    #[arg(long)]
    pub pin: bool,
    /// How much memory the engine takes.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// What is kept on disk.
    #[command(flatten)]
    pub disk: DiskArgs,
    /// How ranks find each other.
    #[command(flatten)]
    pub forming: FormingArgs,
    /// Precision of activations in products with weights
    ///
    /// Fewer bits are faster. The errors below were measured on the logits of the built-in model.
    #[arg(long, value_enum, default_value_t = ActivationsArg::Auto)]
    pub activations: ActivationsArg,
    /// When to all-reduce one part of a prompt while the next part is computed
    #[arg(long, value_enum, default_value_t = OverlapArg::Auto)]
    pub overlap: OverlapArg,
    /// Time that a step may take for each new prompt while answers are running, e.g. 50ms or 0.1s
    ///
    /// New prompts are read in pieces, in the same steps as running answers. A smaller value gives
    /// running answers more even gaps between tokens; a larger value lets new requests start
    /// sooner.
    ///
    /// A step takes this long for one waiting prompt, and at most five times as long for five or
    /// more. If the model has experts, it may take up to 24 times as long, because even a short
    /// piece reads most of the experts. Prompts always get at least as much time as the answers in
    /// the step, so on slow machines a step takes up to twice as long as an answer's token. Steps
    /// without running answers have no time limit. Only rank 0 uses this option.
    #[arg(long, value_name = "TIME", default_value = DEFAULT_STEP_TIME, value_parser = step_time)]
    pub step_time: Duration,
    /// Generate one token at a time, without guessing
    ///
    /// By default, the engine guesses text that repeats (edited code, quotations), and one step
    /// verifies several tokens if measurements show that this is faster. Answers are the same.
    #[arg(long)]
    pub no_speculation: bool,
    /// A small model that guesses the next tokens where the text does not repeat
    ///
    /// `builtin`, a folder, a GGUF file, or the name of a model in the Hugging Face cache. Answers
    /// are the same, and faster if guesses are cheap and often right. Choose the smallest model of
    /// the same family, at most a tenth of the size, with the same tokenizer. Only rank 0 loads it,
    /// as a whole, with its own KV cache; both count for --memory. The engine uses it only while
    /// measurements show that this is faster.
    #[arg(long, value_name = "MODEL", conflicts_with = "no_speculation", add = completer())]
    pub draft: Option<OsString>,
    /// Transport between ranks
    #[arg(long, value_enum, default_value_t = TransportArg::Auto, env = "THUNDER_TRANSPORT")]
    pub transport: TransportArg,
}

/// How much memory an engine takes.
#[derive(Args, Debug, Clone)]
pub struct CacheArgs {
    /// Memory limit for all ranks of one machine together, e.g. 8G or 512M [default: the weights,
    /// and a third of the remaining memory for the KV cache]
    ///
    /// The limit covers weights, buffers and the KV cache, which gets the rest. Raise the limit on
    /// a machine that does nothing else, for longer contexts or more parallel requests. The default
    /// leaves room for other programs or a second server.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub memory: Option<u64>,
    /// Maximum tokens of prompt and answer together [default: the model's maximum, or less if
    /// memory is short]
    ///
    /// A smaller number needs less memory for the KV cache. A given number that does not fit into
    /// memory is an error.
    #[arg(long, value_name = "TOKENS")]
    pub context: Option<usize>,
    /// Maximum number of requests that decode together; others wait
    ///
    /// A larger batch gives more tokens a second in total, but fewer for each request, and needs
    /// more memory for the KV cache.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_BATCH, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub max_batch: u16,
    /// Compute every prompt completely, and keep nothing for later prompts with the same beginning
    ///
    /// Answers are the same with and without the cache. The cache uses only memory that no request
    /// needs; for models with states, each request of --max-batch reserves a second state. Turn the
    /// cache off for measurements, or to hide from clients whether another client sent the same
    /// prompt: a shorter time to the first token reveals it.
    #[arg(long)]
    pub no_prefix_cache: bool,
}

/// What an engine keeps on disk.
#[derive(Args, Debug, Clone)]
pub struct DiskArgs {
    /// Folder for computed prompts: later prompts with the same beginning read it from disk, also
    /// after a restart [default: memory only]
    ///
    /// Answers do not change. Each server needs its own folder, in which every rank has a part.
    /// Blocks are written while steps run; if the disk is too slow, blocks are left out. Anybody
    /// who can read the folder can reconstruct the prompts.
    #[arg(long, value_name = "DIR", conflicts_with = "no_prefix_cache")]
    pub cache_dir: Option<PathBuf>,
    /// Size limit of --cache-dir for all ranks of one machine together, e.g. 20G; the least
    /// recently used blocks are removed
    #[arg(long, value_name = "SIZE", default_value = "20G", value_parser = memory)]
    pub cache_size: u64,
}

impl DiskArgs {
    /// The same, for an engine's spec.
    fn spec(&self) -> Option<DiskCacheSpec> {
        self.cache_dir.clone().map(|folder| DiskCacheSpec { folder, bytes: self.cache_size })
    }
}

/// How ranks find each other.
#[derive(Args, Debug, Clone)]
pub struct FormingArgs {
    /// Seconds within which all ranks must join [default: 60]
    ///
    /// Raise it if you start machines by hand, or if they load slowly.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub wait: Option<u32>,
    /// Ports on which this machine's ranks accept connections from ranks of other machines, e.g.
    /// 42000-42063 [default: any free port]
    ///
    /// For firewalls: open these ports on every machine, and the coordinator's port on the machine
    /// of rank 0. While a group forms, each rank of a machine needs its own port.
    #[arg(long, value_name = "FIRST-LAST", env = "THUNDER_PORTS", value_parser = parse_ports)]
    pub ports: Option<RangeInclusive<u16>>,
}

impl FormingArgs {
    /// The same, for a rank's spec.
    pub fn spec(&self) -> Forming {
        Forming {
            wait: self.wait.map(|seconds| Duration::from_secs(seconds.into())),
            ports: self.ports.clone(),
        }
    }
}

/// Bytes from a number with a unit, in powers of 1024.
fn memory(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "M" | "MB" | "MIB" => Some(20),
        "G" | "GB" | "GIB" => Some(30),
        "T" | "TB" | "TIB" => Some(40),
        _ => None,
    };
    let number = digits.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    let bytes = number.zip(unit).map(|(number, unit)| number * f64::from(unit).exp2());
    bytes
        .filter(|bytes| *bytes < u64::MAX as f64)
        .map(|bytes| bytes as u64)
        .ok_or_else(|| "write a number with a unit, e.g. 8G, 1.5G or 512M".to_owned())
}

/// A time from a number with a unit, up to a minute.
pub fn step_time(text: &str) -> Result<Duration, String> {
    let (digits, unit) = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(digits), _) => (digits, 1e-3),
        (None, Some(digits)) => (digits, 1.0),
        (None, None) => ("", 0.0),
    };
    let seconds = digits.parse().ok().map(|number: f64| number * unit);
    seconds
        .filter(|seconds| (1e-3..=60.0).contains(seconds))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "write a time of 1ms to 60s with its unit, e.g. 50ms or 0.1s".to_owned())
}

impl LayoutArgs {
    /// Ranks to start: --ranks, or one for each weight of --split.
    pub fn ranks(&self) -> usize {
        self.ranks.map_or(self.split.len().max(1), usize::from)
    }

    /// How a model would be split over `ranks` ranks.
    ///
    /// # Errors
    /// When it cannot be split so.
    pub fn shard_plan(&self, folder: &ModelFolder, ranks: usize) -> anyhow::Result<ShardPlan> {
        Ok(self.spec(folder.path.clone(), String::new()).shard_plan(folder, ranks)?)
    }

    /// A spec with this layout and defaults for the rest.
    pub fn spec(&self, model: PathBuf, name: String) -> EngineSpec {
        EngineSpec {
            parallelism: self.parallel.into(),
            stages: self.stages.map(usize::from),
            experts: self.experts.into(),
            split: self.split.clone(),
            kv: self.kv.into(),
            ..EngineSpec::new(model, name)
        }
    }
}

impl EngineArgs {
    /// The spec of an engine with these options.
    pub fn spec(&self, model: PathBuf, name: String) -> EngineSpec {
        EngineSpec {
            device: self.device,
            threads: self.threads,
            pin: self.pin,
            context: self.cache.context,
            memory: self.cache.memory,
            max_batch: self.cache.max_batch.into(),
            step_time: self.step_time,
            prefix_cache: !self.cache.no_prefix_cache,
            disk_cache: self.disk.spec().filter(|_| !self.cache.no_prefix_cache),
            speculation: !self.no_speculation,
            activations: self.activations.into(),
            overlap: self.overlap.into(),
            transport: self.transport.into(),
            ..self.layout.spec(model, name)
        }
    }
}

/// `--parallel`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParallelArg {
    /// Each rank holds a part of every layer, and all ranks compute each token together. For fast
    /// links
    Tensor,
    /// Each rank holds some whole layers. For slow links: each rank sends one message in a step. A
    /// single request does not get faster
    Pipeline,
}

impl From<ParallelArg> for Parallelism {
    fn from(parallel: ParallelArg) -> Self {
        match parallel {
            ParallelArg::Tensor => Self::Tensor,
            ParallelArg::Pipeline => Self::Pipeline,
        }
    }
}

/// `--experts`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertsArg {
    /// channels, or whole if the experts have so few quantization groups or blocks of channels that
    /// a rank would get over 1.25 times as much as with whole experts
    Auto,
    /// Each rank holds some channels of every expert, so its share of the work is the same for
    /// every token
    Channels,
    /// Each rank holds some whole experts. Reads are fewer and larger, but a token may keep one
    /// rank busy while another is idle
    Whole,
}

impl From<ExpertsArg> for ExpertSplit {
    fn from(experts: ExpertsArg) -> Self {
        match experts {
            ExpertsArg::Auto => Self::Auto,
            ExpertsArg::Channels => Self::Channels,
            ExpertsArg::Whole => Self::Whole,
        }
    }
}

/// `--activations`.
#[derive(ValueEnum, Serialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum ActivationsArg {
    /// For everyday use; error 0.8 %. Prompts use bf16 if the CPU has a matrix unit (AMX).
    /// Everything else uses int8, except MLP channels, which use int16 because a few of their
    /// values are far larger than the others
    Auto,
    /// For faster prompts without a matrix unit; error 1.3 %. Like auto, but int8 for MLP channels
    /// too
    Int8,
    /// For answers closer to the original model; error at most 0.4 %. Like auto, but 2 bytes
    /// everywhere. Slower in batches, and on prompts without a matrix unit
    Bf16,
    /// For comparing machines: 2-byte integers, whose products with quantized weights have the same
    /// bits on every machine
    Int16,
    /// For finding out whether activations cause a problem: plain floats, many times slower on
    /// prompts
    F32,
}

impl From<ActivationsArg> for Activations {
    fn from(activations: ActivationsArg) -> Self {
        match activations {
            ActivationsArg::Auto => Self::Auto,
            ActivationsArg::Int8 => Self::Int8,
            ActivationsArg::Bf16 => Self::Bf16,
            ActivationsArg::Int16 => Self::Int16,
            ActivationsArg::F32 => Self::F32,
        }
    }
}

/// `--overlap`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverlapArg {
    /// Overlap if the all-reduces are expected to take longer than its cost: reading a layer's
    /// weights a second time
    Auto,
    /// Overlap for every prompt
    Always,
    /// Do not overlap. For prompts in the fewest passes, or to measure the gain of overlap
    Never,
}

impl From<OverlapArg> for Overlap {
    fn from(overlap: OverlapArg) -> Self {
        match overlap {
            OverlapArg::Auto => Self::Auto,
            OverlapArg::Always => Self::Always,
            OverlapArg::Never => Self::Never,
        }
    }
}

/// `--kv`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvArg {
    /// 16-bit floats
    F16,
    /// 8-bit integers, with a scale for each head and token. For long contexts: little more than
    /// half of the memory and reading time of f16
    Int8,
}

impl From<KvArg> for KvFormat {
    fn from(kv: KvArg) -> Self {
        match kv {
            KvArg::F16 => Self::F16,
            KvArg::Int8 => Self::Int8,
        }
    }
}

/// `--transport`.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportArg {
    /// Shared memory within a machine; between machines RDMA if they have it, otherwise TCP
    Auto,
    /// Shared memory only. All ranks must be on one machine
    Shm,
    /// TCP, also within a machine. For finding out whether another transport causes a problem
    Tcp,
    /// RDMA wherever there is a device, also within a machine. For measuring RDMA
    Rdma,
}

impl TransportArg {
    /// The value of `THUNDER_TRANSPORT`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }
}

impl From<TransportArg> for TransportChoice {
    fn from(transport: TransportArg) -> Self {
        match transport {
            TransportArg::Auto => Self::Auto,
            TransportArg::Shm => Self::Shm,
            TransportArg::Tcp => Self::Tcp,
            TransportArg::Rdma => Self::Rdma,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_steps_have_units() {
        for (text, ms) in [("50ms", 50), ("0.1s", 100), ("1ms", 1), ("60s", 60_000), ("2.5ms", 2)] {
            assert_eq!(step_time(text).map(|time| time.as_millis()), Ok(ms), "{text}");
        }
        for wrong in ["50", "", "ms", "s", "0ms", "-1s", "61s", "1m", "nans", "1e-9s", "50 µs"] {
            let error = step_time(wrong).expect_err(wrong);
            assert!(error.contains("50ms"), "{error}");
        }
        assert_eq!(step_time(DEFAULT_STEP_TIME), Ok(thunder_engine::STEP_TIME));
    }

    #[test]
    fn sizes_of_memory_have_units() {
        for (text, bytes) in [("8G", 8 << 30), ("1.5GiB", 3 << 29), ("512m", 512 << 20), ("2T", 2 << 40)] {
            assert_eq!(memory(text), Ok(bytes), "{text}");
        }
        for wrong in ["8", "", "G", "-1G", "0G", "8Q", "1e300G", "infG", "8 G G", "8é"] {
            let error = memory(wrong).expect_err(wrong);
            assert!(error.contains("8G"), "{error}");
        }
    }
}
