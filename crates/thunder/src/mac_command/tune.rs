//! `thunder mac tune`: memory for the GPU, and power.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use serde_json::json;
use thunder_cables::tune::{self, GpuLimit};
use thunder_model::ShardFootprint;

use super::changes::{ChangeArgs, carry_out, print_commands};
use super::desk::{DeskArgs, confirm, with_sudo};
use super::look::gpu_words;
use crate::engine_args::LayoutArgs;
use crate::session;

/// Let the GPU use enough memory for a model, and turn Low Power Mode off; `thunder mac undo`
/// reverts this
///
/// macOS allows the GPU only a part of the memory (iogpu.wired_limit_mb). For --model, prints the
/// memory that each machine's share needs, the memory that remains for macOS, and the resulting
/// limit. Changes nothing where the default limit is enough. The new limit lasts until the next
/// restart.
#[derive(Args)]
#[command(mut_arg("ranks", |ranks| ranks.hide(true)))]
pub struct TuneCommand {
    #[command(flatten)]
    desk: DeskArgs,
    #[command(flatten)]
    changes: ChangeArgs,
    /// Model to make room for, with one rank on each machine: a folder, a GGUF file or a name
    #[arg(long, value_name = "MODEL")]
    model: Option<std::ffi::OsString>,
    #[command(flatten)]
    layout: LayoutArgs,
    /// Tokens of the KV cache to make room for
    #[arg(long, value_name = "TOKENS", default_value_t = 32_768)]
    context: u64,
    /// Print the arithmetic and the commands, and run no command
    #[arg(long)]
    dry_run: bool,
    /// Print the plan as one JSON object (with --dry-run)
    #[arg(long, requires = "dry_run")]
    json: bool,
}

impl TuneCommand {
    /// Runs the command.
    pub fn run(self) -> Result<ExitCode> {
        let desk = self.desk.read()?;
        let needs = self.needs(desk.machines.len())?;
        let limits: Vec<Option<GpuLimit>> = desk
            .machines
            .iter()
            .enumerate()
            .map(|(rank, machine)| needs.get(rank).map(|need| tune::gpu_limit(machine, *need)).transpose())
            .collect::<Result<_, _>>()?;
        let plans: Vec<_> = desk
            .machines
            .iter()
            .zip(&limits)
            .map(|(machine, limit)| tune::plan(machine, limit.as_ref()))
            .filter(|plan| !plan.actions.is_empty())
            .collect();
        if self.json {
            println!("{}", json!({ "limits": limits, "plan": plans }));
            return Ok(ExitCode::SUCCESS);
        }
        limits.iter().flatten().for_each(print_limit);
        if plans.is_empty() {
            println!("Nothing to change.");
            return Ok(ExitCode::SUCCESS);
        }
        print_commands(&desk, &plans);
        if self.dry_run {
            return Ok(ExitCode::SUCCESS);
        }
        let file = self.changes.open()?;
        if !confirm("Run these commands?", self.changes.yes)? {
            bail!("nothing was changed");
        }
        let mut record = file.load()?;
        let names: Vec<String> = plans.iter().map(|plan| plan.machine.clone()).collect();
        let shells = self.desk.ssh.shells(&names);
        carry_out(&plans, &desk, &with_sudo(&shells, &names)?, &file, &mut record)?;
        Ok(ExitCode::SUCCESS)
    }

    /// Bytes that each rank needs.
    fn needs(&self, ranks: usize) -> Result<Vec<u64>> {
        let Some(model) = &self.model else { return Ok(Vec::new()) };
        let folder = session::open_folder(model)?;
        let plan = self.layout.shard_plan(&folder, ranks)?;
        let footprints = thunder_model::model::shard_footprints(&folder, &plan, self.layout.kv.into())?;
        let need = |footprint: &ShardFootprint| {
            footprint.weight_bytes.saturating_add(footprint.kv_bytes_per_token.saturating_mul(self.context))
        };
        Ok(footprints.iter().map(need).collect())
    }
}

fn print_limit(limit: &GpuLimit) {
    let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30));
    println!(
        "{}: {} memory − {} for macOS = {} at most; the model needs {} and {} for buffers",
        limit.machine,
        gib(limit.memory),
        gib(limit.reserve),
        gib(limit.memory - limit.reserve),
        gib(limit.model),
        gib(limit.buffers)
    );
    let now = gpu_words(limit.now);
    match limit.set_mib {
        Some(mib) => println!("  the GPU may hold {now}: the limit has to be {mib} MiB"),
        None => println!("  the GPU may hold {now}, which is enough"),
    }
}
