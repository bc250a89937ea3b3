//! `thunder bench decode` and `thunder bench prefill`: tokens per second, compared with the
//! machine's limits.

mod decode;
#[cfg(feature = "gpu")]
mod gpu_kernels;
mod peaks;
mod prefill;

use std::ffi::OsStr;
use std::time::{Duration, Instant};

use clap::Args;
use thunder_compute::cpu::measure::arithmetic;
use thunder_engine::assembly::device::{GpuLimits, gpu_limits};
use thunder_engine::{Request, Usage};

use crate::engine_args::EngineArgs;
use crate::model_arg::ModelArg;
use crate::session::{self, Session};
use crate::{progress, prompt};
pub use decode::DecodeCommand;
use peaks::{Peaks, Threads};
pub use prefill::PrefillCommand;

/// Options of both commands.
#[derive(Args)]
struct Common {
    #[command(flatten)]
    model: ModelArg,
    /// Rounds to measure; the medians are printed. Each round also measures the limits of the
    /// machine
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeat: u16,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
    /// The limits of a rank's GPU, if the rank uses one.
    #[arg(skip)]
    gpu: Option<GpuLimits>,
}

impl Common {
    /// Loads the model, like [`session::open`]. Without a draft model, every token is computed,
    /// because rounds repeat the same tokens.
    fn open(&mut self, prefix_cache: bool) -> anyhow::Result<Option<Session>> {
        self.gpu = gpu_limits(self.engine.device).map_err(anyhow::Error::msg)?;
        self.engine.cache.no_prefix_cache = !prefix_cache;
        self.engine.no_speculation = self.engine.draft.is_none();
        session::open(self.model.name(), &self.engine)
    }
}

/// How long GPUs warm up after their first run. They lower their clocks while a model is loaded (an
/// H100 from 1,980 to 345 MHz), and raise them after some tenths of a second of work.
const GPU_WARM_UP: Duration = Duration::from_secs(1);

/// Label of the share of peak arithmetic: operations in products with weights, against a loop of
/// the same instruction.
const PEAK_SHARE: &str = "share of peak arithmetic";

/// Number of weights by which a token is multiplied, on all ranks together.
struct ModelWork {
    /// Of the layers.
    layers: u64,
    /// Of the output projection.
    head: u64,
    is_quantized: bool,
}

impl ModelWork {
    fn of(model: &OsStr) -> anyhow::Result<Self> {
        let folder = session::open_folder(model)?;
        Ok(Self {
            layers: folder.spec.layer_weights(),
            head: (folder.spec.hidden * folder.spec.vocab) as u64,
            is_quantized: folder.weights.is_quantized(),
        })
    }
}

/// One round, or the medians of several.
struct Measured {
    time_to_first_token: Duration,
    /// Of all sequences together.
    tokens_per_s: f64,
    reduce_share: f64,
    /// Memory bandwidth in bytes per second.
    memory: f64,
    /// Tokens per byte that memory could deliver in the same time.
    per_byte: f64,
    /// Tokens per operation that the cores or GPUs could do in the same time.
    per_operation: f64,
    /// A sequence's speed as a share of its speed in the first batch size.
    kept: f64,
    /// Maximum tokens of a prompt that were read while the clock ran.
    prompt_tokens: usize,
}

impl Measured {
    fn medians(rounds: &[Self]) -> Self {
        let median = |of: fn(&Self) -> f64| {
            let mut all: Vec<f64> = rounds.iter().map(of).collect();
            arithmetic::median(&mut all)
        };
        Self {
            time_to_first_token: Duration::from_secs_f64(median(|round| {
                round.time_to_first_token.as_secs_f64()
            })),
            tokens_per_s: median(|round| round.tokens_per_s),
            reduce_share: median(|round| round.reduce_share),
            memory: median(|round| round.memory),
            per_byte: median(|round| round.per_byte),
            per_operation: median(|round| round.per_operation),
            kept: median(|round| round.kept),
            prompt_tokens: rounds.iter().map(|round| round.prompt_tokens).max().unwrap_or_default(),
        }
    }
}

fn at_least<const LEAST: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number >= LEAST => Ok(number),
        _ => Err(format!("must be a whole number of at least {LEAST}")),
    }
}

/// Requests to measure: prompts of `prompt` tokens, `tokens` tokens to generate, their other
/// parameters, and batch sizes.
struct Work<'a> {
    prompt: usize,
    tokens: usize,
    options: Request,
    batches: &'a [u16],
}

impl Work<'_> {
    /// Rows of a batch's steps, and whether they are a prompt's. With one token to generate, the
    /// prompt takes all the time.
    fn rows(&self, batch: u16) -> (usize, bool) {
        if self.tokens == 1 { (self.prompt, true) } else { (usize::from(batch), false) }
    }
}

/// Runs the requests, each round followed by the machine's limits. The first round warms up.
/// Returns medians per batch size.
fn measure(
    session: &Session,
    common: &Common,
    model: &ModelWork,
    work: &Work<'_>,
    rate: impl Fn(&[Usage]) -> f64,
) -> anyhow::Result<Vec<Measured>> {
    let activations = common.engine.activations.into();
    let mut peaks = match common.gpu {
        Some(limits) => Peaks::Gpu {
            limits,
            activations,
            is_quantized: model.is_quantized,
            ranks: session.head.plan.ranks(),
        },
        None => Peaks::Cpu(Box::new(Threads::new(activations, model, session.head.threads)?)),
    };
    let mut rounds: Vec<Vec<Measured>> = work.batches.iter().map(|_| Vec::new()).collect();
    let mut warms_since = None;
    let bar = progress::measurements((usize::from(common.repeat) + 1) * work.batches.len());
    for round in 0..=u32::from(common.repeat) {
        bar.set_message(match (round, common.gpu) {
            (0, Some(_)) => "warming up; a new kind of step first compiles its kernels",
            (0, None) => "warming up",
            _ => "",
        });
        let mut first_speed = None;
        for (&batch, rounds) in work.batches.iter().zip(&mut rounds) {
            let (usages, reduce_share) = run(session, work, batch, round)?;
            bar.inc(1);
            if round == 0 {
                // In the first run, a GPU waits while kernels are compiled.
                let began = *warms_since.get_or_insert_with(Instant::now);
                while common.gpu.is_some() && began.elapsed() < GPU_WARM_UP {
                    run(session, work, batch, round)?;
                }
                continue;
            }
            let tokens_per_s = rate(&usages);
            let speed = tokens_per_s / f64::from(batch);
            let (memory, operations) = peaks.measure(work.rows(batch));
            rounds.push(Measured {
                time_to_first_token: usages[0].time_to_first_token,
                tokens_per_s,
                reduce_share,
                memory,
                per_byte: tokens_per_s / memory,
                per_operation: tokens_per_s / operations,
                kept: speed / *first_speed.get_or_insert(speed),
                prompt_tokens: usages.iter().map(computed_of_prompt).max().unwrap_or_default(),
            });
        }
    }
    bar.finish_and_clear();
    Ok(rounds.iter().map(|rounds| Measured::medians(rounds)).collect())
}

/// Tokens of a request's prompt that were computed, not found in the prefix cache.
fn computed_of_prompt(usage: &Usage) -> usize {
    usage.prompt_tokens - usage.cached_tokens
}

/// Runs a batch of requests. Returns their usages and the share of time spent in all-reduces.
fn run(session: &Session, work: &Work<'_>, batch: u16, round: u32) -> anyhow::Result<(Vec<Usage>, f64)> {
    let engine = &session.head.engine;
    let vocab = engine.info().vocab_size as u32;
    // Different prompts, so that the prefix cache has none of them before.
    let seed = 31 * round + 1009 * u32::from(batch);
    let request = |index: u16, tokens: usize| Request {
        prompt: (0..work.prompt as u32).map(|i| (i * 97 + seed + u32::from(index) * 7) % vocab).collect(),
        max_tokens: Some(tokens),
        ignore_eos: true,
        ..work.options.clone()
    };
    let answer = |tokens: usize| -> anyhow::Result<Vec<Usage>> {
        let submit = |index| engine.submit(request(index, tokens));
        let streams = (0..batch).map(submit).collect::<Result<Vec<_>, _>>()?;
        let read = |stream| Ok(prompt::read(stream, || false, |_| Ok(()))?.usage);
        streams.into_iter().map(read).collect()
    };
    let mut before = engine.counters().times();
    let mut usages = answer(1)?;
    if work.tokens > 1 {
        // The prompts are in the cache now. Otherwise the first ones would wait between their
        // tokens until the others are read.
        let time_to_first_token = usages[0].time_to_first_token;
        before = engine.counters().times();
        usages = answer(work.tokens)?;
        usages[0].time_to_first_token = time_to_first_token;
    }
    Ok((usages, engine.counters().reduce_share_since(before)))
}

/// Where a model was measured.
struct Setup {
    ranks: usize,
    /// Of rank 0, for people.
    device: String,
    transport: String,
    /// Of all ranks together.
    threads: usize,
}

impl Setup {
    fn of(session: &Session) -> Self {
        let head = &session.head;
        let (device, transport) = (head.device.clone(), head.transport.clone());
        Self { ranks: head.plan.ranks(), device, transport, threads: head.threads.in_group }
    }

    /// The ranks and how they are connected, for people.
    fn ranks_over(&self) -> String {
        if self.ranks == 1 {
            "1 rank".to_owned()
        } else {
            format!("{} ranks over {}", self.ranks, self.transport)
        }
    }
}

/// Bytes that a decode step reads on all ranks together: weights (only of the experts that the
/// tokens choose), and the KV cache of `batch` sequences of `context` tokens.
fn bytes_per_step(session: &Session, context: usize, batch: usize) -> u64 {
    let footprints = &session.head.footprints;
    let weights = footprints.iter().map(|footprint| footprint.read_bytes(batch)).sum::<u64>();
    let kv = footprints.iter().map(|footprint| footprint.kv_bytes_per_token).sum::<u64>();
    weights + kv * (context * batch) as u64
}
