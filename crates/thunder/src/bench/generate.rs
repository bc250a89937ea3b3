//! `thunder bench decode` and `thunder bench prefill`.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use serde::Serialize;
use serde_json::json;
use thunder_compute::cpu::peak::{self, Arithmetic};
use thunder_compute::{Activations, Encoding, Float, Isa, memory};
use thunder_engine::assembly::ThreadCounts;
use thunder_engine::assembly::assemble::STEP_ROWS;
use thunder_engine::{Request, Sampling, Usage};
use thunder_model::ModelFolder;
use thunder_model::error::human_bytes;

use crate::engine_args::EngineArgs;
use crate::prompt;
use crate::session::{self, Session};
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
    /// Sequences that are generated at once; several numbers are measured in turn, and each held against the first
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u16).range(1..=256))]
    batch: Vec<u16>,
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

/// Weights that a token is multiplied with, on all ranks together.
struct ModelWork {
    layers: u64,
    /// Of the output projection.
    head: u64,
    is_quantized: bool,
    /// Bytes of an embedding of which a step reads a few rows only; 0 if it is the output projection too.
    lookup_bytes: u64,
}

impl ModelWork {
    fn of(model: &str) -> anyhow::Result<Self> {
        let folder: ModelFolder = session::open_folder(model)?;
        Ok(Self {
            layers: folder.spec.layer_weights(),
            head: (folder.spec.hidden * folder.spec.vocab) as u64,
            is_quantized: folder.weights.is_quantized(),
            lookup_bytes: thunder_model::model::lookup_bytes(&folder),
        })
    }
}

/// Memory bandwidth and arithmetic peak of the engine's threads. Measured after each round, because a machine's speed varies.
///
/// Only this host can be measured: other hosts are taken to give as much per thread.
struct Peaks {
    reader: memory::Reader,
    isa: Isa,
    activations: Activations,
    encoding: Encoding,
    threads: ThreadCounts,
}

impl Peaks {
    fn new(common: &Common, work: &ModelWork, threads: ThreadCounts) -> anyhow::Result<Self> {
        let isa = Isa::detect().map_err(anyhow::Error::msg)?;
        let encoding = match work.is_quantized {
            true => Encoding::Affine { bits: 4, group: 64, scales: Float::F16 },
            false => Encoding::Float(Float::BF16),
        };
        Ok(Self {
            reader: memory::Reader::new(threads.on_host, BANDWIDTH_BYTES, isa)?,
            isa,
            activations: common.engine.activations.into(),
            encoding,
            threads,
        })
    }

    /// Bytes a second, and operations a second in products of so many rows, of prompts or others.
    fn measure(&mut self, rows: (usize, bool)) -> [f64; 2] {
        let arithmetic = Arithmetic::of_product(self.isa, self.activations, self.encoding, rows);
        let operations = peak::operations_per_s(self.isa, arithmetic, self.threads.on_host, PEAK_TIME);
        let hosts = self.threads.in_group as f64 / self.threads.on_host as f64;
        [hosts * self.reader.bytes_per_s(BANDWIDTH_TIME), hosts * operations]
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
    /// What a sequence keeps of its speed in the first of several batches.
    kept: f64,
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
            kept: median(|round| round.kept),
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
        self.common.engine.max_batch =
            self.batch.iter().fold(self.common.engine.max_batch, |most, &batch| most.max(batch));
        let Some(session) = session::open(&self.common.model, &self.common.engine)? else { return Ok(()) };
        let room = session.head.engine.info().context_length;
        if self.prompt + self.tokens > room {
            bail!(
                "--prompt {} and --tokens {} are more than the {room} tokens of context that there is room for",
                self.prompt,
                self.tokens
            );
        }
        let model = ModelWork::of(&self.common.model)?;
        let threads = session.head.threads.in_group;
        let work = Work { prompt: self.prompt, tokens: self.tokens, batches: &self.batch };
        let measured = measure(&session, &self.common, &model, &work, |usages| {
            let slowest = usages.iter().map(|usage| usage.decode_time).max().unwrap_or_default();
            let tokens: usize = usages.iter().map(|usage| usage.completion_tokens.saturating_sub(1)).sum();
            tokens as f64 / slowest.as_secs_f64().max(1e-9)
        });
        let read =
            |batch| bytes_per_token(&session, &model, self.prompt + self.tokens / 2, usize::from(batch));
        let bytes: Vec<(u64, u64)> = self.batch.iter().map(|&batch| read(batch)).collect();
        let (ranks, transport) = (session.head.plan.ranks(), session.head.transport.clone());
        session.close()?;
        let operations = 2.0 * (model.layers + model.head) as f64;
        let rows: Vec<DecodeRow> = (self.batch.iter().zip(bytes).zip(measured?))
            .map(|((&batch, (weights, kv)), measured)| {
                let bytes = (weights + kv) as f64 / f64::from(batch);
                DecodeRow {
                    batch,
                    tokens_per_s: measured.tokens_per_s,
                    kept_per_sequence: measured.kept,
                    time_to_first_token_s: measured.time_to_first_token.as_secs_f64(),
                    bytes_per_step: weights + kv,
                    bytes_per_s: bytes * measured.tokens_per_s,
                    memory_bytes_per_s: measured.memory,
                    memory_share: bytes * measured.per_byte,
                    operations_per_s: operations * measured.tokens_per_s,
                    peak_share: operations * measured.per_operation,
                    reduce_share: measured.reduce_share,
                }
            })
            .collect();
        if self.common.json {
            println!(
                "{}",
                json!({ "ranks": ranks, "transport": transport, "threads": threads, "rows": rows })
            );
            return Ok(());
        }
        println!("{ranks} ranks over {transport}, {threads} threads in all");
        println!("{}", decode_table(&rows));
        Ok(())
    }
}

/// What a number of sequences at once gives.
#[derive(Serialize)]
struct DecodeRow {
    batch: u16,
    /// Of all sequences together.
    tokens_per_s: f64,
    kept_per_sequence: f64,
    time_to_first_token_s: f64,
    bytes_per_step: u64,
    bytes_per_s: f64,
    memory_bytes_per_s: f64,
    memory_share: f64,
    operations_per_s: f64,
    peak_share: f64,
    reduce_share: f64,
}

/// A column for each number of sequences.
fn decode_table(rows: &[DecodeRow]) -> comfy_table::Table {
    let batches: Vec<String> = rows.iter().map(|row| row.batch.to_string()).collect();
    let mut headings = vec!["sequences"];
    headings.extend(batches.iter().map(String::as_str));
    let mut table = table::new(&headings);
    let mut add = |name: &str, value: &dyn Fn(&DecodeRow) -> String| {
        table.add_row(std::iter::once(name.to_owned()).chain(rows.iter().map(value)));
    };
    add("tokens/s", &|row| format!("{:.2}", row.tokens_per_s));
    if rows.len() > 1 {
        add("speed that each keeps", &|row| format!("{:.0} %", 100.0 * row.kept_per_sequence));
    }
    add("first token, ms", &|row| format!("{:.1}", row.time_to_first_token_s * 1e3));
    add("bytes a step", &|row| human_bytes(row.bytes_per_step));
    add("GB/s read", &|row| format!("{:.1}", row.bytes_per_s / 1e9));
    add("GB/s of these threads' memory", &|row| format!("{:.1}", row.memory_bytes_per_s / 1e9));
    add("share of it", &|row| format!("{:.0} %", 100.0 * row.memory_share));
    add(PEAK_SHARE, &|row| format!("{:.1} %", 100.0 * row.peak_share));
    add("time in all-reduces", &|row| format!("{:.1} %", 100.0 * row.reduce_share));
    table
}

impl PrefillCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let Some(session) = session::open(&self.common.model, &self.common.engine)? else { return Ok(()) };
        let prompt = self.prompt as f64;
        let model = ModelWork::of(&self.common.model)?;
        let threads = session.head.threads.in_group;
        let work = Work { prompt: self.prompt, tokens: 1, batches: &[1] };
        let measured = measure(&session, &self.common, &model, &work, |usages| {
            prompt / usages[0].time_to_first_token.as_secs_f64().max(1e-9)
        });
        let (weights, _) = bytes_per_token(&session, &model, 0, 1);
        let plan = (session.head.plan.ranks(), session.head.transport.clone());
        session.close()?;
        let measured = measured?.remove(0);
        // Weights are read once for each step's rows.
        let bytes_a_token = weights * self.prompt.div_ceil(STEP_ROWS) as u64 / self.prompt as u64;
        let memory_share = bytes_a_token as f64 * measured.per_byte;
        // The head makes the logits of one token only.
        let operations = 2.0 * model.layers as f64;
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

/// What is asked for: so many tokens after each prompt, of as many sequences at once as each batch has.
struct Work<'a> {
    prompt: usize,
    tokens: usize,
    batches: &'a [u16],
}

impl Work<'_> {
    /// Rows of a step of a batch, and whether they are a prompt's: all time goes into the prompt if one token ends the answer.
    fn rows(&self, batch: u16) -> (usize, bool) {
        if self.tokens == 1 { (self.prompt, true) } else { (usize::from(batch), false) }
    }
}

/// Runs requests, the first time to warm up, and what limits them in turn with them; returns medians for each batch.
fn measure(
    session: &Session,
    common: &Common,
    model: &ModelWork,
    work: &Work<'_>,
    rate: impl Fn(&[Usage]) -> f64,
) -> anyhow::Result<Vec<Measured>> {
    let mut peaks = Peaks::new(common, model, session.head.threads)?;
    let mut rounds: Vec<Vec<Measured>> = work.batches.iter().map(|_| Vec::new()).collect();
    for round in 0..=u32::from(common.repeat) {
        let mut first_speed = None;
        for (&batch, rounds) in work.batches.iter().zip(&mut rounds) {
            let (usages, reduce_share) = run(session, work, batch, round)?;
            if round == 0 {
                continue;
            }
            let tokens_per_s = rate(&usages);
            let speed = tokens_per_s / f64::from(batch);
            let [memory, operations] = peaks.measure(work.rows(batch));
            rounds.push(Measured {
                time_to_first_token: usages[0].time_to_first_token,
                tokens_per_s,
                reduce_share,
                memory,
                per_byte: tokens_per_s / memory,
                per_operation: tokens_per_s / operations,
                kept: speed / *first_speed.get_or_insert(speed),
            });
        }
    }
    Ok(rounds.iter().map(|rounds| Measured::medians(rounds)).collect())
}

/// Answers a batch of requests: what each took, and the share of the time that was spent in all-reduces.
fn run(session: &Session, work: &Work<'_>, batch: u16, round: u32) -> anyhow::Result<(Vec<Usage>, f64)> {
    let engine = &session.head.engine;
    let vocab = engine.info().vocab_size as u32;
    let request = |index: u16| Request {
        // Different prompts, so that nothing is gained from having seen one.
        prompt: (0..work.prompt as u32)
            .map(|i| (i * 97 + 31 * round + u32::from(index) * 7) % vocab)
            .collect(),
        sampling: Sampling::default(),
        max_tokens: Some(work.tokens),
        stop: Vec::new(),
        ignore_eos: true,
        logprobs: None,
    };
    let before = engine.counters().times();
    let streams = (0..batch).map(|index| engine.submit(request(index))).collect::<Result<Vec<_>, _>>()?;
    let never = AtomicBool::new(false);
    let usages = streams
        .into_iter()
        .map(|stream| Ok(prompt::read(stream, &never, |_| Ok(()))?.usage))
        .collect::<anyhow::Result<Vec<_>>>()?;
    Ok((usages, engine.counters().reduce_share_since(before)))
}

/// Bytes of weights and of keys and values that a decode step reads, on all ranks together.
fn bytes_per_token(session: &Session, model: &ModelWork, context: usize, batch: usize) -> (u64, u64) {
    let weights = session.head.footprints.iter().map(|rank| rank.weight_bytes).sum::<u64>();
    let kv = session.head.footprints.iter().map(|rank| rank.kv_bytes_per_token).sum::<u64>();
    (weights - model.lookup_bytes, kv * (context * batch) as u64)
}
