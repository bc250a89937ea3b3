//! `thunder bench decode` and `thunder bench prefill`.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use serde_json::json;
use thunder_compute::cpu::peak::{self, Arithmetic};
use thunder_compute::{Encoding, Float, Isa, memory};
use thunder_engine::{Request, Sampling, Usage};
use thunder_model::error::human_bytes;

use crate::prompt;
use crate::session::{self, EngineArgs, Multiplied, Session};
use crate::table;

/// Bytes that are read to know the memory's bandwidth; more than caches hold.
const BANDWIDTH_BYTES: usize = 1 << 30;
/// How long memory is read after each round, and how long numbers are multiplied.
const BANDWIDTH_TIME: Duration = Duration::from_millis(400);
const PEAK_TIME: Duration = Duration::from_millis(100);

/// What both measurements take.
#[derive(Args)]
struct Common {
    /// `builtin`, a folder (see `thunder model synth`), or a model in the Hugging Face cache
    #[arg(default_value = crate::builtin::NAME)]
    model: String,
    /// Times to measure, each in turn with what memory and arithmetic give; medians count
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeat: u16,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

/// Tokens per second of answers, and the share of memory bandwidth that this is
#[derive(Args)]
pub struct DecodeCommand {
    #[command(flatten)]
    common: Common,
    /// Tokens of the prompt
    #[arg(long, default_value_t = 16, value_parser = at_least::<1>)]
    prompt: usize,
    /// Tokens to generate
    #[arg(long, default_value_t = 64, value_parser = at_least::<2>)]
    tokens: usize,
    /// Sequences that are generated at once
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    batch: u16,
}

/// Tokens per second of reading a prompt
#[derive(Args)]
pub struct PrefillCommand {
    #[command(flatten)]
    common: Common,
    /// Tokens of the prompt
    #[arg(long, default_value_t = 512, value_parser = at_least::<1>)]
    prompt: usize,
}

/// What is made of products of weights, attention aside, held against a loop of the same instruction.
const PEAK_SHARE: &str = "share of the arithmetic's peak";

/// What the machine gives at most. It is measured after each round, as machines are not always equally fast.
struct Limits {
    reader: memory::Reader,
    isa: Isa,
    arithmetic: Arithmetic,
    threads: usize,
}

impl Limits {
    /// Of so many rows, of prompts or others.
    fn new(
        common: &Common,
        multiplied: Multiplied,
        rows: (usize, bool),
        threads: usize,
    ) -> anyhow::Result<Self> {
        let isa = Isa::detect().map_err(anyhow::Error::msg)?;
        let encoding = match multiplied.quantized {
            true => Encoding::Affine { bits: 4, group: 64, scales: Float::F16 },
            false => Encoding::Float(Float::BF16),
        };
        Ok(Self {
            reader: memory::Reader::new(threads, BANDWIDTH_BYTES, isa)?,
            isa,
            arithmetic: Arithmetic::of_product(isa, common.engine.activations.into(), encoding, rows),
            threads,
        })
    }

    /// Bytes a second, and operations a second.
    fn measure(&mut self) -> [f64; 2] {
        let Self { reader, isa, arithmetic, threads } = self;
        [reader.bytes_per_s(BANDWIDTH_TIME), peak::operations_per_s(*isa, *arithmetic, *threads, PEAK_TIME)]
    }
}

/// One round, or the medians of several.
struct Measured {
    time_to_first_token: Duration,
    /// Of all sequences together.
    tokens_per_s: f64,
    reduce_share: f64,
    /// Bytes a second that memory gave.
    memory: f64,
    /// Tokens for each byte that memory gives, and for each operation that the arithmetic does at most.
    per_byte: f64,
    per_operation: f64,
}

impl Measured {
    fn medians(rounds: &[Self]) -> Self {
        let median = |of: fn(&Self) -> f64| {
            let mut all: Vec<f64> = rounds.iter().map(of).collect();
            peak::median(&mut all)
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
        }
    }
}

fn at_least<const LEAST: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number >= LEAST => Ok(number),
        _ => Err(format!("must be a number from {LEAST} on")),
    }
}

impl DecodeCommand {
    /// Runs the command.
    pub fn run(mut self) -> anyhow::Result<()> {
        // All sequences run at once, or the rate would count those that wait as well.
        self.common.engine.max_batch = self.common.engine.max_batch.max(self.batch);
        let batch = usize::from(self.batch);
        let Some(session) = session::open(&self.common.model, &self.common.engine)? else { return Ok(()) };
        let room = session.engine.info().context_length;
        if self.prompt + self.tokens > room {
            bail!(
                "--prompt {} and --tokens {} are more than the {room} tokens of context that there is room for",
                self.prompt,
                self.tokens
            );
        }
        let multiplied = session.multiplied;
        let threads = threads(&self.common.engine, &session);
        let limits = Limits::new(&self.common, multiplied, (batch, false), threads)?;
        let measured = measure(&session, &self.common, self.prompt, self.tokens, batch, limits, |usages| {
            let slowest = usages.iter().map(|usage| usage.decode_time).max().unwrap_or_default();
            let tokens: usize = usages.iter().map(|usage| usage.completion_tokens.saturating_sub(1)).sum();
            tokens as f64 / slowest.as_secs_f64().max(1e-9)
        });
        let (weights, kv) = bytes_per_token(&session, self.prompt + self.tokens / 2, batch);
        let plan = (session.plan.ranks(), session.transport.clone());
        session.close()?;
        let measured = measured?;
        let operations = 2.0 * (multiplied.layers + multiplied.head) as f64;
        let peak_share = operations * measured.per_operation;
        let bytes = (weights + kv) as f64 / batch as f64;
        let (bytes_per_s, memory_share) = (bytes * measured.tokens_per_s, bytes * measured.per_byte);
        if self.common.json {
            let object = json!({
                "ranks": plan.0, "transport": plan.1, "threads": threads, "batch": self.batch,
                "tokens_per_s": measured.tokens_per_s,
                "time_to_first_token_s": measured.time_to_first_token.as_secs_f64(),
                "bytes_per_step": weights + kv, "bytes_per_s": bytes_per_s,
                "memory_bytes_per_s": measured.memory, "memory_share": memory_share,
                "operations_per_s": operations * measured.tokens_per_s, "peak_share": peak_share,
                "reduce_share": measured.reduce_share,
            });
            println!("{object}");
            return Ok(());
        }
        let mut table = table::new(&["", "decode"]);
        table.add_row(["ranks".to_owned(), format!("{} over {}", plan.0, plan.1)]);
        table.add_row(["threads in all".to_owned(), threads.to_string()]);
        table.add_row(["sequences".to_owned(), self.batch.to_string()]);
        table.add_row(["tokens/s".to_owned(), format!("{:.2}", measured.tokens_per_s)]);
        let first = measured.time_to_first_token.as_secs_f64() * 1e3;
        table.add_row(["first token, ms".to_owned(), format!("{first:.1}")]);
        table.add_row(["bytes a step".to_owned(), human_bytes(weights + kv)]);
        table.add_row(["GB/s read".to_owned(), format!("{:.1}", bytes_per_s / 1e9)]);
        table.add_row(["GB/s of these threads' memory".to_owned(), format!("{:.1}", measured.memory / 1e9)]);
        table.add_row(["share of it".to_owned(), format!("{:.0} %", 100.0 * memory_share)]);
        table.add_row([PEAK_SHARE.to_owned(), format!("{:.1} %", 100.0 * peak_share)]);
        table.add_row(["time in all-reduces".to_owned(), format!("{:.1} %", 100.0 * measured.reduce_share)]);
        println!("{table}");
        Ok(())
    }
}

impl PrefillCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let Some(session) = session::open(&self.common.model, &self.common.engine)? else { return Ok(()) };
        let prompt = self.prompt as f64;
        let multiplied = session.multiplied;
        let threads = threads(&self.common.engine, &session);
        let limits = Limits::new(&self.common, multiplied, (self.prompt, true), threads)?;
        let measured = measure(&session, &self.common, self.prompt, 1, 1, limits, |usages| {
            prompt / usages[0].time_to_first_token.as_secs_f64().max(1e-9)
        });
        let (weights, _) = bytes_per_token(&session, 0, 1);
        let plan = (session.plan.ranks(), session.transport.clone());
        session.close()?;
        let measured = measured?;
        // Weights are read once for each step's rows.
        let bytes_a_token = weights * self.prompt.div_ceil(session::STEP_ROWS) as u64 / self.prompt as u64;
        let memory_share = bytes_a_token as f64 * measured.per_byte;
        // The head makes the logits of one token only.
        let operations = 2.0 * multiplied.layers as f64;
        let peak_share = operations * measured.per_operation;
        if self.common.json {
            let object = json!({
                "ranks": plan.0, "transport": plan.1, "threads": threads, "prompt_tokens": self.prompt,
                "tokens_per_s": measured.tokens_per_s,
                "bytes_per_token": bytes_a_token, "memory_bytes_per_s": measured.memory,
                "memory_share": memory_share,
                "operations_per_s": operations * measured.tokens_per_s, "peak_share": peak_share,
                "time_to_first_token_s": measured.time_to_first_token.as_secs_f64(),
                "reduce_share": measured.reduce_share,
            });
            println!("{object}");
            return Ok(());
        }
        let mut table = table::new(&["", "prefill"]);
        table.add_row(["ranks".to_owned(), format!("{} over {}", plan.0, plan.1)]);
        table.add_row(["threads in all".to_owned(), threads.to_string()]);
        table.add_row(["prompt tokens".to_owned(), self.prompt.to_string()]);
        table.add_row(["bytes a token".to_owned(), human_bytes(bytes_a_token)]);
        table.add_row(["share of memory bandwidth".to_owned(), format!("{:.1} %", 100.0 * memory_share)]);
        table.add_row([PEAK_SHARE.to_owned(), format!("{:.1} %", 100.0 * peak_share)]);
        table.add_row(["tokens/s".to_owned(), format!("{:.1}", measured.tokens_per_s)]);
        let first = measured.time_to_first_token.as_secs_f64() * 1e3;
        table.add_row(["first token, ms".to_owned(), format!("{first:.1}")]);
        table.add_row(["time in all-reduces".to_owned(), format!("{:.1} %", 100.0 * measured.reduce_share)]);
        println!("{table}");
        Ok(())
    }
}

/// Runs requests, the first time to warm up, and what limits them in turn with them; returns medians.
fn measure(
    session: &Session,
    common: &Common,
    prompt_tokens: usize,
    tokens: usize,
    batch: usize,
    mut limits: Limits,
    rate: impl Fn(&[Usage]) -> f64,
) -> anyhow::Result<Measured> {
    let engine = &session.engine;
    let vocab = engine.info().vocab_size as u32;
    let mut rounds = Vec::new();
    for round in 0..=u32::from(common.repeat) {
        let request = |index: usize| Request {
            // Different prompts, so that nothing is gained from having seen one.
            prompt: (0..prompt_tokens.max(1) as u32)
                .map(|i| (i * 97 + 31 * round + index as u32 * 7) % vocab)
                .collect(),
            sampling: Sampling::default(),
            max_tokens: Some(tokens.max(1)),
            stop: Vec::new(),
            ignore_eos: true,
            logprobs: None,
        };
        let before = engine.counters().times();
        let streams = (0..batch.max(1)).map(|i| engine.submit(request(i))).collect::<Result<Vec<_>, _>>()?;
        let never = AtomicBool::new(false);
        let usages = streams
            .into_iter()
            .map(|stream| Ok(prompt::read(stream, &never, |_| Ok(()))?.usage))
            .collect::<anyhow::Result<Vec<_>>>()?;
        if round > 0 {
            let reduce_share = engine.counters().reduce_share_since(before);
            let tokens_per_s = rate(&usages);
            let [memory, operations] = limits.measure();
            rounds.push(Measured {
                time_to_first_token: usages[0].time_to_first_token,
                tokens_per_s,
                reduce_share,
                memory,
                per_byte: tokens_per_s / memory,
                per_operation: tokens_per_s / operations,
            });
        }
    }
    Ok(Measured::medians(&rounds))
}

/// Bytes of weights and of keys and values that a decode step reads, on all ranks together.
fn bytes_per_token(session: &Session, context: usize, batch: usize) -> (u64, u64) {
    let weights = session.demands.iter().map(|demand| demand.weight_bytes).sum::<u64>();
    let kv = session.demands.iter().map(|demand| demand.kv_bytes_per_token).sum::<u64>();
    (weights - session.embedding_bytes, kv * (context * batch) as u64)
}

fn threads(args: &EngineArgs, session: &Session) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let ranks = session.plan.ranks();
    args.threads.unwrap_or_else(|| (cores / ranks).max(1)) * ranks
}
