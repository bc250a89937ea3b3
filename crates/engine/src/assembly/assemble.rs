//! From a [`RankSpec`] to a running rank.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Instant;

use thunder_collectives::{CommError, Group, Op};
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_compute::{Backend, ComputeError, CpuBackend, CpuConfig, Isa};
use thunder_model::chat::ChatTemplate;
use thunder_model::model::{check_present, shard_footprints};
use thunder_model::tokenizer::Tokenizer;
use thunder_model::{Capacity, ModelFolder, Pooling, ShardFootprint, ShardPlan};

use super::device::{Device, DeviceUse};
use super::disk::disk_spec;
use super::draft::Draft;
use super::error::AssemblyError;
use super::group::form_group;
use super::headers::open_checked;
use super::memory::{ENCODER_ROWS, KvCacheRequest, KvCacheSize, MemoryBudget, Neighbours, kv_cache_tokens};
use super::places::RankPlace;
use super::running::{Follower, RunningEngine, RunningRank};
use super::spec::RankSpec;
use super::threads::{ThreadCounts, ThreadPlacement};
use crate::same_shard::Setting;
use crate::speculation::MAX_ROWS;
use crate::{
    AdapterInfo, DiskSpec, DraftShard, Engine, EngineLoop, Limits, ModelFiles, ModelInfo, ModelKind,
    RankShard, RankWorker, RoutedExperts, Sampling,
};

/// Rows of a step if a rank computes on its CPU: prompt tokens that are read together. GPUs report
/// a larger number.
pub const STEP_ROWS: usize = 256;

/// Maximum rows of a step that verify drafts. Each has a row of logits.
const DRAFT_ROWS: usize = 16;

/// Maximum requests that wait for a slot.
const MAX_WAITING: usize = 1024;

/// Opens the model, joins the group, loads the shard, and on rank 0 starts the scheduler.
///
/// `listener` is for rank 0: an already bound listener at the coordinator's address.
///
/// # Errors
/// When the spec is wrong, the model cannot be loaded or does not fit, or a peer was lost.
pub fn assemble(
    spec: &RankSpec,
    listener: Option<Arc<TcpListener>>,
    progress: &mut dyn FnMut(Progress),
) -> Result<RunningRank, AssemblyError> {
    let assembly = Assembly::open(spec)?;
    assembly.start(form_group(spec, listener, None)?, progress)
}

/// What [`Assembly::start`] reports, on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The size of the KV cache, before anything is loaded.
    KvCache(KvCacheSize),
    /// Bytes of the rank's weights.
    Weights {
        /// Loaded so far.
        loaded: u64,
        /// Total bytes.
        total: u64,
    },
}

/// A checked spec and model of a rank that is not in a group yet. This is [`assemble`] in two
/// steps, for callers that start the other ranks in between: an error that affects every rank is
/// found before other ranks exist.
pub struct Assembly {
    spec: RankSpec,
    folder: ModelFolder,
    plan: ShardPlan,
    footprints: Vec<ShardFootprint>,
    context: usize,
    /// On rank 0 only.
    text: Option<TextModel>,
    /// On rank 0 only.
    draft: Option<Draft>,
}

/// What a rank knows once its group has formed.
struct Start {
    limits: Limits,
    device: String,
    transport: String,
    threads: ThreadCounts,
    disk: Option<DiskSpec>,
}

/// What turns text into tokens.
struct TextModel {
    tokenizer: Arc<Tokenizer>,
    chat_template: Option<Arc<ChatTemplate>>,
}

impl Assembly {
    /// Validates the spec and reads the model's headers; on rank 0 also the tokenizer and the chat
    /// template.
    ///
    /// # Errors
    /// If the spec is wrong, or the model cannot be read or split.
    pub fn open(spec: &RankSpec) -> Result<Self, AssemblyError> {
        spec.validate()?;
        let mut spec = spec.clone();
        let (folder, context) = open_checked(&mut spec.engine)?;
        let engine = &spec.engine;
        let plan = engine.shard_plan(&folder, spec.ranks)?;
        check_present(&folder, &plan, spec.rank)?;
        let footprints = shard_footprints(&folder, &plan, engine.kv)?;
        let text = if spec.is_head() {
            Some(TextModel { tokenizer: folder.tokenizer()?, chat_template: folder.chat_template()? })
        } else {
            None
        };
        let draft = match (&engine.draft, &text) {
            (Some(draft), Some(text)) => {
                let target = (engine.name.as_str(), text.tokenizer.as_ref());
                Some(Draft::open(draft, target, engine.kv, engine.max_batch)?)
            }
            _ => None,
        };
        // Reading the tokenizer took much memory temporarily. It is returned before the weights
        // need it.
        thunder_compute::memory::give_back();
        Ok(Self { spec, folder, plan, footprints, context, text, draft })
    }

    /// A message about tensors of the model that no rank reads, if there are any.
    pub fn unread_tensors(&self) -> Option<String> {
        thunder_model::unread_tensors(&self.folder)
    }

    /// Bytes of the weights of all ranks.
    pub fn weight_bytes(&self) -> u64 {
        self.footprints.iter().map(|footprint| footprint.weight_bytes).sum()
    }

    /// Loads the shard, together with all ranks of the group, and starts the scheduler on rank 0.
    ///
    /// # Errors
    /// When the model does not fit or cannot be loaded, or a peer was lost.
    pub fn start(
        mut self,
        mut group: Group,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<RunningRank, AssemblyError> {
        let places = RankPlace::gather(&mut group)?;
        let cpu = self.cpu_config(&places)?;
        let count = cpu.threads;
        #[cfg(feature = "gpu")]
        let cores = cpu.first_core.map(|first| thunder_gpu::Cores { first, count });
        let needs = &self.footprints[self.spec.rank].needs;
        let device = Device::choose(self.spec.engine.device, self.turn(&places), cpu, needs);
        let device = device.map_err(AssemblyError::Device)?;
        self.agree_on_drafts(&mut group)?;
        let used = DeviceUse::gather(&mut group, &places, &device)?;
        let has_own_gpu = used[self.spec.rank].is_only_gpu_user(&used);
        // Ranks without the feature must agree on it too.
        let mut peers = [u64::from(has_own_gpu)];
        group.all_reduce(&mut peers, Op::Min)?;
        Draft::count(self.draft.as_ref(), &mut group, &mut self.footprints)?;
        let limits = self.limits(&mut group, &used, &device)?;
        let tokens = limits.kv_blocks * KV_BLOCK_TOKENS;
        progress(Progress::KvCache(KvCacheSize::new(&self.footprints, tokens, self.kv_request())));
        let threads = thread_counts(&mut group, count, &places)?;
        let transport = transport_names(&group);
        let name = device.name();
        tracing::info!(
            ranks = self.plan.ranks(),
            transport,
            kv_tokens = tokens,
            device = name,
            "group formed"
        );
        let disk =
            disk_spec(&self.spec.engine, self.spec.rank, (&self.footprints, &places), &device.computes());
        let start = Start { limits, device: name, transport, threads, disk };
        match device {
            Device::Cpu(cpu) => {
                self.load(group, start, progress, move |tensor| Ok(CpuBackend::new(&cpu, tensor)))
            }
            #[cfg(feature = "gpu")]
            Device::Gpu(found) => {
                let (activations, overlap) = (self.spec.engine.activations, self.spec.engine.overlap);
                let mailboxes = match has_own_gpu {
                    true => thunder_gpu::Mailboxes::Auto,
                    false => thunder_gpu::Mailboxes::Never,
                };
                let peers = peers == [1];
                let config =
                    thunder_gpu::GpuConfig { activations, overlap, remembers: true, mailboxes, peers, cores };
                self.load(group, start, progress, move |tensor| {
                    thunder_gpu::GpuBackend::new(&found, config, tensor)
                })
            }
        }
    }

    /// Disables the model's own layer for drafts on all ranks if one rank does, because only rank 0
    /// knows about a draft model.
    fn agree_on_drafts(&mut self, group: &mut Group) -> Result<(), AssemblyError> {
        let mut has_ahead = [u64::from(self.folder.spec.ahead.is_some())];
        group.all_reduce(&mut has_ahead, Op::Min)?;
        if has_ahead == [0] && self.folder.spec.ahead.take().is_some() {
            self.footprints = shard_footprints(&self.folder, &self.plan, self.spec.engine.kv)?;
        }
        Ok(())
    }

    /// Loads the shard to a device, and starts the scheduler on rank 0.
    fn load<B: Backend + Send + 'static>(
        self,
        group: Group,
        Start { limits, device, transport, threads, disk }: Start,
        progress: &mut dyn FnMut(Progress),
        backend: impl FnOnce(Group) -> Result<B, ComputeError>,
    ) -> Result<RunningRank, AssemblyError>
    where
        RankWorker<B>: Send,
    {
        let capacity = Capacity {
            rows: limits.rows,
            logit_rows: limits.sequences + limits.draft_rows,
            kv_blocks: limits.kv_blocks,
            slots: limits.sequences + limits.snapshots.unwrap_or(0),
            kv_format: self.spec.engine.kv,
        };
        let began = Instant::now();
        let shard = RankShard {
            folder: &self.folder,
            plan: &self.plan,
            capacity,
            snapshots: limits.snapshots.unwrap_or(0),
            settings: &self.settings(),
            draft: self.draft.as_ref().map(|draft| DraftShard {
                folder: &draft.folder,
                capacity: Capacity {
                    logit_rows: limits.sequences.min(MAX_ROWS),
                    slots: limits.sequences,
                    ..capacity
                },
            }),
            disk: disk.as_ref(),
        };
        let mut loaded = |loaded, total| progress(Progress::Weights { loaded, total });
        let rank = RankWorker::load(shard, group, backend, &mut loaded)?;
        let model = self.spec.engine.model.display();
        tracing::info!(%model, seconds = began.elapsed().as_secs_f64(), "loaded");
        if self.spec.is_head() {
            let start = Start { limits, device, transport, threads, disk };
            self.start_scheduler(rank, start).map(|head| RunningRank::Head(Box::new(head)))
        } else {
            Ok(RunningRank::Follower(Follower { rank: Box::new(rank) }))
        }
    }

    /// Limits for the scheduler: KV cache blocks for every sequence's context, if all ranks have
    /// enough memory.
    fn limits(
        &self,
        group: &mut Group,
        used: &[DeviceUse],
        device: &Device,
    ) -> Result<Limits, AssemblyError> {
        let (rank, engine) = (self.spec.rank, &self.spec.engine);
        let places: Vec<_> = used.iter().map(|used| (used.host, used.memory)).collect();
        let (memory, neighbours) = (device.memory(), Neighbours::new(rank, &places));
        let budget = MemoryBudget::new(memory.bytes, engine.memory, &self.footprints, rank, &neighbours)?;
        let (own, request) = (&self.footprints[rank], self.kv_request());
        let tokens = kv_cache_tokens(own, rank, budget, request, memory)?;
        // All ranks have the same number of rows, and the same number of blocks: as many as fit on
        // the rank with the least memory.
        let step_rows = self.encoder_rows().unwrap_or(device.step_rows());
        let mut least = [tokens.div_ceil(KV_BLOCK_TOKENS as u64), step_rows as u64];
        group.all_reduce(&mut least, Op::Min)?;
        let [blocks, rows] = least.map(|least| least as usize);
        Ok(Limits {
            sequences: engine.max_batch,
            rows,
            kv_blocks: blocks,
            whole_prompts: self.folder.spec.encoder.is_some().then_some(ENCODER_ROWS),
            prefix_cache: engine.prefix_cache,
            snapshots: self.has_states().then_some(engine.snapshots()),
            draft_rows: if engine.speculation { DRAFT_ROWS } else { 0 },
            ahead: self.folder.spec.ahead.is_some(),
            // Known after the draft model is loaded.
            draft_states: false,
            step_time: engine.step_time,
            routed: RoutedExperts::of(&self.footprints),
        })
    }

    /// True if a layer of the model keeps a state of fixed size for each sequence.
    fn has_states(&self) -> bool {
        self.footprints.iter().any(|footprint| footprint.state_bytes_per_sequence > 0)
    }

    /// Number of ranks on this host before this one.
    fn turn(&self, places: &[RankPlace]) -> usize {
        let rank = self.spec.rank;
        places[..rank].iter().filter(|place| place.host == places[rank].host).count()
    }

    /// Rows of a step if the model is an encoder.
    fn encoder_rows(&self) -> Option<usize> {
        self.folder.spec.encoder.as_ref().map(|_| self.context.max(ENCODER_ROWS))
    }

    fn kv_request(&self) -> KvCacheRequest {
        KvCacheRequest::of(&self.spec.engine, &self.folder.spec, self.context)
    }

    fn cpu_config(&self, places: &[RankPlace]) -> Result<CpuConfig, AssemblyError> {
        let engine = &self.spec.engine;
        let placed = ThreadPlacement::new(places, self.spec.rank, engine.threads, engine.pin)?;
        Ok(CpuConfig {
            threads: placed.threads,
            packing_threads: placed.packing_threads,
            first_core: placed.first_core,
            isa: Isa::detect().map_err(AssemblyError::Kernel)?,
            activations: engine.activations,
            overlap: engine.overlap,
        })
    }

    /// Settings that must be the same on all ranks, by the names that users know.
    fn settings(&self) -> Vec<Setting> {
        let engine = &self.spec.engine;
        let split: Vec<String> = engine.split.iter().map(f64::to_string).collect();
        let split = if split.is_empty() { "even".to_owned() } else { split.join(",") };
        let lower = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
        [
            ("thunder's version", env!("CARGO_PKG_VERSION").to_owned()),
            ("--parallel", lower(&engine.parallelism)),
            ("--stages", engine.stages.map_or("as --parallel says".to_owned(), |count| count.to_string())),
            ("--experts", lower(&engine.experts)),
            ("--split", split),
            ("--kv", lower(&engine.kv)),
            ("--max-batch", engine.max_batch.to_string()),
            ("--no-speculation", (!engine.speculation).to_string()),
            ("--no-prefix-cache", (!engine.prefix_cache).to_string()),
            ("--cache-dir", if engine.disk_cache.is_some() { "given" } else { "not given" }.to_owned()),
            ("--activations", lower(&engine.activations)),
            ("--overlap", lower(&engine.overlap)),
        ]
        .map(|(name, value)| Setting { name: name.to_owned(), value })
        .into()
    }

    fn start_scheduler<B: Backend + 'static>(
        self,
        rank: RankWorker<B>,
        Start { limits, device, transport, threads, .. }: Start,
    ) -> Result<RunningEngine, AssemblyError>
    where
        RankWorker<B>: Send,
    {
        let Self { spec, folder, plan, footprints, context, text, .. } = self;
        let step_rows = limits.rows;
        let Some(TextModel { tokenizer, chat_template }) = text else {
            unreachable!("rank 0 has read the tokenizer")
        };
        let info = ModelInfo {
            name: spec.engine.name,
            context_length: context.min(limits.kv_blocks * KV_BLOCK_TOKENS),
            kind: match &folder.spec.encoder {
                None => ModelKind::Decoder,
                Some(encoder) if encoder.scores => ModelKind::Reranker,
                Some(_) => ModelKind::Embedder,
            },
            token_types: folder.spec.encoder.as_ref().map_or(1, |encoder| encoder.types.max(1)),
            vocab_size: folder.spec.vocab,
            tokenizer,
            chat_template,
            default_sampling: default_sampling(&folder),
            eos: folder.spec.eos.clone(),
            pooling: match &folder.spec.encoder {
                Some(encoder) => encoder.pooling.clone(),
                None => Pooling::read(&folder.path)?,
            },
            digest: hexadecimal(folder.weights.fingerprint()),
            files: ModelFiles::of(&folder),
            adapters: folder
                .adapters
                .iter()
                .map(|of| AdapterInfo {
                    name: of.name.clone(),
                    digest: hexadecimal(of.fingerprint()),
                    bytes: of.bytes(),
                })
                .collect(),
            ranks: plan.ranks(),
        };
        let (engine, inbox) = Engine::channel(info, MAX_WAITING);
        let info = Arc::new(engine.info().clone());
        let scheduler = EngineLoop::new(rank, info, inbox, limits, folder.spec.eos.clone());
        let scheduler = std::thread::Builder::new()
            .name("scheduler".into())
            .spawn(move || scheduler.run())
            .map_err(AssemblyError::Thread)?;
        Ok(RunningEngine { engine, plan, footprints, device, transport, threads, step_rows, scheduler })
    }
}

/// Ranks exchange their numbers of threads, because machines may have different numbers of cores.
fn thread_counts(group: &mut Group, threads: usize, places: &[RankPlace]) -> Result<ThreadCounts, CommError> {
    let mut all = vec![0u64; group.size()];
    let counts = vec![1; all.len()];
    group.all_gather(&[threads as u64], &mut all, &counts)?;
    let all: Vec<usize> = all.into_iter().map(|threads| threads as usize).collect();
    Ok(ThreadCounts::new(&all, places))
}

/// Transports from this rank to the others, for people.
fn transport_names(group: &Group) -> String {
    let others = (0..group.size()).filter(|rank| *rank != group.rank());
    let mut names: Vec<String> = others.map(|rank| group.transport(rank).to_string()).collect();
    names.sort();
    names.dedup();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// A digest as people write it.
fn hexadecimal(digest: [u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The sampling in generation_config.json; greedy unless it asks for sampling.
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
