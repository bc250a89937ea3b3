//! `cargo xtask lines`: the source files that are longer than the house allows.

use crate::repository;
use anyhow::Context;
use std::{fs, path::Path, process::Command};

#[derive(clap::Args)]
pub struct Args {
    /// The number of lines that a file may have
    #[arg(long, default_value_t = 400)]
    max: usize,
    /// Count tests too, which may be longer
    #[arg(long)]
    tests: bool,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let root = repository();
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z", "*.rs", "*.py", "*.sh"])
        .current_dir(&root)
        .output()
        .context("could not start git")?;
    anyhow::ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).context("a file's name is not UTF-8")?;
    let mut long = Vec::new();
    for name in names.split('\0').filter(|name| !name.is_empty() && (args.tests || !is_test(name))) {
        // A file that was deleted but is still in the index has no length.
        let Ok(text) = fs::read_to_string(root.join(name)) else { continue };
        let lines = text.lines().count();
        if lines > args.max {
            long.push((lines, name));
        }
    }
    long.sort_unstable_by(|a, b| b.cmp(a));
    for (lines, name) in &long {
        println!("{lines:6}  {name}");
    }
    println!("{} files over {} lines", long.len(), args.max);
    Ok(())
}

/// Whether a file holds tests alone: it lies in a `tests` folder or is called `tests`.
fn is_test(name: &str) -> bool {
    let path = Path::new(name);
    path.iter().any(|part| part == "tests") || path.file_stem().is_some_and(|stem| stem == "tests")
}

#[cfg(test)]
mod tests {
    use super::is_test;

    #[test]
    fn tests_are_told_from_code() {
        for name in ["crates/model/tests/golden.rs", "crates/model/src/plan/tests.rs", "tests/golden/make.py"]
        {
            assert!(is_test(name), "{name}");
        }
        for name in ["crates/model/src/latest.rs", "crates/tests-of-x/src/lib.rs", "xtask/src/main.rs"] {
            assert!(!is_test(name), "{name}");
        }
    }
}
