//! `cargo xtask bench`: the headline measurements, in one run of one build, as JSON that
//! docs/performance.md quotes.

mod machine;
mod measure;
mod measurements;
mod peers;
mod report;
mod tables;

use crate::repository;
use anyhow::Context;
use report::Report;
use std::{fs, path::PathBuf};

#[derive(clap::Args)]
pub struct Args {
    /// One round of few tokens on the smallest model: checks that everything runs; the figures mean
    /// nothing
    #[arg(long)]
    quick: bool,
    /// Measure llama.cpp (built by bench/llama_cpp.sh at the first use, 9 minutes) and Open MPI (if
    /// mpicc is installed) too
    #[arg(long)]
    peers: bool,
    /// Rounds of each measurement; thunder and its peer take turns, and medians count
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: u16,
    /// Name of this machine in the result and in its file name [default: the CPU's name and the
    /// number of cores]
    #[arg(long)]
    machine: Option<String>,
    /// Write the result to this file [default: bench/results/MACHINE-DATE.json; with --quick
    /// target/bench-quick.json]
    #[arg(long)]
    output: Option<PathBuf>,
    /// Print the Markdown tables of a result, without measuring
    #[arg(long, value_name = "RESULT", conflicts_with_all = ["quick", "peers", "output", "machine"])]
    tables: Option<PathBuf>,
    /// With --tables: put them into this document, between its lines `<!-- tables of … -->` and
    /// `<!-- end of tables -->`
    #[arg(long, value_name = "DOCUMENT", requires = "tables")]
    into: Option<PathBuf>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(path) = &args.tables {
        let report = Report::read(path)?;
        let Some(document) = &args.into else {
            print!("{}", tables::markdown(&report));
            return Ok(());
        };
        let text = fs::read_to_string(document).with_context(|| document.display().to_string())?;
        let name = path.strip_prefix(repository()).unwrap_or(path);
        let text = tables::replace(&text, &name.display().to_string(), &report)?;
        fs::write(document, text).with_context(|| document.display().to_string())?;
        println!("{} has the tables of {}", document.display(), name.display());
        return Ok(());
    }
    let report = measure::all(args)?;
    let path = match &args.output {
        Some(path) => path.clone(),
        None if args.quick => repository().join("target/bench-quick.json"),
        None => repository().join(format!("bench/results/{}-{}.json", report.machine.name, report.date)),
    };
    report.write(&path)?;
    print!("\n{}", tables::markdown(&report));
    println!("\nwritten: {}", path.display());
    if !args.quick {
        println!(
            "into the document: cargo xtask bench --tables {} --into docs/performance.md",
            path.display()
        );
    }
    Ok(())
}
