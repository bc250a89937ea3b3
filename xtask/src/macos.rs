//! `cargo xtask check-macos`: type-checks the workspace for macOS on a Debian machine. Nothing is
//! linked or run: linking needs Apple's SDK.

use crate::cross::{self, Target};
use std::time::Instant;

const TARGET: Target =
    Target { name: "aarch64-apple-darwin", zig: "aarch64-macos", library: "std,panic_abort", runner: None };

#[derive(clap::Args)]
pub struct Args {
    /// Make the chroot if it is missing, and stop
    #[arg(long)]
    install: bool,
    /// Arguments of `cargo check` [default: the whole workspace with its tests]
    #[arg(last = true)]
    cargo: Vec<String>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let chroot = cross::chroot()?;
    if args.install {
        return Ok(());
    }
    let started = Instant::now();
    let mut cargo: Vec<&str> = args.cargo.iter().map(String::as_str).collect();
    if cargo.is_empty() {
        cargo = vec!["--workspace", "--all-targets"];
    }
    cross::cargo(&chroot, &TARGET, &[], "check", &cargo)?;
    println!("check-macos: {} passed in {:.0} s", TARGET.name, started.elapsed().as_secs_f64());
    Ok(())
}
