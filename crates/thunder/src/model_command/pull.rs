//! `thunder model pull`.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use clap::Args;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde_json::json;
use thunder_hub::{Located, PullEvent, PullOptions};
use thunder_model::error::human_bytes;
use thunder_node::agent::Work;

use super::nodes::NodesArgs;
use super::{folder_bytes, is_builtin, speed};

/// Shown after the options.
pub const HELP: &str = "\
Examples:
  thunder model pull mlx-community/Qwen3-0.6B-4bit
  thunder model pull Qwen/Qwen3-0.6B --revision main
  thunder model pull Qwen/Qwen3-8B-GGUF:Q4_K_M       (the GGUF files of one quantization)
  thunder model pull Qwen/Qwen3-8B --nodes all       (to every node of the cluster, downloaded once)

The model goes into the Hugging Face cache, which MLX and transformers share. An interrupted pull continues where it \
stopped.

HF_TOKEN gives access to gated and private models, HF_ENDPOINT names another hub, and HF_HUB_CACHE moves the cache.";

/// `thunder model pull`.
#[derive(Args)]
pub struct Pull {
    /// The model's name on the hub, or the address of its page; :QUANTIZATION selects GGUF files
    #[arg(value_name = "ORG/NAME[:QUANTIZATION]")]
    name: String,
    /// Branch, tag or commit to download
    #[arg(long, value_name = "REVISION", default_value = "main")]
    revision: String,
    /// Print one JSON object on standard output; progress goes to standard error
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    nodes: NodesArgs,
}

impl Pull {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        if is_builtin(self.name.as_ref(), self.json, "nothing has to be pulled") {
            return Ok(());
        }
        if let Some(cluster) = self.nodes.cluster()? {
            return cluster.run(Work::Pull, &self.name, &self.revision, self.json);
        }
        let progress = PullProgress::new();
        let start = Instant::now();
        let pulled = thunder_hub::pull(&self.name, &self.revision, &PullOptions::from_env(), &|event| {
            progress.show(event)
        });
        let fetched = progress.finish();
        let Located { folder, repo, commit } = pulled?;
        let repo = repo.unwrap_or(self.name);
        let name = match self.revision.as_str() {
            "main" => repo,
            revision => format!("{repo}@{revision}"),
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
            0 => println!("already complete: nothing was downloaded"),
            bytes => println!("{}", speed("downloaded", bytes, start.elapsed())),
        }
        println!("next: thunder run {name} \"Hello!\"");
        Ok(())
    }
}

/// Progress of a pull: bars on a terminal, otherwise one line for each file.
pub(super) struct PullProgress {
    bars: MultiProgress,
    on_terminal: bool,
    state: Mutex<PullState>,
}

#[derive(Default)]
struct PullState {
    /// The bar of all files together.
    total: Option<ProgressBar>,
    /// By file name.
    files: HashMap<String, FileState>,
}

struct FileState {
    /// Bytes at the start of this pull.
    first: u64,
    /// Bytes now.
    done: u64,
    bar: ProgressBar,
}

impl PullProgress {
    pub(super) fn new() -> Self {
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
            // Printed above the bars. An error means that the terminal was closed.
            self.bars.println(line).ok();
        } else {
            eprintln!("{line}");
        }
    }

    pub(super) fn show(&self, event: PullEvent<'_>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            PullEvent::Start { files, bytes, present } => {
                let there =
                    if present > 0 { format!(" ({present} already downloaded)") } else { String::new() };
                self.say(&format!("{files} files of {} to download{there}", human_bytes(bytes)));
                state.total = Some(self.bars.add(self.bar(bytes, "total")));
            }
            PullEvent::Bytes { file, done, total } => {
                let bar = || self.bars.insert_from_back(1, self.bar(total, file));
                let entry = state.files.entry(file.to_owned()).or_insert_with(|| FileState {
                    first: done,
                    done,
                    bar: bar(),
                });
                // A download that starts again discards bytes, possibly also those of an earlier
                // pull.
                entry.first = entry.first.min(done);
                entry.done = done;
                entry.bar.set_position(done);
                let all = state.files.values().map(|file| file.done).sum();
                if let Some(bar) = &state.total {
                    bar.set_position(all);
                }
            }
            PullEvent::Retry { file, reason, wait } => {
                self.say(&format!("{file}: {reason}; retrying after {:.1} s", wait.as_secs_f64()));
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

    /// Removes the bars and returns the bytes that this pull downloaded.
    pub(super) fn finish(&self) -> u64 {
        // An error means that the terminal is closed.
        self.bars.clear().ok();
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.files.values().map(|file| file.done - file.first).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_a_server_discards_are_not_counted() {
        let progress = PullProgress::new();
        progress.show(PullEvent::Start { files: 2, bytes: 300, present: 1 });
        for done in [50, 90, 0, 100] {
            progress.show(PullEvent::Bytes { file: "a", done, total: 100 });
        }
        // An earlier pull had downloaded 120 bytes.
        for done in [120, 200] {
            progress.show(PullEvent::Bytes { file: "b", done, total: 200 });
        }
        progress.show(PullEvent::Done { file: "a" });
        assert_eq!(progress.finish(), 100 + 80);
    }
}
