//! `cargo xtask dist`: archives to install from, with their SHA-256, and the Homebrew formula.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use crate::repository;

/// Machines for which archives are made.
const TARGETS: [&str; 4] =
    ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin", "x86_64-apple-darwin"];
/// Shells with completions.
const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];
/// Files of the repository that go into every archive.
const FILES: [&str; 4] = ["README.md", "LICENSE-MIT", "LICENSE-APACHE", "docs/recovery.txt"];

#[derive(clap::Args)]
pub struct Args {
    /// Folder for the archives [default: target/dist]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Address of the archives, for the formula
    #[arg(long, value_name = "URL", default_value = "https://thunderhead.invalid/releases")]
    base_url: String,
    /// Print what can be built here, and build nothing
    #[arg(long)]
    check: bool,
    /// Pack this existing program for this machine, and build nothing
    #[arg(long, value_name = "FILE", conflicts_with = "check")]
    program: Option<PathBuf>,
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
    let pack = |target: &str, program: &Path, pages: &Path| {
        Packing { out: &out, version, target, program, pages }.archive()
    };
    if let Some(program) = &args.program {
        archives.push(pack(&host, program, program)?);
    } else {
        // The host comes first: its program writes the manual pages and completions of all
        // archives, which are the same for all machines.
        let mut targets: Vec<&str> =
            plans.iter().filter(|(_, obstacle)| obstacle.is_none()).map(|(target, _)| *target).collect();
        targets.sort_by_key(|target| *target != host);
        let mut pages = None;
        for target in targets {
            let built = build(target, target == host)?;
            let program = without_debug_information(target, &built, &out)?;
            let pages = pages.get_or_insert(built);
            archives.push(pack(target, &program, pages)?);
            fs::remove_file(&program)?;
        }
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

/// The linker for a target that is not the host; `None` if the host's own works.
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

/// Builds the program. Returns its path.
fn build(target: &str, is_host: bool) -> Result<PathBuf> {
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
    // `cargo xtask` has set these for xtask; build scripts that depend on them would run again.
    let is_xtasks = |name: &OsStr| {
        let name = name.to_string_lossy();
        name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
    };
    std::env::vars_os().filter(|(name, _)| is_xtasks(name)).for_each(|(name, _)| {
        cargo.env_remove(name);
    });
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
    Ok(folder.join("thunder"))
}

/// A copy of the program without debug information, which is nine tenths of it on Linux. On macOS
/// it is in files of its own, and changing the program would undo its signature.
fn without_debug_information(target: &str, program: &Path, out: &Path) -> Result<PathBuf> {
    let copy = out.join(format!("thunder-{target}"));
    if target.contains("apple") {
        fs::copy(program, &copy).with_context(|| program.display().to_string())?;
        return Ok(copy);
    }
    // The strip of binutils stands next to each compiler; the host's own has no prefix.
    let is_host = target == host()?;
    let tool =
        linker(target).filter(|_| !is_host).map_or("strip".to_owned(), |gcc| gcc.replace("gcc", "strip"));
    output(Command::new(&tool).args(["--strip-debug", "-o"]).arg(&copy).arg(program))
        .with_context(|| format!("{tool} comes with the package binutils"))?;
    Ok(copy)
}

/// An archive to install from.
struct Packing<'a> {
    out: &'a Path,
    version: &'a str,
    target: &'a str,
    program: &'a Path,
    /// The program that runs here, and writes the manual pages and completions.
    pages: &'a Path,
}

impl Packing<'_> {
    fn archive(&self) -> Result<PathBuf> {
        let name = format!("thunderhead-{}-{}", self.version, self.target);
        let stage = self.out.join(&name);
        if stage.exists() {
            fs::remove_dir_all(&stage)?;
        }
        fs::create_dir_all(stage.join("completions"))?;
        fs::copy(self.program, stage.join("thunder")).with_context(|| self.program.display().to_string())?;
        for file in FILES {
            let path = repository().join(file);
            let name = path.file_name().context("a file of the archive has no name")?;
            fs::copy(&path, stage.join(name)).with_context(|| path.display().to_string())?;
        }
        // Its full path, because a name without a folder would be searched on PATH.
        let pages = fs::canonicalize(self.pages).with_context(|| self.pages.display().to_string())?;
        output(Command::new(&pages).arg("man").arg(stage.join("man1")))?;
        for shell in SHELLS {
            let script = output(Command::new(&pages).args(["completions", shell]))?;
            // The script calls the program by its path here; installed, it is on PATH.
            let script = script.replace(&pages.display().to_string(), "thunder");
            fs::write(stage.join("completions").join(shell), script)?;
        }
        let archive = self.out.join(format!("{name}.tar.gz"));
        // A fixed order, owner and time, so that the same program gives the same archive. GNU's and
        // macOS's tar have only these options in common.
        let mut files = vec![PathBuf::from(&name)];
        list(self.out, Path::new(&name), &mut files)?;
        files.sort();
        for file in &files {
            fs::File::open(self.out.join(file))?.set_modified(SystemTime::UNIX_EPOCH)?;
        }
        let names = self.out.join(format!("{name}.files"));
        let lines: String = files.iter().map(|file| format!("{}\n", file.display())).collect();
        fs::write(&names, lines)?;
        let mut tar = Command::new("tar");
        let owner: &[&str] = if cfg!(target_os = "macos") {
            &["--uid", "0", "--gid", "0"]
        } else {
            &["--owner=0", "--group=0"]
        };
        tar.args(owner).args(["--numeric-owner", "--no-recursion", "-czf"]);
        output(tar.arg(&archive).arg("-C").arg(self.out).arg("-T").arg(&names))?;
        fs::remove_file(&names)?;
        fs::remove_dir_all(&stage)?;
        Ok(archive)
    }
}

/// Adds the files and folders below `folder`, which is relative to `root`.
fn list(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(root.join(folder))? {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            list(root, &path, files)?;
        }
        files.push(path);
    }
    Ok(())
}

fn formula(template: &str, version: &str, sha256: &str, base_url: &str) -> String {
    template
        .replace("@VERSION@ and @SHA256@ are", "version and hash are")
        .replace("@VERSION@", version)
        .replace("@SHA256@", sha256)
        .replace("@BASE_URL@", base_url.trim_end_matches('/'))
}

fn sha256(path: &Path) -> Result<String> {
    // An archive has about 10 MB, so it is read as a whole.
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
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
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

    /// A stand-in for `thunder` that is built in 1 ms, instead of a minute for linking.
    fn stand_in(folder: &Path) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = folder.join("thunder");
        let script = "#!/bin/sh\ncase $1 in\n  man) mkdir -p \"$2\"; echo .TH >\"$2/thunder.1\" ;;\n\
                      \x20 completions) echo \"complete $2 by $0\" ;;\nesac\n";
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// The program that `./test` has built next to this test; a stand-in if only xtask was built.
    fn program(folder: &Path) -> (PathBuf, bool) {
        let built = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("thunder");
        if built.is_file() { (built, true) } else { (stand_in(folder), false) }
    }

    #[test]
    fn archives_hold_all_that_an_installation_needs_and_fit_their_hashes() {
        let folder = std::env::temp_dir().join(format!("thunder-dist-test-{}", std::process::id()));
        let out = folder.join("dist");
        fs::create_dir_all(&out).unwrap();
        let (program, is_real) = program(&folder);
        let base_url = "https://example.org/releases".to_owned();
        run(&Args { out: Some(out.clone()), base_url, check: false, program: Some(program.clone()) })
            .unwrap();

        let sh = |script: &str| {
            let run = Command::new("sh").current_dir(&out).args(["-ec", script]).output().unwrap();
            assert!(run.status.success(), "{script}: {}", String::from_utf8_lossy(&run.stderr));
            String::from_utf8(run.stdout).unwrap()
        };
        assert_eq!(sh("sha256sum -c SHA256SUMS | grep -c ': OK'").trim(), "2");
        let name = format!("thunderhead-{}-{}", env!("CARGO_PKG_VERSION"), host().unwrap());
        sh(&format!("mkdir unpacked && tar -xzf {name}.tar.gz -C unpacked"));
        let unpacked = out.join("unpacked").join(&name);
        let text = |file: &str| fs::read_to_string(unpacked.join(file)).unwrap();
        for file in FILES {
            let name = Path::new(file).file_name().unwrap().to_str().unwrap();
            assert_eq!(text(name), fs::read_to_string(repository().join(file)).unwrap(), "{file}");
        }
        assert_eq!(fs::read(unpacked.join("thunder")).unwrap(), fs::read(&program).unwrap());
        for shell in SHELLS {
            let script = text(&format!("completions/{shell}"));
            let is_installed = script.contains("thunder") && !script.contains(&*program.to_string_lossy());
            assert!(is_installed, "{shell}: {script}");
        }
        assert!(text("man1/thunder.1").contains(".TH"));
        if is_real {
            assert!(text("man1/thunder-mac-check.1").contains("\\-\\-hosts"));
            assert!(sh(&format!("unpacked/{name}/thunder --version")).contains(env!("CARGO_PKG_VERSION")));
            sh(&format!("bash -n unpacked/{name}/completions/bash"));
        }
        // Homebrew builds from the source archive, whose hash the formula has.
        let source = format!("thunderhead-{}-source.tar.gz", env!("CARGO_PKG_VERSION"));
        let formula = fs::read_to_string(out.join("thunderhead.rb")).unwrap();
        let hash = sha256(&out.join(&source)).unwrap();
        assert!(formula.contains(&format!("sha256 \"{hash}\"")), "{formula}");
        assert!(formula.contains(&format!("url \"https://example.org/releases/{source}\"")), "{formula}");
        let listed = sh(&format!("tar -tzf {source}"));
        let folder_name = source.trim_end_matches("-source.tar.gz");
        for needed in ["Cargo.lock", "crates/thunder/Cargo.toml", "packaging/homebrew/thunderhead.rb.in"] {
            assert!(listed.lines().any(|line| line == format!("{folder_name}/{needed}")), "{needed}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_same_program_gives_the_same_archive() {
        let folder = std::env::temp_dir().join(format!("thunder-dist-same-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let program = stand_in(&folder);
        let packing =
            Packing { out: &folder, version: "1", target: "here", program: &program, pages: &program };
        let pack = || fs::read(packing.archive().unwrap()).unwrap();
        let first = pack();
        // Files get other times and may be found in another order.
        std::thread::sleep(std::time::Duration::from_millis(1100));
        assert!(pack() == first);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn debug_information_is_left_out() {
        let folder = std::env::temp_dir().join(format!("thunder-dist-strip-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let program = std::env::current_exe().unwrap();
        let copy = without_debug_information(&host().unwrap(), &program, &folder).unwrap();
        let bytes = |path: &Path| fs::metadata(path).unwrap().len();
        assert!(bytes(&copy) < bytes(&program) / 2, "{} of {}", bytes(&copy), bytes(&program));
        // It still runs.
        let lists = Command::new(&copy).arg("--list").output().unwrap();
        assert!(String::from_utf8_lossy(&lists.stdout).contains("debug_information_is_left_out"));
        fs::remove_dir_all(&folder).unwrap();
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
