//! `thunder backup` and `thunder restore`.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use serde_json::json;
use thunder_access::{Access, Actor, Now, Restored, Retention};

use crate::admin_client::{AdminArgs, RemoteArgs};
use crate::store_args::StoreArgs;
use crate::up::DataArgs;

/// Write a server's whole state to one file: keys, limits, usage, audit log, configuration
///
/// Run it on the server's machine, on a cluster on each node. The server keeps running. The file
/// contains the hashes of keys and the private key of --tls: keep it as safe as the server.
#[derive(Args)]
pub struct BackupCommand {
    /// New file for the backup
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    data: DataArgs,
}

impl BackupCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let path = std::path::absolute(&self.file).context("the file has no absolute path")?;
        let admin = AdminArgs::new(self.store, self.data, RemoteArgs::default());
        let report = admin.ask("POST", "/admin/backup", Some(&json!({"path": path})))?;
        if self.json {
            println!("{report}");
            return Ok(());
        }
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

/// Restore a backup to a folder without a store; stop the server first
///
/// The whole backup is checked first: a truncated or changed backup restores nothing. For a node,
/// give --data FOLDER: the node's own data folder, or a new one.
#[derive(Args)]
pub struct RestoreCommand {
    /// File from `thunder backup`
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Replace a configuration or certificate in the folder that differs from the backup's; without
    /// this option, nothing is restored then
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    data: DataArgs,
}

impl RestoreCommand {
    /// Runs the command.
    pub fn run(self) -> anyhow::Result<()> {
        let folder = self.store.folder_of_node(self.data.given())?;
        let Restored { report, replaced } = thunder_access::restore(&self.file, &folder, self.force)?;
        // Revocations after the backup are undone, so the log names the restore.
        let access = Access::open(&folder, Retention::default(), None)?;
        let details = json!({ "records": report.records, "audit": report.audit });
        let file = self.file.display().to_string();
        access.note_act(&Actor::local(), "store.restore", Some(&file), details, Now::read().time)?;
        drop(access);
        if self.json {
            let mut told = json!(report);
            (told["folder"], told["replaced"]) = (json!(folder), json!(replaced));
            println!("{told}");
            return Ok(());
        }
        for name in replaced {
            eprintln!("{} is the backup's now", folder.join(name).display());
        }
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
