//! `cargo xtask golden`: makes the golden fixtures with MLX-LM, in a virtual environment of their
//! own.

use crate::{
    cache,
    process::{command, run as run_command},
    repository,
};
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    /// A virtual environment that has tests/golden/requirements.txt already
    #[arg(long, env = "THUNDER_MLX_VENV")]
    venv: Option<PathBuf>,
    /// Cases to make [default: all]
    names: Vec<String>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let folder = repository().join("tests/golden");
    let venv = match &args.venv {
        Some(venv) => venv.clone(),
        None => {
            let venv = cache()?.join("venv-mlx");
            if !venv.join("bin/python").exists() {
                run_command(command(["python3", "-m", "venv"]).arg(&venv))?;
            }
            let requirements = folder.join("requirements.txt");
            run_command(
                command([venv.join("bin/pip")]).args(["install", "--quiet", "-r"]).arg(requirements),
            )?;
            venv
        }
    };
    run_command(command([venv.join("bin/python")]).arg("-B").arg(folder.join("make.py")).args(&args.names))
}
