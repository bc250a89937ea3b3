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

/// Requests that decode together, unless the user says otherwise.
pub const DEFAULT_MAX_BATCH: u16 = 16;

/// The default of `--step-time`, as people write it.
pub const DEFAULT_STEP_TIME: &str = "15ms";

/// How the model is split over ranks.
#[derive(Args, Debug, Clone)]
pub struct LayoutArgs {
    /// Ranks to start on this machine [default: the number of --split's weights, else 1]
    ///
    /// More ranks on one machine help where one process cannot use all cores or memory channels. To
    /// use several machines, start this command under `thunder launch`, without --ranks: with
    /// THUNDER_RANK, THUNDER_WORLD_SIZE and THUNDER_COORDINATOR (or MLX's variables) in the
    /// environment, this process joins that group.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub ranks: Option<u16>,
    /// How layers are split over ranks
    #[arg(long, value_enum, default_value_t = ParallelArg::Tensor)]
    pub parallel: ParallelArg,
    /// Both: a pipeline of this many stages, each split over its ranks, which are consecutive. For
    /// groups of machines with fast links within a group, and slow ones between groups
    ///
    /// The number of ranks must be a multiple of it. --parallel tensor is 1 stage, --parallel
    /// pipeline as many as ranks.
    #[arg(long, value_name = "N", conflicts_with = "parallel",
        value_parser = clap::value_parser!(u16).range(1..=256))]
    pub stages: Option<u16>,
    /// How routed experts are divided over ranks
    ///
    /// For models with experts and --parallel tensor. Answers are the same.
    #[arg(long, value_enum, default_value_t = ExpertsArg::Auto)]
    pub experts: ExpertsArg,
    /// Relative share of each rank, e.g. 3,1: rank 0 holds three quarters [default: even shares]
    ///
    /// Use it when machines differ in speed or memory: the slowest rank sets the pace.
    #[arg(long, value_name = "W,W,…", value_delimiter = ',')]
    pub split: Vec<f64>,
    /// Number format of the KV cache
    #[arg(long, value_enum, default_value_t = KvArg::F16)]
    pub kv: KvArg,
}

/// Checks that `--ranks`, if given, is the size of the group that the environment describes.
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
    /// What computes: auto, cpu, gpu or gpu:N
    ///
    /// auto takes a GPU if there is a real one, else the CPU. gpu fails if there is none. Ranks of
    /// one machine take its GPUs in turn. gpu:N is number N of `thunder devices list`, and may be a
    /// driver that computes on the CPU (for tests).
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Auto, env = "THUNDER_DEVICE")]
    pub device: DeviceChoice,
    /// Compute threads of each rank [default: this machine's cores divided by its ranks]
    ///
    /// Fewer leave cores to other programs. While weights are packed at load, all cores are used.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Pin each compute thread to its own core, if there are enough cores
    ///
    /// Faster on a machine that does nothing else, slower if other programs run: a pinned thread
    /// cannot move away from them.
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
    /// Fewer bits are faster. The errors below are of the built-in model's logits.
    #[arg(long, value_enum, default_value_t = ActivationsArg::Auto)]
    pub activations: ActivationsArg,
    /// When to all-reduce one part of a prompt while the next part is computed
    #[arg(long, value_enum, default_value_t = OverlapArg::Auto)]
    pub overlap: OverlapArg,
    /// How long a step may take that running answers wait for, for each new prompt that it reads,
    /// e.g. 50ms or 0.1s
    ///
    /// Prompts are read in pieces next to the running answers: with one prompt, a step takes this
    /// long, with five or more five times as long; up to 24 times where the model has experts, of
    /// which shorter pieces would read most anyway. Less time lets running answers go on more
    /// evenly, more time lets new requests begin sooner. Steps without running answers are as long
    /// as they may be. Prompts get at least as much time as the answers take by themselves, so on
    /// slow machines a step takes twice as long as an answer's token. Give it to rank 0.
    #[arg(long, value_name = "TIME", default_value = DEFAULT_STEP_TIME, value_parser = step_time)]
    pub step_time: Duration,
    /// Generate one token at a time, and never guess
    ///
    /// By default, text that repeats itself (code that is edited, quotations) is guessed, and a
    /// step verifies several tokens where that was measured to be faster. Answers are the same.
    #[arg(long)]
    pub no_speculation: bool,
    /// A small model that guesses the next tokens where the text does not repeat itself
    ///
    /// `builtin`, a folder, a GGUF file, or the name of a model in the Hugging Face cache. Answers
    /// are the same, and come faster if guesses are cheap and often right: take the smallest model
    /// of the same family, a tenth of the size or less. It must have the same tokenizer. Rank 0
    /// alone reads it and holds it whole, with a KV cache of its own; both count for --memory. It
    /// is used only while that was measured to be faster.
    #[arg(long, value_name = "MODEL", conflicts_with = "no_speculation", add = completer())]
    pub draft: Option<OsString>,
    /// Transport between ranks
    #[arg(long, value_enum, default_value_t = TransportArg::Auto, env = "THUNDER_TRANSPORT")]
    pub transport: TransportArg,
}

/// How much memory an engine takes.
#[derive(Args, Debug, Clone)]
pub struct CacheArgs {
    /// Most memory that the ranks on one machine use together, e.g. 8G or 512M [default: what the
    /// weights need, and a third of what is then left for the KV cache]
    ///
    /// Counts weights, KV cache and buffers; the KV cache gets what the others leave. Raise it on a
    /// machine that does nothing else, for longer contexts or more requests at a time. The default
    /// leaves room for other programs or a second server.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub memory: Option<u64>,
    /// Most tokens of prompt and answer together [default: the model's maximum, or less if memory
    /// is short]
    ///
    /// A smaller number takes less memory for the KV cache. If the number is given and does not
    /// fit, that is an error.
    #[arg(long, value_name = "TOKENS")]
    pub context: Option<usize>,
    /// Requests that decode together; others wait
    ///
    /// A larger batch answers more requests in all, each of them more slowly, and takes more memory
    /// for the KV cache.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_BATCH, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub max_batch: u16,
    /// Compute every prompt anew, and keep nothing of it for later prompts that begin alike
    ///
    /// Answers are the same with and without. The cache uses memory that no request needs now;
    /// models with states set aside a second state for each request of --max-batch. Turn it off to
    /// measure, or if no client may learn from the time to first token whether another one has sent
    /// the same prompt.
    #[arg(long)]
    pub no_prefix_cache: bool,
}

/// What an engine keeps on disk.
#[derive(Args, Debug, Clone)]
pub struct DiskArgs {
    /// Folder for what was computed of prompts, so that later prompts that begin alike need not
    /// compute it again, also after a restart [default: only memory is used]
    ///
    /// Answers are the same. Each server needs a folder of its own; every rank keeps its own part
    /// in it. Blocks are written next to the steps, or not at all if the disk is too slow. Anybody
    /// who can read the folder can find out what was asked.
    #[arg(long, value_name = "DIR", conflicts_with = "no_prefix_cache")]
    pub cache_dir: Option<PathBuf>,
    /// Most bytes in --cache-dir for the ranks of one machine together, e.g. 20G; what was longest
    /// without use is removed
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
    /// Seconds that all ranks may take to join [default: 60]
    ///
    /// Raise it if machines are started by hand or load slowly.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub wait: Option<u32>,
    /// Ports on which this machine's ranks take connections of other machines' ranks, e.g.
    /// 42000-42063 [default: any free port]
    ///
    /// For firewalls: open these ports on every machine, and the coordinator's on the machine of
    /// rank 0. While a group forms, each rank of a machine needs a port of its own.
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
    /// Each layer is split over all ranks: all compute every token together. Needs a fast link
    Tensor,
    /// Each rank holds some of the layers. For slow links: one message per step and rank, but no
    /// faster for one request
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
    /// Channels, unless experts have too few for the number of ranks
    Auto,
    /// Each rank holds some channels of every expert: all ranks are equally busy with every token
    Channels,
    /// Each rank holds some experts whole: fewer, larger reads, but a token may keep one rank busy
    /// and another idle
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
    /// Prompts: bf16 if the CPU has a matrix unit (AMX). Elsewhere int8, but int16 for MLP
    /// channels, where a few values are far larger than the others. For everyday use; error 0.8 %
    Auto,
    /// Like auto, but int8 for MLP channels too. For faster prompts without a matrix unit; error
    /// 1.3 %
    Int8,
    /// Like auto, but 2 bytes everywhere. For answers closer to the original model; slower in
    /// batches, and on prompts without a matrix unit; error at most 0.4 %
    Bf16,
    /// 2-byte integers. For comparing machines: products with quantized weights have the same bits
    /// on all of them
    Int16,
    /// Plain floats. For ruling out activations as the cause of a problem; many times slower on
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
    /// If the all-reduces are estimated to take longer than reading a layer's weights a second
    /// time, which is the cost
    Auto,
    /// For every prompt
    Always,
    /// Never. For one rank's prompts to be computed in the fewest passes, or to measure what
    /// overlap gives
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
    /// 1 byte, with a scale per head and token. For long contexts: little more than half of f16's
    /// memory and reading time
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
    /// Shared memory within a machine; RDMA between machines that have it, else TCP
    Auto,
    /// Shared memory only: all ranks must be on one machine
    Shm,
    /// TCP, also within a machine. For ruling out the other transports as the cause of a problem
    Tcp,
    /// RDMA wherever there is a device, also within a machine
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
