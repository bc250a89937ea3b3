//! `cargo xtask test-neon`: runs the tests of the compute kernels for 64-bit Arm in an emulator, on
//! a Debian machine. It shows whether results are right, not how fast they are.

use crate::cross::{self, Target};
use std::time::Instant;

/// The emulated processor has every extension that the emulator knows.
const TARGET: Target = Target {
    name: "aarch64-unknown-linux-gnu",
    zig: "aarch64-linux-gnu",
    library: "std,panic_unwind,test",
    runner: Some("qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu"),
};

/// The best instruction set for Arm. Naming it makes the tests fail if the emulator lacks it,
/// instead of testing only the others.
const KERNEL: &str = "i8mm";

#[derive(clap::Args)]
pub struct Args {
    /// Arguments of `cargo test` [default: the library of thunder-compute]
    #[arg(last = true)]
    cargo: Vec<String>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let chroot = cross::chroot()?;
    cross::install_emulator(&chroot)?;
    let started = Instant::now();
    let mut cargo = vec!["--release"];
    if args.cargo.is_empty() {
        cargo.extend(["--package", "thunder-compute", "--lib"]);
    } else {
        cargo.extend(args.cargo.iter().map(String::as_str));
    }
    cross::cargo(&chroot, &TARGET, &[("THUNDER_KERNEL", KERNEL)], "test", &cargo)?;
    println!("test-neon: passed in {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}
