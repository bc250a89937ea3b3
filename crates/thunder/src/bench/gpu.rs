//! `thunder bench gpu`: all that is to be known of a GPU, as one JSON object.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use thunder_collectives::Group;
use thunder_compute::Activations;
use thunder_compute::conformance::{self, Limits};
use thunder_engine::assembly::device::{DeviceChoice, first_gpu};
use thunder_gpu::{Found, GpuBackend, GpuConfig};
use thunder_model::synth::Shape;

use crate::{interrupt, progress};

/// How long a part may take: a driver that hangs is a finding too.
const PART_LIMIT: Duration = Duration::from_secs(900);
/// Measured operations: of most families, and of others.
const OPERATIONS: &str =
    "4/64,8/64,attention,norm,experts,router,latent,delta-rule,state-space,conv,gated-conv";
/// Sizes of exchanged sums.
const EXCHANGED_KIB: [usize; 3] = [8, 16, 64];

/// What rounding of activations and weights to 8 and 16 bits may cost in the suite.
const LIMITS: Limits = Limits {
    float_products: 1e-3,
    quantized_products: 2e-2,
    attention: 1e-3,
    attention_int8: 1.5e-2,
    rows: 1e-5,
};

/// Check and measure a GPU, and print one JSON object to send to the developers
///
/// For GPUs that the developers do not have. Compares each kernel with the CPU. Measures bandwidth,
/// sums over ranks inside a kernel, operations, and decode and prefill of models with random
/// weights, which it writes and then removes. Takes about ten minutes. Each part is its own
/// process; if one crashes, only its results are missing.
#[derive(Args)]
pub struct GpuCommand {
    /// GPU to measure: gpu, or gpu:N with the numbers of `thunder devices list`
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Gpu)]
    device: DeviceChoice,
    /// Models whose shapes to measure, with 4-bit weights, by their names in `thunder model synth
    /// --arch`. A model that does not fit into memory is only reported
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "llama-1b,qwen3-4b,llama-8b",
          value_parser = clap::builder::PossibleValuesParser::new(Shape::names()))]
    shapes: Vec<String>,
    /// Tokens of the prompts
    #[arg(long, value_name = "N", default_value_t = 480, value_parser = clap::value_parser!(u16).range(1..=4096))]
    prompt: u16,
    /// Folder for the models, up to 5 GiB; each model is removed after its measurement [default:
    /// the system's folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Parts to leave out
    #[arg(long, value_enum, value_name = "PART", value_delimiter = ',')]
    without: Vec<Part>,
    /// Run one part in this process
    #[arg(long, hide = true)]
    only: Option<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Comparison of each kernel with the CPU.
    Conformance,
    /// Sums over ranks inside kernels.
    Exchanges,
    /// Single operations.
    Operations,
}

impl GpuCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let found = first_gpu(self.device).map_err(anyhow::Error::msg)?;
        let found = found.ok_or_else(|| anyhow!("--device {}: no GPU; give gpu or gpu:N", self.device))?;
        let report = match self.only {
            Some(Part::Conformance) => conformance_of(&found)?,
            Some(Part::Exchanges) => match thunder_gpu::exchange_times(&found, &EXCHANGED_KIB)? {
                Ok(times) => json!(times),
                Err(reason) => json!({ "refused": reason }),
            },
            Some(Part::Operations) | None => self.all(&found)?,
        };
        println!("{report}");
        Ok(())
    }

    fn all(&self, found: &Found) -> anyhow::Result<Value> {
        let name = self.device.to_string();
        let device = name.as_str();
        let parent = self.folder.clone().unwrap_or_else(std::env::temp_dir);
        let bar = progress::measurements(3 + 3 * self.shapes.len());
        let says_parts = !std::io::stderr().is_terminal();
        interrupt::catch()?;
        let signal = Arc::new(AtomicI32::new(0));
        let came = Arc::clone(&signal);
        let _asked = interrupt::on_next(move |number| {
            came.store(number, Ordering::Relaxed);
            true
        });
        let part = |what: &str, words: &[&str]| -> Value {
            bar.set_message(what.to_owned());
            if says_parts {
                eprintln!("measuring {what}");
            }
            let began = Instant::now();
            let result =
                output_of(words, &signal).unwrap_or_else(|error| json!({ "error": format!("{error:#}") }));
            bar.inc(1);
            json!({ "seconds": began.elapsed().as_secs_f64(), "result": result })
        };
        let of_device = |more: &[&'static str]| -> Vec<String> {
            ["bench", "gpu", "--device", device]
                .into_iter()
                .chain(more.iter().copied())
                .map(str::to_owned)
                .collect()
        };
        let run =
            |what: &str, words: &[String]| part(what, &words.iter().map(String::as_str).collect::<Vec<_>>());
        let wanted = |part: Part| !self.without.contains(&part);
        let conformance = wanted(Part::Conformance)
            .then(|| run("kernels against the CPU", &of_device(&["--only", "conformance"])));
        let exchanges = wanted(Part::Exchanges)
            .then(|| run("sums inside of kernels", &of_device(&["--only", "exchanges"])));
        let operations = ["bench", "kernels", "--device", device, "--json", "--op", OPERATIONS];
        let operations = wanted(Part::Operations).then(|| part("operations", &operations));
        end_if_asked(&signal);
        let mut models = serde_json::Map::new();
        let prompt = self.prompt.to_string();
        for shape in &self.shapes {
            let folder = parent.join(format!("thunder-bench-{}-{shape}", std::process::id()));
            let path = folder.to_str().context("the folder's name is not Unicode")?;
            let written = part(
                &format!("writing {shape}"),
                &["model", "synth", "--arch", shape.as_str(), "--json", path],
            );
            let bench = |what: &str| {
                let common = ["bench", what, "--device", device, "--json", "--prompt", prompt.as_str(), path];
                part(&format!("{what} of {shape}"), &common)
            };
            let of_shape =
                json!({ "written": written, "decode": bench("decode"), "prefill": bench("prefill") });
            remove(&folder)?;
            end_if_asked(&signal);
            models.insert(shape.clone(), of_shape);
        }
        bar.finish_and_clear();
        let bandwidth = thunder_gpu::bandwidth(found);
        Ok(json!({
            "version": env!("CARGO_PKG_VERSION"),
            "system": std::env::consts::OS,
            "architecture": std::env::consts::ARCH,
            "cores": std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
            "device": found.info,
            "memory_bytes_per_s": bandwidth.as_ref().ok(),
            "bandwidth_error": bandwidth.as_ref().err().map(ToString::to_string),
            "conformance": conformance,
            "exchanges": exchanges,
            "operations": operations,
            "models": models,
        }))
    }
}

/// The conformance suite's results, and the kernel forms that were refused.
fn conformance_of(found: &Found) -> anyhow::Result<Value> {
    let config = GpuConfig { activations: Activations::Auto, ..GpuConfig::default() };
    let mut backend = GpuBackend::new(found, config, Group::solo())?;
    let report = conformance::run(&mut backend, &LIMITS);
    let failures: Vec<_> =
        report.failures.iter().map(|failure| format!("{}: {}", failure.case, failure.reason)).collect();
    Ok(json!({ "compared": report.compared, "failures": failures, "refusals": backend.refusals() }))
}

/// Ends the process if a signal has come. No part runs then.
fn end_if_asked(signal: &AtomicI32) {
    match signal.load(Ordering::Relaxed) {
        0 => {}
        number => interrupt::end(number),
    }
}

fn remove(folder: &Path) -> anyhow::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{} cannot be removed", folder.display()))
        }
        _ => Ok(()),
    }
}

/// The JSON output of this program, started with these arguments. Ends it if a signal comes.
fn output_of(words: &[&str], signal: &AtomicI32) -> anyhow::Result<Value> {
    if signal.load(Ordering::Relaxed) != 0 {
        bail!("interrupted");
    }
    let program = std::env::current_exe().context("cannot find this program")?;
    // Files, because a pipe without a reader would stop the process.
    let (output, errors) = (tempfile::NamedTempFile::new()?, tempfile::NamedTempFile::new()?);
    let mut child = Command::new(program)
        .args(words)
        .stdin(Stdio::null())
        .stdout(output.reopen()?)
        .stderr(errors.reopen()?)
        .spawn()?;
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        let is_interrupted = signal.load(Ordering::Relaxed) != 0;
        if is_interrupted || began.elapsed() > PART_LIMIT {
            child.kill()?;
            child.wait()?;
            match is_interrupted {
                true => bail!("interrupted"),
                false => bail!("no end after {} s", PART_LIMIT.as_secs()),
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let text = std::fs::read_to_string(output.path())?;
    if !status.success() {
        let errors = std::fs::read_to_string(errors.path())?;
        let last: Vec<&str> = errors.lines().rev().take(8).collect();
        bail!("{status}: {}", last.into_iter().rev().collect::<Vec<_>>().join("; "));
    }
    serde_json::from_str(text.trim()).with_context(|| format!("'{}' is no JSON", text.trim()))
}
