//! `thunder doctor`.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use clap::Args;
use serde::Serialize;
use serde_json::json;
use thunder_compute::Isa;
use thunder_model::error::human_bytes;
use thunder_verbs::doctor;

use crate::config_command;
use crate::devices;
use crate::store_args::StoreArgs;
use crate::up::DataArgs;

/// With fewer open files than this, a server cannot serve a hundred clients.
const FEWEST_FILES: u64 = 4096;
/// A disk with less free space than this may fill up within days.
const LEAST_FREE_BYTES: u64 = 1 << 30;

/// Report this machine's cores, memory, kernels, GPUs and RDMA devices, and what RDMA and a server
/// lack
///
/// The exit status is 1 if a server or node could not start or would not be safe; each fault has a
/// remedy. Possible later problems and missing parts of RDMA are warnings, with exit status 0.
#[derive(Args)]
pub struct DoctorCommand {
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    data: DataArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

impl DoctorCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let rdma = doctor::examine();
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let memory = thunder_compute::memory::available_bytes();
        let kernels: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
        let folder = self.store.folder_of_node(self.data.given()).ok().filter(|folder| folder.exists());
        let mut findings = findings(open_files(), folder.as_deref());
        let gpus = devices::json();
        let (is_set, finds_gpus) = (
            std::env::var_os("XDG_RUNTIME_DIR").is_some(),
            gpus.as_array().is_some_and(|gpus| !gpus.is_empty()),
        );
        findings.extend(window_system(is_set, finds_gpus));
        let faults = findings.iter().filter(|finding| finding.severity == Severity::Fault).count();
        if self.json {
            let object = json!({
                "cores": cores,
                "memory_available_bytes": memory,
                "kernels": kernels,
                "gpus": gpus,
                "rdma": rdma,
                "findings": findings,
            });
            println!("{object}");
            return ended(faults);
        }
        println!("cores     {cores}");
        println!("memory    {} available", memory.map_or("unknown".into(), human_bytes));
        println!("kernels   {} (the last one is used; {} forces another)", kernels.join(", "), Isa::VARIABLE);
        println!("GPUs");
        devices::lines().iter().for_each(|line| println!("  {line}"));
        println!("RDMA");
        rdma.to_string().lines().for_each(|line| println!("  {line}"));
        println!("server    {}", if faults == 0 { "ready" } else { "needs something" });
        for Finding { severity, what, remedy } in &findings {
            let begin = if *severity == Severity::Warning { "warning: " } else { "" };
            println!("  {begin}{what}\n    → {remedy}");
        }
        ended(faults)
    }
}

/// How the command ends.
fn ended(faults: usize) -> anyhow::Result<()> {
    anyhow::ensure!(faults == 0, "{faults} of the findings must be dealt with before a server starts");
    Ok(())
}

/// What a finding means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    /// A server would not start, or others could read its secrets.
    Fault,
    /// It may become a problem.
    Warning,
}

/// Something that a server lacks, and what to do.
#[derive(Debug, PartialEq, Serialize)]
struct Finding {
    severity: Severity,
    what: String,
    remedy: String,
}

/// Message of the GPU's driver where nobody is logged in: Mesa looks for a window system, whose
/// library prints an error.
fn window_system(is_set: bool, finds_gpus: bool) -> Option<Finding> {
    (cfg!(target_os = "linux") && !is_set && finds_gpus).then(|| Finding {
        severity: Severity::Warning,
        what: "XDG_RUNTIME_DIR is not set: the GPU's driver may print an error that says so. It looks for a window \
               system, which computing does not need"
            .to_owned(),
        remedy: "nothing, or `export XDG_RUNTIME_DIR=/run/user/$(id -u)` before the start".to_owned(),
    })
}

/// The limit of open files; `None`: there is none.
fn open_files() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

/// The faults of a server with this store.
fn findings(open_files: Option<u64>, store: Option<&Path>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut find = |severity, what: String, remedy: String| findings.push(Finding { severity, what, remedy });
    if let Some(limit) = open_files.filter(|limit| *limit < FEWEST_FILES) {
        find(
            Severity::Warning,
            format!("{limit} files may be open: each client takes one, and each rank some"),
            "`ulimit -n 65536` before the start; `thunder service install` sets it".to_owned(),
        );
    }
    let Some(store) = store else { return findings };
    let shown = store.display();
    match std::fs::metadata(store) {
        Err(error) => find(
            Severity::Fault,
            format!("cannot look into {shown}: {error}"),
            format!("`chown` {shown} to the server's user"),
        ),
        Ok(metadata) if metadata.permissions().mode() & 0o077 != 0 => {
            let what = format!("other users can enter {shown}, which holds keys");
            find(Severity::Fault, what, format!("`chmod 700 {shown}`"));
        }
        Ok(_) => {}
    }
    if let Ok(disk) = rustix::fs::statvfs(store) {
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if free < LEAST_FREE_BYTES {
            find(
                Severity::Warning,
                format!(
                    "{} are free for {shown}: a server that cannot record usage refuses requests",
                    human_bytes(free)
                ),
                "free some space, or lower --keep-requests".to_owned(),
            );
        }
    }
    for fault in config_command::faults(store) {
        find(Severity::Fault, fault, "`thunder config check` after each change".to_owned());
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_finding_has_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let private = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(folder.path(), private).unwrap();
        // Whether the disk is full depends on the machine.
        let found = |files| {
            let findings = findings(files, Some(folder.path()));
            findings.into_iter().filter(|finding| !finding.what.contains("are free")).collect::<Vec<_>>()
        };
        assert_eq!(found(None), []);
        assert_eq!(found(Some(65_536)), []);
        let few = &found(Some(1024))[0];
        assert!(few.what.contains("1024") && few.severity == Severity::Warning);
        std::fs::write(folder.path().join("config.toml"), "nonsense = 1").unwrap();
        let wrong = &found(None)[0];
        assert!(wrong.what.contains("nonsense") && wrong.severity == Severity::Fault);
        std::fs::write(folder.path().join("config.toml"), "").unwrap();
        std::fs::write(folder.path().join("node.toml"), "tls-cert = \"/none.pem\"").unwrap();
        assert!(found(None)[0].what.contains("node.toml"), "{:?}", found(None));
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(found(None).iter().any(|finding| finding.remedy.contains("chmod 700")));
    }

    #[test]
    fn the_drivers_error_about_the_window_system_is_explained() {
        assert_eq!((window_system(true, true), window_system(false, false)), (None, None));
        let found = window_system(false, true);
        assert_eq!(found.is_some(), cfg!(target_os = "linux"));
        assert!(
            found.is_none_or(|found| found.severity == Severity::Warning && found.remedy.contains("export"))
        );
    }
}
