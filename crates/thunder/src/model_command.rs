//! `thunder model`: models on this machine's disk.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde_json::json;
use thunder_hub::{HubError, Located, PullEvent, PullOptions};
use thunder_model::error::human_bytes;
use thunder_model::synth::{self, Shape};

use crate::{session, table};

/// Downloads models, lists them, and makes up random ones to measure with.
#[derive(Args)]
pub struct ModelCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Download a model from the Hugging Face hub
    #[command(after_help = PULL_HELP)]
    Pull(Pull),
    /// List the models in the Hugging Face cache
    List(List),
    /// Print the folder that a model lies in
    #[command(after_help = "Example:\n  ls \"$(thunder model path mlx-community/Qwen3-0.6B-4bit)\"")]
    Path(Find),
    /// Write a model of true shape with random weights, to measure with
    #[command(after_help = SYNTH_HELP)]
    Synth(Synth),
}

const PULL_HELP: &str = "\
Examples:
  thunder model pull mlx-community/Qwen3-0.6B-4bit
  thunder model pull Qwen/Qwen3-0.6B --revision main

The model goes into the Hugging Face cache, where MLX and transformers find it too, and what they pulled is found here. \
An interrupted pull goes on where it stopped. HF_TOKEN opens gated and private models; HF_ENDPOINT names another hub; \
HF_HUB_CACHE moves the cache.";

const SYNTH_HELP: &str = "\
The text that such a model makes is noise, but each token costs what the real model's does. See what a cluster makes \
of a model before downloading it:
  thunder model synth --arch llama-8b --bits 4 /tmp/llama-8b
  thunder plan --model /tmp/llama-8b --ranks 2
  thunder bench decode /tmp/llama-8b --ranks 2

Every machine of a cluster can write its own copy: the same options give the same bytes.";

/// `thunder model pull`.
#[derive(Args)]
struct Pull {
    /// Its name on the hub
    #[arg(value_name = "ORG/NAME")]
    name: String,
    /// Branch, tag or commit
    #[arg(long, default_value = "main")]
    revision: String,
    /// Print one JSON object; progress goes to standard error
    #[arg(long)]
    json: bool,
}

/// `thunder model list`.
#[derive(Args)]
struct List {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// `thunder model path`.
#[derive(Args)]
struct Find {
    /// `builtin`, a folder, or the name of a model in the Hugging Face cache
    #[arg(value_name = "MODEL")]
    name: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// `thunder model synth`.
#[derive(Args)]
struct Synth {
    /// Which model's shape
    #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(Shape::names()))]
    arch: String,
    /// Bits a weight; 16 is bf16
    #[arg(long, default_value = "4", value_parser = ["2", "3", "4", "5", "6", "8", "16"])]
    bits: String,
    /// Weights that share a scale
    #[arg(long, default_value = "64", value_parser = ["32", "64", "128"])]
    group: String,
    /// Which random numbers
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// A new folder for it
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Print one JSON object; progress goes to standard error
    #[arg(long)]
    json: bool,
}

impl ModelCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        match self.action {
            Action::Pull(pull) => pull.run(),
            Action::List(list) => list.run(),
            Action::Path(find) => find.run(),
            Action::Synth(synth) => synth.run(),
        }
    }
}

impl Pull {
    fn run(self) -> anyhow::Result<()> {
        let progress = PullProgress::new();
        let start = Instant::now();
        let pulled = thunder_hub::pull(&self.name, &self.revision, &PullOptions::from_env(), &|event| {
            progress.show(event)
        });
        let fetched = progress.finish();
        let Located { folder, commit, .. } = pulled?;
        let name = match self.revision.as_str() {
            "main" => self.name.clone(),
            revision => format!("{}@{revision}", self.name),
        };
        if self.json {
            let report = json!({
                "model": name,
                "folder": folder,
                "commit": commit,
                "bytes": folder_bytes(&folder)?,
                "fetched_bytes": fetched,
                "seconds": start.elapsed().as_secs_f64(),
            });
            println!("{report}");
            return Ok(());
        }
        println!("{name} is in {} ({})", folder.display(), human_bytes(folder_bytes(&folder)?));
        match fetched {
            0 => println!("it was complete: nothing was fetched"),
            bytes => println!("{}", speed("fetched", bytes, start.elapsed())),
        }
        println!("next: thunder run {name} \"Hello!\"");
        Ok(())
    }
}

/// What a pull says of itself: bars on a terminal, else a line a file.
struct PullProgress {
    bars: MultiProgress,
    on_terminal: bool,
    state: Mutex<PullState>,
}

#[derive(Default)]
struct PullState {
    /// Of all files together.
    total: Option<ProgressBar>,
    /// Bytes at the start of this pull, bytes now, and the bar of each file.
    files: HashMap<String, FileState>,
}

struct FileState {
    first: u64,
    done: u64,
    bar: ProgressBar,
}

impl PullProgress {
    fn new() -> Self {
        let on_terminal = std::io::stderr().is_terminal();
        Self { bars: MultiProgress::new(), on_terminal, state: Mutex::default() }
    }

    fn bar(&self, bytes: u64, label: &str) -> ProgressBar {
        let style = ProgressStyle::with_template(
            "{msg:40!} {bar:30} {bytes:>11}/{total_bytes:11} {bytes_per_sec:>13} {eta}",
        );
        let bar = ProgressBar::new(bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(label.to_owned());
        bar
    }

    fn say(&self, line: &str) {
        if self.on_terminal {
            // Above the bars. If the terminal is gone, so is who would read it.
            self.bars.println(line).ok();
        } else {
            eprintln!("{line}");
        }
    }

    fn show(&self, event: PullEvent<'_>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            PullEvent::Start { files, bytes, present } => {
                let there = if present > 0 { format!(" ({present} are there)") } else { String::new() };
                self.say(&format!("{files} files of {} to fetch{there}", human_bytes(bytes)));
                state.total = Some(self.bars.add(self.bar(bytes, "total")));
            }
            PullEvent::Bytes { file, done, total } => {
                let bar = || self.bars.insert_from_back(1, self.bar(total, file));
                let entry = state.files.entry(file.to_owned()).or_insert_with(|| FileState {
                    first: done,
                    done,
                    bar: bar(),
                });
                // A server that begins again takes bytes back, perhaps those of an earlier pull as well.
                entry.first = entry.first.min(done);
                entry.done = done;
                entry.bar.set_position(done);
                let all = state.files.values().map(|file| file.done).sum();
                if let Some(bar) = &state.total {
                    bar.set_position(all);
                }
            }
            PullEvent::Retry { file, reason, wait } => {
                self.say(&format!("{file}: {reason}; trying again after {:.1} s", wait.as_secs_f64()));
            }
            PullEvent::Done { file } => {
                if let Some(entry) = state.files.get(file) {
                    entry.bar.finish_and_clear();
                }
                if !self.on_terminal {
                    self.say(&format!("{file}: complete"));
                }
            }
            _ => {}
        }
    }

    /// Takes the bars away; the bytes that came.
    fn finish(&self) -> u64 {
        // A terminal that is gone needs no tidying.
        self.bars.clear().ok();
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.files.values().map(|file| file.done - file.first).sum()
    }
}

impl List {
    fn run(self) -> anyhow::Result<()> {
        let root = thunder_hub::cache_root();
        let mut models: Vec<(String, Result<u64, String>)> = Vec::new();
        for repo in cached_repos(&root)? {
            let state = match thunder_hub::locate_in(&repo, &root) {
                Ok(model) => Ok(folder_bytes(&model.folder)?),
                Err(HubError::Incomplete { missing, .. }) => Err(format!("lacks {missing}")),
                // Repositories of which only other revisions were pulled, or only single files of other kinds.
                Err(_) => continue,
            };
            models.push((repo, state));
        }
        models.sort();
        if self.json {
            let models: Vec<_> = models
                .iter()
                .map(|(name, state)| match state {
                    Ok(bytes) => json!({ "name": name, "complete": true, "bytes": bytes }),
                    Err(reason) => json!({ "name": name, "complete": false, "reason": reason }),
                })
                .collect();
            println!("{}", json!({ "cache": root, "models": models }));
            return Ok(());
        }
        if models.is_empty() {
            println!("no models in {}: get one with thunder model pull ORG/NAME", root.display());
            return Ok(());
        }
        let mut table = table::new(&["model", "size"]);
        for (name, state) in models {
            let size = state.map_or_else(|reason| format!("incomplete: {reason}"), human_bytes);
            table.add_row([name, size]);
        }
        println!("{table}");
        Ok(())
    }
}

/// The names of the cache's repositories.
fn cached_repos(root: &Path) -> anyhow::Result<Vec<String>> {
    let entries = match std::fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot list {}", root.display())),
    };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    Ok(names.filter_map(|name| name.strip_prefix("models--").map(repo_of_folder)).collect())
}

/// Names have no `--` of their own, so it stands for the slash.
fn repo_of_folder(folder_name: &str) -> String {
    folder_name.replacen("--", "/", 1)
}

/// Bytes of a folder's files, those behind links included.
fn folder_bytes(folder: &Path) -> anyhow::Result<u64> {
    let failed = || format!("cannot list {}", folder.display());
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder).with_context(failed)? {
        let metadata = std::fs::metadata(entry.with_context(failed)?.path()).with_context(failed)?;
        bytes += if metadata.is_file() { metadata.len() } else { 0 };
    }
    Ok(bytes)
}

impl Find {
    fn run(self) -> anyhow::Result<()> {
        let (folder, name) = session::find_model(&self.name)?;
        let folder = std::path::absolute(&folder).unwrap_or(folder);
        if self.json {
            println!("{}", json!({ "model": name, "folder": folder, "bytes": folder_bytes(&folder)? }));
        } else {
            println!("{}", folder.display());
        }
        Ok(())
    }
}

impl Synth {
    fn run(self) -> anyhow::Result<()> {
        let Some(shape) = Shape::named(&self.arch) else { bail!("--arch {}: no such shape", self.arch) };
        let bits: u32 = self.bits.parse().with_context(|| format!("--bits {}", self.bits))?;
        let bits = (bits != 16).then_some(bits);
        let group: usize = self.group.parse().with_context(|| format!("--group {}", self.group))?;
        let style =
            ProgressStyle::with_template("writing {bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
        let bar = ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        let start = Instant::now();
        let mut written = 0;
        synth::write(&shape, bits, group, &self.folder, self.seed, &mut |done, total| {
            written = done;
            bar.set_length(total);
            bar.set_position(done);
        })?;
        bar.finish_and_clear();
        let elapsed = start.elapsed();
        if self.json {
            let report = json!({
                "arch": shape.name,
                "bits": bits.unwrap_or(16),
                "group": bits.map(|_| group),
                "seed": self.seed,
                "folder": self.folder,
                "bytes": written,
                "seconds": elapsed.as_secs_f64(),
            });
            println!("{report}");
            return Ok(());
        }
        let folder = self.folder.display();
        println!("{} with random weights is in {folder}", shape.name);
        println!("{}", speed("wrote", written, elapsed));
        println!("next: thunder plan --model {folder} --ranks 2");
        println!("      thunder bench decode {folder} --ranks 2");
        Ok(())
    }
}

/// How much was moved, in which time.
fn speed(verb: &str, bytes: u64, elapsed: Duration) -> String {
    let per_second = bytes as f64 / elapsed.as_secs_f64().max(1e-3);
    format!(
        "{verb} {} in {:.1} s ({}/s)",
        human_bytes(bytes),
        elapsed.as_secs_f64(),
        human_bytes(per_second as u64)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_models_are_listed_with_their_names() {
        let cache = tempfile::tempdir().expect("a folder");
        for folder in ["models--org--a-name_1.0", "models--gpt2", "datasets--org--x", ".locks"] {
            std::fs::create_dir(cache.path().join(folder)).expect("created");
        }
        let mut repos = cached_repos(cache.path()).expect("listed");
        repos.sort();
        assert_eq!(repos, ["gpt2", "org/a-name_1.0"]);
        assert!(cached_repos(&cache.path().join("nothing")).expect("no cache is an empty one").is_empty());
    }

    #[test]
    fn bytes_that_a_server_takes_back_are_not_counted() {
        let progress = PullProgress::new();
        progress.show(PullEvent::Start { files: 2, bytes: 300, present: 1 });
        for done in [50, 90, 0, 100] {
            progress.show(PullEvent::Bytes { file: "a", done, total: 100 });
        }
        // An earlier pull had left 120.
        for done in [120, 200] {
            progress.show(PullEvent::Bytes { file: "b", done, total: 200 });
        }
        progress.show(PullEvent::Done { file: "a" });
        assert_eq!(progress.finish(), 100 + 80);
    }
}
