//! `thunder bench prefill`.

use anyhow::bail;
use clap::Args;
use serde_json::{Value, json};
use thunder_engine::Request;
use thunder_model::error::human_bytes;

#[cfg(feature = "gpu")]
use super::gpu_kernels;
use super::{Common, Measured, ModelWork, PEAK_SHARE, Setup, Work, at_least, bytes_per_step, measure};
use crate::table;

/// Measure the speed of reading prompts, and the share of peak arithmetic that it uses
#[derive(Args)]
pub struct PrefillCommand {
    #[command(flatten)]
    common: Common,
    /// Tokens of the prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = at_least::<1>)]
    prompt: usize,
    /// Also time each kernel of a GPU, and its longest submission; a driver may end submissions
    /// that take too long
    #[cfg(feature = "gpu")]
    #[arg(long)]
    kernels: bool,
}

/// What a prompt's token takes.
struct Cost {
    bytes: u64,
    /// Multiplications and additions. The output projection is computed for the last token only and
    /// not counted.
    operations: f64,
}

impl PrefillCommand {
    /// Runs the command.
    pub fn run(mut self) -> anyhow::Result<()> {
        if self.common.engine.draft.is_some() {
            bail!("--draft is for generating, and bench prefill only reads a prompt: leave it out");
        }
        let Some(session) = self.common.open(false)? else {
            return Ok(());
        };
        let model = ModelWork::of(self.common.model.name())?;
        let work = Work { prompt: self.prompt, tokens: 1, options: Request::default(), batches: &[1] };
        let measured = measure(&session, &self.common, &model, &work, |usages| {
            self.prompt as f64 / usages[0].time_to_first_token.as_secs_f64().max(1e-9)
        });
        // Weights are read once per step, for all of its rows.
        let steps = self.prompt.div_ceil(session.head.step_rows) as u64;
        let setup = Setup::of(&session);
        let cost = Cost {
            bytes: bytes_per_step(&session, 0, 1) * steps / self.prompt as u64,
            operations: 2.0 * model.layers as f64,
        };
        #[cfg(feature = "gpu")]
        let profiles = match self.kernels {
            true => gpu_kernels::profiles(&session, &work)?,
            false => Vec::new(),
        };
        session.close()?;
        let measured = measured?.remove(0);
        #[cfg(feature = "gpu")]
        let kernels = self.kernels.then(|| gpu_kernels::json(&profiles));
        #[cfg(not(feature = "gpu"))]
        let kernels = None;
        self.print(&setup, &cost, &measured, kernels);
        #[cfg(feature = "gpu")]
        for (batch, profile) in profiles.iter().filter(|_| !self.common.json) {
            gpu_kernels::print(*batch, profile, measured.memory);
        }
        Ok(())
    }

    fn print(&self, setup: &Setup, cost: &Cost, measured: &Measured, kernels: Option<Value>) {
        let memory_share = cost.bytes as f64 * measured.per_byte;
        let peak_share = cost.operations * measured.per_operation;
        if self.common.json {
            let mut object = json!({
                "ranks": setup.ranks, "device": setup.device,
                "transport": setup.transport, "threads": setup.threads,
                "prompt_tokens": self.prompt,
                "tokens_per_s": measured.tokens_per_s,
                "bytes_per_token": cost.bytes, "memory_bytes_per_s": measured.memory,
                "memory_share": memory_share,
                "operations_per_s": cost.operations * measured.tokens_per_s, "peak_share": peak_share,
                "time_to_first_token_s": measured.time_to_first_token.as_secs_f64(),
                "reduce_share": measured.reduce_share,
            });
            if let Some(kernels) = kernels {
                object["kernels"] = kernels;
            }
            println!("{object}");
            return;
        }
        let mut table = table::new(&["", "prefill"]);
        table.add_row(["device".to_owned(), setup.device.clone()]);
        table.add_row(["measured on".to_owned(), setup.ranks_over()]);
        table.add_row(["threads in all".to_owned(), setup.threads.to_string()]);
        table.add_row(["prompt tokens".to_owned(), self.prompt.to_string()]);
        table.add_row(["bytes per token".to_owned(), human_bytes(cost.bytes)]);
        table.add_row(["share of memory bandwidth".to_owned(), format!("{:.1} %", 100.0 * memory_share)]);
        table.add_row([PEAK_SHARE.to_owned(), format!("{:.1} %", 100.0 * peak_share)]);
        table.add_row(["tokens/s".to_owned(), format!("{:.1}", measured.tokens_per_s)]);
        let first = measured.time_to_first_token.as_secs_f64() * 1e3;
        table.add_row(["first token, ms".to_owned(), format!("{first:.1}")]);
        table.add_row(["time in all-reduces".to_owned(), format!("{:.1} %", 100.0 * measured.reduce_share)]);
        println!("{table}");
    }
}
