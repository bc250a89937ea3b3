//! What to run, as plain data: the command line and control messages both fill these types.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thunder_collectives::TransportChoice;
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{Activations, KvFormat, Overlap};
use thunder_model::error::human_bytes;
use thunder_model::{ExpertSplit, ModelError, ModelFolder, Parallelism, ShardPlan};

use super::device::DeviceChoice;
use super::threads::MAX_THREADS;
use crate::STEP_TIME;

/// Maximum adapters of an engine: a step's message has 16 bits for their number.
pub const MAX_ADAPTERS: usize = 256;

/// Maximum requests that decode together: [`EngineSpec::max_batch`] is 1 to this.
pub const MAX_BATCH: usize = 256;

/// One engine, the same on all of its ranks except where a field says otherwise.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineSpec {
    /// Folder with the model's files. The path may differ between hosts, the files may not.
    pub model: PathBuf,
    /// Name to serve the model under.
    pub name: String,
    /// Low-rank adapters that requests can choose by name.
    #[serde(default)]
    pub adapters: Vec<AdapterSpec>,
    /// Split each layer over the ranks, or give each rank consecutive layers.
    pub parallelism: Parallelism,
    /// Stages of consecutive layers, each split over the same number of ranks. `None`:
    /// `parallelism` decides.
    #[serde(default)]
    pub stages: Option<usize>,
    /// How the routed experts of a layer are divided among its ranks.
    #[serde(default)]
    pub experts: ExpertSplit,
    /// Relative share of each rank, in rank order. Empty: even shares.
    pub split: Vec<f64>,
    /// Number format of the KV cache.
    pub kv: KvFormat,
    /// Compute threads of each rank. `None`: the host's cores divided by its ranks. May differ
    /// between ranks.
    pub threads: Option<usize>,
    /// Pin each thread to its own core if the host has enough cores. May differ between ranks.
    pub pin: bool,
    /// Most tokens of prompt and answer together. `None`: the model's maximum, or less if memory is
    /// short.
    pub context: Option<usize>,
    /// Bytes that the engine's ranks on one host may use together, for weights, KV cache and
    /// buffers. `None`: what the weights need, and a part of the rest for the KV cache. May differ
    /// between ranks.
    pub memory: Option<u64>,
    /// Requests that decode together, 1 to [`MAX_BATCH`].
    pub max_batch: usize,
    /// Maximum time of a step that also reads prompts while answers are running. Rank 0 decides.
    #[serde(default = "default_step_time")]
    pub step_time: Duration,
    /// Keep computed prompts for later prompts with the same beginning.
    pub prefix_cache: bool,
    /// The prefix cache's second tier, on all ranks or on none.
    #[serde(default)]
    pub disk_cache: Option<DiskCacheSpec>,
    /// Guess tokens of texts that repeat themselves, and verify several in one step if that is
    /// faster. Answers do not change.
    pub speculation: bool,
    /// A small model that guesses tokens where the text does not repeat itself. Only rank 0 reads
    /// it; other ranks need not know about it.
    #[serde(default)]
    pub draft: Option<DraftSpec>,
    /// Precision of activations in products with weights.
    pub activations: Activations,
    /// When to all-reduce one part of a prompt while the next part is being computed.
    pub overlap: Overlap,
    /// Transport between ranks.
    pub transport: TransportChoice,
    /// The device that computes. May differ between ranks.
    #[serde(default)]
    pub device: DeviceChoice,
}

const fn default_step_time() -> Duration {
    STEP_TIME
}

/// Blocks of prompts on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskCacheSpec {
    /// Folder of one server's blocks; each rank has a folder in it. May differ between hosts.
    pub folder: PathBuf,
    /// Maximum bytes of all ranks on a host. May differ between hosts.
    pub bytes: u64,
}

/// A draft model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftSpec {
    /// Its name, for people.
    pub name: String,
    /// Its folder, or its GGUF file.
    pub model: PathBuf,
}

/// A low-rank adapter (LoRA).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterSpec {
    /// The name that requests give as their model.
    pub name: String,
    /// Its folder, as PEFT or MLX-LM write it. The path may differ between hosts.
    pub path: PathBuf,
}

impl EngineSpec {
    /// A spec with the defaults: even tensor-parallel shards, f16 KV cache, all cores, 16 requests
    /// at a time.
    pub fn new(model: impl Into<PathBuf>, name: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            name: name.into(),
            adapters: Vec::new(),
            parallelism: Parallelism::default(),
            stages: None,
            experts: ExpertSplit::default(),
            split: Vec::new(),
            kv: KvFormat::default(),
            threads: None,
            pin: false,
            context: None,
            memory: None,
            max_batch: 16,
            step_time: STEP_TIME,
            prefix_cache: true,
            disk_cache: None,
            speculation: true,
            draft: None,
            activations: Activations::default(),
            overlap: Overlap::default(),
            transport: TransportChoice::default(),
            device: DeviceChoice::default(),
        }
    }

    /// Checks everything that can be checked without the model.
    ///
    /// # Errors
    /// Names the first field that is wrong.
    pub fn validate(&self) -> Result<(), SpecError> {
        if let Some(threads) = self.threads.filter(|threads| !(1..=MAX_THREADS).contains(threads)) {
            return Err(SpecError::Threads { threads });
        }
        if let Some(context) = self.context.filter(|context| *context < KV_BLOCK_TOKENS) {
            return Err(SpecError::ContextTooShort { context });
        }
        if self.adapters.len() > MAX_ADAPTERS {
            return Err(SpecError::Adapters { count: self.adapters.len() });
        }
        let mut names: Vec<&str> = self.adapters.iter().map(|adapter| adapter.name.as_str()).collect();
        names.push(&self.name);
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(SpecError::SameName { name: pair[0].to_owned() });
        }
        if self.disk_cache.is_some() && !self.prefix_cache {
            return Err(SpecError::DiskWithoutCache);
        }
        if !(1..=MAX_BATCH).contains(&self.max_batch) {
            return Err(SpecError::MaxBatch { max_batch: self.max_batch });
        }
        Ok(())
    }

    /// Tokens of prompt and answer together that one request may have, memory aside.
    ///
    /// # Errors
    /// When the spec asks for more than the model's maximum.
    pub fn context_tokens(&self, model_maximum: usize) -> Result<usize, SpecError> {
        match self.context {
            Some(context) if context > model_maximum => {
                Err(SpecError::ContextTooLong { context, model_maximum })
            }
            context => Ok(context.unwrap_or(model_maximum)),
        }
    }

    /// Copies of states that a model with states keeps for the prefix cache: as many as there are
    /// sequences.
    pub const fn snapshots(&self) -> usize {
        if self.prefix_cache { self.max_batch } else { 0 }
    }

    /// Which part of the model each of `ranks` ranks holds.
    ///
    /// # Errors
    /// If the number of weights in `split` is not the number of ranks, or the model cannot be split
    /// like this.
    pub fn shard_plan(&self, folder: &ModelFolder, ranks: usize) -> Result<ShardPlan, PlanError> {
        let weights = match self.split.len() {
            0 => vec![1.0; ranks],
            count if count == ranks => self.split.clone(),
            weights => return Err(SpecError::Split { weights, ranks }.into()),
        };
        let plan = match self.stages {
            Some(stages) => ShardPlan::staged(&folder.spec, stages, &weights),
            None => ShardPlan::new(&folder.spec, self.parallelism, &weights),
        };
        Ok(plan?.with_experts(self.experts))
    }
}

/// Why a model cannot be split as requested.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The spec contradicts itself.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The model does not allow it.
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// One rank of an engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankSpec {
    /// The engine.
    pub engine: EngineSpec,
    /// This rank, from 0.
    pub rank: usize,
    /// Ranks of the engine.
    pub ranks: usize,
    /// How this rank finds the others. Not used when `ranks` is 1.
    pub group: GroupSource,
    /// How this rank waits for the others.
    pub forming: Forming,
}

/// How a rank waits for the others. May differ between ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forming {
    /// How long all ranks may take to join. `None`: `THUNDER_RENDEZVOUS_LIMIT_MS`, otherwise a
    /// minute.
    pub wait: Option<Duration>,
    /// Ports for the other ranks' connections. `None`: `THUNDER_PORTS`, otherwise any free port.
    pub ports: Option<RangeInclusive<u16>>,
}

impl RankSpec {
    /// The only rank of an engine.
    pub fn solo(engine: EngineSpec) -> Self {
        Self { engine, rank: 0, ranks: 1, group: GroupSource::Environment, forming: Forming::default() }
    }

    /// Checks everything that can be checked without the model.
    ///
    /// # Errors
    /// Names the first field that is wrong.
    pub fn validate(&self) -> Result<(), SpecError> {
        let Self { rank, ranks, .. } = *self;
        if rank >= ranks {
            return Err(SpecError::Rank { rank, ranks });
        }
        let weights = self.engine.split.len();
        if weights != 0 && weights != ranks {
            return Err(SpecError::Split { weights, ranks });
        }
        self.engine.validate()
    }

    /// Whether this rank takes requests and runs the scheduler.
    pub fn is_head(&self) -> bool {
        self.rank == 0
    }
}

/// How a rank finds the other ranks of its group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GroupSource {
    /// From `THUNDER_*` or MLX's variables, see [`thunder_collectives::Config::from_env`].
    Environment,
    /// From the spec. Limits and devices still come from `THUNDER_*` variables where those are set.
    Rendezvous {
        /// Address where rank 0 listens, `host:port`.
        coordinator: String,
        /// Known to all ranks and to nobody else.
        secret: Secret,
    },
}

/// A secret that `Debug` does not print. It is serialized, because control messages carry it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}

/// What is wrong with a spec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// There is no such rank.
    #[error("rank is {rank}, but the engine's {ranks} ranks are numbered from 0")]
    Rank {
        /// The rank.
        rank: usize,
        /// Ranks of the engine.
        ranks: usize,
    },
    /// A draft model was given for a model that does not write text.
    #[error("{model} is an encoder, which writes no text: --draft is for models that do")]
    DraftOfEncoder {
        /// The model.
        model: String,
    },
    /// The number of shares is wrong.
    #[error("split has {weights} weights for {ranks} ranks: give one weight for each rank")]
    Split {
        /// Weights given.
        weights: usize,
        /// Ranks of the engine.
        ranks: usize,
    },
    /// The number of threads is out of range.
    #[error("threads is {threads}, but must be 1 to {MAX_THREADS}")]
    Threads {
        /// Threads asked for.
        threads: usize,
    },
    /// The context is smaller than a block of the KV cache.
    #[error("context is {context} tokens, but must be at least {KV_BLOCK_TOKENS}")]
    ContextTooShort {
        /// Tokens asked for.
        context: usize,
    },
    /// The context exceeds the model's maximum.
    #[error("context is {context} tokens, but the model's maximum is {model_maximum}")]
    ContextTooLong {
        /// Tokens asked for.
        context: usize,
        /// The model's maximum.
        model_maximum: usize,
    },
    /// Too many adapters.
    #[error("{count} adapters are given, but {MAX_ADAPTERS} are the most")]
    Adapters {
        /// Adapters given.
        count: usize,
    },
    /// Two adapters, or an adapter and the model, have the same name.
    #[error("the name {name:?} is given twice among the model and its adapters: give each its own")]
    SameName {
        /// The name.
        name: String,
    },
    /// There is nothing to keep on disk.
    #[error("the prefix cache is off, so it cannot be kept on disk: leave out one of both")]
    DiskWithoutCache,
    /// The batch is out of range.
    #[error("max_batch is {max_batch}, but must be 1 to {MAX_BATCH}")]
    MaxBatch {
        /// Requests asked for.
        max_batch: usize,
    },
    /// The host has less memory.
    #[error(
        "memory is {}, but this machine has {} available now: give less, or end other programs",
        human_bytes(*asked), human_bytes(*available)
    )]
    Memory {
        /// Bytes asked for.
        asked: u64,
        /// Bytes available.
        available: u64,
    },
    /// The environment describes another rank than the spec.
    #[error(
        "the spec is for rank {rank} of {ranks}, but the environment's variables are for rank {found_rank} of {found_ranks}"
    )]
    Environment {
        /// Rank in the spec.
        rank: usize,
        /// Ranks in the spec.
        ranks: usize,
        /// Rank in the environment.
        found_rank: usize,
        /// Ranks in the environment.
        found_ranks: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> RankSpec {
        let mut engine = EngineSpec::new("/models/a", "org/a");
        engine.split = vec![3.0, 1.0];
        engine.context = Some(4096);
        engine.threads = Some(8);
        let group = GroupSource::Rendezvous {
            coordinator: "10.0.0.1:32323".to_owned(),
            secret: Secret("5ec7e7".to_owned()),
        };
        let forming = Forming { wait: Some(Duration::from_secs(90)), ports: Some(42000..=42063) };
        RankSpec { engine, rank: 1, ranks: 2, group, forming }
    }

    fn adapter(name: &str) -> AdapterSpec {
        AdapterSpec { name: name.to_owned(), path: "/adapters".into() }
    }

    #[test]
    fn a_spec_survives_json() {
        let all = [
            spec(),
            RankSpec::solo(EngineSpec::new("/models/a", "a")),
            RankSpec {
                engine: EngineSpec {
                    adapters: vec![adapter("b")],
                    draft: Some(DraftSpec { name: "c".to_owned(), model: "/models/c".into() }),
                    parallelism: Parallelism::Pipeline,
                    stages: Some(2),
                    experts: ExpertSplit::Whole,
                    kv: KvFormat::Int8,
                    pin: true,
                    step_time: Duration::from_millis(75),
                    activations: Activations::Bf16,
                    overlap: Overlap::Never,
                    transport: TransportChoice::Rdma,
                    device: DeviceChoice::Numbered(1),
                    ..spec().engine
                },
                ..spec()
            },
        ];
        for spec in all {
            let text = serde_json::to_string(&spec).expect("a spec is plain data");
            assert_eq!(serde_json::from_str::<RankSpec>(&text).expect(&text), spec);
        }
    }

    #[test]
    fn json_uses_the_command_lines_names() {
        let json = serde_json::to_value(spec()).expect("a spec is plain data");
        let engine = &json["engine"];
        let names = ["parallelism", "kv", "activations", "overlap", "transport"].map(|field| &engine[field]);
        assert_eq!(names, ["tensor", "f16", "auto", "auto", "auto"]);
    }

    #[test]
    fn unknown_fields_are_refused() {
        let mut json = serde_json::to_value(spec()).expect("a spec is plain data");
        json["engine"]["turbo"] = true.into();
        let error = serde_json::from_value::<RankSpec>(json).expect_err("nothing is called turbo");
        assert!(error.to_string().contains("turbo"), "{error}");
    }

    #[test]
    fn debug_output_hides_the_secret() {
        let text = format!("{:?}", spec());
        assert!(!text.contains("5ec7e7") && text.contains("(hidden)"), "{text}");
    }

    #[test]
    fn wrong_fields_are_named() {
        assert_eq!(spec().validate(), Ok(()));
        type Spoil = fn(&mut RankSpec);
        let without_cache: Spoil = |spec| {
            let folder = "/cache".into();
            spec.engine.prefix_cache = false;
            spec.engine.disk_cache = Some(DiskCacheSpec { folder, bytes: 1 << 30 });
        };
        let cases: &[(Spoil, &str)] = &[
            (|spec| spec.rank = 2, "rank is 2"),
            (|spec| spec.ranks = 3, "2 weights for 3 ranks"),
            (|spec| spec.engine.threads = Some(0), "threads is 0"),
            (|spec| spec.engine.threads = Some(1025), "threads is 1025"),
            (|spec| spec.engine.context = Some(31), "context is 31 tokens"),
            (|spec| spec.engine.adapters.push(adapter("org/a")), "\"org/a\" is given twice"),
            (|spec| spec.engine.adapters = vec![adapter("b"), adapter("b")], "\"b\" is given twice"),
            (|spec| spec.engine.adapters = vec![adapter("b"); 257], "257 adapters"),
            (|spec| spec.engine.max_batch = 0, "max_batch is 0"),
            (without_cache, "the prefix cache is off"),
            (|spec| spec.engine.max_batch = 257, "max_batch is 257"),
        ];
        for (change, words) in cases {
            let mut wrong = spec();
            change(&mut wrong);
            let error = wrong.validate().expect_err(words).to_string();
            assert!(error.contains(words), "{words:?} is not in {error:?}");
        }
    }

    #[test]
    fn the_models_maximum_bounds_the_context() {
        let mut engine = spec().engine;
        assert_eq!(engine.context_tokens(8192), Ok(4096));
        assert_eq!(
            engine.context_tokens(2048),
            Err(SpecError::ContextTooLong { context: 4096, model_maximum: 2048 })
        );
        engine.context = None;
        assert_eq!(engine.context_tokens(2048), Ok(2048));
    }
}
