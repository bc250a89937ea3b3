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
use crate::store_args::StoreArgs;

/// Fewer open files than this stop a server of a hundred clients.
const FEWEST_FILES: u64 = 4096;
/// Less disk than this fills up within days.
const LEAST_FREE_BYTES: u64 = 1 << 30;

/// Report this machine's cores, memory, kernels and RDMA devices, what RDMA lacks, and what a
/// server would lack
#[derive(Args)]
pub struct DoctorCommand {
    #[command(flatten)]
    store: StoreArgs,
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
        let folder = self.store.folder().ok().filter(|folder| folder.exists());
        let findings = findings(open_files(), folder.as_deref());
        if self.json {
            let object = json!({
                "cores": cores, "memory_available_bytes": memory, "kernels": kernels, "rdma": rdma, "findings": findings,
            });
            println!("{object}");
            return Ok(());
        }
        println!("cores     {cores}");
        println!("memory    {} available", memory.map_or("unknown".into(), human_bytes));
        println!("kernels   {} (the last one is used; {} forces another)", kernels.join(", "), Isa::VARIABLE);
        println!("RDMA");
        rdma.to_string().lines().for_each(|line| println!("  {line}"));
        println!("server    {}", if findings.is_empty() { "ready" } else { "needs something" });
        for Finding { what, remedy } in &findings {
            println!("  {what}\n    → {remedy}");
        }
        Ok(())
    }
}

/// Something that a server lacks, and what to do.
#[derive(Debug, PartialEq, Serialize)]
struct Finding {
    what: String,
    remedy: String,
}

/// The limit of open files; `None`: there is none.
fn open_files() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

/// What a server with this store would lack.
fn findings(open_files: Option<u64>, store: Option<&Path>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut find = |what: String, remedy: String| findings.push(Finding { what, remedy });
    if let Some(limit) = open_files.filter(|limit| *limit < FEWEST_FILES) {
        find(
            format!("{limit} files may be open: each client takes one, and each rank some"),
            "`ulimit -n 65536` before the start; `thunder service install` sets it".to_owned(),
        );
    }
    let Some(store) = store else { return findings };
    let shown = store.display();
    match std::fs::metadata(store) {
        Err(error) => find(
            format!("cannot look into {shown}: {error}"),
            format!("`chown` {shown} to the server's user"),
        ),
        Ok(metadata) if metadata.permissions().mode() & 0o077 != 0 => {
            find(format!("other users can enter {shown}, which holds keys"), format!("`chmod 700 {shown}`"));
        }
        Ok(_) => {}
    }
    if let Ok(disk) = rustix::fs::statvfs(store) {
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if free < LEAST_FREE_BYTES {
            find(
                format!(
                    "{} are free for {shown}: a server that cannot record usage refuses requests",
                    human_bytes(free)
                ),
                "free some space, or lower --keep-requests".to_owned(),
            );
        }
    }
    let config = store.join("config.toml");
    if config.exists()
        && let Err(error) = config_command::shown(Some(&config))
    {
        find(format!("{error:#}"), "`thunder config check` after each change".to_owned());
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
        // A full disk is another machine's finding.
        let found = |files| {
            let findings = findings(files, Some(folder.path()));
            findings.into_iter().filter(|finding| !finding.what.contains("are free")).collect::<Vec<_>>()
        };
        assert_eq!(found(None), []);
        assert_eq!(found(Some(65_536)), []);
        assert!(found(Some(1024))[0].what.contains("1024"));
        std::fs::write(folder.path().join("config.toml"), "nonsense = 1").unwrap();
        assert!(found(None)[0].what.contains("nonsense"));
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(found(None).iter().any(|finding| finding.remedy.contains("chmod 700")));
    }
}
