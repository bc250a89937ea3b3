//! Programs for comparison: llama.cpp's llama-bench and Open MPI's MPI_Allreduce.

use super::report::Model;
use crate::process::{command, on_path, output, run as run_command};
use crate::repository;
use anyhow::Context;
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// llama-bench and its models.
pub struct LlamaCpp {
    bench: PathBuf,
    /// By shape and bits.
    models: HashMap<(String, u32), PathBuf>,
}

impl LlamaCpp {
    pub fn build() -> anyhow::Result<Self> {
        Ok(Self { bench: path(&script(&["build"])?)?, models: HashMap::new() })
    }

    /// Writes the GGUF of a shape, if it is not there.
    pub fn model(&mut self, model: &Model) -> anyhow::Result<()> {
        // Both have one scale for 32 or 64 weights: 4.5 and 8.5 bits a weight.
        let format = if model.bits == 8 { "q8_0" } else { "q4_0" };
        let file = path(&script(&["model", &model.shape, format])?)?;
        self.models.insert((model.shape.clone(), model.bits), file);
        Ok(())
    }

    /// Tokens a second of a prompt, or of generated tokens, in one round.
    pub fn tokens_per_s(
        &self,
        model: &Model,
        threads: usize,
        (prompt, generated): (usize, usize),
    ) -> anyhow::Result<f64> {
        let file = self.models.get(&(model.shape.clone(), model.bits)).context("the model was not made")?;
        let mut bench = command([&self.bench]);
        bench.arg("-m").arg(file).args(["-r", "1", "-o", "json"]);
        bench.args(["-p", &prompt.to_string(), "-n", &generated.to_string(), "-t", &threads.to_string()]);
        let text = output(&mut bench)?;
        let measured: Value = serde_json::from_str(&text).with_context(|| format!("llama-bench: {text}"))?;
        measured[0]["avg_ts"].as_f64().with_context(|| format!("llama-bench printed no avg_ts: {text}"))
    }
}

fn script(arguments: &[&str]) -> anyhow::Result<String> {
    output(command([repository().join("bench/llama_cpp.sh")]).args(arguments))
}

/// The last line of a script's output.
fn path(text: &str) -> anyhow::Result<PathBuf> {
    text.lines().last().map(PathBuf::from).context("bench/llama_cpp.sh printed no path")
}

/// bench/allreduce_mpi.c.
pub struct Mpi {
    program: PathBuf,
}

impl Mpi {
    /// Compiles the program; returns `None` if Open MPI is not installed.
    pub fn build(target: &Path) -> anyhow::Result<Option<Self>> {
        if !on_path("mpicc") || !on_path("mpirun") {
            return Ok(None);
        }
        let program = target.join("allreduce_mpi");
        let mut compile = command(["mpicc", "-O3", "-march=native", "-o"]);
        run_command(compile.arg(&program).arg(repository().join("bench/allreduce_mpi.c")))?;
        Ok(Some(Self { program }))
    }

    /// Medians of f32 sums between two processes, for each size.
    pub fn median_us(&self, transport: &str, sizes: &[u64], milliseconds: u64) -> anyhow::Result<Vec<f64>> {
        let layer = if transport == "shm" { "self,vader" } else { "self,tcp" };
        let mut run =
            command(["mpirun", "-n", "2", "--bind-to", "core", "--mca", "pml", "ob1", "--mca", "btl", layer]);
        run.args(["--mca", "btl_tcp_if_include", "lo"]).arg(&self.program);
        run.args(["f32", &milliseconds.to_string()]).args(sizes.iter().map(u64::to_string));
        run.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        let text = output(&mut run)?;
        let rows = text.lines().map(|line| {
            let row: Value = serde_json::from_str(line).with_context(|| format!("allreduce_mpi: {line}"))?;
            row["median_us"].as_f64().with_context(|| format!("allreduce_mpi: {line}"))
        });
        rows.collect()
    }
}
