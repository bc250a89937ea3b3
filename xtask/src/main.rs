//! Tools for developers: `cargo xtask COMMAND`. Tests belong to the tests of a crate.

mod api_reference;
mod bench;
mod cross;
mod dist;
mod golden;
mod lines;
mod macos;
mod neon;
mod process;
#[cfg(test)]
mod rules;

use clap::{Parser, Subcommand};
use std::path::{Path, PathBuf};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "What developers of Thunderhead run")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the headline measurements, 8 minutes on 2 cores, and write
    /// bench/results/MACHINE-DATE.json
    Bench(bench::Args),
    /// Type-check the workspace for macOS (aarch64-apple-darwin) on a Debian machine; root, about
    /// 3.5 GiB
    CheckMacos(macos::Args),
    /// Run the kernels' tests for 64-bit Arm (NEON) in an emulator on a Debian machine; root, same
    /// chroot
    TestNeon(neon::Args),
    /// Make the golden fixtures again with MLX-LM
    Golden(golden::Args),
    /// Make archives with their SHA-256 and the Homebrew formula, for what can be built here
    Dist(dist::Args),
    /// Write docs/api-reference.md from the OpenAPI document of the server
    ApiReference(api_reference::Args),
    /// List long files, functions and comments, and banned phrases
    Lines(lines::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::CheckMacos(args) => macos::run(&args),
        Command::TestNeon(args) => neon::run(&args),
        Command::Golden(args) => golden::run(&args),
        Command::Dist(args) => dist::run(&args),
        Command::ApiReference(args) => api_reference::run(&args),
        Command::Lines(args) => lines::run(&args),
    }
}

/// The repository's root: the folder above this package's.
fn repository() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_path_buf()
}

/// The folder for results that are expensive to make: `$XDG_CACHE_HOME/thunderhead`, or
/// `~/.cache/thunderhead`.
fn cache() -> anyhow::Result<PathBuf> {
    let base = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(cache), _) if !cache.is_empty() => PathBuf::from(cache),
        (_, Some(home)) => PathBuf::from(home).join(".cache"),
        _ => anyhow::bail!("neither XDG_CACHE_HOME nor HOME is set, so there is no place for the cache"),
    };
    Ok(base.join("thunderhead"))
}
