//! Runs an engine of the built-in model inside a test, and reads its answers.

use std::path::Path;

use std::sync::Arc;
use std::time::Duration;

use thunder_collectives::{Group, TransportChoice, local};
use thunder_compute::{Activations, Backend, CpuBackend, CpuConfig, Isa, KvFormat};
use thunder_engine::{
    AdapterInfo, DiskSpec, DraftShard, Engine, EngineLoop, Event, EventStream, Limits, ModelInfo, RankShard,
    RankWorker, Sampling, Usage,
};
use thunder_model::tokenizer::Tokenizer;
use thunder_model::{Capacity, ModelFolder, Parallelism, ShardPlan};

/// Ranks, and how the model is split over them.
pub const LAYOUTS: [(usize, Parallelism); 4] = [
    (1, Parallelism::Tensor),
    (2, Parallelism::Tensor),
    (2, Parallelism::Pipeline),
    (3, Parallelism::Pipeline),
];

/// Limits with which prompts are read as fast as rows allow, however long steps take.
pub fn any_pace() -> Limits {
    Limits { step_time: Duration::from_secs(60), ..Limits::default() }
}

/// Maximum tokens of prompt and answer.
pub const CONTEXT: usize = 128;

pub const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the built-in model on `ranks` ranks, each a thread, while `work` uses the engine.
pub fn with_engine(ranks: usize, parallel: Parallelism, limits: Limits, work: impl FnOnce(Engine) + Send) {
    with_engine_of(&thunder_testing::builtin_model(), ranks, parallel, limits, work);
}

/// Like [`with_engine`], with the model in this folder.
pub fn with_engine_of(
    folder: &Path,
    ranks: usize,
    parallel: Parallelism,
    limits: Limits,
    work: impl FnOnce(Engine) + Send,
) {
    with_engine_of_adapted(ModelFolder::open(folder).unwrap(), ranks, parallel, limits, work);
}

/// Like [`with_engine`], with a model that has adapters.
pub fn with_engine_of_adapted(
    folder: ModelFolder,
    ranks: usize,
    parallel: Parallelism,
    limits: Limits,
    work: impl FnOnce(Engine) + Send,
) {
    with_engine_of_drafted(folder, None, ranks, parallel, limits, work);
}

/// Like [`with_engine_of_adapted`], with the draft model in this folder.
pub fn with_engine_of_drafted(
    folder: ModelFolder,
    draft: Option<&Path>,
    ranks: usize,
    parallel: Parallelism,
    limits: Limits,
    work: impl FnOnce(Engine) + Send,
) {
    with_engine_of_all(folder, (draft, None), (ranks, parallel), limits, CONTEXT, work);
}

/// Like [`with_engine_of`], with activations of 16 bits everywhere: sums of ranks then differ from
/// those of one rank in their last bits only.
pub fn with_engine_of_int16(
    folder: &Path,
    layout: (usize, Parallelism),
    limits: Limits,
    work: impl FnOnce(Engine) + Send,
) {
    let folder = ModelFolder::open(folder).unwrap();
    with_engine_computing(folder, Activations::Int16, (None, None), layout, limits, CONTEXT, work);
}

/// Like [`with_engine_of_drafted`], with a disk tier of the prefix cache, and at most `context`
/// tokens of prompt and answer.
pub fn with_engine_of_all(
    folder: ModelFolder,
    others: (Option<&Path>, Option<&DiskSpec>),
    layout: (usize, Parallelism),
    limits: Limits,
    context: usize,
    work: impl FnOnce(Engine) + Send,
) {
    with_engine_computing(folder, Activations::default(), others, layout, limits, context, work);
}

fn with_engine_computing(
    folder: ModelFolder,
    activations: Activations,
    others: (Option<&Path>, Option<&DiskSpec>),
    layout: (usize, Parallelism),
    limits: Limits,
    context: usize,
    work: impl FnOnce(Engine) + Send,
) {
    let cpu = CpuConfig::new(1, Isa::detect().unwrap(), activations);
    let backend = |group| CpuBackend::new(&cpu, group);
    with_engine_on((&backend, &|_| {}), folder, others, layout, limits, context, work);
}

/// Like [`with_engine_of_all`], on these backends. `look` sees those of all ranks but 0, after
/// their last step.
pub fn with_engine_on<B: Backend>(
    (backend, look): (&(impl Fn(Group) -> B + Sync), &(impl Fn(&B) + Sync)),
    folder: ModelFolder,
    (draft, disk): (Option<&Path>, Option<&DiskSpec>),
    (ranks, parallel): (usize, Parallelism),
    limits: Limits,
    context: usize,
    work: impl FnOnce(Engine) + Send,
) {
    let draft = draft.map(|path| ModelFolder::open(path).unwrap());
    let plan = ShardPlan::new(&folder.spec, parallel, &vec![1.0; ranks]).unwrap();
    let capacity = Capacity {
        rows: limits.rows,
        logit_rows: limits.sequences + limits.draft_rows,
        kv_blocks: limits.kv_blocks,
        slots: limits.sequences + limits.snapshots.unwrap_or(0),
        kv_format: KvFormat::F16,
    };
    let snapshots = limits.snapshots.unwrap_or(0);
    let draft = draft.as_ref().map(|folder| DraftShard { folder, capacity });
    let shard = RankShard { folder: &folder, plan: &plan, capacity, snapshots, settings: &[], draft, disk };
    let info = ModelInfo {
        name: "builtin".to_owned(),
        context_length: context,
        vocab_size: folder.spec.vocab,
        // Fixtures have no tokenizer.
        tokenizer: folder.tokenizer().unwrap_or_else(|_| builtin_tokenizer()),
        chat_template: None,
        default_sampling: Sampling::default(),
        eos: folder.spec.eos.clone(),
        pooling: Default::default(),
        kind: Default::default(),
        token_types: 1,
        digest: String::new(),
        files: Default::default(),
        adapters: folder
            .adapters
            .iter()
            .map(|adapter| AdapterInfo { name: adapter.name.clone(), digest: String::new(), bytes: 0 })
            .collect(),
        ranks,
    };
    let (engine, inbox) = Engine::channel(info, 64);
    let info = Arc::new(engine.info().clone());
    let (work, inbox) = (std::sync::Mutex::new(Some((work, engine))), std::sync::Mutex::new(Some(inbox)));
    let groups = match ranks {
        1 => vec![Group::solo()],
        _ => local::groups(ranks, TransportChoice::Shm).unwrap(),
    };
    local::run_on(groups, |group| {
        let is_head = group.rank() == 0;
        let shard = RankShard { draft: shard.draft.filter(|_| is_head), ..shard };
        let mut worker =
            RankWorker::load(shard, group, |tensor| Ok(backend(tensor)), &mut |_, _| {}).unwrap();
        if !is_head {
            worker.follow().unwrap();
            return look(worker.backend());
        }
        let inbox = inbox.lock().unwrap().take().unwrap();
        let engine_loop = EngineLoop::new(worker, info.clone(), inbox, limits, folder.spec.eos.clone());
        let (work, engine) = work.lock().unwrap().take().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || work(engine));
            engine_loop.run().unwrap();
        });
    });
}

fn builtin_tokenizer() -> Arc<Tokenizer> {
    ModelFolder::open(&thunder_testing::builtin_model()).unwrap().tokenizer().unwrap()
}

/// The whole answer, or `None` if the engine failed.
pub fn read(stream: EventStream) -> Option<String> {
    read_with_usage(stream).map(|(answer, _)| answer)
}

/// Like [`read`], and also returns the usage.
pub fn read_with_usage(mut stream: EventStream) -> Option<(String, Usage)> {
    let mut answer = String::new();
    loop {
        match stream.next_within(PATIENCE).expect("an event comes in time")? {
            Event::Delta { text, .. } => answer.push_str(&text),
            Event::Mark { .. } | Event::Accepted { .. } | Event::Work(_) => {}
            Event::Hidden { .. } | Event::Likelihoods { .. } => panic!("text was asked for"),
            Event::Done { usage, .. } => return Some((answer, usage)),
            Event::Failed { message, .. } => panic!("{message}"),
        }
    }
}
