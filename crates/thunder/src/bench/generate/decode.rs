//! `thunder bench decode`.

use std::sync::atomic::Ordering;

use anyhow::bail;
use clap::Args;
use serde::Serialize;
use serde_json::json;
use thunder_compute::step::KV_BLOCK_TOKENS;
use thunder_engine::{Request, Sampling};
use thunder_model::error::human_bytes;

use super::{Common, Measured, ModelWork, PEAK_SHARE, Setup, Work, at_least, bytes_per_step, measure};
use crate::table;

/// Measure the speed of generating tokens, and the shares of memory bandwidth and of peak
/// arithmetic that it uses
///
/// Prompts are random tokens. All prompts are read before the clock starts; "first token" is the
/// time that the first prompt takes. With --draft, the speed depends on how often the draft model
/// guesses correctly after such prompts, and the shares of the machine's limits are not printed.
#[derive(Args)]
pub struct DecodeCommand {
    #[command(flatten)]
    common: Common,
    /// Tokens of each prompt, rounded up to whole blocks of the KV cache (32 tokens) plus two
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = at_least::<1>)]
    prompt: usize,
    /// Tokens to generate for each prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 64, value_parser = at_least::<2>)]
    tokens: usize,
    /// Numbers of sequences to generate together, e.g. 1,4,16; each is measured and compared with
    /// the first. Raises --max-batch if needed, so that none waits
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u16).range(1..=256))]
    batch: Vec<u16>,
    /// Temperature at which tokens are chosen; 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature)]
    temperature: f32,
    /// Choose among the likeliest tokens whose probabilities sum to this
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = share, requires = "temperature")]
    top_p: f32,
    /// Divide positive logits of tokens in the prompt and the answer by this, and multiply negative
    /// ones by it (0.01 to 10); 1 changes nothing
    #[arg(long, value_name = "R", default_value_t = 1.0, value_parser = penalty)]
    repetition_penalty: f32,
    /// Report the log-probabilities of each token and of this many alternatives (0 to 20), for
    /// which all logits of a step are read; by default none are reported
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=20))]
    logprobs: Option<u8>,
    /// Also time each kernel of a GPU: its runs in a step, their time, and the share of memory
    /// bandwidth for reading weights
    #[cfg(feature = "gpu")]
    #[arg(long)]
    kernels: bool,
}

impl DecodeCommand {
    /// Runs the command.
    pub fn run(mut self) -> anyhow::Result<()> {
        // All sequences run at once: waiting sequences would count as slow ones.
        self.common.engine.cache.max_batch =
            self.batch.iter().fold(self.common.engine.cache.max_batch, |most, &batch| most.max(batch));
        let Some(session) = self.common.open(true)? else {
            return Ok(());
        };
        // The prefix cache has whole blocks, and leaves two tokens at least to be read.
        let prompt = self.prompt.next_multiple_of(KV_BLOCK_TOKENS) + 2;
        let room = session.head.engine.info().context_length;
        if prompt + self.tokens > room {
            bail!(
                "--prompt {} (with its last block: {prompt}) and --tokens {} are more than the context of {room} tokens",
                self.prompt,
                self.tokens
            );
        }
        let sampling = Sampling {
            temperature: self.temperature,
            top_p: self.top_p,
            repetition_penalty: self.repetition_penalty,
            seed: Some(1),
            ..Sampling::default()
        };
        let model = ModelWork::of(self.common.model.name())?;
        let options = Request { sampling, logprobs: self.logprobs.map(usize::from), ..Request::default() };
        let work = Work { prompt, tokens: self.tokens, options, batches: &self.batch };
        let measured = measure(&session, &self.common, &model, &work, |usages| {
            let slowest = usages.iter().map(|usage| usage.decode_time).max().unwrap_or_default();
            let tokens: usize = usages.iter().map(|usage| usage.completion_tokens.saturating_sub(1)).sum();
            tokens as f64 / slowest.as_secs_f64().max(1e-9)
        });
        #[cfg(feature = "gpu")]
        let profiles = match self.kernels {
            true => super::gpu_kernels::profiles(&session, &work)?,
            false => Vec::new(),
        };
        let context = prompt + self.tokens / 2;
        let bytes: Vec<u64> =
            self.batch.iter().map(|&batch| bytes_per_step(&session, context, batch.into())).collect();
        let counters = session.head.engine.counters();
        let [guessed, right] =
            [&counters.drafted, &counters.drafts_right].map(|count| count.load(Ordering::Relaxed));
        let drafts = self.common.engine.draft.is_some().then_some((guessed, right));
        let setup = Setup::of(&session);
        session.close()?;
        let operations = 2.0 * (model.layers + model.head) as f64;
        let rows: Vec<DecodeRow> = (self.batch.iter().zip(bytes).zip(measured?))
            .map(|((&batch, bytes), measured)| DecodeRow::new(batch, bytes, operations, &measured))
            .collect();
        if self.common.json {
            let mut object = json!({
                "ranks": setup.ranks,
                "device": setup.device,
                "transport": setup.transport,
                "threads": setup.threads,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "repetition_penalty": self.repetition_penalty,
                "logprobs": self.logprobs,
                "rows": rows,
            });
            if let Some((guessed, right)) = drafts {
                object["guessed"] = guessed.into();
                object["guesses_right"] = right.into();
            }
            #[cfg(feature = "gpu")]
            if self.kernels {
                object["kernels"] = super::gpu_kernels::json(&profiles);
            }
            println!("{object}");
            return Ok(());
        }
        println!("{}: {}, {} thread(s) in all", setup.device, setup.ranks_over(), setup.threads);
        println!("{}", decode_table(&rows, drafts.is_none()));
        if let Some((guessed, right)) = drafts {
            println!("{right} of {guessed} verified guesses were right, in all rounds");
        }
        #[cfg(feature = "gpu")]
        for (batch, profile) in &profiles {
            super::gpu_kernels::print(*batch, profile, rows[0].memory_bytes_per_s);
        }
        Ok(())
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    number(text, |number| (0.0..=100.0).contains(&number)).ok_or_else(|| "must be from 0 to 100".to_owned())
}

fn penalty(text: &str) -> Result<f32, String> {
    number(text, |number| (0.01..=10.0).contains(&number)).ok_or_else(|| "must be from 0.01 to 10".to_owned())
}

fn share(text: &str) -> Result<f32, String> {
    number(text, |number| number > 0.0 && number <= 1.0)
        .ok_or_else(|| "must be over 0, and at most 1".to_owned())
}

fn number(text: &str, is_right: impl Fn(f32) -> bool) -> Option<f32> {
    text.parse().ok().filter(|number| is_right(*number))
}

/// Figures of one batch size.
#[derive(Serialize)]
struct DecodeRow {
    batch: u16,
    /// Of all sequences together.
    tokens_per_s: f64,
    kept_per_sequence: f64,
    time_to_first_token_s: f64,
    /// Tokens of each prompt that were read while the clock ran: the prefix cache has the others.
    prompt_tokens_in_time: usize,
    bytes_per_step: u64,
    bytes_per_s: f64,
    memory_bytes_per_s: f64,
    memory_share: f64,
    operations_per_s: f64,
    peak_share: f64,
    reduce_share: f64,
}

impl DecodeRow {
    fn new(batch: u16, bytes_per_step: u64, operations_per_token: f64, measured: &Measured) -> Self {
        let bytes_per_token = bytes_per_step as f64 / f64::from(batch);
        Self {
            batch,
            tokens_per_s: measured.tokens_per_s,
            kept_per_sequence: measured.kept,
            time_to_first_token_s: measured.time_to_first_token.as_secs_f64(),
            prompt_tokens_in_time: measured.prompt_tokens,
            bytes_per_step,
            bytes_per_s: bytes_per_token * measured.tokens_per_s,
            memory_bytes_per_s: measured.memory,
            memory_share: bytes_per_token * measured.per_byte,
            operations_per_s: operations_per_token * measured.tokens_per_s,
            peak_share: operations_per_token * measured.per_operation,
            reduce_share: measured.reduce_share,
        }
    }
}

/// One column per batch size. `shares`: also the shares of the machine's limits.
fn decode_table(rows: &[DecodeRow], shares: bool) -> comfy_table::Table {
    let batches: Vec<String> = rows.iter().map(|row| row.batch.to_string()).collect();
    let mut headings = vec!["sequences"];
    headings.extend(batches.iter().map(String::as_str));
    let mut table = table::new(&headings);
    let mut add = |name: &str, value: &dyn Fn(&DecodeRow) -> String| {
        table.add_row(std::iter::once(name.to_owned()).chain(rows.iter().map(value)));
    };
    add("tokens/s", &|row| format!("{:.2}", row.tokens_per_s));
    if rows.len() > 1 {
        add("speed of each, of the first", &|row| format!("{:.0} %", 100.0 * row.kept_per_sequence));
    }
    add("first token, ms", &|row| format!("{:.1}", row.time_to_first_token_s * 1e3));
    if !shares {
        return table;
    }
    add("bytes per step", &|row| human_bytes(row.bytes_per_step));
    add("GB/s read", &|row| format!("{:.1}", row.bytes_per_s / 1e9));
    add("GB/s that can be read", &|row| format!("{:.1}", row.memory_bytes_per_s / 1e9));
    add("share of memory bandwidth", &|row| format!("{:.0} %", 100.0 * row.memory_share));
    add(PEAK_SHARE, &|row| format!("{:.1} %", 100.0 * row.peak_share));
    add("time in all-reduces", &|row| format!("{:.1} %", 100.0 * row.reduce_share));
    table
}
