//! `cargo xtask check-macos`: type-checks the workspace for a Mac on a Debian machine that has none.
//!
//! No standard library for macOS can be installed by rustup here, so a small chroot of Debian unstable brings a `rustc`
//! with its library's sources, and cargo builds that library for the target (`-Zbuild-std`). Build scripts that compile C
//! get zig's compiler (PyPI's `ziglang`), which carries macOS's headers. Nothing is linked and nothing runs: linking
//! needs Apple's SDK.

use crate::{
    cache,
    process::{command, on_path, run as run_command, succeeds},
    repository,
};
use anyhow::{Context, bail};
use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Command,
    time::Instant,
};

const TARGET: &str = "aarch64-apple-darwin";
/// What zig calls the target.
const ZIG_TARGET: &str = "aarch64-macos";
const DEBIAN_PACKAGES: &str = "ca-certificates,rustc,cargo,rust-src,gcc,libc6-dev";
/// Where the repository and the build's output lie inside the chroot: always the same, so that cargo finds its own
/// earlier results.
const SOURCE: &str = "/thunderhead/source";
const OUTPUT: &str = "/thunderhead/target";

/// zig as a C compiler: cc-rs passes clang's target flags, which zig spells differently.
const ZIG_CC: &str = r#"#!/bin/bash
words=()
while (($#)); do
  case $1 in
    --target=*) ;;
    -arch) shift ;;
    *) words+=("$1") ;;
  esac
  shift
done
exec /opt/zig/ziglang/zig cc -target "$ZIG_TARGET" "${words[@]}"
"#;
const ZIG_AR: &str = "#!/bin/sh\nexec /opt/zig/ziglang/zig ar \"$@\"\n";

/// Mounts are made in a namespace of their own, so they are gone with the process however it ends.
const ENTER: &str = r#"
set -eu
chroot=$1 repository=$2 source=$3
shift 3
mount --bind /proc "$chroot/proc"
mount --rbind /dev "$chroot/dev"
mount --bind -o ro "$repository" "$chroot$source"
exec chroot "$chroot" "$@"
"#;

#[derive(clap::Args)]
pub struct Args {
    /// Only make the chroot, if it is not there
    #[arg(long)]
    install: bool,
    /// What to check, as arguments of `cargo check` (the whole workspace with its tests, if none is given)
    #[arg(last = true)]
    cargo: Vec<String>,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let chroot = cache()?.join("macos/sid");
    // The last thing that the installation makes, so that one that was broken off is made again.
    let complete = chroot.join("thunderhead/complete");
    if !complete.exists() {
        install(&chroot)?;
        fs::write(&complete, "")?;
    }
    if args.install {
        return Ok(());
    }
    let started = Instant::now();
    check(&chroot, &args.cargo)?;
    println!("check-macos: {TARGET} passed in {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

fn install(chroot: &Path) -> anyhow::Result<()> {
    println!("check-macos: making a chroot of Debian unstable in {} (about 3.5 GiB)", chroot.display());
    let mut missing: Vec<_> =
        ["debootstrap", "unzip"].into_iter().filter(|program| !on_path(program)).collect();
    if !succeeds(&mut command(["python3", "-m", "pip", "--version"])) {
        missing.push("python3-pip");
    }
    if !missing.is_empty() {
        run_command(&mut command(["apt-get", "update", "--quiet"]))?;
        run_command(command(["apt-get", "install", "--quiet", "--yes"]).args(missing))?;
    }
    fs::create_dir_all(chroot)?;
    if !chroot.join("usr/bin/cargo").exists() {
        let include = format!("--include={DEBIAN_PACKAGES}");
        run_command(command(["debootstrap", "--variant=minbase", &include, "sid"]).arg(chroot))
            .context("debootstrap needs root and Debian's packages")?;
    }
    for file in ["etc/ssl/certs/ca-certificates.crt", "etc/resolv.conf"] {
        fs::copy(Path::new("/").join(file), chroot.join(file))
            .with_context(|| format!("could not copy /{file}"))?;
    }
    let zig = chroot.join("opt/zig");
    fs::create_dir_all(&zig)?;
    run_command(
        command(["python3", "-m", "pip", "download", "--quiet", "--no-deps", "ziglang", "--dest"]).arg(&zig),
    )?;
    for entry in fs::read_dir(&zig)? {
        let wheel = entry?.path();
        if wheel.extension().is_some_and(|extension| extension == "whl") {
            run_command(command(["unzip", "-q", "-o"]).arg(&wheel).arg("-d").arg(&zig))?;
            fs::remove_file(&wheel)?;
        }
    }
    fs::set_permissions(zig.join("ziglang/zig"), Permissions::from_mode(0o755))?;
    for (name, text) in [("zig-cc", ZIG_CC), ("zig-ar", ZIG_AR)] {
        let path = chroot.join("usr/local/bin").join(name);
        fs::write(&path, text)?;
        fs::set_permissions(&path, Permissions::from_mode(0o755))?;
    }
    for folder in [SOURCE, OUTPUT] {
        fs::create_dir_all(chroot.join(folder.trim_start_matches('/')))?;
    }
    Ok(())
}

fn check(chroot: &Path, cargo: &[String]) -> anyhow::Result<()> {
    let repository = repository();
    if !repository.join("Cargo.lock").exists() {
        bail!("there is no Cargo.lock: run cargo check once, the check cannot write one");
    }
    let lower = TARGET.replace('-', "_");
    let upper = lower.to_uppercase();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "bash", "-c", ENTER, "enter"]);
    command.arg(chroot).arg(&repository).arg(SOURCE);
    command.args(["/usr/bin/env", "--ignore-environment", "--chdir", SOURCE]);
    command.args(["PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/root", "SDKROOT=/nonexistent"]);
    // Lets Debian's stable compiler take -Zbuild-std.
    command.arg("RUSTC_BOOTSTRAP=1");
    command.arg(format!("CARGO_TARGET_DIR={OUTPUT}"));
    command.arg(format!("ZIG_TARGET={ZIG_TARGET}"));
    command.arg(format!("CC_{lower}=zig-cc")).arg(format!("AR_{lower}=zig-ar"));
    command.arg(format!("CARGO_TARGET_{upper}_LINKER=zig-cc"));
    command.args(["cargo", "check", "--locked", "-Zbuild-std=std,panic_abort", "--target", TARGET]);
    if cargo.is_empty() {
        command.args(["--workspace", "--all-targets"]);
    } else {
        command.args(cargo);
    }
    let status = command.status().context("could not start unshare (Debian package util-linux)")?;
    if !status.success() {
        bail!("the workspace does not pass for {TARGET} ({status}); the errors are above");
    }
    Ok(())
}
