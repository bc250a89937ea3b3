//! `thunder backup` and `thunder restore`.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use serde_json::json;

use crate::admin_client::AdminArgs;
use crate::store_args::StoreArgs;

/// Write a server's whole state to one file: keys, limits, usage, audit log, configuration
///
/// The server goes on meanwhile. The file opens the server to whoever has it (it holds the hashes
/// of keys, and the key of --tls): keep it as safe as the server.
#[derive(Args)]
pub struct BackupCommand {
    /// New file for the backup
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    admin: AdminArgs,
}

impl BackupCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let path = std::path::absolute(&self.file).context("the file has no absolute path")?;
        let report = self.admin.ask("POST", "/admin/backup", Some(&json!({"path": path})))?;
        println!(
            "{}: {} keys, {} requests, {} audit entries, {} files, {} bytes",
            self.file.display(),
            report["keys"],
            report["records"],
            report["audit"],
            report["files"],
            report["bytes"]
        );
        Ok(())
    }
}

/// Restore a backup to a folder without a store; end the server before
///
/// The backup is checked as a whole first: one that was cut off or changed restores nothing.
#[derive(Args)]
pub struct RestoreCommand {
    /// File of `thunder backup`
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    store: StoreArgs,
}

impl RestoreCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let folder = self.store.folder()?;
        let report = thunder_access::restore(&self.file, &folder)?;
        println!(
            "{} has {} keys, {} requests and {} audit entries",
            folder.display(),
            report.keys,
            report.records,
            report.audit
        );
        Ok(())
    }
}
