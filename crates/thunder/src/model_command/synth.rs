//! `thunder model synth`.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use serde_json::json;
use thunder_model::synth::{self, Shape};

use super::speed;
use crate::progress;

/// Shown after the options.
pub const HELP: &str = "\
Such a model generates random text, but each token costs as much as with the real model. Use it to measure a model's \
speed on a cluster before you download it:
  thunder model synth --arch llama-8b --bits 4 /tmp/llama-8b
  thunder plan /tmp/llama-8b --ranks 2
  thunder bench decode /tmp/llama-8b --ranks 2

Each machine of a cluster can write its own copy: the same options give the same bytes.";

/// `thunder model synth`.
#[derive(Args)]
pub struct Synth {
    /// The model whose shapes to use
    #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(Shape::names()))]
    arch: String,
    /// Number of layers to write, for a model that is too large for this machine [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    layers: Option<u32>,
    /// Change a field of config.json to a JSON value; can be repeated
    ///
    /// For fields that only some models have. n_routed_experts=32 gives a model of 256 experts an
    /// eighth of them: a token reads as much as before, and memory holds an eighth. With
    /// deepseek-v4.1-flash --layers 2, also cut the tables by a hundred: engram_vocab_size=240000
    /// and engram_num_embeddings=[3841180] (2.6 GiB with 32 experts; 53.6 GiB with whole tables).
    #[arg(long, value_name = "FIELD=JSON")]
    set: Vec<String>,
    /// Also write the layer that predicts further tokens (multi-token prediction), for drafts
    ///
    /// For models whose published checkpoints have this layer: DeepSeek V3 and V3.2, GLM-4.5 to 5.
    /// Most quantized checkpoints lack it.
    #[arg(long)]
    mtp: bool,
    /// Bits per weight; 16 is bf16
    #[arg(long, value_name = "BITS", default_value = "4", value_parser = ["2", "3", "4", "5", "6", "8", "16"])]
    bits: String,
    /// Weights that share one scale; not used with 16 bits
    #[arg(long, value_name = "N", default_value = "64", value_parser = ["32", "64", "128"])]
    group: String,
    /// Seed of the random weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Folder to write to; must be empty or not exist
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Print one JSON object on standard output; progress goes to standard error
    #[arg(long)]
    json: bool,
}

impl Synth {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let Some(mut shape) = Shape::named(&self.arch) else { bail!("--arch {}: unknown model", self.arch) };
        if let Some(layers) = self.layers {
            if layers as usize > shape.layers {
                bail!("--layers {layers}: {} has {} layers", self.arch, shape.layers);
            }
            shape.layers = layers as usize;
        }
        for change in &self.set {
            let Some((field, value)) = change.split_once('=') else {
                bail!("--set {change}: FIELD=JSON is needed, n_routed_experts=32 for example")
            };
            let value = serde_json::from_str(value).with_context(|| format!("--set {change}"))?;
            shape.set(field, value).map_err(|reason| anyhow!("--set {change}: {reason}"))?;
        }
        if self.mtp && !shape.has_ahead() {
            bail!("--mtp: {} has no layer that predicts further tokens", self.arch);
        }
        shape.ahead = self.mtp;
        let bits: u32 = self.bits.parse().with_context(|| format!("--bits {}", self.bits))?;
        let bits = (bits != 16).then_some(bits);
        let group: usize = self.group.parse().with_context(|| format!("--group {}", self.group))?;
        let bar = progress::bytes("writing");
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
                "layers": shape.layers,
                "set": self.set,
                "mtp": shape.ahead,
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
        println!("next: thunder plan {folder} --ranks 2");
        match shape.is_encoder() {
            true => println!("      thunder serve --model {folder} --ranks 2"),
            false => println!("      thunder bench decode {folder} --ranks 2"),
        }
        Ok(())
    }
}
