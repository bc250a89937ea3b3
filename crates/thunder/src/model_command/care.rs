//! `thunder model update`, `verify` and `status`.

use std::cell::Cell;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use clap::Args;
use serde_json::json;
use thunder_hub::PullOptions;
use thunder_model::error::human_bytes;
use thunder_node::agent::{Status, Work};
use thunder_node::report::of_bytes;

use super::list::cached_models;
use super::nodes::NodesArgs;
use super::{is_builtin, pull, speed};
use crate::cluster_command::{fetch, status};
use crate::current_thread;
use crate::model_arg::completer;
use crate::session;
use crate::up::DataArgs;

/// Interval of progress.
const SHOW_EVERY: Duration = Duration::from_millis(500);

/// `thunder model update`.
#[derive(Args)]
pub struct Update {
    /// The model's name on the hub
    #[arg(value_name = "ORG/NAME[:QUANTIZATION]", required_unless_present = "all")]
    name: Option<String>,
    /// All models of the Hugging Face cache
    #[arg(long, conflicts_with = "name")]
    all: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    nodes: NodesArgs,
}

impl Update {
    /// Runs the command.
    ///
    /// # Errors
    /// When a model cannot be downloaded; the others are updated all the same.
    pub fn run(self) -> anyhow::Result<()> {
        let name = self.name.as_deref().unwrap_or_default();
        if is_builtin(name.as_ref(), self.json, "it is updated with the program") {
            return Ok(());
        }
        if let Some(cluster) = self.nodes.cluster()? {
            return match self.name {
                Some(name) => cluster.run(Work::Update, &name, "main", self.json),
                None => cluster.update_all(self.json),
            };
        }
        let root = thunder_hub::cache_root();
        let is_one = self.name.is_some();
        let names = match self.name {
            Some(name) => vec![name],
            None => cached_models(&root)?,
        };
        let (began, mut reports) = (Instant::now(), Vec::new());
        let options = PullOptions { refresh: true, ..PullOptions::from_env() };
        let mut failed = 0;
        for name in &names {
            let before = thunder_hub::locate_in(name, &root).ok().and_then(|model| model.commit);
            let progress = pull::PullProgress::new();
            let pulled = thunder_hub::pull(name, "main", &options, &|event| progress.show(event));
            progress.finish();
            match pulled {
                Ok(model) if self.json => {
                    let is_new = model.commit != before;
                    reports.push(json!({ "model": name, "commit": model.commit, "changed": is_new }));
                }
                Ok(model) if model.commit == before => println!("{name} is up to date"),
                Ok(model) => println!("{name} is now {}", model.commit.unwrap_or_default()),
                Err(error) => {
                    failed += 1;
                    reports.push(json!({ "model": name, "error": error.to_string() }));
                    eprintln!("{name}: {error}");
                }
            }
        }
        if self.json {
            let seconds = began.elapsed().as_secs_f64();
            match &mut reports[..] {
                [report] if is_one => {
                    report["seconds"] = seconds.into();
                    println!("{report}");
                }
                _ => println!("{}", json!({ "models": reports, "seconds": seconds })),
            }
        }
        ensure!(failed == 0, "{failed} of {} models could not be updated", names.len());
        Ok(())
    }
}

/// `thunder model verify`.
#[derive(Args)]
pub struct Verify {
    /// A model of the Hugging Face cache
    #[arg(value_name = "MODEL", add = completer())]
    name: OsString,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    nodes: NodesArgs,
}

impl Verify {
    /// Runs the command.
    ///
    /// # Errors
    /// When a file is damaged or cannot be read.
    pub fn run(self) -> anyhow::Result<()> {
        if is_builtin(&self.name, self.json, "its files are checked whenever it is used") {
            return Ok(());
        }
        if let Some(cluster) = self.nodes.cluster()? {
            return cluster.run(Work::Verify, &self.name.to_string_lossy(), "main", self.json);
        }
        let (model, name) = session::find_model(&self.name)?;
        let part = self.name.to_str().and_then(|name| thunder_hub::part_in(name, &thunder_hub::cache_root()));
        let part = part.filter(|part| part.path == model);
        let (began, shown) = (Instant::now(), Cell::new(Instant::now()));
        let (read, shows) = (Cell::new(0), std::io::stderr().is_terminal());
        let verified = thunder_hub::verify(&model, &|bytes| {
            read.set(read.get() + bytes);
            if shows && shown.get().elapsed() > SHOW_EVERY {
                shown.set(Instant::now());
                eprint!("\r{}", speed("read", read.get(), began.elapsed()));
            }
        })?;
        if shows {
            eprintln!("\r{}", speed("read", read.get(), began.elapsed()));
        }
        let files = |files: &[std::path::PathBuf]| {
            files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>()
        };
        let (damaged, unknown) = (files(&verified.damaged), files(&verified.unknown));
        if self.json {
            println!(
                "{}",
                json!({
                    "model": name, "right": verified.right, "bytes": verified.bytes, "unknown": unknown,
                    "damaged": damaged,
                })
            );
        } else {
            println!("{name}: {} files of {} are right", verified.right, human_bytes(verified.bytes));
            part.iter().for_each(|part| println!("part: {}", of_bytes(part.present, part.total)));
            unknown.iter().for_each(|file| println!("no hash is known for {file}"));
            damaged.iter().for_each(|file| println!("damaged: {file}"));
        }
        if !damaged.is_empty() {
            bail!(
                "{} files of {name} are damaged: `thunder model pull {name}` downloads them again",
                damaged.len()
            );
        }
        Ok(())
    }
}

/// `thunder model status`.
#[derive(Args)]
pub struct ModelStatus {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Show the state of each rank, and the progress of downloads and checks
    #[arg(long)]
    detail: bool,
    #[command(flatten)]
    data: DataArgs,
}

impl ModelStatus {
    /// Runs the command.
    ///
    /// # Errors
    /// When no agent answers.
    pub fn run(self) -> anyhow::Result<()> {
        let data = self.data.folder()?;
        let status: Status = current_thread::runtime()?.block_on(fetch(&data))?;
        if self.json {
            println!("{}", json!({ "models": status.models, "tasks": status.tasks }));
            return Ok(());
        }
        let running = status.tasks.iter().filter(|task| self.detail && !task.is_over());
        for (task, node) in running.flat_map(|task| task.nodes.iter().map(move |node| (task, node))) {
            let (done, total) = (human_bytes(node.done), human_bytes(node.total));
            println!("{} on {}: {done} of {total}", task.model, node.node);
        }
        if status.models.is_empty() {
            println!("no model is loaded: `thunder model load MODEL`");
            return Ok(());
        }
        println!("{}", status::models_table(&status));
        for model in status.models.iter().filter(|_| self.detail) {
            for (number, rank) in model.ranks.iter().enumerate() {
                println!("{} rank {number} on {}: {}", model.name, rank.node, rank.words);
            }
        }
        Ok(())
    }
}
