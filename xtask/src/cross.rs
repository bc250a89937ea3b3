//! A cross compiler in a chroot of Debian unstable.
//!
//! rustup cannot install a standard library for the targets here. So the chroot has a `rustc` with
//! the library's sources, and cargo builds the library for the target (`-Zbuild-std`). Build
//! scripts that compile C, and the linker, use zig's compiler (PyPI's `ziglang`), which has the
//! targets' headers.

use crate::{
    cache,
    process::{command, on_path, run as run_command, succeeds},
    repository,
};
use anyhow::{Context, bail};
use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

/// The compiler and its library's sources; an emulator and a C library for programs of 64-bit Arm.
const DEBIAN_PACKAGES: &str = "ca-certificates,rustc,cargo,rust-src,gcc,libc6-dev";
const EMULATOR_PACKAGES: [&str; 3] = ["qemu-user", "libc6-arm64-cross", "libgcc-s1-arm64-cross"];
/// The repository and the build's output inside the chroot. The paths never change, so that cargo
/// finds its earlier results.
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

/// Mounts are in a namespace of their own and end with the process.
const ENTER: &str = r#"
set -eu
chroot=$1 repository=$2 source=$3
shift 3
mount --bind /proc "$chroot/proc"
mount --rbind /dev "$chroot/dev"
mount --bind -o ro "$repository" "$chroot$source"
exec chroot "$chroot" "$@"
"#;

/// A machine to build for.
pub struct Target {
    pub name: &'static str,
    /// What zig calls it.
    pub zig: &'static str,
    /// The parts of the standard library that are built.
    pub library: &'static str,
    /// What runs its programs, with arguments.
    pub runner: Option<&'static str>,
}

/// The chroot, made if it is not there.
pub fn chroot() -> anyhow::Result<PathBuf> {
    let chroot = cache()?.join("macos/sid");
    // The last file of the installation, so that an incomplete installation is made again.
    let complete = chroot.join("thunderhead/complete");
    if !complete.exists() {
        install(&chroot)?;
        fs::write(&complete, "")?;
    }
    Ok(chroot)
}

/// Adds the emulator.
pub fn install_emulator(chroot: &Path) -> anyhow::Result<()> {
    if chroot.join("usr/bin/qemu-aarch64").exists()
        && chroot.join("usr/aarch64-linux-gnu/lib/libgcc_s.so.1").exists()
    {
        return Ok(());
    }
    let inside = |words: &[&str]| run_command(command(["chroot"]).arg(chroot).args(words));
    // Mirrors may lag behind by weeks, but their files are still signed.
    inside(&["apt-get", "update", "--quiet", "-o", "Acquire::Check-Valid-Until=false"])?;
    let install = ["apt-get", "install", "--quiet", "--yes", "--no-install-recommends"];
    inside(&[install.as_slice(), &EMULATOR_PACKAGES].concat())
}

fn install(chroot: &Path) -> anyhow::Result<()> {
    println!("making a chroot of Debian unstable in {} (about 3.5 GiB)", chroot.display());
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

/// Runs cargo in the chroot, for the target: its verb, then arguments after those for the target.
pub fn cargo(
    chroot: &Path,
    target: &Target,
    environment: &[(&str, &str)],
    verb: &str,
    arguments: &[&str],
) -> anyhow::Result<()> {
    let repository = repository();
    if !repository.join("Cargo.lock").exists() {
        bail!("there is no Cargo.lock: run cargo check once, the chroot cannot write one");
    }
    let lower = target.name.replace('-', "_");
    let upper = lower.to_uppercase();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "bash", "-c", ENTER, "enter"]);
    command.arg(chroot).arg(&repository).arg(SOURCE);
    command.args(["/usr/bin/env", "--ignore-environment", "--chdir", SOURCE]);
    command.args(["PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/root", "SDKROOT=/nonexistent"]);
    // Lets Debian's stable compiler take -Zbuild-std.
    command.arg("RUSTC_BOOTSTRAP=1");
    command.arg(format!("CARGO_TARGET_DIR={OUTPUT}"));
    command.arg(format!("ZIG_TARGET={}", target.zig));
    command.arg(format!("CC_{lower}=zig-cc")).arg(format!("AR_{lower}=zig-ar"));
    command.arg(format!("CARGO_TARGET_{upper}_LINKER=zig-cc"));
    if let Some(runner) = target.runner {
        command.arg(format!("CARGO_TARGET_{upper}_RUNNER={runner}"));
    }
    if let Ok(jobs) = std::env::var("CARGO_BUILD_JOBS") {
        command.arg(format!("CARGO_BUILD_JOBS={jobs}"));
    }
    command.args(environment.iter().map(|(name, value)| format!("{name}={value}")));
    command.args(["cargo", verb, "--locked", "--target", target.name]);
    command.arg(format!("-Zbuild-std={}", target.library)).args(arguments);
    let status = command.status().context("could not start unshare (Debian package util-linux)")?;
    if !status.success() {
        bail!("cargo {verb} for {} failed ({status}); the errors are above", target.name);
    }
    Ok(())
}
