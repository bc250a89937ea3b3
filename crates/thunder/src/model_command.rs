//! `thunder model`: models on this machine's disk, and models that the cluster serves.

mod care;
mod infer;
mod list;
mod load;
mod nodes;
mod pull;
mod remove;
mod synth;

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use serde_json::json;
use thunder_model::error::human_bytes;

pub use list::cached_models;
pub use load::{ask_for, may_plan, parse_share};

use crate::model_arg::completer;
use crate::{builtin, session};

/// Download and list models, load them on the cluster, or write random models for measurements
#[derive(Args)]
pub struct ModelCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Download a model from the Hugging Face hub, to this machine or to nodes of the cluster
    #[command(after_help = pull::HELP)]
    Pull(pull::Pull),
    /// List the models in the Hugging Face cache, here or on nodes of the cluster
    List(list::List),
    /// Delete a model from the Hugging Face cache, here or on nodes of the cluster
    Remove(remove::Remove),
    /// Serve a model on the nodes of the cluster
    Load(load::Load),
    /// Stop serving a model on the cluster
    Unload(load::Unload),
    /// Send a prompt to a model that the cluster serves
    Infer(infer::Infer),
    /// Show the models that the cluster serves, and where they run
    Status(care::ModelStatus),
    /// Download the changes of a model in the Hugging Face cache
    Update(care::Update),
    /// Check a model's files against their hashes
    Verify(care::Verify),
    /// Print the folder or GGUF file of a model
    #[command(after_help = "Example:\n  ls \"$(thunder model path mlx-community/Qwen3-0.6B-4bit)\"")]
    Path(Find),
    /// Write a model with the shapes of a known model and random weights, for measurements
    #[command(after_help = synth::HELP)]
    Synth(synth::Synth),
}

/// `thunder model path`.
#[derive(Args)]
struct Find {
    /// `builtin`, a folder, a GGUF file, or the name of a model in the Hugging Face cache
    #[arg(value_name = "MODEL", add = completer())]
    name: OsString,
    /// Print one JSON object with name, folder and bytes
    #[arg(long)]
    json: bool,
}

impl ModelCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        match self.action {
            Action::Pull(pull) => pull.run(),
            Action::List(list) => list.run(),
            Action::Remove(remove) => remove.run(),
            Action::Load(load) => load.run(),
            Action::Unload(unload) => unload.run(),
            Action::Infer(infer) => infer.run(),
            Action::Status(status) => status.run(),
            Action::Update(update) => update.run(),
            Action::Verify(verify) => verify.run(),
            Action::Path(find) => find.run(),
            Action::Synth(synth) => synth.run(),
        }
    }
}

impl Find {
    fn run(self) -> anyhow::Result<()> {
        let (folder, name) = session::find_model(&self.name)?;
        let folder = std::path::absolute(&folder).unwrap_or(folder);
        if self.json {
            println!("{}", json!({ "model": name, "folder": folder, "bytes": folder_bytes(&folder)? }));
        } else {
            // A path for a shell, as its raw bytes.
            let mut out = std::io::stdout().lock();
            out.write_all(folder.as_os_str().as_encoded_bytes())?;
            out.write_all(b"\n")?;
        }
        Ok(())
    }
}

/// True if this is the built-in model, which is not in the Hugging Face cache. Then it also prints
/// what this means for a command.
fn is_builtin(name: &OsStr, json: bool, what: &str) -> bool {
    let is_builtin = name == builtin::NAME;
    if is_builtin && json {
        println!("{}", json!({ "model": builtin::NAME, "part_of_program": true }));
    } else if is_builtin {
        println!("{} is part of the program: {what}", builtin::NAME);
    }
    is_builtin
}

/// Bytes of a folder's files, or of a GGUF model's files, following links.
pub fn folder_bytes(folder: &Path) -> anyhow::Result<u64> {
    if folder.is_file() {
        let bytes = |file: &Path| {
            let metadata =
                std::fs::metadata(file).with_context(|| format!("cannot read {}", file.display()))?;
            Ok(metadata.len())
        };
        return thunder_hub::gguf_parts(folder).iter().map(|file| bytes(file)).sum();
    }
    let failed = || format!("cannot list {}", folder.display());
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder).with_context(failed)? {
        let metadata = std::fs::metadata(entry.with_context(failed)?.path()).with_context(failed)?;
        bytes += if metadata.is_file() { metadata.len() } else { 0 };
    }
    Ok(bytes)
}

/// Bytes, time and speed of a transfer, for people.
fn speed(verb: &str, bytes: u64, elapsed: Duration) -> String {
    let per_second = bytes as f64 / elapsed.as_secs_f64().max(1e-3);
    format!(
        "{verb} {} in {:.1} s ({}/s)",
        human_bytes(bytes),
        elapsed.as_secs_f64(),
        human_bytes(per_second as u64)
    )
}
