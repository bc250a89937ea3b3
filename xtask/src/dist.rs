//! `cargo xtask dist`: archives to install from, with their SHA-256, and the Homebrew formula.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use crate::repository;

/// Machines that archives are made for.
const TARGETS: [&str; 4] =
    ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin", "x86_64-apple-darwin"];
/// Shells with completions.
const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];
/// Files of the repository that go into every archive.
const FILES: [&str; 6] = [
    "README.md",
    "LICENSE-MIT",
    "LICENSE-APACHE",
    "docs/recovery.txt",
    "packaging/launchd/org.thunderhead.node.plist",
    "packaging/systemd/thunderhead.service",
];

#[derive(clap::Args)]
pub struct Args {
    /// Folder for the archives [default: target/dist]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Where the archives will be, for the formula
    #[arg(long, value_name = "URL", default_value = "https://thunderhead.invalid/releases")]
    base_url: String,
    /// Say what can be built here, and build nothing
    #[arg(long)]
    check: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let host = host()?;
    let plans = TARGETS.map(|target| (target, obstacle(target, &host)));
    for (target, obstacle) in &plans {
        println!("{target}: {}", obstacle.as_deref().unwrap_or("can be built here"));
    }
    if args.check {
        return Ok(());
    }
    let out = args.out.clone().unwrap_or_else(|| repository().join("target/dist"));
    fs::create_dir_all(&out)?;
    let version = env!("CARGO_PKG_VERSION");
    let mut archives = vec![source_archive(&out, version)?];
    for (target, _) in plans.iter().filter(|(_, obstacle)| obstacle.is_none()) {
        archives.push(binary_archive(&out, version, target, *target == host)?);
    }
    let mut sums = String::new();
    for archive in &archives {
        let name = archive.file_name().map(OsStr::to_string_lossy).unwrap_or_default();
        let _ = writeln!(sums, "{}  {name}", sha256(archive)?);
    }
    fs::write(out.join("SHA256SUMS"), &sums)?;
    let template = fs::read_to_string(repository().join("packaging/homebrew/thunderhead.rb.in"))?;
    let formula = formula(&template, version, &sha256(&archives[0])?, &args.base_url);
    fs::write(out.join("thunderhead.rb"), formula)?;
    print!("{sums}");
    println!("in {}; check with `sha256sum -c SHA256SUMS`", out.display());
    Ok(())
}

/// The machine that this runs on, as rustc names it.
fn host() -> Result<String> {
    let text = output(Command::new("rustc").arg("-vV"))?;
    text.lines()
        .find_map(|line| line.strip_prefix("host: "))
        .map(str::to_owned)
        .context("rustc names no host")
}

/// Why `target` cannot be built here.
fn obstacle(target: &str, host: &str) -> Option<String> {
    if target == host {
        return None;
    }
    if target.contains("apple") && !host.contains("apple") {
        return Some("cannot be built here: linking needs Apple's SDK, so run this on a Mac".to_owned());
    }
    let library = output(Command::new("rustc").args(["--print", "target-libdir", "--target", target]));
    if !library.is_ok_and(|library| Path::new(library.trim()).is_dir()) {
        return Some(format!("cannot be built here: `rustup target add {target}` first"));
    }
    let linker = linker(target)?;
    let found = Command::new(linker).arg("--version").output().is_ok();
    (!found).then(|| format!("cannot be built here: the linker {linker} is not there"))
}

/// The linker for a target that is not the host; `None` where the host's own does.
fn linker(target: &str) -> Option<&'static str> {
    match target {
        "aarch64-unknown-linux-gnu" => Some("aarch64-linux-gnu-gcc"),
        "x86_64-unknown-linux-gnu" => Some("x86_64-linux-gnu-gcc"),
        _ => None,
    }
}

/// The committed sources. `git archive` writes the same bytes for a commit each time.
fn source_archive(out: &Path, version: &str) -> Result<PathBuf> {
    let archive = out.join(format!("thunderhead-{version}-source.tar.gz"));
    let prefix = format!("--prefix=thunderhead-{version}/");
    let mut git = Command::new("git");
    git.current_dir(repository())
        .args(["archive", "--format=tar.gz", &prefix, "-o"])
        .arg(&archive)
        .arg("HEAD");
    output(&mut git)?;
    Ok(archive)
}

fn binary_archive(out: &Path, version: &str, target: &str, is_host: bool) -> Result<PathBuf> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(repository()).args([
        "build",
        "--release",
        "--locked",
        "-p",
        "thunder",
        "--bin",
        "thunder",
    ]);
    let folder = if is_host {
        repository().join("target/release")
    } else {
        cargo.args(["--target", target]);
        if let Some(linker) = linker(target) {
            let variable = target.to_uppercase().replace('-', "_");
            cargo.env(format!("CARGO_TARGET_{variable}_LINKER"), linker);
            cargo.env(format!("CC_{}", target.replace('-', "_")), linker);
        }
        repository().join("target").join(target).join("release")
    };
    ensure!(cargo.status()?.success(), "building for {target} failed");
    let name = format!("thunderhead-{version}-{target}");
    let stage = out.join(&name);
    if stage.exists() {
        fs::remove_dir_all(&stage)?;
    }
    fs::create_dir_all(stage.join("completions"))?;
    fs::copy(folder.join("thunder"), stage.join("thunder"))?;
    for file in FILES {
        let path = repository().join(file);
        let name = path.file_name().context("a file of the archive has no name")?;
        fs::copy(&path, stage.join(name)).with_context(|| path.display().to_string())?;
    }
    // Pages and completions are the same everywhere: the host's program writes them.
    if is_host {
        let program = stage.join("thunder");
        output(Command::new(&program).arg("man").arg(stage.join("man1")))?;
        for shell in SHELLS {
            let script = output(Command::new(&program).args(["completions", shell]))?;
            // The script calls the program by its path here; installed, it is on PATH.
            let script = script.replace(&program.display().to_string(), "thunder");
            fs::write(stage.join("completions").join(shell), script)?;
        }
    }
    let archive = out.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    // One order, owner and time, so that the same program gives the same archive.
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "-czf"]);
    output(tar.arg(&archive).arg("-C").arg(out).arg(&name))?;
    fs::remove_dir_all(&stage)?;
    Ok(archive)
}

fn formula(template: &str, version: &str, sha256: &str, base_url: &str) -> String {
    template
        .replace("@VERSION@ and @SHA256@ are", "version and hash are")
        .replace("@VERSION@", version)
        .replace("@SHA256@", sha256)
        .replace("@BASE_URL@", base_url.trim_end_matches('/'))
}

fn sha256(path: &Path) -> Result<String> {
    // An archive is some 10 MB, so it is read whole.
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    Ok(Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect())
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_built_is_said() {
        let here = "x86_64-unknown-linux-gnu";
        assert_eq!(obstacle(here, here), None);
        assert!(obstacle("aarch64-apple-darwin", here).unwrap().contains("Apple's SDK"));
    }

    #[test]
    fn the_formula_has_no_blank_left() {
        let template = fs::read_to_string(repository().join("packaging/homebrew/thunderhead.rb.in")).unwrap();
        let text = formula(&template, "1.2.3", "abc", "https://x/");
        assert!(
            !text.contains('@') && text.contains("url \"https://x/thunderhead-1.2.3-source.tar.gz\""),
            "{text}"
        );
        assert!(text.contains("sha256 \"abc\""));
    }

    #[test]
    fn files_of_archives_are_there() {
        FILES.iter().for_each(|file| assert!(repository().join(file).exists(), "{file}"));
    }

    #[test]
    fn hashes_are_those_of_sha256sum() {
        let folder = std::env::temp_dir().join(format!("thunder-dist-{}", std::process::id()));
        fs::write(&folder, "abc").unwrap();
        let hash = sha256(&folder).unwrap();
        fs::remove_file(&folder).unwrap();
        assert_eq!(hash, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
